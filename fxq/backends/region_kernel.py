"""Kernels of whole regions: what an engine has made of the qdq form, which it makes again from that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, fx
from typing_extensions import Self

from fxq.backends.kernel import Kernel
from fxq.backends.qdq_form import Form, Part
from fxq.common.data import Batch
from fxq.common.isolation import copied
from fxq.errors import BackendError
from fxq.graph.info import EngineLayer
from fxq.graph.plain_data import from_data
from fxq.graph.query import arguments_of, read_attribute, submodule
from fxq.graph.region import Region
from fxq.graph.run import Runner

log = logging.getLogger("fxq")


class RegionKernel(Kernel):
    """A region of the qdq graph as one kernel. Its tensors are those of the region; its form says the rest.

    What an engine makes of it, `build` returns: at the first call, and again where a tensor was changed. It is
    neither copied nor pickled. A class of its own has a `name`, and is all that an engine has to write.

    Args:
        tensors: the tensors of the region, by name.
    """

    name: ClassVar[str] = "qdq.region"
    returns_view: ClassVar[bool] = True

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach())

    @classmethod
    def of(cls, gm: fx.GraphModule, region: Region) -> Self:
        """The kernel of a region of the graph of `gm`."""
        paths = dict.fromkeys(str(step.target) for step in region.steps if step.op == "get_attr")
        names = (f"t{i}_{path.rpartition('.')[2]}" for i, path in enumerate(paths))  # no attribute has such a name
        return cls(**{name: read_attribute(gm, path) for name, path in zip(names, paths, strict=True)})

    def graph_inside(self) -> fx.GraphModule | None:
        """As in `Bindable`: the region."""
        if self.form is None:
            return None
        graph, tensors = from_data(list(self.form.nodes)), self.form.tensors
        for node in graph.find_nodes(op="get_attr"):
            part = tensors[str(node.target)]
            assert isinstance(part, Part)  # it has all tensors of the region
            node.target = part.name
        return fx.GraphModule({**dict(self.named_buffers()), **self.form.modules}, graph)

    def take_graph(self, gm: fx.GraphModule) -> None:
        """Run this region from now on; its tensors are those of the kernel."""
        self.form = Form.of_graph(gm, gm.graph, self, tuple(range(len(gm.graph.find_nodes(op="placeholder")))))

    def build(self, form: fx.GraphModule) -> Callable[..., Any]:
        """What runs the region: takes its inputs and returns its value, or a tuple of several.

        Args:
            form: the region as a module in qdq form. Returned as it is, it is what an engine's result must be.
        """
        return form

    def layers(self, *inputs: Any) -> tuple[EngineLayer, ...]:
        """What an engine runs for these inputs, in order; empty where it does not say. It is measured anew."""
        return ()

    def forward(self, *inputs: Any) -> Any:
        """As the region."""
        run: Callable[..., Any] = self._kept("", self._built)
        return run(*inputs)

    def _built(self) -> Callable[..., Any]:
        if self.form is None:
            raise BackendError(
                f"{self.name}: the kernel was not made of a region of a graph, so it does not know what to compute."
            )
        return self.build(self.form.module(self))


def layers_run(gm: fx.GraphModule, batch: Batch) -> dict[fx.Node, tuple[EngineLayer, ...]]:
    """What engines run in a graph for a batch, by the nodes of their kernels; those that do not say are left out."""
    found: dict[fx.Node, tuple[EngineLayer, ...]] = {}
    kernels = {node: kernel for node in gm.graph.nodes if isinstance(kernel := submodule(gm, node), RegionKernel)}
    if not kernels:
        return found
    runner = Runner(gm, copied(batch))
    for node in gm.graph.nodes:
        if node in kernels:
            try:
                found[node] = kernels[node].layers(*arguments_of(node, runner.values)[0])
            except Exception as error:  # whatever an engine raises: that it runs is verified elsewhere
                log.debug("%s does not say what it runs: %s", node.name, error)
        runner.step(node)
    return {node: layers for node, layers in found.items() if layers}
