"""Detection of modules that compute other results in train mode than in eval mode."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from fxq.common.data import Batch
from fxq.common.hooks import forward_hooks
from fxq.common.isolation import copied, seeded, untouched, without_autocast
from fxq.common.metrics import identical, tensors


def first_in_train_mode(model: nn.Module) -> str | None:
    """Path of the first module in train mode whose results depend on the mode; "" for the model, None if there is none.

    Most modules, such as activation functions, do not depend on the mode.
    """
    return next((path for path, m in model.named_modules() if m.training and _looks_at_mode(m)), None)


def different_in_train_mode(model: nn.Module, batch: Batch, kept: Collection[nn.Module]) -> list[str]:
    """Return the paths of modules with other outputs or other buffer updates in train mode than in eval mode.

    Modules that may depend on the mode are run in train mode on a batch. A module that fails there counts as different.

    Args:
        model: in eval mode; stays unchanged.
        batch: inputs of the model.
        kept: modules to leave out.
    """
    left, modes = set(map(id, kept)), {path: m.training for path, m in copy.deepcopy(model).train().named_modules()}
    asked = {path: m for path, m in model.named_modules() if id(m) not in left and modes[path] and _looks_at_mode(m)}
    before = _called(model, batch)

    def differs(modules: Collection[nn.Module]) -> bool:
        for module in modules:
            module.training = True
        try:
            return not _same_run(_called(model, batch), before)
        except Exception:  # a forward may raise anything
            return True
        finally:
            for module in modules:
                module.training = False

    if not asked or not differs(asked.values()):
        return []
    return [path for path, module in asked.items() if differs([module])] or list(asked)


class _Norms(TorchFunctionMode):
    """Notes for which running means batch norms are computed with those of the batch, and for which they are not."""

    def __init__(self) -> None:
        super().__init__()
        self.moving, self.fixed = set[int](), set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for every function of torch."""
        if func is nn.functional.batch_norm:
            arguments = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
            (self.moving if arguments.get("training") else self.fixed).add(id(arguments["running_mean"]))
        return func(*args, **(kwargs or {}))


def fixed_statistics(model: nn.Module, batch: Batch) -> list[str]:
    """Return the paths of batch norms that use fixed statistics even in train mode of the model.

    The `train()` of the model may leave them in eval mode, or its code may call them so.

    Args:
        model: in eval mode; stays unchanged.
        batch: inputs of the model.
    """
    if not any(isinstance(m, _BatchNorm) for m in model.modules()):
        return []
    trained = copy.deepcopy(model).train()  # a copy, since `train()` of the user may change anything
    norms = {p: m for p, m in trained.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is not None}
    with seeded(), torch.no_grad(), without_autocast(), _Norms() as calls, suppress(Exception):  # a batch too small
        inputs = copied(batch)
        trained(*inputs.args, **inputs.kwargs)
    fixed = calls.fixed.union(id(m.running_mean) for m in norms.values() if not m.training) - calls.moving
    return [path for path, m in norms.items() if id(m.running_mean) in fixed]


def _called(model: nn.Module, batch: Batch) -> tuple[list[Tensor], list[str]]:
    """Run a model; return its output tensors and the names of the buffers and attributes that it changed, restored."""
    with untouched(model) as changes, seeded(), torch.no_grad(), without_autocast(), _through_modules():
        inputs = copied(batch)  # a forward may change its inputs
        outputs = list(tensors(model(*inputs.args, **inputs.kwargs)))
    return outputs, [
        *changes.buffers,
        *(f"{path}.{name}" for path, names in changes.attributes.items() for name in names),
    ]


@contextmanager
def _through_modules() -> Iterator[None]:
    """Context in which torch's transformer layers call their modules, instead of one fused kernel in eval mode."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _same_run(run: tuple[list[Tensor], list[str]], other: tuple[list[Tensor], list[str]]) -> bool:
    (outputs, changes), (other_outputs, other_changes) = run, other
    same_length = changes == other_changes and len(outputs) == len(other_outputs)
    return same_length and all(map(identical, outputs, other_outputs))


def _looks_at_mode(module: nn.Module) -> bool:
    """Whether the results of a module may depend on the mode: by its type, or since its code reads `training`."""
    if isinstance(module, _NormBase):
        return module.running_mean is not None
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0:
        return True
    own, kind = vars(module).get("forward"), cast(type, type(module))
    return isinstance(module, nn.RReLU) or _reads_mode(kind) or any(map(_names_mode, (*forward_hooks(module), own)))


@lru_cache(maxsize=4096)
def _reads_mode(kind: type) -> bool:
    """Whether the code of a module type, outside of torch, reads `training`, or is not available."""
    if issubclass(kind, torch.jit.ScriptModule):
        return True
    classes = [cls for cls in kind.__mro__ if not cls.__module__.startswith(("torch.nn.modules.", "builtins"))]
    return any(_names_mode(value) for cls in classes for value in vars(cls).values())


def _names_mode(value: Any) -> bool:
    """Whether the code of a function, method, property or callable object names `training`."""
    return any("training" in (*code.co_names, *code.co_consts) for code in _codes(value, set()))


def _codes(value: Any, seen: set[int]) -> Iterator[CodeType]:
    """Yield the code of a value, and of the functions that it holds, such as a decorated function."""
    if value is None or isinstance(value, (type, nn.Module)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, CodeType):
        yield value
        parts: list[Any] = [part for part in value.co_consts if isinstance(part, CodeType)]
    elif isinstance(value, FunctionType):
        parts = [value.__code__, *filter(callable, _enclosed(value))]
    else:
        called = vars(type(value)).get("__call__")
        parts = [getattr(value, name, None) for name in ("__func__", "fget", "func")]
        parts += [called] if isinstance(called, FunctionType) else []
    for part in parts:
        yield from _codes(part, seen)


def _enclosed(function: FunctionType) -> Iterator[Any]:
    """Yield the values of a function's closure variables."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a variable without a value yet
            yield cell.cell_contents
