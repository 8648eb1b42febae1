"""A whole model as ONNX, for any runtime: inputs and outputs by name, sizes that vary, and ONNX's own nodes alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from fxq.common.trees import mapped
from fxq.errors import InputError, unknown
from fxq.graph.info import info
from fxq.graph.query import arguments_of, called_name, is_op
from fxq.onnx.graph import Known, write_node
from fxq.onnx.varying_sizes import VaryingSizes
from fxq.onnx.writer import NotInOnnx, Value, Writer

Dynamic = bool | Mapping[str, Mapping[int, str]]
"""Which axes of which inputs vary in size, by the name of the input, and what the size is called there."""


@dataclass(frozen=True)
class WrittenModel:
    """A whole model as ONNX.

    Attributes:
        model: `onnx.ModelProto`.
        inputs: the tensors of the example by the names of the inputs.
        integers: the names of the values that quantize nodes make, by node.
    """

    model: Any
    inputs: Mapping[str, Tensor]
    integers: Mapping[fx.Node, str]


def write_model(gm: fx.GraphModule, given: Mapping[fx.Node, Any], dynamic: Dynamic, **options: Any) -> WrittenModel:
    """A qdq graph as a model.

    Tensors inside of an input that is a tuple, a list or a mapping are inputs of their own: `x_0`, `x_key`. Those of an
    output are outputs of their own, which are called by their keys. Numbers and flags are written as they are.

    Args:
        gm: a module of canonical ops, conversions and units.
        given: an example for each placeholder; of tensors, the shapes and dtypes count.
        dynamic: which axes vary in size. True: the first one of each input that has as many entries there as the first
            input. False: none.
        options: of `Writer`.

    Raises:
        InputError: `dynamic` names no input or no axis of it.
        NotInOnnx: a node cannot be said in ONNX, or takes a size that varies for granted; the message says which.
    """
    inputs = dict(inputs_of(given))
    axes = _axes({name: x for name, x in inputs.items() if x.dim()}, dynamic)
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
    known: Known = {n: mapped(x, lambda leaf: values.get(id(leaf), leaf)) for n, x in given.items()}
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            known[node] = _written(writer, gm, node, known, axes)
    ends = dict(_named(arguments_of(gm.graph.output_node(), known)[0][0], ""))
    if not ends:
        raise NotInOnnx("the model returns no tensor")
    model = writer.model(list(ends.values()), list(ends), keep_inputs=True)
    integers = {n: value.name for n, value in known.items() if is_op(n, "quantize", "requantize")}
    return WrittenModel(model, inputs, integers)


def inputs_of(given: Mapping[fx.Node, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among what placeholders are given, by the names of the inputs that they become."""
    for node, value in given.items():
        yield from _tensors(value, str(node.target).lstrip("*"))


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside nested containers, with its name."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (tuple, list, Mapping)):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(part, f"{name}_{_plain(key)}")


def _named(value: Any, name: str) -> Iterator[tuple[str, Value]]:
    """Every value among those that a model returns, with its name."""
    if isinstance(value, Value):
        yield name or "output", value
    elif isinstance(value, (tuple, list, Mapping)):
        own = isinstance(value, Mapping)
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            first = _plain(key) if own else f"output_{key}"
            yield from _named(part, f"{name}_{_plain(key)}" if name else first)


def _plain(key: Any) -> str:
    return re.sub(r"\W", "_", str(key))


def _axes(inputs: Mapping[str, Tensor], dynamic: Dynamic) -> Mapping[str, Mapping[int, str]]:
    """The axes that vary, by input."""
    if isinstance(dynamic, bool):
        batch = next((len(x) for x in inputs.values()), None)
        return {name: {0: "batch"} for name, x in inputs.items() if len(x) == batch} if dynamic else {}
    for name, axes in dynamic.items():
        if name not in inputs:
            raise InputError(f"dynamic: {unknown('input', name, inputs)}")
        for axis, label in axes.items():
            if not (isinstance(axis, int) and 0 <= axis < inputs[name].dim() and isinstance(label, str)):
                raise InputError(
                    f"dynamic: {axis!r}: {label!r} is no axis of {name!r} and a name for its size. It has axes 0 to "
                    f'{inputs[name].dim() - 1}; give {{0: "batch"}}, for example.'
                )
    return dynamic


def _written(
    writer: Writer, gm: fx.GraphModule, node: fx.Node, known: Known, axes: Mapping[str, Mapping[int, str]]
) -> Any:
    """Write a node; its value. An error says which it is, and what can be done."""
    about = info(node)
    place = f"{node.name} ({called_name(node)}{f', layer {about.path!r}' if about.path else ''})"
    try:
        made = write_node(writer, gm, node, known)
    except NotInOnnx as error:
        raise NotInOnnx(f"{place}: {error}") from None
    except Exception as error:
        if not axes:
            raise
        raise NotInOnnx(f"{place} does not take {_said(axes)} of another size: {error}. {_FIXED}") from error
    assumed = writer.sizes.assumed() if writer.sizes is not None else None
    if assumed is not None:
        raise NotInOnnx(f"{place} takes {_said(axes)} for a fixed size ({assumed}). {_FIXED}")
    return made


_FIXED = "Export it with dynamic=False, for inputs of the example's size, or name the axes that vary in dynamic=."


def _said(axes: Mapping[str, Mapping[int, str]]) -> str:
    names: Sequence[str] = list(dict.fromkeys(label for own in axes.values() for label in own.values()))
    return " or ".join(map(repr, names))
