"""A whole model as ONNX, for any runtime: inputs and outputs by name, sizes that vary, and ONNX's own nodes alone."""

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
    varying_axes,
)
from fxq.graph.info import info
from fxq.graph.query import DYNAMIC_GRID_OPS, arguments_of, called_name, is_op
from fxq.graph.unit import calls_of
from fxq.onnx.graph import ModelCache, write_node
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.onnx.varying_sizes import VaryingSizes
from fxq.onnx.writer import Value, Writer
from fxq.ops import OPS


@dataclass(frozen=True)
class WrittenModel:
    """A whole model as ONNX.

    Attributes:
        model: `onnx.ModelProto`.
        inputs: the tensors of the example by the names of the inputs.
        integers: the names of the values that quantize nodes make, and of the grids that are measured, by node.
        least: what was taken for granted of sizes that vary, where a runtime may give numbers for smaller ones.
        axes: dynamic axes by input name.
    """

    model: Any
    inputs: Mapping[str, Tensor]
    integers: Mapping[fx.Node, str]
    least: Sequence[str] = ()
    axes: Axes = field(default_factory=dict)


def write_model(gm: fx.GraphModule, examples: Mapping[fx.Node, Any], dynamic: Dynamic, **options: Any) -> WrittenModel:
    """A qdq graph as a model.

    Tensors inside of an input that is a tuple, a list or a mapping are inputs of their own: `x_0`, `x_key`. Those of an
    output are outputs of their own, which are called by their keys. Numbers and flags are written as they are.

    Args:
        gm: a module of canonical ops, conversions and units.
        examples: an example for each placeholder; of tensors, the shapes and dtypes count.
        dynamic: which axes vary in size. True: the first one of each input that has as many entries there as the first
            input. False: none.
        options: of `Writer`.

    Raises:
        InputError: `dynamic` names no input or no axis of it.
        NotInOnnx: a node cannot be said in ONNX, or takes a size that varies for granted; the message says which.
    """
    inputs = dict(inputs_of(examples))
    axes = varying_axes(inputs, dynamic)
    sizes = VaryingSizes() if axes else None
    writer = Writer(portable=True, sizes=sizes, **options)
    values: dict[int, Value] = {}
    for name, x in inputs.items():
        like = x
        if sizes is not None:
            named = axes.get(name, {})
            shape = [sizes.axis(named[i], name, i, n) if i in named else n for i, n in enumerate(x.shape)]
            like = writer.empty(shape, x.dtype)
        values[id(x)] = writer.input(name, like)
    values_of_nodes: ModelCache = {n: mapped(x, lambda leaf: values.get(id(leaf), leaf)) for n, x in examples.items()}
    least: list[str] = []
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            asked = sizes.asked() if sizes is not None else []
            values_of_nodes[node] = _written(writer, gm, node, values_of_nodes, axes)
            if sizes is not None and not _convolves(
                gm, node
            ):  # these fail on what is too small, pools and indices do not
                least += sizes.asked()[len(asked) :]
    ends = dict(_named(arguments_of(gm.graph.output_node(), values_of_nodes)[0][0], ""))
    if not ends:
        raise NotInOnnx("the model returns no tensor")
    model = writer.model(list(ends.values()), list(ends), keep_inputs=True)
    integers = {
        n: value.name for n, value in values_of_nodes.items() if is_op(n, "quantize", "requantize", *DYNAMIC_GRID_OPS)
    }
    return WrittenModel(model, inputs, integers, least, axes)


def _convolves(gm: fx.GraphModule, node: fx.Node) -> bool:
    calls = calls_of(gm, node)
    return bool(calls) and calls[0].op.name in (*OPS.family("conv"), *OPS.family("conv_transpose"))


def _named(value: Any, name: str) -> Iterator[tuple[str, Value]]:
    """Every value among those that a model returns, with its name."""
    if isinstance(value, Value):
        yield name or "output", value
    elif isinstance(value, (tuple, list, Mapping)):
        own = isinstance(value, Mapping)
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            first = plain_name(key) if own else f"output_{key}"
            yield from _named(part, f"{name}_{plain_name(key)}" if name else first)


def _written(writer: Writer, gm: fx.GraphModule, node: fx.Node, values: ModelCache, axes: Axes) -> Any:
    """Write a node; its value. An error says which it is, and what can be done."""
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
            f"{place} does not take {size_names(axes)} of another size: {error}. {FIXED_SIZE_REMEDY}"
        ) from error
    assumed = writer.sizes.assumed() if writer.sizes is not None else None
    if assumed is not None:
        raise NotInOnnx(f"{place} takes {size_names(axes)} for a fixed size ({assumed}). {FIXED_SIZE_REMEDY}")
    return result
