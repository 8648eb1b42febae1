"""Writes graphs of canonical ops and units as ONNX models."""

from __future__ import annotations

import logging
import math
import operator
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

import fxq.onnx.assignment_nodes
import fxq.onnx.conversion_nodes
import fxq.onnx.layer_nodes
import fxq.onnx.movement_nodes
import fxq.onnx.norm_nodes
import fxq.onnx.pointwise_nodes
import fxq.onnx.pooling_nodes
import fxq.onnx.recurrent_nodes
import fxq.onnx.reduction_nodes
import fxq.onnx.resampling_nodes
import fxq.onnx.state_nodes  # noqa: F401  (registers the functions that write the ops)
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
from fxq.onnx.function_nodes import CALL_WRITERS, CREATION_FUNCTIONS
from fxq.onnx.integer_conv import write_integer_convolutions
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.onnx.varying_sizes import python_dispatch
from fxq.onnx.writer import OP_WRITERS, Value, Writer
from fxq.ops.table import Op

log = logging.getLogger("fxq")

NodeValues = dict[fx.Node, Any]
"""Values of nodes: `Value`, number, or a sequence of these."""


@dataclass(frozen=True)
class OnnxGraph:
    """Graph written as an ONNX model.

    Attributes:
        model: `onnx.ModelProto`.
        input_indices: positions of the graph's inputs that the model takes, in order. Unused inputs are left out.
        returns_sequence: whether the graph returns a tuple or list.
        outputs: outputs of the model, on the meta device.
        channels_last: for each output, whether it is an image (N, H, W, C).
        indices: (position, size) of each input whose values are indices below that size.
    """

    model: Any
    input_indices: tuple[int, ...]
    returns_sequence: bool
    outputs: tuple[Tensor, ...]
    channels_last: tuple[bool, ...]
    indices: tuple[tuple[int, int], ...] = ()


def write_onnx(
    gm: fx.GraphModule, inputs: Sequence[Any], channels_last: Sequence[bool] = (), **options: Any
) -> OnnxGraph:
    """Write a qdq graph as an ONNX model for inputs of these shapes.

    Args:
        gm: module of canonical ops, conversions and units that returns tensors.
        inputs: example inputs. Tensors give shapes and dtypes; numbers become constants.
        channels_last: for each input, whether the model takes it as an image (N, H, W, C). If any is, all 4-d outputs
            are (N, H, W, C) as well.
        options: options of `Writer`.

    Raises:
        NotInOnnx: a node cannot be written in ONNX; the message names it and says why.
    """
    writer, values_of_nodes = Writer(**options), NodeValues()
    placeholders = gm.graph.find_nodes(op="placeholder")
    input_names: dict[fx.Node, str] = {}
    permuted = dict(zip(placeholders, channels_last, strict=False))
    for node, example in zip(placeholders, inputs, strict=True):
        values_of_nodes[node] = example
        if isinstance(example, Tensor):
            like = example.float() if writer.floats and example.dtype in (torch.uint8, torch.int8) else example
            last = permuted.get(node, False)
            value = writer.input(node.name, like.permute(TO_LAST) if last else like)
            values_of_nodes[node] = _permuted(writer, value, TO_FIRST) if last else value
            input_names[node] = value.name
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
    input_indices = tuple(i for i, node in enumerate(placeholders) if input_names.get(node) in names)
    positions = {input_names[node]: i for i, node in enumerate(placeholders) if node in input_names}
    indices = tuple((positions[name], size) for name, size in writer.indices.items())
    return OnnxGraph(model, input_indices, is_sequence, tuple(end.like for end in ends), images, indices)


TO_LAST, TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
"""Permutations of an image to (N, H, W, C), and back to (N, C, H, W)."""


def _permuted(writer: Writer, value: Value, perm: Sequence[int]) -> Value:
    return Value(writer.emit("Transpose", value, perm=list(perm)), value.like.permute(*perm))


def refusal(gm: fx.GraphModule, node: fx.Node) -> str | None:
    """Reason why a node cannot be written in ONNX, as far as its recorded shapes tell; None if it can."""
    writer, values = Writer(), NodeValues()
    try:
        for read in node.all_input_nodes:
            _add_recorded(writer, gm, read, values)
            if values[read] is None:
                return "one of its sizes is known only at run time"
        write_node(writer, gm, node, values)
    except NotInOnnx as error:
        return str(error)
    return None


def _add_recorded(writer: Writer, gm: fx.GraphModule, node: fx.Node, values: NodeValues) -> None:
    """Add a node to `values` as an input of its recorded shape, or None without one; write constants and sizes."""
    if is_weight(node) or is_size(node):
        for read in node.all_input_nodes:
            if read not in values:
                _add_recorded(writer, gm, read, values)
        has_values = all(values[read] is not None for read in node.all_input_nodes)
        values[node] = write_node(writer, gm, node, values) if has_values else None
        return
    about = info(node)
    values[node] = None
    if about.shape is not None and about.dtype is not None:
        values[node] = writer.input(node.name, torch.empty(about.shape, dtype=about.dtype, device="meta"))


def write_node(writer: Writer, gm: fx.GraphModule, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Write a node and return its value, or values.

    Args:
        writer: writer of the model.
        gm: module of the node's graph.
        node: the node.
        values: values of the nodes that it reads.

    Raises:
        NotInOnnx: it cannot be written in ONNX.
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
    constant = constant_value(writer, node, args, kwargs) if writer.portable else UNKNOWN
    if constant is not UNKNOWN:
        return constant
    op = op_of(node)
    if op is None:
        return _write_call(writer, gm, node, args, kwargs)
    if op.name not in OP_WRITERS:
        raise NotInOnnx(f"fxq has no ONNX form of {op.name}")
    options = {**op.options, **kwargs}
    try:
        with writer.scoped(node.name), python_dispatch() if writer.sizes is not None else nullcontext():
            result = OP_WRITERS[op.name](writer, *args, **options)
    except NotInOnnx as error:
        raise NotInOnnx(f"{op.name}: {error}") from None
    return result if isinstance(result, Value) else Value(result, _like(writer, op, args, options))


def _write_unit(writer: Writer, unit: Unit, args: Sequence[Any]) -> Any:
    values = NodeValues(zip(unit.graph.find_nodes(op="placeholder"), args, strict=True))
    for node in unit.graph.nodes:
        if node.op not in ("placeholder", "output"):
            values[node] = write_node(writer, unit, node, values)
    return arguments_of(unit.graph.output_node(), values)[0][0]


def _like(writer: Writer, op: Op, args: Any, options: Any) -> Tensor:
    """Result of an op on the meta device."""
    args, options = _on_meta((args, options))
    if writer.floats and op.name in CONVERSIONS and op.name not in DYNAMIC_GRID_OPS:
        return torch.empty_like(args[0], dtype=torch.float32)
    leaves, spec = tree_flatten((args, options))
    if writer.sizes is None and not any(isinstance(leaf, slice) for leaf in leaves):
        layouts = (_Layout(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        return _like_of_layouts(op, torch.get_default_dtype(), spec, *layouts)
    with _computing(writer):
        result: Tensor = op.target(*args, **options)
    return result


class _Layout(NamedTuple):
    """Layout of a tensor."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self, device: str) -> Tensor:
        """Tensor of zeros with this layout, whose elements may share memory."""
        size = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        zeros = torch.zeros(0 if 0 in self.shape else size, dtype=self.dtype, device=device)
        return zeros.as_strided(self.shape, self.strides)


@lru_cache(maxsize=4096, typed=True)
def _like_of_layouts(op: Op, default: torch.dtype, spec: TreeSpec, *leaves: Any) -> Tensor:
    """Result of an op on the meta device, cached: PyTorch computes it in slow Python code, and nodes are written often.

    Where arithmetic is cheap, it runs on zeros on the CPU: many meta kernels are Python code whose first call imports
    `torch._dynamo`, which takes seconds. Those of layers without a bias are not, so layers stay on the meta device, and
    the bias of a linear layer is left out.

    Args:
        op: the op.
        default: default dtype, which the results of some ops have.
        spec: structure of its arguments and options.
        leaves: arguments and options, with layouts in place of tensors.
    """
    leaves = (*leaves[:2], None) if op.name == "linear" and len(leaves) == 3 else leaves
    elements = sum(math.prod(leaf.shape) for leaf in leaves if isinstance(leaf, _Layout))
    is_cheap = elements <= (MAX_COMPUTED if op.macs is None else MAX_MULTIPLIED)
    if is_cheap and not op.traits.weight and "torch._dynamo" not in sys.modules:
        try:
            return tree_map(_on_meta_device, _result(op, "cpu", spec, leaves))
        except Exception as error:  # for its values, which are zeros
            log.debug("%s does not run on zeros: %s", op.name, error)
    return _result(op, "meta", spec, leaves)


MAX_COMPUTED, MAX_MULTIPLIED = 1 << 24, 1 << 20
"""Number of elements of the arguments of an op up to which it runs on the CPU to get the layout of its result, and that
for products of activations."""


def _result(op: Op, device: str, spec: TreeSpec, leaves: Sequence[Any]) -> Any:
    """Result of an op on zeros of these layouts."""
    values = [leaf.zeros(device) if isinstance(leaf, _Layout) else leaf for leaf in leaves]
    args, options = tree_unflatten(values, spec)
    return op.target(*args, **options)


def _on_meta_device(x: Any) -> Any:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def _computing(writer: Writer) -> AbstractContextManager[Any]:
    """Context manager for the computation of shapes."""
    return nullcontext() if writer.sizes is None else writer.sizes.computing()


def _write_call(writer: Writer, gm: fx.GraphModule, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Write a call that is not an op: of a function in `CALL_WRITERS`, or one that reads only shapes and numbers."""
    reads: list[Value] = []
    fx.node.map_aggregate((args, kwargs), lambda a: reads.append(a) if isinstance(a, Value) else None)
    if writer.portable and node.target is check_fixed:
        return None  # the model is for inputs like the example
    if writer.portable and node.target in (CALL_WRITERS if reads else CREATION_FUNCTIONS):
        return CALL_WRITERS[node.target](writer, *args, **kwargs)
    of_shapes = reads_only_metadata(node) or (writer.portable and is_check(node))
    if node.op == "call_module":
        module_type = type(gm.get_submodule(str(node.target))).__name__
        raise NotInOnnx(f"the module {node.target!r} ({module_type}) is a leaf, so fxq does not know what it computes")
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
