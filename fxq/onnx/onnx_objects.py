"""Types, nodes, graphs and models of the package onnx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxq.errors import FxqError
from fxq.quant.packing import pack_adjacent

OPSET = 21
"""First opset with 4-bit integers and one scale per block."""

_IR_VERSION = 10
"""Version of the file format for this opset."""


class NotInOnnx(FxqError):
    """Raised for a call that cannot be written in ONNX; the message is the reason."""


@dataclass(frozen=True)
class OnnxNode:
    """Node of an ONNX model: op type, names of its inputs and outputs, and attributes."""

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]


_CONTRIBUTED = frozenset({"DynamicQuantizeLSTM", "MatMulIntegerToFloat", "MatMulNBits"})
"""Op types that ONNX Runtime adds to ONNX."""
_RUNTIME_DOMAIN = "com.microsoft"


def _domain(node: OnnxNode) -> str:
    """Domain of a node's op type; empty for ONNX."""
    return _RUNTIME_DOMAIN if node.op_type in _CONTRIBUTED else ""


TYPE_NUMBERS = {
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.int16: 5, torch.int32: 6, torch.int64: 7, torch.bool: 9,
    torch.float16: 10, torch.float64: 11, torch.bfloat16: 16,
}  # fmt: skip
"""ONNX's type number of each dtype that is written."""

UINT4, INT4 = 21, 22
"""ONNX's type numbers of 4-bit integers, which torch stores in bytes."""


def onnx_type(dtype: torch.dtype) -> int:
    """ONNX's type number of a dtype.

    Raises:
        NotInOnnx: ONNX has no such type.
    """
    if dtype not in TYPE_NUMBERS:
        raise NotInOnnx(f"ONNX has no type for values of {dtype}")
    return TYPE_NUMBERS[dtype]


def _constant(helper: Any, name: str, tensor: Tensor, kind: int) -> Any:
    values = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).flatten()
    if kind in (UINT4, INT4):
        values = pack_adjacent(values.view(torch.uint8)[None] & 15, 4)
    return helper.make_tensor(name, kind, tensor.shape, values.view(torch.uint8).numpy().tobytes(), raw=True)


def onnx_package() -> Any:
    try:
        import onnx
        import onnx.helper
    except ImportError:
        raise FxqError("onnx is not installed: pip install fxq[onnx].") from None
    return onnx


Declared = tuple[str, torch.dtype, Sequence[int | str]]
"""Name, dtype and shape of an input or output; a dynamic size is a name or an expression."""


def graph_proto(
    nodes: Sequence[OnnxNode],
    inputs: Sequence[Declared],
    outputs: Sequence[Declared],
    constants: Mapping[str, tuple[Tensor, int]],
) -> Any:
    """Build an `onnx.GraphProto`.

    Args:
        nodes: nodes in topological order.
        inputs: declared inputs.
        outputs: declared outputs.
        constants: values and ONNX's type number of each constant, by name.

    Raises:
        FxqError: onnx is not installed.
    """
    helper = onnx_package().helper
    protos = [
        helper.make_node(n.op_type, n.inputs, n.outputs, n.outputs[0], domain=_domain(n), **n.attributes) for n in nodes
    ]
    declared = (
        [helper.make_tensor_value_info(name, onnx_type(dtype), shape) for name, dtype, shape in declarations]
        for declarations in (inputs, outputs)
    )
    return helper.make_graph(protos, "fxq", *declared, [_constant(helper, n, *c) for n, c in constants.items()])


THREADS = "threads"
"""Metadata key for the maximum number of threads that a model may run on."""


def model_proto(graph: Any, about: Mapping[str, str] | None = None) -> Any:
    """Build the `onnx.ModelProto` of a graph, with metadata."""
    helper = onnx_package().helper
    versions = {"": OPSET, **{node.domain: 1 for node in graph.node if node.domain}}
    opsets = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="fxq")
    helper.set_model_props(model, dict(about or {}))
    return model
