"""Files of ONNX models: loading, checks of hostile files, and conversion of their constants and attributes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxq.errors import FileError, words_of
from fxq.onnx.onnx_objects import INT4, TYPE_NUMBERS, UINT4, NotInOnnx, onnx_package

FOUR_BIT = (UINT4, INT4)
"""ONNX's type numbers of 4-bit integers."""

DTYPES = {number: dtype for dtype, number in TYPE_NUMBERS.items()} | {
    4: torch.uint16, 12: torch.uint32, 13: torch.uint64, 14: torch.complex64, 15: torch.complex128,
    UINT4: torch.uint8, INT4: torch.int8,
}  # fmt: skip
"""Dtype of each of ONNX's type numbers; 4-bit integers are held in bytes."""

ONNX_DOMAINS = ("", "ai.onnx")
"""Names of ONNX's own domain of op types."""

MIN_OPSET = 7
"""Oldest version of ONNX's op set that is read."""


def load_model(source: str | os.PathLike[str] | Any) -> Any:
    """Load an ONNX model, with its external data, as `onnx.ModelProto` with its local functions inlined.

    Args:
        source: path of the file, or a `ModelProto`.

    Raises:
        FileError: the file is missing, damaged, or refers to data outside its folder.
    """
    onnx_package()
    import onnx.inliner

    if isinstance(source, onnx.ModelProto):
        model, name = source, "the model"
    else:
        path = Path(source)
        name = str(path)
        if not path.is_file():
            raise FileError(f"{path}: there is no such file.")
        try:
            model = onnx.load(path)
        except Exception as error:  # protobuf, external data and the file system raise classes of their own
            raise FileError(f"{path}: this is no readable ONNX model: {words_of(error)}") from error
    _check_constants(model.graph, name)
    try:
        if model.ByteSize() < 2**31:
            _check(model)
        return onnx.inliner.inline_local_functions(model) if len(model.functions) else model
    except Exception as error:
        raise FileError(f"{name}: the ONNX model is invalid: {words_of(error)}") from error


def _check(model: Any) -> None:
    """Run the checker of `onnx`. It demands shapes of outputs, which are optional: missing ones are empty meanwhile."""
    import onnx.checker

    types = [output.type.tensor_type for output in model.graph.output if output.type.HasField("tensor_type")]
    without_shape = [kind for kind in types if not kind.HasField("shape")]
    for kind in without_shape:
        kind.shape.SetInParent()
    try:
        onnx.checker.check_model(model)
    finally:
        for kind in without_shape:
            kind.ClearField("shape")


def opset_of(model: Any) -> int:
    """Version of ONNX's op set that a model uses.

    Raises:
        FileError: the model names no version, or one that is too old.
    """
    opset = max((entry.version for entry in model.opset_import if entry.domain in ONNX_DOMAINS), default=0)
    if opset < MIN_OPSET:
        raise FileError(f"the model uses opset {opset} of ONNX; fxq reads opset {MIN_OPSET} and newer.")
    return opset


def _check_constants(graph: Any, name: str) -> None:
    """Raise `FileError` if a constant's shape does not match the number of its bytes."""
    for tensor in graph.initializer:
        count = int(np.prod([int(size) for size in tensor.dims], dtype=object))
        held = len(tensor.raw_data) if tensor.HasField("raw_data") else None
        if min(tensor.dims, default=0) < 0 or (held is not None and count > 2 * held):
            raise FileError(f"{name}: the constant {tensor.name!r} of shape {list(tensor.dims)} has {held} bytes.")


def constant_of(proto: Any) -> Tensor:
    """Values of an `onnx.TensorProto`.

    Raises:
        NotInOnnx: it has a type that PyTorch lacks, such as text.
        FileError: it has more or fewer bytes than its shape needs.
    """
    import onnx.numpy_helper

    if proto.data_type not in DTYPES:
        raise NotInOnnx(f"constants of ONNX's type {proto.data_type} are not supported")
    dtype = DTYPES[proto.data_type]
    try:
        array = np.ascontiguousarray(onnx.numpy_helper.to_array(proto)).reshape(tuple(proto.dims))
    except ValueError as error:
        shape = list(proto.dims)
        raise FileError(f"the constant {proto.name!r} of shape {shape} is damaged: {words_of(error)}") from error
    if dtype is torch.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(dtype)
    if proto.data_type in FOUR_BIT:
        array = array.astype(np.uint8 if proto.data_type == UINT4 else np.int8)
    return torch.from_numpy(array.copy()).to(dtype)


def attributes_of(node: Any) -> Mapping[str, Any]:
    """Attributes of an `onnx.NodeProto` as Python values: text as str, tensors as `Tensor`, graphs as they are."""
    import onnx.helper

    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {name: _python(value) for name, value in attributes.items()}


def _python(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if type(value).__name__ == "TensorProto":
        return constant_of(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_python(entry) for entry in value]
    return value


def dtype_of_number(number: int) -> torch.dtype:
    """Dtype of ONNX's type number.

    Raises:
        NotInOnnx: PyTorch has no such dtype.
    """
    if number not in DTYPES:
        raise NotInOnnx(f"PyTorch has no dtype for ONNX's type {number}")
    return DTYPES[number]
