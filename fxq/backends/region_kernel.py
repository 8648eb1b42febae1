"""`RegionKernel`: kernel of a whole region, which an engine compiles from the region's q/dq form."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from typing_extensions import Self

from fxq.backends.kernel import Kernel, refuse
from fxq.backends.qdq_form import BufferSlice, QdqForm, constants_of
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
    """Kernel of a region of the qdq graph. Its `form` says what it computes, and where its constants are stored.

    An engine derives a class with a `name` and a `build` method. `build` compiles the region at the first call, and
    again after a tensor has changed. Its result is neither copied nor pickled.

    All constants of one dtype are stored in one buffer, so that a call has few tensors to check for edits.

    Args:
        tensors: the constants of each dtype in one tensor (n,), by names such as `flat_int8`.
    """

    name: ClassVar[str] = "qdq.region"
    returns_view: ClassVar[bool] = True

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach())

    @classmethod
    def of(cls, gm: fx.GraphModule, region: Region) -> Self:
        """Return the kernel of a region of the graph of `gm`."""
        return cls.of_graph(gm, region.to_graph())

    @classmethod
    def of_graph(cls, gm: fx.GraphModule, graph: fx.Graph, config: Mapping[str, Any] | None = None) -> Self:
        """Return the kernel of a graph, which is modified and then belongs to the kernel.

        Args:
            gm: module with the tensors and units that the graph uses.
            graph: the graph of a region.
            config: options of the kernel, if its class has any.
        """
        slices: dict[str, BufferSlice | Tensor] = {}
        names: dict[str, str] = {}
        flat: dict[str, list[Tensor]] = {}
        ends: Counter[str] = Counter()
        for path, tensor in constants_of(gm, graph).items():
            buffer = str(tensor.dtype).replace("torch.", "flat_")  # a prefix, since nn.Module has a method `bfloat16`
            name = path.rpartition(".")[2]
            while name in slices:
                name = f"{name}_{len(slices)}"
            names[path], slices[name] = name, BufferSlice(buffer, ends[buffer], tensor.shape)
            flat.setdefault(buffer, []).append(tensor.detach().reshape(-1))
            ends[buffer] += tensor.numel()
        for node in graph.find_nodes(op="get_attr"):
            node.target = names[str(node.target)]
        kernel = cls.from_config(config or {}, {buffer: torch.cat(tensors) for buffer, tensors in flat.items()})
        kernel.form = QdqForm.of_graph(gm, graph, tuple(range(len(graph.find_nodes(op="placeholder")))), slices)
        return kernel

    def graph_inside(self) -> fx.GraphModule | None:
        return self.form.module(self) if self.form is not None else None

    def check(self) -> None:
        """Check the kernel, and check again that its integer sums fit int32, since weights may have been edited."""
        super().check()
        refuse(self.name, self.sums_refused())

    def sums_refused(self) -> str | None:
        """Why integer sums of the region could overflow int32, or None if they cannot."""
        inside = self.graph_inside()
        if inside is None:
            return None
        reasons = ((node, node_refused(inside, node)) for node in inside.graph.nodes)
        return next((f"{node.name}: {reason}" for node, reason in reasons if reason is not None), None)

    def build(self, form: fx.GraphModule) -> Callable[..., Any]:
        """Return a function that runs the region: it takes the inputs and returns the output, or a tuple of outputs.

        Args:
            form: the region as a module in q/dq form. The default returns it; results of an engine must agree with it.
        """
        return form

    def layers(self, *inputs: Any) -> tuple[EngineLayer, ...]:
        """Profile the kernel: the timed layers that the engine runs for these inputs, in order. Empty if unknown."""
        return ()

    def tune(self, *inputs: Any) -> None:
        """Time the kernel's variants on inputs like these and keep the fastest. The default has no variants."""

    def forward(self, *inputs: Any) -> Any:
        run: Callable[..., Any] = self._cached("", self._built)
        return run(*inputs)

    def _built(self) -> Callable[..., Any]:
        if self.form is None:
            raise BackendError(
                f"{self.name}: the kernel has no q/dq form. Make it from a region of a graph, by RegionKernel.of."
            )
        return self.build(self.form.module(self))


def engine_layers(gm: fx.GraphModule, batch: Batch) -> dict[fx.Node, tuple[EngineLayer, ...]]:
    """Layers that engines run in a graph for a batch, by kernel node. Kernels without layers are omitted."""
    kernel_layers: dict[fx.Node, tuple[EngineLayer, ...]] = {}
    for node, kernel, inputs in _kernel_calls(gm, batch):
        try:
            kernel_layers[node] = kernel.layers(*inputs)
        except Exception as error:  # whatever an engine raises; verification checks that the kernel runs
            log.debug("the kernel %s cannot be profiled: %s", node.name, error)
    return {node: layers for node, layers in kernel_layers.items() if layers}


def tune(gm: fx.GraphModule, batch: Batch) -> None:
    """Let the kernels of a graph choose their fastest variant for a batch. Stops at the first kernel that fails."""
    try:
        for node, kernel, inputs in _kernel_calls(gm, batch):
            try:
                kernel.tune(*inputs)
            except Exception as error:  # whatever an engine raises
                log.debug("the kernel %s cannot be tuned: %s", node.name, error)
    except Exception as error:  # verification reports the kernel, and replaces it by its q/dq form
        log.debug("a kernel fails on the example: %s", error)


def _kernel_calls(gm: fx.GraphModule, batch: Batch) -> Iterator[tuple[fx.Node, RegionKernel, tuple[Any, ...]]]:
    """Run a graph on a batch, and yield each region kernel with its node and inputs before it is called."""
    kernels = {node: kernel for node in gm.graph.nodes if isinstance(kernel := submodule(gm, node), RegionKernel)}
    runner, left = Runner(gm, copied(batch)), len(kernels)
    for node in gm.graph.nodes if kernels else ():
        if node in kernels:
            yield node, kernels[node], arguments_of(node, runner.values)[0]
            left -= 1
        if not left:
            return  # to run the last kernel would compile it
        runner.step(node)
