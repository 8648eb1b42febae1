"""The public function that reads ONNX files as PyTorch models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

import fxq.onnx.reading.control_readers
import fxq.onnx.reading.layer_readers
import fxq.onnx.reading.movement_readers
import fxq.onnx.reading.pointwise_readers
import fxq.onnx.reading.quantized_readers
import fxq.onnx.reading.reduction_readers
import fxq.onnx.reading.resampling_readers
import fxq.onnx.reading.size_readers  # noqa: F401  (registers the functions that read the ops)
from fxq.errors import FileError, InputError
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
    its quantizers write. Nodes of a quantized file (QDQ and QOperator) round to the grids of the file in float.

    Args:
        path: path of the file, with external data in the same folder, or an `onnx.ModelProto`.
        sizes: values of dynamic sizes, by their names in the file, such as `{"batch": 1}`, which makes them fixed.
        constants: values of inputs, by their names in the file, such as `{"sr": 16000}`. They are then no inputs of the
            model, and branches and loops on them are resolved.

    Raises:
        FileError: the file is damaged, or one of its nodes cannot be read; the message names the node.
        InputError: `sizes` or `constants` names something that the file lacks.
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
    reader = Reader(opset_of(model))
    fixed = dict(sizes or {})
    for initializer in graph.initializer:
        reader.values[initializer.name] = reader.declare(initializer)
    names: set[str] = set()
    inputs = [value for value in graph.input if value.name not in reader.values]
    values = dict(constants or {})
    for name in values:
        if name not in {declared.name for declared in inputs}:
            raise InputError(f"constants: the model has no input {name!r}.")
    for value in inputs:
        if value.name in values:
            dtype = dtype_of_number(value.type.tensor_type.elem_type)
            reader.values[value.name] = torch.as_tensor(values[value.name], dtype=dtype)
        else:
            traced = reader.input(value.name, _like(reader, value, fixed, names))
            reader.values[value.name] = traced
            if value.type.tensor_type.elem_type in FOUR_BIT:
                reader.four_bit.add(id(traced))
    unknown = sorted(set(fixed) - names)
    if unknown:
        raise InputError(
            f"sizes: the model has no dynamic size {unknown[0]!r}; it has {', '.join(sorted(names)) or 'none'}."
        )
    reader.read_all(graph.node)
    nodes = []
    for output in graph.output:
        value = reader.values.get(output.name)
        if value is None:
            raise FileError(f"no node of the model computes its output {output.name!r}.")
        nodes.append(reader.node_of(value))
    reader.graph.output(nodes[0] if len(nodes) == 1 else tuple(nodes))
    module = fx.GraphModule(reader.root, reader.graph, "OnnxModel").eval()
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _like(reader: Reader, value: Any, fixed: Mapping[str, int], names: set[str]) -> torch.Tensor:
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
        name = size.dim_param or f"{value.name}.{axis}"
        names.add(name)
        if name in fixed:
            shape.append(fixed[name])
        else:
            shape.append(reader.sizes.axis(name, value.name, axis, 2 if axis == 0 else 512 + 64 * len(names)))
    return reader.sizes.empty(shape, dtype_of_number(kind.elem_type))
