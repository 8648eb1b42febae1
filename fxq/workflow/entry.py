"""Models as users pass them to public functions, checked and in the form that all other functions take: an nn.Module.

The counterpart for recipes is `as_recipe` in `fxq/recipe/recipe.py`. Public functions call both once, at their start.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fxq.common.data import device_of
from fxq.common.file_kinds import is_onnx
from fxq.errors import InputError
from fxq.model import QuantizedModel
from fxq.onnx.reading.read_onnx import read_onnx
from fxq.tracing.wrappers import unwrapped
from fxq.workflow.obstacles import check_model


def float_model(model: Any) -> nn.Module:
    """Return a model to quantize, without its wrappers; for an exported program or ONNX file, a module that runs it.

    Raises:
        InputError: the model cannot be quantized.
    """
    inside: nn.Module = _module_of(model)
    check_model(inside)
    return inside


def _module_of(model: Any) -> Any:
    """Model without its wrappers; the float model of an ONNX file."""
    return read_onnx(model) if is_onnx(model) else unwrapped(model)


def trainable_model(model: Any) -> nn.Module:
    """Return a model to copy for training, as `float_model` does. It may be in train mode; the copy is checked.

    Raises:
        InputError: it is no module.
    """
    inside = _module_of(model)
    if not isinstance(inside, nn.Module):
        raise InputError(f"model is a {type(inside).__name__}, not an nn.Module. (A function? Wrap it in a module.)")
    return inside


def compared_model(a: Any, b: Any) -> nn.Module:
    """Return a float or quantized model to compare with a quantized one, without its wrappers.

    Raises:
        InputError: `fxq.compare` cannot compare the two.
    """
    inside: nn.Module = _module_of(a)
    if not isinstance(b, QuantizedModel):
        hint = " (a is: fxq.compare(float_model, quantized_model, data))" if isinstance(inside, QuantizedModel) else ""
        raise InputError(f"b is a {type(b).__name__}, not a quantized model{hint}.")
    if not isinstance(inside, QuantizedModel):
        check_model(inside)
    if device_of(inside) != device_of(b):
        raise InputError(f"a is on {device_of(inside)}, b on {device_of(b)}; move one of them with .to(...).")
    return inside
