"""Obstacles: reasons why a model cannot be quantized, which are checked before it is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fxq.common.file_kinds import no_module
from fxq.common.names import check_names, is_writable
from fxq.common.train_mode import first_in_train_mode
from fxq.errors import InputError
from fxq.model import QuantizedModel
from fxq.workflow.observed_model import ObservedModel
from fxq.workflow.training_model import TrainingModel

_QUANTIZED_MODULES = (
    "torch.ao.nn.quantized",
    "torch.ao.nn.intrinsic.quantized",
    "torch.ao.nn.qat",
    "torch.ao.nn.intrinsic.qat",
    "torch.ao.quantization.fake_quantize",
    "torch.ao.quantization.observer",
    "fxq.backends",
    "fxq.parts",
)
"""Packages whose modules are quantized or observed already."""

_FXQ_MODELS = (QuantizedModel, ObservedModel, TrainingModel)


def _not_a_module(model: Any) -> str:
    if isinstance(model, nn.Module):
        return ""
    message = f"model is a {type(model).__name__}, not an nn.Module. (A function? Wrap it in a module.)"
    return no_module(model) or message


def _is_fxq_model(model: nn.Module) -> str:
    if not isinstance(model, _FXQ_MODELS):
        return ""
    return f"the model is a {type(model).__name__} already; quantize the float model it came from."


def _is_scripted(model: nn.Module) -> str:
    if not isinstance(model, torch.jit.ScriptModule):
        return ""
    return (
        "the model is a TorchScript module, which has no Python code to trace. Pass the nn.Module that it was "
        "scripted from, or torch.export.export(that module, inputs). A TorchScript module cannot be quantized; as "
        "a submodule of another model it runs in float: nn.Sequential(script_module, ...)."
    )


def _has_quantized_modules(model: nn.Module) -> str:
    for path, module in model.named_modules():
        if isinstance(module, _FXQ_MODELS) or type(module).__module__.startswith(_QUANTIZED_MODULES):
            kind = type(module).__name__
            return f"the model is quantized already: {path or 'the model'} is a {kind}. Give the float model."
    return ""


def _is_exported_module(model: nn.Module) -> str:
    if type(model).__mro__[1].__name__ not in ("_StatefulGraphModule", "_UnliftedModule"):
        return ""
    return "the model is the module of an exported program; give the program that it came from."


def _in_train_mode(model: nn.Module) -> str:
    training = first_in_train_mode(model)
    if training is None:
        return ""
    where = f"its module {training!r} is" if training else "it is"
    return f"the model cannot be quantized while {where} in train mode: call model.eval() first."


def _has_unwritable_names(model: nn.Module) -> str:
    for name, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers()):
        if not is_writable(name):
            return f"{name!r}: torch.fx writes names into code, and cannot write this one; rename it."
    check_names(model, ObservedModel)
    return ""


def _has_no_values(model: nn.Module) -> str:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            return f"{name} has no values and no shape yet: run the float model once on a batch first."
        if tensor.is_meta:
            return (
                f"{name} is on the meta device, so it has no values; load the model's weights first, or pass weights=."
            )
    return ""


_OBSTACLES: Sequence[Callable[[Any], str]] = (
    _not_a_module,
    _is_fxq_model,
    _is_scripted,
    _has_quantized_modules,
    _is_exported_module,
    _in_train_mode,
    _has_unwritable_names,
    _has_no_values,
)
"""Reasons why a model cannot be quantized, in the order in which they are checked: each returns a message, or ""."""


def check_model(model: Any) -> None:
    """Raise `InputError` unless `model` is a float model that can be quantized."""
    for obstacle in _OBSTACLES:
        if message := obstacle(model):
            raise InputError(message)
