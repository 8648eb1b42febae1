"""The public function that reads ONNX files as PyTorch models."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import fx

import fxq.onnx.reading.control_readers
import fxq.onnx.reading.dynamic_readers
import fxq.onnx.reading.layer_readers
import fxq.onnx.reading.movement_readers
import fxq.onnx.reading.pointwise_readers
import fxq.onnx.reading.quantized_readers
import fxq.onnx.reading.recurrent_readers
import fxq.onnx.reading.reduction_readers
import fxq.onnx.reading.resampling_readers
import fxq.onnx.reading.size_readers  # noqa: F401  (registers the functions that read the ops)
from fxq.common.names import in_short
from fxq.errors import FileError, InputError, warn, words_of
from fxq.onnx.reading.onnx_file import FOUR_BIT, dtype_of_number, load_model, opset_of
from fxq.onnx.reading.reader import Reader


def read_onnx(
    path: str | os.PathLike[str] | Any,
    *,
    sizes: Mapping[str, int] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> fx.GraphModule:
    """Float model of an ONNX file, as a `torch.fx.GraphModule` of PyTorch functions and layers in evaluation mode.

    Layers, parameters and inputs keep the names of the file. Dynamic sizes stay dynamic, and shape arithmetic on fixed
    sizes is computed while reading. Opset 7 and newer is read, and the op types of ONNX Runtime that its optimizer and
    its quantizers write. The nodes of a quantized file (QDQ and QOperator) round to its grids:
    `fxq.quantize(path, "stored", example_inputs=x)` runs them on integers.

    Args:
        path: path of the file, with external data in the same folder, or an `onnx.ModelProto`.
        sizes: values of dynamic sizes, by their names in the file, such as `{"batch": 1}`, which makes them fixed.
        constants: values of inputs, by their names in the file, such as `{"sr": 16000}`. They are then no inputs of the
            model, and branches and loops on them are resolved.

    Raises:
        FileError: the file is damaged, or one of its nodes cannot be read; the message names the node.
        InputError: `sizes` or `constants` names something that the file lacks, or has an unsuitable value.
        FxqError: the package onnx is not installed.

    Example:
        >>> import onnx.parser
        >>> text = '<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 2] y) { y = Relu(x) }'
        >>> model = read_onnx(onnx.parser.parse_model(text))
        >>> model(torch.tensor([[-1.0, 2.0]]))
        tensor([[0., 2.]])
    """
    model = load_model(path)
    graph = model.graph
    reader = Reader(opset=opset_of(model))
    for initializer in graph.initializer:
        reader.values[initializer.name] = reader.declare(initializer)
    for name, size in (sizes or {}).items():
        if type(size) is not int or size < 0:
            raise InputError(f"sizes: {name!r} is {size!r}, which is no size.")
    dynamic = _declare_inputs(reader, graph, dict(sizes or {}), dict(constants or {}))
    try:
        reader.read_all(graph.node)
    except FileError as error:
        if not dynamic:
            raise
        raise FileError(
            f"{error} (Sizes that are dynamic in the file: {', '.join(dynamic)}. If one of them is always the same, "
            "fix it with sizes={name: number}.)"
        ) from error
    for name, size in reader.sizes.fixed().items():
        if name in dynamic:
            warn(f"the model computes with the size {name!r} as if it were always {size}: fix it with sizes=.")
    nodes = [_output(reader, output.name) for output in graph.output]
    reader.graph.output(nodes[0] if len(nodes) == 1 else tuple(nodes))
    module = fx.GraphModule(reader.root, reader.graph, "OnnxModel").eval()
    module.graph.eliminate_dead_code()
    in_float = [reader.in_float[node] for node in module.graph.nodes if node in reader.in_float]
    if in_float:
        warn(
            f"{len(in_float)} nodes of the file quantize values in a way that fxq computes in float, with the same "
            f"results: {in_short(in_float)}. Integers need one constant float32 scale and 8 bits for each activation, "
            "or the nodes of ONNX Runtime's dynamic quantizer. You can quantize the float model with fxq instead."
        )
    module.delete_all_unused_submodules()
    module.recompile()
    return module


def _output(reader: Reader, name: str) -> fx.Node:
    """Node that computes an output of the file."""
    value = reader.values.get(name)
    if value is None:
        raise FileError(f"no node of the model computes its output {name!r}.")
    return reader.node_of(value)


def _declare_inputs(reader: Reader, graph: Any, sizes: dict[str, int], constants: dict[str, Any]) -> list[str]:
    """Add the inputs of the file to the model; return the names of the sizes that stay dynamic."""
    inputs = [value for value in graph.input if value.name not in reader.values]
    for name in constants:
        if name not in {value.name for value in inputs}:
            raise InputError(f"constants: the model has no input {name!r}.")
    names: dict[str, None] = {}
    # Different multiples of 32 that a file is unlikely to contain: equal numbers would be taken for one size.
    examples = count(13 * 32, 2 * 32)
    for value in inputs:
        if value.name in constants:
            dtype = dtype_of_number(value.type.tensor_type.elem_type)
            try:
                reader.values[value.name] = torch.as_tensor(constants[value.name], dtype=dtype)
            except (TypeError, ValueError, RuntimeError) as error:
                raise InputError(f"constants: {value.name!r} is no tensor of {dtype}: {words_of(error)}") from error
            continue
        traced = reader.input(value.name, _like(reader, value, sizes, names, examples))
        reader.values[value.name] = traced
        if value.type.tensor_type.elem_type in FOUR_BIT:
            reader.four_bit.add(id(traced))
    for name in sizes:
        if name not in names:
            raise InputError(f"sizes: the model has no dynamic size {name!r}; it has {', '.join(names) or 'none'}.")
    return [name for name in names if name not in sizes]


def _like(
    reader: Reader, value: Any, fixed: Mapping[str, int], names: dict[str, None], examples: Iterator[int]
) -> torch.Tensor:
    """Input of the file without data; sizes without a number are dynamic."""
    if not value.type.HasField("tensor_type"):
        raise FileError(f"the input {value.name!r} is no tensor, which fxq cannot read.")
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        raise FileError(f"the file gives no shape of the input {value.name!r}.")
    shape: list[Any] = []
    for axis, size in enumerate(kind.shape.dim):
        if size.HasField("dim_value") and size.dim_value > 0:
            shape.append(size.dim_value)
            continue
        named = re.search(r"[A-Za-z]", size.dim_param)  # "?" and the like stand for any size
        name = size.dim_param if named else f"{value.name}.{axis}"
        names[name] = None
        if name in fixed:
            shape.append(fixed[name])
        else:
            shape.append(reader.sizes.axis(name, value.name, axis, 7 if axis == 0 else next(examples)))
    return reader.sizes.empty(shape, dtype_of_number(kind.elem_type))
