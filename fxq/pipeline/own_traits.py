"""Check of ops that a user registered: whether their traits hold for the values of the example."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxq.common.data import Batch
from fxq.common.isolation import copied, seeded
from fxq.common.metrics import tensors
from fxq.common.trees import mapped
from fxq.errors import InputError
from fxq.graph.place import where
from fxq.graph.query import arguments_of, op_of
from fxq.graph.run import Runner
from fxq.ops.table import Op

RTOL = 1e-4
"""Difference between two results of one element, relative to the largest result, up to which they count as equal."""


def check_own_traits(gm: fx.GraphModule, example: Batch) -> None:
    """Run a graph on the example if it calls registered ops, and check their traits `pointwise` and `layout`.

    A kernel that relies on a wrong trait is silently wrong.

    Raises:
        InputError: a trait does not hold.
    """
    if any((op := op_of(node)) is not None and _has_checked_traits(op) for node in gm.graph.nodes):
        with seeded(), torch.no_grad():
            _CheckedRun(gm, copied(example)).run()


def _has_checked_traits(op: Op) -> bool:
    return op.is_registered and (op.traits.pointwise or op.traits.layout)


class _CheckedRun(Runner):
    def compute(self, node: fx.Node) -> Any:
        op = op_of(node)
        if op is None or not _has_checked_traits(op):
            return super().compute(node)
        args, options = mapped(arguments_of(node, self.values), _copied)  # the op may change its inputs
        result = super().compute(node)
        why = why_wrong(op, dict(zip(op.tensors, args, strict=False)), options)
        if why:
            trait = "pointwise=True" if op.traits.pointwise else "layout=True"
            raise InputError(
                f"{where(self.gm, node)}: the op {op.name!r} is registered with {trait}, but {why}. Register it with "
                'its true traits, or with fxq.extend.OpTraits("float").'
            )
        return result


def why_wrong(op: Op, values: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Return why a call of an op contradicts its traits; empty if it does not, or rejects other values.

    Args:
        op: the op.
        values: its tensor arguments by name.
        options: its options.
    """
    names = op.traits.inputs
    inputs = [x for x in tensors([values.get(name) for name in names]) if x.is_floating_point() and x.numel()]
    if not inputs or (op.traits.pointwise and len(inputs) != 1):
        return ""

    def called(change: Callable[[Tensor], Tensor]) -> Any:
        arguments = {name: mapped(value, change) if name in names else value for name, value in values.items()}
        return op.target(*mapped(tuple(arguments.values()), _copied), **options)

    others = [value for name, value in values.items() if name not in names]
    try:
        return _why_not_pointwise(called, inputs[0]) if op.traits.pointwise else _why_not_layout(called, inputs, others)
    except Exception:  # the user's function may reject other values with any type of error
        return ""


def _why_not_pointwise(called: Callable[[Callable[[Tensor], Tensor]], Any], x: Tensor) -> str:
    """Replace one half of the elements by their median, then the other: outputs of unchanged ones must not change."""
    half, result = torch.rand(x.shape, device=x.device) < 0.5, called(lambda value: value)
    if not isinstance(result, Tensor) or result.shape != x.shape:
        shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        return f"its output is {shape} for an input of {tuple(x.shape)}"
    result = _wide(result)
    for kept in (half, ~half):
        changed = torch.where(kept, x, x.median())
        again = _wide(called(partial(_instead, changed)))
        if torch.where(kept, (again - result).abs(), 0).max() > RTOL * result.abs().max():
            return "elements of its output change when other elements of its input do"
    return ""


def _instead(changed: Tensor, value: Tensor) -> Tensor:
    return changed if value.shape == changed.shape else value


def _wide(x: Tensor) -> Tensor:
    """Finite values in 64 bits, also of integers and truth values."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64).nan_to_num(0, 0, 0)


def _why_not_layout(
    called: Callable[[Callable[[Tensor], Tensor]], Any], inputs: Sequence[Tensor], others: Sequence[Any]
) -> str:
    """Every value of the output must be one of the inputs, for inputs with unusual values, and for integers."""
    moved = called(_unusual)
    if not isinstance(moved, Tensor):
        return f"it returns a {type(moved).__name__}, not a tensor"
    dtypes = [x.dtype for x in inputs]
    if moved.dtype not in dtypes:
        return f"it returns {moved.dtype} for inputs of {dtypes[0]}"
    allowed = torch.cat([*(_unusual(x).flatten() for x in inputs), *(x.flatten() for x in tensors(others))])
    if not torch.isin(moved[~moved.isnan()], allowed.to(moved.dtype)).all():
        return "its output has values that are in none of its inputs"
    of_integers = called(lambda value: torch.zeros_like(value, dtype=torch.uint8))
    return "" if of_integers.dtype == torch.uint8 else f"it returns {of_integers.dtype} for uint8"


def _unusual(x: Tensor) -> Tensor:
    """Values that no op fills in, such as 0 or 1, and of one sign."""
    return x.abs() * 0.37 + math.pi if x.is_floating_point() else x


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
