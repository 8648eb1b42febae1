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
    """A tensor of a form that is one of the kernel's: its name there, and the shape that the form sees it in."""

    name: str
    shape: torch.Size


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
        return cls.of_graph(gm, region.to_graph(), kernel, tuple(map(list(inputs).index, region.inputs)))

    @classmethod
    def of_graph(cls, gm: fx.GraphModule, graph: fx.Graph, kernel: Kernel, takes: tuple[int, ...]) -> Form:
        """The same where the region is a graph of its own, which uses the tensors and units of `gm`."""
        modules = {str(n.target): gm.get_submodule(str(n.target)) for n in graph.find_nodes(op="call_module")}
        free = {name: tensor for name, tensor in kernel.named_buffers(recurse=False)}
        tensors: dict[str, Part | Tensor] = {}
        for node in graph.find_nodes(op="get_attr"):
            path = str(node.target)
            if path not in tensors:
                value = read_attribute(gm, path)
                name = next((name for name, own in free.items() if _same(own, value)), None)
                tensors[path] = value if name is None else Part(name, value.shape)
                free.pop(name or "", None)
        return cls(to_data(graph), takes, modules, tensors)

    def ends_in(self, part: int | None = None) -> tuple[Any, Mapping[str, Any]]:
        """What it calls for its value, or for one of several, with which options; what only moves integers left out."""
        value, moved, row = self.nodes[-1][2][0], False, None
        if isinstance(value, (tuple, list)) is (part is None):
            return None, {}
        read = value if part is None else value[part]
        while True:
            op, target, args, options, *_ = self.nodes[next(numbers_of(read))]
            row = OPS.of_target(target) if op == "call_function" else None
            if row is None or not row.quant.layout:
                return (None, {}) if moved and row is OPS["dequantize"] else (target, options)
            read, moved = args, True

    def module(self, kernel: Kernel) -> fx.GraphModule:
        """The form as a module of its own, with the kernel's tensors as they are now. It takes what the form takes."""
        attributes: dict[str, Any] = dict(self.modules)
        for path, tensor in self.tensors.items():
            attributes[path] = kernel.get_buffer(tensor.name).view(tensor.shape) if isinstance(tensor, Part) else tensor
        return fx.GraphModule(attributes, from_data(list(self.nodes)), "Form")

    def runner(self, kernel: Kernel) -> Callable[..., Tensor]:
        """What the kernel stands for, as a function of the kernel's inputs."""
        module = self.module(kernel)
        return lambda *inputs: module(*(inputs[i] for i in self.takes))


def _same(own: Tensor, value: Tensor) -> bool:
    """Whether a tensor of a kernel holds these values, perhaps in another shape."""
    return own.dtype == value.dtype and own.numel() == value.numel() and torch.equal(own.view(value.shape), value)


class InForm(Kernel):
    """In the place of a kernel that does not run right on this machine: its q/dq form, right and slow.

    It has the kernel's tensors under their names, and its options.

    Args:
        kernel: the kernel.
        reason: why it does not.
    """

    name: ClassVar[str] = "qdq"
    form: Form

    def __init__(self, kernel: Kernel, reason: str) -> None:
        super().__init__()
        assert kernel.form is not None  # asked before
        self._buffers = kernel._buffers
        self.form, self.reason, self.of, self.settings = kernel.form, reason, type(kernel), kernel.config()

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
        """As the kernel's."""
        run: Callable[..., Tensor] = self._kept("", lambda: self.form.runner(self))
        return run(*inputs)

    def extra_repr(self) -> str:
        """Shown by `print`."""
        return f"{self.of.name}: {self.reason}"
