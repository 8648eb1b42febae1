"""Reader of ONNX graphs: finds the function that reads each node, and names a node that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, fx

from fxq.errors import FileError, words_of
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.onnx.reading.graph_builder import GraphBuilder, Operand, Sizes
from fxq.onnx.reading.onnx_file import FOUR_BIT, ONNX_DOMAINS, attributes_of, constant_of
from fxq.onnx.writer import refuse

_DOMAINS = (*ONNX_DOMAINS, "com.microsoft")
"""Domains of the op types that are read; another domain may give a name of ONNX another meaning."""

MAX_CONSTANT_BYTES = 2**30
"""Largest constant, in bytes, that is computed while reading."""


Reads = TypeVar("Reads", bound=Callable[..., Any])
OP_READERS: dict[str, Callable[..., Any]] = {}
"""Function that reads each ONNX op type: it takes the reader, the inputs in order (None: absent), and attributes."""
SIZE_READERS: dict[str, Callable[..., Any]] = {}
"""Function that computes an ONNX op type on sizes: it takes arrays of objects and the attributes."""


def reads(*op_types: str) -> Callable[[Reads], Reads]:
    """Register the decorated function to read nodes of these op types."""

    def register(function: Reads) -> Reads:
        OP_READERS.update(dict.fromkeys(op_types, function))
        return function

    return register


@dataclass
class Reader(GraphBuilder):
    """Reader of an ONNX graph, which builds a `torch.fx` graph from its nodes.

    Attributes:
        opset: version of ONNX's op set that the file uses.
        four_bit: ids of the constants of 4-bit integers, which are held in bytes.
        in_float: names of nodes that quantize to no grid of fxq, each with the reason, by the node of their result.
        notes: facts about operands that later nodes need, by their id.
        values: values by their name in the file.
        outputs: number of outputs of the node that is being read.
    """

    opset: int = field(kw_only=True)
    four_bit: set[int] = field(default_factory=set)
    in_float: dict[fx.Node, str] = field(default_factory=dict)
    notes: dict[int, Any] = field(default_factory=dict)
    values: dict[str, Operand | None] = field(default_factory=dict)
    outputs: int = 1

    def declare(self, proto: Any) -> Tensor:
        """Return the constant of an `onnx.TensorProto` of the file."""
        tensor = self.constant(proto.name, constant_of(proto))
        if proto.data_type in FOUR_BIT:
            self.four_bit.add(id(tensor))
        return tensor

    def noted(self, note: Any, *operands: Any) -> None:
        """Note a fact about operands."""
        for operand in operands:
            self.notes[id(operand)] = note
            self._kept.append(operand)  # so that its id stays unique

    def read(self, node: Any) -> None:
        """Read a node of the file, and record its outputs in `values`.

        Raises:
            FileError: the node cannot be read; the message names it and says why.
        """
        self.label = node.name or next(filter(None, node.output), node.op_type)
        self.outputs = len(node.output)
        try:
            inputs = [self.value(name) if name else None for name in node.input]
            attributes = attributes_of(node)
            results = self._read(node, inputs, attributes)
        except FileError:
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, NotInOnnx) else f"{type(error).__name__}: {words_of(error)}"
            raise FileError(f"node {self.label!r} ({node.op_type}) cannot be read: {reason}") from error
        results = results if isinstance(results, tuple) else (results,)
        for name, result in zip(node.output, results, strict=False):
            self.values[name] = result
        missing = [name for name in node.output[len(results) :] if name]
        if missing:
            raise FileError(
                f"node {self.label!r} ({node.op_type}) cannot be read: its output {missing[0]!r} is not supported"
            )

    def value(self, name: str) -> Any:
        """Value of a name of the file.

        Raises:
            NotInOnnx: no input, constant or node before has this name.
        """
        refuse(name not in self.values, f"{name!r} is neither an input nor a dense constant nor computed before it")
        return self.values[name]

    def _read(self, node: Any, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        from fxq.onnx.reading.control_readers import read_function

        refuse(node.domain not in _DOMAINS, f"fxq has no reader for op types of the domain {node.domain!r}")
        on_sizes = SIZE_READERS.get(node.op_type) if node.domain in ONNX_DOMAINS else None
        if on_sizes is not None and any(isinstance(v, Sizes) for v in inputs):
            arrays = [_as_sizes(value) for value in inputs]
            if all(array is not None or value is None for array, value in zip(arrays, inputs, strict=True)):
                result = on_sizes(*arrays, **attributes)
                if result is not None:
                    return result
        if node.op_type in OP_READERS:
            result = OP_READERS[node.op_type](self, *inputs, **attributes)
        else:
            result = read_function(self, node, inputs)
            refuse(result is None, "fxq has no reader for this op type")
        for part in result if isinstance(result, tuple) else (result,):
            too_large = isinstance(part, Tensor) and part.numel() * part.element_size() > MAX_CONSTANT_BYTES
            refuse(too_large, "it computes a constant of more than 1 GiB")
        return result

    def read_all(self, nodes: Iterable[Any]) -> None:
        """Read nodes in the order of the file."""
        for node in nodes:
            self.read(node)


def _as_sizes(value: Any) -> Sizes | None:
    """Operand as sizes; None if it is traced, absent, or a large constant."""
    if isinstance(value, Tensor) and value.numel() <= 1024:
        array = np.empty(tuple(value.shape), dtype=object)
        array.reshape(-1)[:] = value.flatten().tolist()
        return Sizes(array, value.dtype)
    return value if isinstance(value, Sizes) else None
