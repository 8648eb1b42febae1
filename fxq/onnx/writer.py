"""A graph becomes an ONNX model: values, constants and nodes as they are written, and what nobody reads left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxq.errors import FxqError

OPSET = 21
"""Blocks of int4, and grids of each channel, need this one."""


class NotInOnnx(FxqError):
    """A call that no ONNX node says; the message is the reason."""


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the model that is being written.

    Attributes:
        name: its name there.
        like: its shape and dtype, on the meta device.
    """

    name: str
    like: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.like.shape)

    @property
    def rank(self) -> int:
        """How many axes it has."""
        return self.like.dim()

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""
        return self.like.dtype


Operand = Value | Tensor | str | None
"""What a node reads: a value, a constant, the name of what an earlier node makes, or nothing."""


@dataclass(frozen=True)
class OnnxNode:
    """A node of the model: its type, what it reads and makes by name, and its attributes."""

    kind: str
    reads: tuple[str, ...]
    makes: str
    attributes: Mapping[str, Any]


@dataclass
class Writer:
    """The model so far.

    Attributes:
        integer_bias: whether the bias of a layer on integers is written in int32, where it fits; else in float32.
        floats: whether conversions are left out, so that all computes in float, with the weights of the integers.
        scope: what the names of nodes begin with: the node of the graph that is being written.
        clamps: by what a clamp makes, what it reads and its bounds.
    """

    integer_bias: bool = True
    floats: bool = False
    scope: str = ""
    _nodes: list[OnnxNode] = field(default_factory=list)
    _constants: dict[str, Tensor] = field(default_factory=dict)
    _named: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _makers: dict[str, OnnxNode] = field(default_factory=dict)
    _made: dict[Any, Tensor] = field(default_factory=dict)
    clamps: dict[str, tuple[str, float, float]] = field(default_factory=dict)

    def emit(self, kind: str, *reads: Operand, **attributes: Any) -> str:
        """Write a node; the name of what it makes."""
        names = [self.name_of(read) for read in reads]
        while names and not names[-1]:
            names.pop()
        made = self._unique(kind)
        node = OnnxNode(kind, tuple(names), made, {k: v for k, v in attributes.items() if v is not None})
        self._nodes.append(node)
        self._makers[made] = node
        return made

    def name_of(self, read: Operand) -> str:
        """The name under which a node reads this."""
        if isinstance(read, Value):
            return read.name
        if isinstance(read, Tensor):
            return self.constant(read)
        return read or ""

    def constant(self, tensor: Tensor) -> str:
        """The name of a constant; the same tensor is written once."""
        name, _ = self._named.get(id(tensor), ("", tensor))
        if not name:
            name = self._unique("constant")
            self._named[id(tensor)] = name, tensor  # which keeps the tensor, so that its id stays its own
            self._constants[name] = tensor
        return name

    def kept(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """A constant that is made of others, once."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def ints(self, values: Iterable[int]) -> Tensor:
        """Axes, sizes and the like."""
        return torch.tensor([int(v) for v in values], dtype=torch.int64, device="cpu")

    def number(self, value: float, like: Value) -> Tensor:
        """A number of the type of a value."""
        return torch.tensor(value, dtype=like.dtype, device="cpu")

    def reshaped(self, read: Operand, shape: Sequence[int]) -> str:
        """The same values in another shape."""
        return self.emit("Reshape", read, self.ints(shape), allowzero=1 if 0 in shape else None)

    def cast(self, read: Operand, dtype: torch.dtype) -> str:
        """The values in another type."""
        return self.emit("Cast", read, to=onnx_type(dtype))

    def made_by(self, name: str) -> OnnxNode | None:
        """The node that makes what has this name."""
        return self._makers.get(name)

    def value_of(self, name: str) -> Tensor | None:
        """The constant of this name."""
        return self._constants.get(name)

    def _unique(self, kind: str) -> str:
        stem = f"{self.scope}/{kind}" if self.scope else kind
        count = self._counts[stem] = self._counts.get(stem, -1) + 1
        return f"{stem}_{count}" if count else stem

    def model(self, inputs: Sequence[Value], outputs: Sequence[Value]) -> Any:
        """The model as `onnx.ModelProto`; what its outputs do not need is left out.

        Raises:
            FxqError: onnx is not installed.
        """
        onnx = _package()
        helper = onnx.helper
        needed = {value.name for value in outputs}
        nodes = []
        for node in reversed(self._nodes):
            if node.makes in needed:
                needed.update(node.reads)
                nodes.append(helper.make_node(node.kind, node.reads, [node.makes], name=node.makes, **node.attributes))
        ends = []
        for i, value in enumerate(outputs):
            name = value.name
            if name not in self._makers or any(other.name == name for other in outputs[:i]):
                name = f"output_{i}"  # a model hands out neither inputs and constants, nor one value twice
                nodes.insert(0, helper.make_node("Identity", [value.name], [name], name=name))
            ends.append(helper.make_tensor_value_info(name, onnx_type(value.dtype), value.shape))
        graph = helper.make_graph(
            nodes[::-1],
            "fxq",
            [helper.make_tensor_value_info(v.name, onnx_type(v.dtype), v.shape) for v in inputs],
            ends,
            [_proto(onnx, name, tensor) for name, tensor in self._constants.items() if name in needed],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


_TYPES = {
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.int16: 5, torch.int32: 6, torch.int64: 7, torch.bool: 9,
    torch.float16: 10, torch.float64: 11, torch.bfloat16: 16,
}  # fmt: skip


def onnx_type(dtype: torch.dtype) -> int:
    """ONNX's number of a type.

    Raises:
        NotInOnnx: it has none.
    """
    if dtype not in _TYPES:
        raise NotInOnnx(f"values of {dtype} have no type in ONNX")
    return _TYPES[dtype]


def _proto(onnx: Any, name: str, tensor: Tensor) -> Any:
    return onnx.numpy_helper.from_array(tensor.detach().cpu().contiguous().numpy(), name)


def _package() -> Any:
    try:
        import onnx
        import onnx.helper
        import onnx.numpy_helper
    except ImportError:
        raise FxqError("onnx is not installed: pip install fxq[onnx].") from None
    return onnx


Row = TypeVar("Row", bound=Callable[..., "str | Value"])
ROWS: dict[str, Callable[..., str | Value]] = {}
"""How each op is written, by its name: takes the writer, the op's tensors in order, and its options by name."""


def writes(*names: str) -> Callable[[Row], Row]:
    """Decorator: the function below writes the ops of these names."""

    def register(function: Row) -> Row:
        ROWS.update(dict.fromkeys(names, function))
        return function

    return register


def refuse(when: Any, reason: str) -> None:
    """Raise `NotInOnnx` with this reason, if there is one."""
    if when:
        raise NotInOnnx(reason)
