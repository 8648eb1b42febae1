"""q/dq form of a kernel: the float ops and conversions that it replaces, stored with it. It runs anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx, nn

from fxq.backends.kernel import Kernel
from fxq.graph.plain_data import NodeData, from_data, numbers_of, to_data
from fxq.graph.query import read_attribute
from fxq.graph.region import Region
from fxq.graph.uncompiled import UncompiledModule
from fxq.ops import OPS


class BufferSlice(NamedTuple):
    """Tensor of a q/dq form that is stored in a buffer of the kernel.

    Attributes:
        name: name of the buffer.
        start: index of its first element in the buffer.
        shape: its shape.
    """

    name: str
    start: int
    shape: torch.Size

    def of(self, kernel: Kernel) -> Tensor:
        """Return the tensor as a view of the kernel's buffer."""
        buffer = kernel.get_buffer(self.name)
        if buffer.numel() != self.shape.numel():
            buffer = buffer.narrow(0, self.start, self.shape.numel())
        return buffer.view(self.shape)


@dataclass(frozen=True)
class QdqForm:
    """Region of the qdq graph as plain data. It uses the kernel's buffers as its constants where they are equal.

    Attributes:
        nodes: its graph.
        takes: for each of its inputs, the index of the kernel's input.
        modules: the units that it calls, by path.
        tensors: its constants, by path: slices of the kernel's buffers, or tensors that only the form has.
    """

    nodes: Sequence[NodeData]
    takes: tuple[int, ...]
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    tensors: Mapping[str, BufferSlice | Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, gm: fx.GraphModule, region: Region, kernel: Kernel, inputs: Sequence[fx.Node]) -> QdqForm:
        """Return the q/dq form of a kernel that replaces a region.

        Args:
            gm: module with the region's graph.
            region: the region.
            kernel: the kernel.
            inputs: inputs of the kernel, in order.
        """
        graph, free = region.to_graph(), dict(kernel.named_buffers(recurse=False))
        tensors: dict[str, BufferSlice | Tensor] = {}
        for path, value in constants_of(gm, graph).items():
            name = next((name for name, buffer in free.items() if _same_values(buffer, value)), None)
            tensors[path] = value if name is None else BufferSlice(name, 0, value.shape)
            free.pop(name or "", None)
        return cls.of_graph(gm, graph, tuple(map(list(inputs).index, region.inputs)), tensors)

    @classmethod
    def of_graph(
        cls, gm: fx.GraphModule, graph: fx.Graph, takes: tuple[int, ...], tensors: Mapping[str, BufferSlice | Tensor]
    ) -> QdqForm:
        """Return the q/dq form of a graph that calls units of `gm` and reads these tensors, by path."""
        modules = {str(n.target): gm.get_submodule(str(n.target)) for n in graph.find_nodes(op="call_module")}
        return cls(to_data(graph), takes, modules, tensors)

    def last_call(self, part: int | None = None) -> tuple[Any, Mapping[str, Any]]:
        """Target and options of the call that computes the result, or the result `part` of several.

        Ops after it that only move integers are skipped. (None, {}) if the call is not known.
        """
        value, moved, row = self.nodes[-1][2][0], False, None
        if isinstance(value, (tuple, list)) is (part is None):
            return None, {}
        read = value if part is None else value[part]
        while True:
            op, target, args, options, *_ = self.nodes[next(numbers_of(read))]
            row = OPS.of_target(target) if op == "call_function" else None
            if row is None or not row.traits.layout:
                return (None, {}) if moved and row is OPS["dequantize"] else (target, options)
            read, moved = args, True

    def module(self, kernel: Kernel) -> fx.GraphModule:
        """Return the form as a graph module with the kernel's current tensors. Its inputs are those of the form."""
        attributes: dict[str, Any] = dict(self.modules)
        for path, tensor in self.tensors.items():
            attributes[path] = tensor.of(kernel) if isinstance(tensor, BufferSlice) else tensor
        return UncompiledModule(attributes, from_data(list(self.nodes)), "QdqForm")

    def runner(self, kernel: Kernel) -> Callable[..., Tensor]:
        """Return the form as a function of the kernel's inputs."""
        module = self.module(kernel)
        return lambda *inputs: module(*(inputs[i] for i in self.takes))


def constants_of(gm: fx.GraphModule, graph: fx.Graph) -> dict[str, Tensor]:
    """Tensors of `gm` that a graph reads, by path."""
    paths = dict.fromkeys(str(node.target) for node in graph.find_nodes(op="get_attr"))
    return {path: read_attribute(gm, path) for path in paths}


def _same_values(buffer: Tensor, value: Tensor) -> bool:
    """Whether a kernel's buffer holds these values, in this or another shape."""
    if buffer.dtype != value.dtype or buffer.numel() != value.numel():
        return False
    return torch.equal(buffer.view(value.shape), value)


class FallbackKernel(Kernel):
    """Replacement of a kernel that is wrong on this machine. It runs the kernel's q/dq form: correct, but slow.

    It has the options and the tensors of the kernel, under the same names.

    Args:
        of: class of the kernel.
        settings: the kernel's `config()`.
        buffers: the kernel's tensors, by name.
        reason: why the kernel cannot be used here.
    """

    name: ClassVar[str] = "qdq"
    form: QdqForm

    def __init__(
        self, of: type[Kernel], settings: Mapping[str, Any], buffers: Mapping[str, Tensor | None], reason: str
    ) -> None:
        super().__init__()
        self._buffers = dict(buffers)
        self.of, self.settings, self.reason = of, dict(settings), reason

    @classmethod
    def instead_of(cls, kernel: Kernel, reason: str) -> FallbackKernel:
        """Return the replacement of a kernel."""
        fallback = cls(type(kernel), kernel.config(), kernel._buffers, reason)
        assert kernel.form is not None  # the caller has checked it
        fallback.form = kernel.form
        return fallback

    @property
    def described(self) -> type[Kernel]:
        return self.of

    def config(self) -> dict[str, Any]:
        """Options of the replaced kernel."""
        return self.settings

    def adopt(self, config: Mapping[str, Any]) -> None:
        """Replace the options of the replaced kernel by `config`; they are used on a machine where it is correct."""
        self.settings = dict(config)
        self.__dict__.pop("_derived", None)  # the caller may have replaced the form

    def check(self) -> None:
        """Accept any tensors, since the form runs anywhere."""

    def kernel(self) -> Kernel:
        """Return the replaced kernel, with its form.

        Raises:
            BackendError: it cannot be made on this machine.
        """
        kernel = self.of.from_config(self.settings, dict(self.named_buffers(recurse=False)))
        kernel.form = self.form
        return kernel

    def forward(self, *inputs: Tensor) -> Tensor:
        run: Callable[..., Tensor] = self._cached("", lambda: self.form.runner(self))
        return run(*inputs)

    def extra_repr(self) -> str:
        """Name of the replaced kernel and the reason, as `print` shows them."""
        return f"{self.of.name}: {self.reason}"
