"""Writes whole models as ONNX for any runtime: named inputs and outputs, dynamic sizes, only ONNX's own op types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from fxq.common.trees import mapped
from fxq.errors import words_of
from fxq.graph.analysis.varying_axes import (
    FIXED_SIZE_REMEDY,
    Axes,
    Dynamic,
    inputs_of,
    plain_name,
    size_names,
    terms_of,
    varying_axes,
)
from fxq.graph.info import info
from fxq.graph.query import DYNAMIC_GRID_OPS, arguments_of, called_name, is_op
from fxq.graph.unit import calls_of
from fxq.onnx.graph import NodeValues, write_node
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.onnx.varying_sizes import VaryingSizes
from fxq.onnx.writer import Value, Writer
from fxq.ops import OPS


@dataclass(frozen=True)
class OnnxModel:
    """Whole model written as ONNX.

    Attributes:
        model: `onnx.ModelProto`.
        inputs: tensors of the example, by input name.
        quantized_names: names of the values of quantize nodes and of dynamic grids in the model, by node of the graph.
        assumptions: conditions on dynamic sizes under which the model is right. For smaller sizes, a runtime may return
            wrong numbers.
        axes: dynamic axes by input name.
    """

    model: Any
    inputs: Mapping[str, Tensor]
    quantized_names: Mapping[fx.Node, str]
    assumptions: Sequence[str] = ()
    axes: Axes = field(default_factory=dict)


def write_model(gm: fx.GraphModule, examples: Mapping[fx.Node, Any], dynamic: Dynamic, **options: Any) -> OnnxModel:
    """Write a qdq graph as an ONNX model for any runtime.

    Each tensor inside of an input that is a tuple, list or mapping becomes a separate input: `x_0`, `x_key`. Each
    tensor inside of an output becomes a separate output, named by its key. Numbers and flags become constants.

    Args:
        gm: module of canonical ops, conversions and units.
        examples: example value of each placeholder. Tensors give shapes and dtypes.
        dynamic: axes of dynamic size. True: the first axis of each input that has the length of the first input's first
            axis. False: none.
        options: options of `Writer`.

    Raises:
        InputError: `dynamic` names an input or axis that does not exist.
        NotInOnnx: a node cannot be written in ONNX, or needs a dynamic size to be fixed; the message names it.
    """
    inputs = dict(inputs_of(examples))
    axes = varying_axes(inputs, dynamic)
    sizes = VaryingSizes() if axes else None
    writer = Writer(portable=True, sizes=sizes, **options)
    values: dict[int, Value] = {}
    if sizes is not None:
        labels = [(label, name, i) for name, named in axes.items() for i, label in named.items()]
        for label, name, i in sorted(labels, key=lambda entry: len(terms_of(entry[0]))):  # sums after their terms
            sizes.axis(label, name, i, inputs[name].shape[i])
    for name, x in inputs.items():
        like = x
        if sizes is not None:
            named = axes.get(name, {})
            shape = [sizes.axis(named[i], name, i, n) if i in named else n for i, n in enumerate(x.shape)]
            like = writer.empty(shape, x.dtype)
        values[id(x)] = writer.input(name, like)
    values_of_nodes: NodeValues = {n: mapped(x, lambda leaf: values.get(id(leaf), leaf)) for n, x in examples.items()}
    assumptions: list[str] = []
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            asked = sizes.asked() if sizes is not None else []
            values_of_nodes[node] = _written(writer, gm, node, values_of_nodes, axes)
            # Runtimes refuse inputs that are too small for a convolution, but not for a pool or an index.
            if sizes is not None and not _convolves(gm, node):
                assumptions += sizes.asked()[len(asked) :]
    ends = dict(_named(arguments_of(gm.graph.output_node(), values_of_nodes)[0][0], ""))
    if not ends:
        raise NotInOnnx("the model returns no tensor")
    model = writer.model(list(ends.values()), list(ends), keep_inputs=True)
    quantized = {
        n: value.name for n, value in values_of_nodes.items() if is_op(n, "quantize", "requantize", *DYNAMIC_GRID_OPS)
    }
    return OnnxModel(model, inputs, quantized, assumptions, axes)


def _convolves(gm: fx.GraphModule, node: fx.Node) -> bool:
    calls = calls_of(gm, node)
    return bool(calls) and calls[0].op.name in (*OPS.family("conv"), *OPS.family("conv_transpose"))


def _named(value: Any, name: str) -> Iterator[tuple[str, Value]]:
    """All values in the result of a model, with their output names."""
    if isinstance(value, Value):
        yield name or "output", value
    elif isinstance(value, (tuple, list, Mapping)):
        is_mapping = isinstance(value, Mapping)
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            first = plain_name(key) if is_mapping else f"output_{key}"
            yield from _named(part, f"{name}_{plain_name(key)}" if name else first)


def _written(writer: Writer, gm: fx.GraphModule, node: fx.Node, values: NodeValues, axes: Axes) -> Any:
    """Write a node and return its value; errors name the node and the remedy."""
    about = info(node)
    place = f"{node.name} ({called_name(node)}{f', layer {about.path!r}' if about.path else ''})"
    try:
        result = write_node(writer, gm, node, values)
    except NotInOnnx as error:
        raise NotInOnnx(f"{place}: {error}") from None
    except Exception as error:
        if not axes:
            raise NotInOnnx(f"{place} cannot be written: {type(error).__name__}: {words_of(error)}") from error
        raise NotInOnnx(
            f"{place} does not work with {size_names(axes)} of another size: {error}. {FIXED_SIZE_REMEDY}"
        ) from error
    assumed = writer.sizes.assumed() if writer.sizes is not None else None
    if assumed is not None:
        raise NotInOnnx(f"{place} needs a fixed size of {size_names(axes)} ({assumed}). {FIXED_SIZE_REMEDY}")
    return result
