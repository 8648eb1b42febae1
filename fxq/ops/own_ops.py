"""Ops of the user's own: a row of the op table by one public call."""

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
    """Decorator: make a function of your own an op, which passes, fusions, recipes and the ledger know by its name.

    The function is what the op means, on float32. Its tensors are positional parameters, its options keyword-only ones.
    A recipe that is to be saved names it: `Recipe.with_extensions`.

    Args:
        *spellings: how models call it besides this function: ops of `torch.library` (with all their overloads), other
            functions that torch.fx records, `nn.Module` types whose attributes have the options' names; where the
            arguments are others than the function's, a `fxq.extend.Spelling`.
        traits: how the op takes part in quantization: `OpTraits("computes", pointwise=True)`, a function of single
            elements, which an exact lookup table computes on integers; `OpTraits("moves", layout=True)`, an op that
            only moves values, also integers; `OpTraits("float")`, an op without an integer form; `OpTraits("computes")`,
            an op that runs on integers where a kernel takes it (`fxq.extend.register_kernel`).
        name: its name; default: the function's.
        commutes: whether its first two tensors can be swapped.
        macs: its multiply-accumulates from the shapes of its output and its tensors; None: too few to count.

    Returns:
        The decorator of the function. One that is defined anew replaces what it was.

    Raises:
        FxqError: the name or a spelling is another op's; or (`InputError`) something given is of the wrong type.

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
    _check_quant(traits)
    written = [spelling for given in spellings for spelling in _spelled(given)]

    def register(function: Function) -> Function:
        if not inspect.isfunction(function):
            raise InputError(f"register_op decorates a plain function, not {function!r}.")
        target = _recorded(function)
        op = Op(name or function.__name__, target, (Spelling(target), *written), traits, commutes, macs)
        _check_arguments(op)
        if op.name in OPS and name_of(OPS[op.name].target) == name_of(function):
            OPS.discard(op.name)
        OPS.add(op)
        return target

    return register


def _recorded(function: Function) -> Function:
    """The function, which torch.fx records as one call in canonical form: it does not look into it."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        lists = (value if isinstance(value, (tuple, list)) else (value,) for value in (*args, *kwargs.values()))
        given = tuple(chain.from_iterable(lists))
        if has_torch_function(given):
            bound = signature.bind(*args, **kwargs)
            return handle_torch_function(call, given, *bound.args, **bound.kwargs)
        return function(*args, **kwargs)

    return call


def _spelled(given: Any) -> Iterator[Spelling]:
    """A spelling; for an op of `torch.library` one for each of its overloads besides."""
    spelling = given if isinstance(given, Spelling) else Spelling(given)
    target = spelling.target
    is_name = isinstance(target, str) and target.isidentifier()
    if not (is_name or callable(target)) or isinstance(target, nn.Module):
        raise InputError(f"an op is spelled by functions, nn.Module types and names of methods, not by {given!r}.")
    yield spelling
    if isinstance(target, torch._ops.OpOverloadPacket):
        yield from (replace(spelling, target=getattr(target, overload)) for overload in target.overloads())


def _check_quant(traits: Any) -> None:
    if not isinstance(traits, OpTraits):
        raise InputError(
            f'quant is a fxq.extend.OpTraits, such as fxq.extend.OpTraits("computes", pointwise=True), not {traits!r}.'
        )
    if traits.kind not in get_args(Kind):
        raise InputError(unknown("kind of a fxq.extend.OpTraits", traits.kind, get_args(Kind)))
    if traits.weight is not None and (traits.axis is None or traits.channels is None):
        raise InputError(
            "a fxq.extend.OpTraits with a weight has axis and channels, too: where its output channels are."
        )


def _check_arguments(op: Op) -> None:
    traits = op.traits
    states = traits.recurrence.states if traits.recurrence is not None else ()
    for argument in (*traits.inputs, traits.weight, *traits.more_weights, traits.bias, *traits.more_biases, *states):
        if argument is not None and argument not in op.tensors:
            wrong = unknown("tensor", argument, op.tensors)
            raise InputError(f"op {op.name!r}: its fxq.extend.OpTraits names what is no positional parameter: {wrong}")
