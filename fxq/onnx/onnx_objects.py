"""ONNX's own objects: types, nodes, graphs and models, as the package onnx has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxq.errors import FxqError

OPSET = 21
"""The first one with integers of four bits and blocks that have scales of their own."""

_IR_VERSION = 10
"""The format of files that belongs to it."""


class NotInOnnx(FxqError):
    """A call that no ONNX node says; the message is the reason."""


@dataclass(frozen=True)
class OnnxNode:
    """A node of the model: its type, what it reads and makes by name, and its attributes."""

    kind: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    attributes: Mapping[str, Any]


_CONTRIBUTED = frozenset({"DynamicQuantizeLSTM", "MatMulIntegerToFloat"})
"""Types of nodes that are none of ONNX's own, but ONNX Runtime's."""
_RUNTIME = "com.microsoft"


def _domain(node: OnnxNode) -> str:
    """Who defines the type of a node; empty: ONNX."""
    return _RUNTIME if node.kind in _CONTRIBUTED else ""


_TYPES = {
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.int16: 5, torch.int32: 6, torch.int64: 7, torch.bool: 9,
    torch.float16: 10, torch.float64: 11, torch.bfloat16: 16,
}  # fmt: skip

UINT4, INT4 = 21, 22
"""ONNX's numbers of two types that torch keeps in a byte: integers of four bits."""


def onnx_type(dtype: torch.dtype) -> int:
    """ONNX's number of a type.

    Raises:
        NotInOnnx: it has none.
    """
    if dtype not in _TYPES:
        raise NotInOnnx(f"values of {dtype} have no type in ONNX")
    return _TYPES[dtype]


def _constant(helper: Any, name: str, tensor: Tensor, kind: int) -> Any:
    values = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).flatten()
    if kind in (UINT4, INT4):
        values = torch.nn.functional.pad(values.view(torch.uint8) & 15, (0, values.numel() % 2))
        values = values[::2] | values[1::2] << 4
    return helper.make_tensor(name, kind, tensor.shape, values.view(torch.uint8).numpy().tobytes(), raw=True)


def _package() -> Any:
    try:
        import onnx
        import onnx.helper
    except ImportError:
        raise FxqError("onnx is not installed: pip install fxq[onnx].") from None
    return onnx


Declared = tuple[str, torch.dtype, Sequence[int | str]]
"""The name, type and shape of an input or output; a size that varies is a name or an expression."""


def graph_proto(
    nodes: Sequence[OnnxNode],
    inputs: Sequence[Declared],
    outputs: Sequence[Declared],
    constants: Mapping[str, tuple[Tensor, int]],
) -> Any:
    """An `onnx.GraphProto`.

    Args:
        nodes: each behind what it reads.
        inputs: what it is called with.
        outputs: what it returns.
        constants: by name, values and ONNX's number of their type.

    Raises:
        FxqError: onnx is not installed.
    """
    helper = _package().helper
    made = [helper.make_node(n.kind, n.reads, n.makes, n.makes[0], domain=_domain(n), **n.attributes) for n in nodes]
    declared = (
        [helper.make_tensor_value_info(name, onnx_type(dtype), shape) for name, dtype, shape in some]
        for some in (inputs, outputs)
    )
    return helper.make_graph(made, "fxq", *declared, [_constant(helper, n, *c) for n, c in constants.items()])


THREADS = "threads"
"""What a model's metadata call the number of threads that it may run on at most."""


def model_proto(graph: Any, about: Mapping[str, str] | None = None) -> Any:
    """The `onnx.ModelProto` of a graph, with its metadata."""
    helper = _package().helper
    versions = {"": OPSET, **{node.domain: 1 for node in graph.node if node.domain}}
    opsets = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="fxq")
    helper.set_model_props(model, dict(about or {}))
    return model
