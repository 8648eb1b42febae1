"""A graph of canonical ops and units, written as an ONNX model."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

import fxq.onnx.assignment_nodes
import fxq.onnx.conversion_nodes
import fxq.onnx.layer_nodes
import fxq.onnx.movement_nodes
import fxq.onnx.norm_nodes
import fxq.onnx.pointwise_nodes
import fxq.onnx.pooling_nodes
import fxq.onnx.recurrent_nodes
import fxq.onnx.reduction_nodes
import fxq.onnx.resampling_nodes  # noqa: F401  (register how the ops are written)
from fxq.graph.guards import check_fixed
from fxq.graph.info import info
from fxq.graph.query import (
    CONVERSIONS,
    DYNAMIC_GRID_OPS,
    arguments_of,
    called_name,
    fills_like,
    is_check,
    is_size,
    op_of,
    read_attribute,
    reads_only_metadata,
)
from fxq.graph.region import is_weight
from fxq.graph.unit import Unit, unit_of
from fxq.onnx.constants import UNKNOWN, constant_value
from fxq.onnx.function_nodes import FUNCTIONS, MAKERS
from fxq.onnx.integer_conv import write_integer_convolutions
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.onnx.varying_sizes import python_dispatch
from fxq.onnx.writer import ROWS, Value, Writer
from fxq.ops.table import Op

ModelCache = dict[fx.Node, Any]


@dataclass(frozen=True)
class Written:
    """A graph as ONNX.

    Attributes:
        model: `onnx.ModelProto`.
        reads: which of the inputs the model takes, in order: those that something is computed of.
        several: whether the graph returns several values.
        outputs: what the model returns, on the meta device: shapes and dtypes.
        channels_last: which of its outputs are images whose last axis has the channels.
        indices: of the inputs that are indices, which they are, and what their values are below.
    """

    model: Any
    reads: tuple[int, ...]
    several: bool
    outputs: tuple[Tensor, ...]
    channels_last: tuple[bool, ...]
    indices: tuple[tuple[int, int], ...] = ()


def write_onnx(
    gm: fx.GraphModule, inputs: Sequence[Any], channels_last: Sequence[bool] = (), **options: Any
) -> Written:
    """A qdq graph as an ONNX model, for inputs of these shapes.

    Args:
        gm: a module of canonical ops, conversions and units; what it returns are tensors.
        inputs: what it takes: of tensors, the shapes and dtypes count; numbers are written as they are.
        channels_last: which of the inputs are images that the model takes as (N, H, W, C); with one, it returns images
            so, too.
        options: of `Writer`.

    Raises:
        NotInOnnx: a node cannot be said in ONNX; the message says which, and why.
    """
    writer, values_of_nodes = Writer(**options), ModelCache()
    placeholders = gm.graph.find_nodes(op="placeholder")
    taken: dict[fx.Node, str] = {}
    turned = dict(zip(placeholders, channels_last, strict=False))
    for node, example in zip(placeholders, inputs, strict=True):
        values_of_nodes[node] = example
        if isinstance(example, Tensor):
            like = example.float() if writer.floats and example.dtype in (torch.uint8, torch.int8) else example
            last = turned.get(node, False)
            value = writer.input(node.name, like.permute(TO_LAST) if last else like)
            values_of_nodes[node], taken[node] = _permuted(writer, value, TO_FIRST) if last else value, value.name
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            values_of_nodes[node] = write_node(writer, gm, node, values_of_nodes)
    returned = arguments_of(gm.graph.output_node(), values_of_nodes)[0][0]
    is_sequence = isinstance(returned, (tuple, list))
    values = list(returned) if is_sequence else [returned]
    images = tuple(any(channels_last) and value.rank == 4 for value in values)
    ends = [_permuted(writer, v, TO_LAST) if image else v for v, image in zip(values, images, strict=True)]
    if writer.integer_conv:
        write_integer_convolutions(writer, ends)
    model = writer.model(ends)
    names = {value.name for value in model.graph.input}
    reads = tuple(i for i, node in enumerate(placeholders) if taken.get(node) in names)
    places = {taken[node]: i for i, node in enumerate(placeholders) if node in taken}
    indices = tuple((places[name], size) for name, size in writer.indices.items())
    return Written(model, reads, is_sequence, tuple(end.like for end in ends), images, indices)


TO_LAST, TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
"""Where the channels of an image go."""


def _permuted(writer: Writer, value: Value, perm: Sequence[int]) -> Value:
    return Value(writer.emit("Transpose", value, perm=list(perm)), value.like.permute(*perm))


def refusal(gm: fx.GraphModule, node: fx.Node) -> str | None:
    """Why a node cannot be said in ONNX, as far as that is known before it runs; None: it can."""
    writer, known = Writer(), ModelCache()
    try:
        for read in node.all_input_nodes:
            _suppose(writer, gm, read, known)
            if known[read] is None:
                return "a size of it is known at run time only"
        write_node(writer, gm, node, known)
    except NotInOnnx as error:
        return str(error)
    return None


def _suppose(writer: Writer, gm: fx.GraphModule, node: fx.Node, known: ModelCache) -> None:
    """Take a node for a value of the shape that it is known to have; constants, grids and sizes for what they are."""
    if is_weight(node) or is_size(node):
        for read in node.all_input_nodes:
            if read not in known:
                _suppose(writer, gm, read, known)
        is_known = all(known[read] is not None for read in node.all_input_nodes)
        known[node] = write_node(writer, gm, node, known) if is_known else None
        return
    about = info(node)
    known[node] = None
    if about.shape is not None and about.dtype is not None:
        known[node] = writer.input(node.name, torch.empty(about.shape, dtype=about.dtype, device="meta"))


def write_node(writer: Writer, gm: fx.GraphModule, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Write a node; its value, or values.

    Args:
        writer: the model.
        gm: the module of the node's graph.
        node: the node.
        values: the values of what it reads.

    Raises:
        NotInOnnx: it cannot be said in ONNX.
    """
    if node.op == "get_attr":
        tensor = read_attribute(gm, str(node.target))
        return Value(writer.constant(tensor), torch.empty_like(tensor, device="meta"))
    args, kwargs = arguments_of(node, values)
    if (unit := unit_of(gm, node)) is not None:
        with writer.scoped(node.name):
            return _write_unit(writer, unit, args)
    if node.target is operator.getitem and not isinstance(args[0], Value):
        return args[0][args[1]]
    known_value = constant_value(writer, node, args, kwargs) if writer.portable else UNKNOWN
    if known_value is not UNKNOWN:
        return known_value
    op = op_of(node)
    if op is None:
        return _no_op(writer, gm, node, args, kwargs)
    if op.name not in ROWS:
        raise NotInOnnx(f"{op.name} has no ONNX node here")
    options = {**op.options, **kwargs}
    try:
        with writer.scoped(node.name), python_dispatch() if writer.sizes is not None else nullcontext():
            result = ROWS[op.name](writer, *args, **options)
    except NotInOnnx as error:
        raise NotInOnnx(f"{op.name}: {error}") from None
    return result if isinstance(result, Value) else Value(result, _like(writer, op, args, options))


def _write_unit(writer: Writer, unit: Unit, args: Sequence[Any]) -> Any:
    known = ModelCache(zip(unit.graph.find_nodes(op="placeholder"), args, strict=True))
    for node in unit.graph.nodes:
        if node.op not in ("placeholder", "output"):
            known[node] = write_node(writer, unit, node, known)
    return arguments_of(unit.graph.output_node(), known)[0][0]


def _like(writer: Writer, op: Op, args: Any, options: Any) -> Tensor:
    """What an op gives, on the meta device."""
    args, options = _on_meta((args, options))
    if writer.floats and op.name in CONVERSIONS and op.name not in DYNAMIC_GRID_OPS:
        return torch.empty_like(args[0], dtype=torch.float32)
    with _computing(writer):
        made: Tensor = op.target(*args, **options)
    return made


def _computing(writer: Writer) -> AbstractContextManager[Any]:
    """For a block that computes shapes."""
    return nullcontext() if writer.sizes is None else writer.sizes.computing()


def _no_op(writer: Writer, gm: fx.GraphModule, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """What a node gives that looks at a tensor's shape alone, or computes with numbers, or calls a known function."""
    reads: list[Value] = []
    fx.node.map_aggregate((args, kwargs), lambda a: reads.append(a) if isinstance(a, Value) else None)
    if writer.portable and node.target is check_fixed:
        return None  # the inputs are those of the example, in kind
    if writer.portable and node.target in (FUNCTIONS if reads else MAKERS):
        return FUNCTIONS[node.target](writer, *args, **kwargs)
    of_shapes = reads_only_metadata(node) or (writer.portable and is_check(node))
    if node.op == "call_module":
        kind = type(gm.get_submodule(str(node.target))).__name__
        raise NotInOnnx(f"the module {node.target!r} ({kind}) is kept as it is, and fxq does not know what it computes")
    if (reads and not of_shapes) or fills_like(node):
        raise NotInOnnx(f"fxq has no ONNX form of this call of {called_name(node)}")
    args, kwargs = _on_meta((args, kwargs))
    target: Any = node.target
    with _computing(writer):
        result = getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)
    if isinstance(result, Tensor):
        raise NotInOnnx(
            f"fxq has no ONNX form of this call of {called_name(node)}, which creates a tensor from numbers"
        )
    return result


def _on_meta(arguments: Any) -> Any:
    return fx.node.map_aggregate(arguments, lambda a: a.like if isinstance(a, Value) else a)
