"""A graph becomes an ONNX model: values, constants and nodes as they are written, and what nobody reads left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxq.onnx.onnx_objects import THREADS, NotInOnnx, OnnxNode, graph_proto, model_proto, onnx_type
from fxq.onnx.varying_sizes import VaryingSizes, varies


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


MOVES = ("Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Expand", "Cast", "Identity")
"""Types of nodes whose values are those that they read first, moved, or in another type."""


def in_range(index: Tensor, size: int) -> bool:
    """Whether all entries are indices below a size; floats are rounded towards zero."""
    if not index.numel():
        return True
    low, high = index.aminmax()
    return bool(low > -1) and bool(high < size)


@dataclass
class Writer:
    """The model so far.

    Attributes:
        integer_bias: whether the bias of a layer on integers is written in int32, where it fits; else in float32.
        floats: whether conversions are left out, so that all computes in float, with the weights of the integers.
        portable: whether all nodes are ONNX's own, for any runtime, which is to check indices itself.
        sizes: the sizes of its inputs that vary; None: none does.
        integer_conv: whether integer convolutions whose result is not quantized are written as ConvInteger, since ONNX
            Runtime runs them in float otherwise.
        clamps: by what a clamp makes, what it reads and its bounds.
        weights: the dequantized weights that a layer on integers reads.
        indices: inputs whose values are indices, and what they are below.
        computed: names of constants that were folded from nodes of the graph.
        threads: on how many threads a runtime may run the model at most; None: on any number.
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
    _inputs: list[Value] = field(default_factory=list)
    _nodes: list[OnnxNode] = field(default_factory=list)
    _makers: dict[str, OnnxNode] = field(default_factory=dict)
    _constants: dict[str, Tensor] = field(default_factory=dict)
    _types: dict[str, int] = field(default_factory=dict)
    _named: dict[tuple[int, int], str] = field(default_factory=dict)
    _made: dict[Any, Tensor] = field(default_factory=dict)
    _emitted: dict[Any, str] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _scope: str = ""

    def input(self, name: str, like: Tensor) -> Value:
        """An input of the model, of the shape and dtype of a tensor."""
        name = f"{self._scope}/{name}" if self._scope else name
        value = Value(self._unique(name), like if like.device.type == "meta" else torch.empty_like(like, device="meta"))
        self._inputs.append(value)
        return value

    def index(self, value: Value, size: int) -> Value:
        """A value whose entries are indices below a size. Engines check none: what is given must be checked before.

        Raises:
            NotInOnnx: it is computed of inputs, or a constant has an entry out of range.
        """
        if self.portable:
            return value
        name = value.name
        while (node := self.made_by(name)) is not None and node.kind in MOVES and node.kind != "Slice":
            name = node.reads[0]
        known = self.value_of(name)
        refuse(node is not None, "its indices are computed")
        refuse(known is not None and not in_range(known, size), "an index is out of range")
        if known is None:
            self.indices[name] = min(size, self.indices.get(name, size))
        return value

    @contextmanager
    def scoped(self, name: str) -> Iterator[None]:
        """What is written inside has names that begin so; of several, the outermost counts."""
        before, self._scope = self._scope, self._scope or name
        try:
            yield
        finally:
            self._scope = before

    def emit(self, kind: str, *reads: Operand, **attributes: Any) -> str:
        """Write a node; the name of what it makes. An attribute that is None is left out."""
        return self.emit_several(kind, reads, 1, **attributes)[0]

    def emit_several(self, kind: str, reads: Iterable[Operand], count: int, **attributes: Any) -> list[str]:
        """Write a node that makes several values; their names."""
        names = [self.name_of(read) for read in reads]
        for key, value in attributes.items():
            refuse(_has_varying(value), f"its {key} depends on a dynamic size")
        while names and not names[-1]:
            names.pop()
        outputs = [self._unique(f"{self._scope}/{kind}") for _ in range(count)]
        present = {key: value for key, value in attributes.items() if value is not None}
        node = OnnxNode(kind, tuple(names), tuple(outputs), present)
        self._nodes.append(node)
        self._makers.update(dict.fromkeys(outputs, node))
        return outputs

    def name_of(self, read: Operand) -> str:
        """The name under which a node reads this."""
        if isinstance(read, Value):
            return read.name
        if isinstance(read, Tensor):
            return self.constant(read)
        return read or ""

    def emit_as(self, output: str, kind: str, *reads: Operand) -> None:
        """Write a node whose output gets an existing name, replacing the node that had it."""
        node = OnnxNode(kind, tuple(map(self.name_of, reads)), (output,), {})
        self._nodes.append(node)
        self._makers[output] = node

    def rewrite(self, rewritten: Callable[[OnnxNode], bool]) -> None:
        """Rewrite the nodes in order: `rewritten` writes a replacement and returns True, or False to keep the node."""
        nodes, self._nodes = self._nodes, []
        for node in nodes:
            with self.scoped(node.makes[0].rpartition("/")[0]):
                if not rewritten(node):
                    self._nodes.append(node)

    def readers(self, outputs: Sequence[Value]) -> dict[str, list[OnnxNode]]:
        """Nodes that read each value, by its name; only nodes that the outputs depend on."""
        by_name: dict[str, list[OnnxNode]] = {}
        needed = {value.name for value in outputs}
        for node in reversed(self._nodes):
            if needed.intersection(node.makes):
                needed.update(node.reads)
                for name in node.reads:
                    by_name.setdefault(name, []).append(node)
        return by_name

    def constant(self, tensor: Tensor, kind: int | None = None) -> str:
        """The name of a constant; the same tensor is written once.

        Args:
            tensor: its values.
            kind: ONNX's number of the type to write it in; None: its own.
        """
        kind = onnx_type(tensor.dtype) if kind is None else kind
        key = id(tensor), kind
        if key not in self._named:
            name = self._named[key] = self._unique(f"{self._scope}/constant")
            self._constants[name], self._types[name] = tensor, kind  # the tensor is kept, so its id stays its own
        return self._named[key]

    def kept(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """A constant that is made of others, once."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def made_once(self, key: Any, emit: Callable[[], str]) -> str:
        """The name of a value that several nodes may read, which is written for the first of them."""
        if key not in self._emitted:
            self._emitted[key] = emit()
        return self._emitted[key]

    def ints(self, values: Iterable[int]) -> Tensor | str:
        """Axes, sizes and the like, 1-d: a constant, or where sizes vary, what is computed of them."""
        given = list(values)
        if self.sizes is not None and any(map(varies, given)):
            return self.sizes.written(self, given)
        return torch.tensor([int(v) for v in given], dtype=torch.int64, device="cpu")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape, on the meta device."""
        if self.sizes is not None:
            return self.sizes.empty(shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    def number(self, value: float, like: Value) -> Tensor:
        """A number of the type of a value."""
        return torch.tensor(value, dtype=like.dtype, device="cpu")

    def reshaped(self, read: Operand, shape: Sequence[int]) -> str:
        """The same values in another shape."""
        shape = list(shape)
        at = [i for i, size in enumerate(shape) if varies(size)]
        if at and isinstance(read, Value) and 0 not in shape and len(at) + (-1 in shape) > 1:
            for i in at:
                if i < read.rank and str(read.shape[i]) == str(shape[i]):
                    shape[i] = 0  # as it was
            return self.emit("Reshape", read, self.ints(_one_inferred(shape)))
        shape = _one_inferred(shape)
        return self.emit("Reshape", read, self.ints(shape), allowzero=1 if 0 in shape else None)

    def joined(self, parts: Sequence[Operand], axis: int) -> str:
        """Parts side by side; one alone as it is."""
        return self.emit("Concat", *parts, axis=axis) if len(parts) > 1 else self.name_of(parts[0])

    def cut(self, read: Operand, axis: int, start: int, stop: int, step: int = 1) -> str:
        """Some of the entries of an axis."""
        return self.emit("Slice", read, *(self.ints([number]) for number in (start, stop, axis, step)))

    def cast(self, read: Operand, dtype: torch.dtype) -> str:
        """The values in another type."""
        return self.emit("Cast", read, to=onnx_type(dtype))

    def made_by(self, name: str) -> OnnxNode | None:
        """The node that makes what has this name."""
        return self._makers.get(name)

    def value_of(self, name: str) -> Tensor | None:
        """The constant of this name."""
        return self._constants.get(name)

    def type_of(self, name: str) -> int | None:
        """ONNX's number of the type of the constant of this name."""
        return self._types.get(name)

    def _unique(self, name: str) -> str:
        """The name, with a number behind it where there is one already."""
        count = self._counts[name] = self._counts.get(name, -1) + 1
        return self._unique(f"{name}_{count}") if count else name

    def body(self) -> Writer:
        """A writer of the graph that a node of this one runs, again and again."""
        return Writer(self.integer_bias, self.floats, self.portable, self.sizes, _scope=f"{self._scope}/step")

    def model(self, outputs: Sequence[Value], names: Sequence[str] = (), keep_inputs: bool = False) -> Any:
        """The model as `onnx.ModelProto`; see `graph`."""
        about = {} if self.threads is None else {THREADS: str(self.threads)}
        return model_proto(self.graph(outputs, names, keep_inputs), about)

    def graph(self, outputs: Sequence[Value], names: Sequence[str] = (), keep_inputs: bool = False) -> Any:
        """What was written as `onnx.GraphProto`; what its outputs do not need is left out.

        Args:
            outputs: what it returns.
            names: what they are called; default: as they are.
            keep_inputs: whether inputs that nothing is computed of stay inputs.

        Raises:
            FxqError: onnx is not installed.
        """
        nodes: list[OnnxNode] = []
        ends: list[Value] = []
        renamed: dict[str, str] = {}
        for i, value in enumerate(outputs):
            wanted = self._unique(names[i]) if names else ""
            name = wanted or value.name
            if value.name not in self._makers or value.name in {*renamed, *(end.name for end in ends)}:
                name = wanted or self._unique(
                    f"{self._scope}/output_{i}".lstrip("/")
                )  # inputs, constants, and a value twice need a node
                nodes.append(OnnxNode("Identity", (value.name,), (name,), {}))
            elif wanted:
                renamed[value.name] = wanted
            ends.append(Value(name, value.like))
        needed = {value.name for value in outputs}

        def rename(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(renamed.get(name, name) for name in names)

        for node in reversed(self._nodes):
            if needed.intersection(node.makes):
                needed.update(node.reads)
                nodes.append(node)
        kept = {name: (self._constants[name], self._types[name]) for name in self._constants if name in needed}
        return graph_proto(
            [replace(n, reads=rename(n.reads), makes=rename(n.makes)) for n in reversed(nodes)],
            [self._declared(value) for value in self._inputs if keep_inputs or value.name in needed],
            [self._declared(value) for value in ends],
            kept,
        )

    def _declared(self, value: Value) -> tuple[str, torch.dtype, list[int | str]]:
        """The name, type and shape of an input or output; sizes that vary have names, or the text of what they are."""
        shape = [self.sizes.text(size) if self.sizes and varies(size) else int(size) for size in value.shape]
        return value.name, value.dtype, shape


def _has_varying(value: Any) -> bool:
    """Whether an attribute of a node is or contains a dynamic size."""
    return any(map(varies, value)) if isinstance(value, (tuple, list)) else varies(value)


def _one_inferred(shape: list[Any]) -> list[Any]:
    """A shape of which the one size that varies follows from the others."""
    at = [i for i, size in enumerate(shape) if varies(size)]
    return [-1 if i in at else size for i, size in enumerate(shape)] if len(at) == 1 and -1 not in shape else shape


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
