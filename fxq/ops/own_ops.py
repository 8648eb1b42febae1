"""Registration of user-defined ops in the op table."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from itertools import chain
from typing import Any, get_args

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

from fxq.common.source import name_of
from fxq.errors import InputError, unknown
from fxq.ops import OPS
from fxq.ops.table import Op, Spelling
from fxq.ops.traits import Kind, OpTraits

Function = Callable[..., Any]


def register_op(
    *spellings: Any,
    traits: OpTraits,
    name: str | None = None,
    commutes: bool = False,
    macs: Callable[..., int] | None = None,
) -> Callable[[Function], Function]:
    """Decorator that registers a function as an op, which passes, fusions, recipes and the ledger refer to by name.

    The function defines the op on float32. Its tensors are positional parameters, its options keyword-only parameters.
    A recipe that will be saved has to name the op with `Recipe.with_extensions`.

    Args:
        *spellings: other ways in which models call the op: ops of `torch.library` (with all their overloads), functions
            that torch.fx records, `nn.Module` types whose attributes have the names of the options. A
            `fxq.extend.Spelling` describes one whose arguments differ from the function's.
        traits: how the op takes part in quantization. `OpTraits("computes", pointwise=True)`: a function of single
            elements, which an exact lookup table computes on integers. `OpTraits("moves", layout=True)`: an op that
            only moves values, on integers, too. `OpTraits("float")`: an op without an integer form.
            `OpTraits("computes")`: an op that runs on integers if a kernel supports it (`fxq.extend.register_kernel`).
            `fxq.quantize` checks `pointwise` and `layout` with the values of the example.
        name: name of the op; the function's name by default.
        commutes: whether its first two tensors can be swapped.
        macs: returns its multiply-accumulates from the shapes of its output and its tensors; None if they are
            negligible.

    Returns:
        The decorator. A function that is defined again replaces its earlier op.

    Raises:
        FxqError: the name or a spelling belongs to another op.
        InputError: an argument has the wrong type.

    Example:
        >>> @fxq.extend.register_op(traits=fxq.extend.OpTraits("computes", pointwise=True))
        ... def gaussian(x, *, width: float = 1.0):
        ...     return torch.exp(-((x / width) ** 2))
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        ...
        ...     def forward(self, x):
        ...         return self.second(gaussian(self.first(x), width=2.0))
        >>> recipe = fxq.Recipe.static(backend="reference")
        >>> [(entry.op, entry.precision) for entry in fxq.quantize(Net(), recipe, data=[torch.randn(2, 8)]).ledger]
        [('linear', 'int8'), ('gaussian', 'int8'), ('linear', 'int8')]
        >>> fxq.ops.OPS.discard("gaussian")
    """
    _check_traits(traits)
    other_spellings = [spelling for entry in spellings for spelling in _spellings_of(entry)]

    def register(function: Function) -> Function:
        if not inspect.isfunction(function):
            raise InputError(f"register_op decorates a plain function, not {function!r}.")
        target = _traceable(function)
        op = Op(name or function.__name__, target, (Spelling(target), *other_spellings), traits, commutes, macs, True)
        _check_arguments(op)
        if op.name in OPS and name_of(OPS[op.name].target) == name_of(function):
            OPS.discard(op.name)
        OPS.add(op)
        return target

    return register


def _traceable(function: Function) -> Function:
    """Wrap a function so that torch.fx records it as one call in canonical form, without tracing into it."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        lists = (value if isinstance(value, (tuple, list)) else (value,) for value in (*args, *kwargs.values()))
        values = tuple(chain.from_iterable(lists))
        if has_torch_function(values):
            bound = signature.bind(*args, **kwargs)
            return handle_torch_function(call, values, *bound.args, **bound.kwargs)
        return function(*args, **kwargs)

    return call


def _spellings_of(entry: Any) -> Iterator[Spelling]:
    """Yield the spelling of an entry and, for an op of `torch.library`, one for each of its overloads."""
    spelling = entry if isinstance(entry, Spelling) else Spelling(entry)
    target = spelling.target
    is_name = isinstance(target, str) and target.isidentifier()
    if not (is_name or callable(target)) or isinstance(target, nn.Module):
        raise InputError(f"a spelling of an op is a function, an nn.Module type or a method name, not {entry!r}.")
    yield spelling
    if isinstance(target, torch._ops.OpOverloadPacket):
        yield from (replace(spelling, target=getattr(target, overload)) for overload in target.overloads())


def _check_traits(traits: Any) -> None:
    if not isinstance(traits, OpTraits):
        raise InputError(
            f'traits is a fxq.extend.OpTraits, such as fxq.extend.OpTraits("computes", pointwise=True), not {traits!r}.'
        )
    if traits.kind not in get_args(Kind):
        raise InputError(unknown("kind of a fxq.extend.OpTraits", traits.kind, get_args(Kind)))
    if traits.weight is not None and (traits.axis is None or traits.channels is None):
        raise InputError(
            "a fxq.extend.OpTraits with a weight also needs axis and channels: the axes of the output channels in the "
            "weight and in the output."
        )


def _check_arguments(op: Op) -> None:
    traits = op.traits
    states = traits.recurrence.states if traits.recurrence is not None else ()
    for argument in (*traits.inputs, traits.weight, *traits.more_weights, traits.bias, *traits.more_biases, *states):
        if argument is not None and argument not in op.tensors:
            reason = unknown("tensor", argument, op.tensors)
            raise InputError(
                f"op {op.name!r}: its fxq.extend.OpTraits names an argument that is not a positional parameter: "
                f"{reason}"
            )
