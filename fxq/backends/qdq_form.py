"""What a kernel stands for, kept with it: its q/dq form, which runs anywhere."""

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
from fxq.ops import OPS


class Part(NamedTuple):
    """A tensor of a form that lies in one of the kernel's: its name there, where it begins, and its shape."""

    name: str
    start: int
    shape: torch.Size

    def of(self, kernel: Kernel) -> Tensor:
        """The tensor."""
        whole = kernel.get_buffer(self.name)
        if whole.numel() != self.shape.numel():
            whole = whole.narrow(0, self.start, self.shape.numel())
        return whole.view(self.shape)


@dataclass(frozen=True)
class Form:
    """A region of the qdq graph as data, with the kernel's tensors in the place of its own.

    Attributes:
        nodes: its graph.
        takes: for each of its inputs, which of the kernel's inputs that is.
        modules: the units that it calls, by path.
        tensors: what it reads besides its inputs, by path: tensors of the kernel, and others.
    """

    nodes: Sequence[NodeData]
    takes: tuple[int, ...]
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    tensors: Mapping[str, Part | Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, gm: fx.GraphModule, region: Region, kernel: Kernel, inputs: Sequence[fx.Node]) -> Form:
        """The form of a kernel that takes the place of a region.

        Args:
            gm: the module of the region's graph.
            region: the region.
            kernel: the kernel.
            inputs: what the kernel reads, in order.
        """
        graph, free = region.to_graph(), dict(kernel.named_buffers(recurse=False))
        tensors: dict[str, Part | Tensor] = {}
        for path, value in constants_of(gm, graph).items():
            name = next((name for name, own in free.items() if _same(own, value)), None)
            tensors[path] = value if name is None else Part(name, 0, value.shape)
            free.pop(name or "", None)
        return cls.of_graph(gm, graph, tuple(map(list(inputs).index, region.inputs)), tensors)

    @classmethod
    def of_graph(
        cls, gm: fx.GraphModule, graph: fx.Graph, takes: tuple[int, ...], tensors: Mapping[str, Part | Tensor]
    ) -> Form:
        """The same of a graph that uses the units of `gm`, and these tensors."""
        modules = {str(n.target): gm.get_submodule(str(n.target)) for n in graph.find_nodes(op="call_module")}
        return cls(to_data(graph), takes, modules, tensors)

    def last_call(self, part: int | None = None) -> tuple[Any, Mapping[str, Any]]:
        """What it calls for its value, or for one of several, with which options; what only moves integers left out."""
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
        """The form as a module of its own, with the kernel's tensors as they are now. It takes what the form takes."""
        attributes: dict[str, Any] = dict(self.modules)
        for path, tensor in self.tensors.items():
            attributes[path] = tensor.of(kernel) if isinstance(tensor, Part) else tensor
        return fx.GraphModule(attributes, from_data(list(self.nodes)), "Form")

    def runner(self, kernel: Kernel) -> Callable[..., Tensor]:
        """What the kernel stands for, as a function of the kernel's inputs."""
        module = self.module(kernel)
        return lambda *inputs: module(*(inputs[i] for i in self.takes))


def constants_of(gm: fx.GraphModule, graph: fx.Graph) -> dict[str, Tensor]:
    """The tensors of `gm` that a graph reads, by path."""
    paths = dict.fromkeys(str(node.target) for node in graph.find_nodes(op="get_attr"))
    return {path: read_attribute(gm, path) for path in paths}


def _same(own: Tensor, value: Tensor) -> bool:
    """Whether a tensor of a kernel holds these values, perhaps in another shape."""
    return own.dtype == value.dtype and own.numel() == value.numel() and torch.equal(own.view(value.shape), value)


class FallbackKernel(Kernel):
    """In the place of a kernel that does not run right on this machine: its q/dq form, right and slow.

    It has the kernel's tensors under their names, and its options.

    Args:
        of: the class of the kernel.
        settings: the kernel's `config()`.
        buffers: its tensors.
        reason: why it does not.
    """

    name: ClassVar[str] = "qdq"
    form: Form

    def __init__(
        self, of: type[Kernel], settings: Mapping[str, Any], buffers: Mapping[str, Tensor | None], reason: str
    ) -> None:
        super().__init__()
        self._buffers = dict(buffers)
        self.of, self.settings, self.reason = of, dict(settings), reason

    @classmethod
    def instead_of(cls, kernel: Kernel, reason: str) -> FallbackKernel:
        """In the place of this kernel."""
        made = cls(type(kernel), kernel.config(), kernel._buffers, reason)
        assert kernel.form is not None  # asked before
        made.form = kernel.form
        return made

    @property
    def described(self) -> type[Kernel]:
        return self.of

    def config(self) -> dict[str, Any]:
        """The kernel's."""
        return self.settings

    def adopt(self, config: Mapping[str, Any]) -> None:
        """As in `Kernel`: for the kernel, which may be right on another machine. The form may be another one, too."""
        self.settings = dict(config)
        self.__dict__.pop("_packed", None)  # it has run the form as it was

    def check(self) -> None:
        """The form runs anywhere."""

    def kernel(self) -> Kernel:
        """The kernel.

        Raises:
            BackendError: it refuses this machine.
        """
        made = self.of.from_config(self.settings, dict(self.named_buffers(recurse=False)))
        made.form = self.form
        return made

    def forward(self, *inputs: Tensor) -> Tensor:
        run: Callable[..., Tensor] = self._kept("", lambda: self.form.runner(self))
        return run(*inputs)

    def extra_repr(self) -> str:
        """Shown by `print`."""
        return f"{self.of.name}: {self.reason}"
