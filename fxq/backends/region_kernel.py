"""Kernels of whole regions: what an engine has made of the qdq form, which it makes again from that."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from typing_extensions import Self

from fxq.backends.kernel import Kernel, refuse
from fxq.backends.qdq_form import Form, Part, constants_of
from fxq.common.data import Batch
from fxq.common.isolation import copied
from fxq.errors import BackendError
from fxq.graph.analysis.integer_sums import node_refused
from fxq.graph.info import EngineLayer
from fxq.graph.query import arguments_of, submodule
from fxq.graph.region import Region
from fxq.graph.run import Runner

log = logging.getLogger("fxq")


class RegionKernel(Kernel):
    """A region of the qdq graph as one kernel. Its form says what it computes, and where in its tensors which one lies.

    All constants of one dtype are one tensor, so that a call has few to ask whether they were written to.
    What an engine makes of the region, `build` returns: at the first call, and again where a tensor was changed. It is
    neither copied nor pickled. A class of its own has a `name`, and is all that an engine has to write.

    Args:
        tensors: the constants of each dtype, one behind the other: `flat_int8` and the like.
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
        return cls.of_graph(gm, region.to_graph())

    @classmethod
    def of_graph(cls, gm: fx.GraphModule, graph: fx.Graph, config: Mapping[str, Any] | None = None) -> Self:
        """The kernel of a graph that uses the tensors and units of `gm`, and is the kernel's from now on.

        `config` has the options of a class that has some.
        """
        parts: dict[str, Part | Tensor] = {}
        names: dict[str, str] = {}
        flat: dict[str, list[Tensor]] = {}
        ends: Counter[str] = Counter()
        for path, tensor in constants_of(gm, graph).items():
            whole = str(tensor.dtype).replace("torch.", "flat_")  # modules have a method that is called bfloat16
            name = path.rpartition(".")[2]
            while name in parts:
                name = f"{name}_{len(parts)}"
            names[path], parts[name] = name, Part(whole, ends[whole], tensor.shape)
            flat.setdefault(whole, []).append(tensor.detach().reshape(-1))
            ends[whole] += tensor.numel()
        for node in graph.find_nodes(op="get_attr"):
            node.target = names[str(node.target)]
        kernel = cls.from_config(config or {}, {whole: torch.cat(same) for whole, same in flat.items()})
        kernel.form = Form.of_graph(gm, graph, tuple(range(len(graph.find_nodes(op="placeholder")))), parts)
        return kernel

    def graph_inside(self) -> fx.GraphModule | None:
        return self.form.module(self) if self.form is not None else None

    def check(self) -> None:
        """Check the kernel, and bound its integer sums again, since weights may have been edited."""
        super().check()
        refuse(self.name, self.sums_refused())

    def sums_refused(self) -> str | None:
        """Reason why integer sums of the region could overflow int32, or None if they cannot."""
        inside = self.graph_inside()
        if inside is None:
            return None
        reasons = ((node, node_refused(inside, node)) for node in inside.graph.nodes)
        return next((f"{node.name}: {reason}" for node, reason in reasons if reason is not None), None)

    def build(self, form: fx.GraphModule) -> Callable[..., Any]:
        """What runs the region: takes its inputs and returns its value, or a tuple of several.

        Args:
            form: the region as a module in qdq form. Returned as it is, it is what an engine's result must be.
        """
        return form

    def layers(self, *inputs: Any) -> tuple[EngineLayer, ...]:
        """What an engine runs for these inputs, in order; empty where it does not say. It is measured anew."""
        return ()

    def tune(self, *inputs: Any) -> None:
        """Measure on inputs like these what can be chosen, and keep what is fastest; there may be nothing to choose."""

    def forward(self, *inputs: Any) -> Any:
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
    for node, kernel, inputs in _called(gm, batch):
        try:
            found[node] = kernel.layers(*inputs)
        except Exception as error:  # whatever an engine raises: that it runs is verified elsewhere
            log.debug("%s does not say what it runs: %s", node.name, error)
    return {node: layers for node, layers in found.items() if layers}


def tune(gm: fx.GraphModule, batch: Batch) -> None:
    """Let the kernels of a graph choose what is fastest for a batch; behind one that fails, none does."""
    try:
        for node, kernel, inputs in _called(gm, batch):
            try:
                kernel.tune(*inputs)
            except Exception as error:  # as above
                log.debug("%s cannot be tuned: %s", node.name, error)
    except Exception as error:  # verification says which kernel it was, and puts it back
        log.debug("a kernel fails on the example: %s", error)


def _called(gm: fx.GraphModule, batch: Batch) -> Iterator[tuple[fx.Node, RegionKernel, tuple[Any, ...]]]:
    """Run a graph; the kernels of regions, with their inputs, each before it is called."""
    kernels = {node: kernel for node in gm.graph.nodes if isinstance(kernel := submodule(gm, node), RegionKernel)}
    runner = Runner(gm, copied(batch))
    for node in gm.graph.nodes if kernels else ():
        if node in kernels:
            yield node, kernels[node], arguments_of(node, runner.values)[0]
        runner.step(node)
