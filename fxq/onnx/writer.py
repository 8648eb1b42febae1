"""Writer of ONNX models: collects values, constants and nodes, and drops those that no output needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fxq.onnx.onnx_objects import THREADS, NotInOnnx, OnnxNode, graph_proto, model_proto, onnx_type
from fxq.onnx.varying_sizes import VaryingSizes, varies


class WithoutData:
    """Tensor without data: what is known of it is `like`, a tensor of its shape and dtype."""

    like: Tensor

    @property
    def shape(self) -> tuple[Any, ...]:
        """Shape of the tensor. Dynamic sizes are symbols."""
        return tuple(self.like.shape)

    @property
    def rank(self) -> int:
        """Number of axes."""
        return self.like.dim()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.like.dtype


@dataclass(frozen=True, eq=False)
class Value(WithoutData):
    """Tensor of the model that is being written.

    Attributes:
        name: name in the model.
        like: tensor of its shape and dtype, on the meta device.
    """

    name: str
    like: Tensor


Operand = Value | Tensor | str | None
"""Input of a node: a value, a constant, the name of an earlier node's output, or None for an absent input."""


MOVING_OP_TYPES = ("Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Expand", "Cast", "Identity")
"""Op types that only move or cast the values of their first input."""


def in_range(index: Tensor, size: int) -> bool:
    """Whether all entries are indices of an axis of this size; floats are rounded towards zero."""
    if not index.numel():
        return True
    low, high = index.aminmax()
    return bool(low.item() > -1 and high.item() < size)


class DynamicSteps(NamedTuple):
    """Value (steps - zero_point) * scale on a dynamic grid.

    Attributes:
        steps: name of the integers, as float32.
        scale: scale, computed at run time.
        zero_point: zero point as float32, computed at run time or constant.
    """

    steps: str
    scale: Value
    zero_point: Operand


@dataclass
class Writer:
    """Model that is being written, node by node.

    Attributes:
        integer_bias: whether to write the bias of an integer layer in int32 if it fits, instead of float32.
        floats: whether to skip conversions, so that the model computes in float with the dequantized weights.
        portable: whether to use only ONNX's own op types, for any runtime. The runtime then checks indices.
        sizes: dynamic sizes of the inputs; None if all sizes are fixed.
        integer_conv: whether to write integer convolutions with float results as ConvInteger, because ONNX Runtime
            would run them in float.
        clamps: input name and bounds of each clamp, by the name of its output.
        weights: names of the dequantized weights that integer layers read.
        indices: sizes of the axes that inputs index into, by the name of the input.
        computed: names of constants that were folded from nodes of the graph.
        threads: maximum number of threads that a runtime may run the model on; None for any number.
        nbits: whether to write weight-only linear layers as MatMulNBits, an op type of ONNX Runtime.
        for_openvino: whether to avoid nodes that OpenVINO computes wrong, see `fxq/onnx/recurrent_nodes.py`, and to
            write dynamic grids as it runs them on integers, see `fxq/onnx/dynamic_steps.py`.
        dynamic_steps: for OpenVINO, the steps of each value that is dequantized from a dynamic grid, by its name.
        recurrent_reads: number of recurrent nodes that read each value, moved or rounded or not, by name.
    """

    integer_bias: bool = True
    floats: bool = False
    portable: bool = False
    sizes: VaryingSizes | None = None
    integer_conv: bool = False
    clamps: dict[str, tuple[str, float, float]] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)
    indices: dict[str, int] = field(default_factory=dict)
    computed: set[str] = field(default_factory=set)
    threads: int | None = None
    nbits: bool = False
    for_openvino: bool = False
    dynamic_steps: dict[str, DynamicSteps] = field(default_factory=dict)
    recurrent_reads: dict[str, int] = field(default_factory=dict)
    _inputs: list[Value] = field(default_factory=list)
    _nodes: list[OnnxNode] = field(default_factory=list)
    _producers: dict[str, OnnxNode] = field(default_factory=dict)
    _constants: dict[str, Tensor] = field(default_factory=dict)
    _types: dict[str, int] = field(default_factory=dict)
    _constant_names: dict[tuple[int, int], str] = field(default_factory=dict)
    _cached: dict[Any, Tensor] = field(default_factory=dict)
    _emitted: dict[Any, str] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _scope: str = ""

    def input(self, name: str, like: Tensor) -> Value:
        """Declare an input of the model with the shape and dtype of a tensor."""
        name = f"{self._scope}/{name}" if self._scope else name
        value = Value(self._unique(name), like if like.device.type == "meta" else torch.empty_like(like, device="meta"))
        self._inputs.append(value)
        return value

    def index(self, value: Value, size: int) -> Value:
        """Return a value to use as indices of an axis, and record it in `indices`.

        Engines do not check indices, so the caller of the model checks its inputs against `indices`.

        Args:
            value: the indices.
            size: size of the axis.

        Raises:
            NotInOnnx: the indices are computed from inputs, or a constant index is out of range.
        """
        if self.portable:
            return value
        name = value.name
        while (node := self.producer(name)) is not None and node.op_type in MOVING_OP_TYPES and node.op_type != "Slice":
            name = node.inputs[0]
        constant = self.constant_of(name)
        refuse(node is not None, "its indices are computed")
        refuse(constant is not None and not in_range(constant, size), "an index is out of range")
        if constant is None:
            self.indices[name] = min(size, self.indices.get(name, size))
        return value

    @contextmanager
    def scoped(self, name: str) -> Iterator[None]:
        """Prefix the names of what is written inside with `name`; nested scopes keep the outermost prefix."""
        before, self._scope = self._scope, self._scope or name
        try:
            yield
        finally:
            self._scope = before

    def emit(self, op_type: str, *operands: Operand, **attributes: Any) -> str:
        """Write a node and return the name of its output. Attributes that are None are left out."""
        return self.emit_several(op_type, operands, 1, **attributes)[0]

    def emit_several(self, op_type: str, operands: Iterable[Operand], count: int, **attributes: Any) -> list[str]:
        """Write a node with `count` outputs and return their names."""
        names = [self.name_of(operand) for operand in operands]
        for key, value in attributes.items():
            refuse(_has_varying(value), f"its {key} depends on a dynamic size")
        while names and not names[-1]:
            names.pop()
        outputs = [self._unique(f"{self._scope}/{op_type}") for _ in range(count)]
        present = {key: value for key, value in attributes.items() if value is not None}
        node = OnnxNode(op_type, tuple(names), tuple(outputs), present)
        self._nodes.append(node)
        self._producers.update(dict.fromkeys(outputs, node))
        return outputs

    def name_of(self, operand: Operand) -> str:
        """Name of an operand as an input of a node; a tensor becomes a constant, None the empty name."""
        if isinstance(operand, Value):
            return operand.name
        if isinstance(operand, Tensor):
            return self.constant(operand)
        return operand or ""

    def emit_as(self, output: str, op_type: str, *operands: Operand) -> None:
        """Write a node that replaces the node with the output `output`, under the same name."""
        node = OnnxNode(op_type, tuple(map(self.name_of, operands)), (output,), {})
        self._nodes.append(node)
        self._producers[output] = node

    def rewrite(self, rewritten: Callable[[OnnxNode], bool]) -> None:
        """Replace nodes: `rewritten` writes a replacement and returns True, or returns False to keep the node."""
        nodes, self._nodes = self._nodes, []
        for node in nodes:
            with self.scoped(node.outputs[0].rpartition("/")[0]):
                if not rewritten(node):
                    self._nodes.append(node)

    def readers(self, outputs: Sequence[Value]) -> dict[str, list[OnnxNode]]:
        """Nodes that read each value, by its name; only nodes that the outputs depend on."""
        by_name: dict[str, list[OnnxNode]] = {}
        needed = {value.name for value in outputs}
        for node in reversed(self._nodes):
            if needed.intersection(node.outputs):
                needed.update(node.inputs)
                for name in node.inputs:
                    by_name.setdefault(name, []).append(node)
        return by_name

    def constant(self, tensor: Tensor, type_number: int | None = None) -> str:
        """Return the name of a constant; a tensor object is written once.

        Args:
            tensor: its values.
            type_number: ONNX's type number to write it with; None for that of the dtype.
        """
        type_number = onnx_type(tensor.dtype) if type_number is None else type_number
        key = id(tensor), type_number
        if key not in self._constant_names:
            name = self._constant_names[key] = self._unique(f"{self._scope}/constant")
            self._constants[name], self._types[name] = tensor, type_number  # holds the tensor, so its id stays unique
        return self._constant_names[key]

    def cached_constant(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor computed from other constants, from the cache or by calling `make`."""
        if key not in self._cached:
            self._cached[key] = make()
        return self._cached[key]

    def emit_once(self, key: Any, emit: Callable[[], str]) -> str:
        """Return the name of a value with this key; `emit` writes it on the first call."""
        if key not in self._emitted:
            self._emitted[key] = emit()
        return self._emitted[key]

    def ints(self, values: Iterable[int]) -> Tensor | str:
        """Axes or sizes as a 1-d int64 constant, or for dynamic sizes, as a value that the model computes."""
        numbers = list(values)
        if self.sizes is not None and any(map(varies, numbers)):
            return self.sizes.written(self, numbers)
        return torch.tensor([int(number) for number in numbers], dtype=torch.int64, device="cpu")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an empty tensor of this shape on the meta device."""
        if self.sizes is not None:
            return self.sizes.empty(shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    def number(self, value: float, like: Value) -> Tensor:
        """Return a 0-d tensor of a number in the dtype of a value."""
        return torch.tensor(value, dtype=like.dtype, device="cpu")

    def number_or_size(self, value: Any, dtype: torch.dtype) -> Tensor | str:
        """Return a number as a 0-d constant; a dynamic size as a 0-d value that the model computes."""
        if self.sizes is not None and varies(value):
            return self.cast(self.emit("Squeeze", self.sizes.written(self, [value])), dtype)
        return torch.tensor(value, dtype=dtype, device="cpu")

    def reshaped(self, read: Operand, shape: Sequence[int]) -> str:
        """Write a Reshape to this shape."""
        shape = list(shape)
        dynamic_axes = [i for i, size in enumerate(shape) if varies(size)]
        if dynamic_axes and isinstance(read, Value) and 0 not in shape and len(dynamic_axes) + (-1 in shape) > 1:
            for i in dynamic_axes:
                if i < read.rank and str(read.shape[i]) == str(shape[i]):
                    shape[i] = 0  # ONNX: keeps the size of the input
            return self.emit("Reshape", read, self.ints(_one_inferred(shape)))
        shape = _one_inferred(shape)
        return self.emit("Reshape", read, self.ints(shape), allowzero=1 if 0 in shape else None)

    def joined(self, parts: Sequence[Operand], axis: int) -> str:
        """Write a Concat along an axis; a single part is returned unchanged."""
        return self.emit("Concat", *parts, axis=axis) if len(parts) > 1 else self.name_of(parts[0])

    def cut(self, read: Operand, axis: int, start: int, stop: int, step: int = 1) -> str:
        """Write a Slice of one axis."""
        return self.emit("Slice", read, *(self.ints([number]) for number in (start, stop, axis, step)))

    def flipped(self, read: Operand) -> str:
        """Write a Slice that reverses the first axis."""
        return self.cut(read, 0, -1, torch.iinfo(torch.int64).min, -1)

    def cast(self, read: Operand, dtype: torch.dtype) -> str:
        """Write a Cast to a dtype."""
        return self.emit("Cast", read, to=onnx_type(dtype))

    def producer(self, name: str) -> OnnxNode | None:
        """Node that computes the value of this name; None for inputs and constants."""
        return self._producers.get(name)

    def constant_of(self, name: str) -> Tensor | None:
        """Constant of this name; None if it is no constant."""
        return self._constants.get(name)

    def type_number_of(self, name: str) -> int | None:
        """ONNX's type number of the constant of this name; None if it is no constant."""
        return self._types.get(name)

    def _unique(self, name: str) -> str:
        """Return the name, with a number appended if it exists already."""
        count = self._counts[name] = self._counts.get(name, -1) + 1
        return self._unique(f"{name}_{count}") if count else name

    def body(self) -> Writer:
        """Return a writer for the body of a loop node."""
        return Writer(self.integer_bias, self.floats, self.portable, self.sizes, _scope=f"{self._scope}/step")

    def model(self, outputs: Sequence[Value], names: Sequence[str] = (), keep_inputs: bool = False) -> Any:
        """Build the model as `onnx.ModelProto`; see `graph`."""
        about = {} if self.threads is None else {THREADS: str(self.threads)}
        return model_proto(self.graph(outputs, names, keep_inputs), about)

    def graph(self, outputs: Sequence[Value], names: Sequence[str] = (), keep_inputs: bool = False) -> Any:
        """Build the graph as `onnx.GraphProto`, without nodes that its outputs do not need.

        Args:
            outputs: values that the graph returns.
            names: names of the outputs; default: the names of the values.
            keep_inputs: whether to keep inputs that no node reads.

        Raises:
            FxqError: onnx is not installed.
        """
        nodes: list[OnnxNode] = []
        ends: list[Value] = []
        renamed: dict[str, str] = {}
        for i, value in enumerate(outputs):
            wanted = self._unique(names[i]) if names else ""
            name = wanted or value.name
            if value.name not in self._producers or value.name in {*renamed, *(end.name for end in ends)}:
                # Inputs, constants and repeated values need an Identity node to be outputs.
                name = wanted or self._unique(f"{self._scope}/output_{i}".lstrip("/"))
                nodes.append(OnnxNode("Identity", (value.name,), (name,), {}))
            elif wanted:
                renamed[value.name] = wanted
            ends.append(Value(name, value.like))
        needed = {value.name for value in outputs}

        def rename(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(renamed.get(name, name) for name in names)

        for node in reversed(self._nodes):
            if needed.intersection(node.outputs):
                needed.update(node.inputs)
                nodes.append(node)
        constants = {name: (self._constants[name], self._types[name]) for name in self._constants if name in needed}
        return graph_proto(
            [replace(n, inputs=rename(n.inputs), outputs=rename(n.outputs)) for n in reversed(nodes)],
            [self._declared(value) for value in self._inputs if keep_inputs or value.name in needed],
            [self._declared(value) for value in ends],
            constants,
        )

    def _declared(self, value: Value) -> tuple[str, torch.dtype, list[int | str]]:
        """Name, dtype and shape of an input or output; dynamic sizes are names or the text of an expression."""
        shape = [self.sizes.text(size) if self.sizes and varies(size) else int(size) for size in value.shape]
        return value.name, value.dtype, shape


def _has_varying(value: Any) -> bool:
    """Whether an attribute of a node is or contains a dynamic size."""
    return any(map(varies, value)) if isinstance(value, (tuple, list)) else varies(value)


def _one_inferred(shape: list[Any]) -> list[Any]:
    """Replace a single dynamic size of a shape by -1, which ONNX infers."""
    dynamic = [i for i, size in enumerate(shape) if varies(size)]
    if len(dynamic) != 1 or -1 in shape:
        return shape
    return [-1 if i in dynamic else size for i, size in enumerate(shape)]


Row = TypeVar("Row", bound=Callable[..., "str | Value"])
OP_WRITERS: dict[str, Callable[..., str | Value]] = {}
"""Function that writes each op, by op name. It takes the writer, the op's tensors in order, and its options by name."""


def writes(*names: str) -> Callable[[Row], Row]:
    """Register the decorated function to write the ops of these names."""

    def register(function: Row) -> Row:
        OP_WRITERS.update(dict.fromkeys(names, function))
        return function

    return register


def refuse(when: Any, reason: str) -> None:
    """Raise `NotInOnnx` with this reason if `when` is true."""
    if when:
        raise NotInOnnx(reason)
