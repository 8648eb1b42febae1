"""Check of ops that a user registered: whether their traits hold for the values of the example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxq.common.data import Batch
from fxq.common.isolation import copied, seeded
from fxq.common.metrics import tensors
from fxq.common.trees import mapped
from fxq.errors import InputError, words_of
from fxq.graph.place import where
from fxq.graph.query import arguments_of, op_of
from fxq.graph.run import Runner
from fxq.ops.table import Op

RTOL = 1e-4
"""Difference between two results of one element, relative to the largest result, up to which they count as equal."""


def check_own_traits(gm: fx.GraphModule, example: Batch) -> None:
    """Run a graph on the example if it calls registered ops, and check their traits `pointwise` and `layout`.

    A kernel that relied on a wrong trait would compute something else without notice.

    Raises:
        InputError: a trait does not hold.
    """
    if any((op := op_of(node)) is not None and _has_checked_traits(op) for node in gm.graph.nodes):
        with seeded():
            _CheckedRun(gm, copied(example)).run()


def _has_checked_traits(op: Op) -> bool:
    return op.is_own and (op.traits.pointwise or op.traits.layout)


class _CheckedRun(Runner):
    def compute(self, node: fx.Node) -> Any:
        result, op = super().compute(node), op_of(node)
        if op is not None and _has_checked_traits(op):
            args, options = arguments_of(node, self.values)
            why = why_wrong(op, dict(zip(op.tensors, args, strict=False)), options, result)
            if why:
                trait = "pointwise=True" if op.traits.pointwise else "layout=True"
                raise InputError(
                    f"{where(self.gm, node)}: the op {op.name!r} is registered with {trait}, but {why}. Register it "
                    'with the traits that it has, fxq.extend.OpTraits("float") if none.'
                )
        return result


def why_wrong(op: Op, values: Mapping[str, Any], options: Mapping[str, Any], result: Any) -> str:
    """Return why a call of an op contradicts its traits; empty if it does not.

    Args:
        op: the op.
        values: its tensor arguments by name.
        options: its options.
        result: what the call returned.
    """
    inputs = [x for x in tensors([values.get(name) for name in op.traits.inputs]) if x.is_floating_point()]
    if not inputs or not all(x.numel() for x in inputs):
        return ""
    if not isinstance(result, Tensor):
        return f"it returns a {type(result).__name__}, not a tensor"
    if op.traits.pointwise:
        return _why_not_pointwise(op, values, options, result, inputs[0]) if len(inputs) == 1 else ""
    return _why_not_layout(op, values, options, result)


def _why_not_pointwise(op: Op, values: Mapping[str, Any], options: Mapping[str, Any], result: Tensor, x: Tensor) -> str:
    """Replace a random half of the input: the other elements of the output must stay."""
    if result.shape != x.shape:
        return f"its output has the shape {tuple(result.shape)} for an input of {tuple(x.shape)}"
    kept = torch.rand_like(x) < 0.5
    changed = torch.where(kept, x, -0.5 * x.flip(tuple(range(x.dim()))) - 1)
    again = op.target(*(changed if value is x else value for value in values.values()), **options)
    difference = torch.where(kept, (again - result).abs(), 0).nan_to_num(0, 0, 0)
    limit = RTOL * float(result.abs().nan_to_num(0, 0, 0).max())
    return "elements of its output change when other elements of its input do" if difference.max() > limit else ""


def _why_not_layout(op: Op, values: Mapping[str, Any], options: Mapping[str, Any], result: Tensor) -> str:
    """Every value of the output must be one of the inputs, also where these are integers."""
    if not torch.isin(result[~result.isnan()], torch.cat([x.flatten() for x in tensors(values)])).all():
        return "its output has values that are in none of its inputs"
    integers = [mapped(value, _as_integers) if name in op.traits.inputs else value for name, value in values.items()]
    try:
        moved = op.target(*integers, **options)
    except Exception as error:  # the user's function may raise any type of error
        return f"it does not run on uint8: {words_of(error)}"
    return "" if moved.dtype == torch.uint8 else f"it returns {moved.dtype} for uint8"


def _as_integers(value: Any) -> Any:
    return torch.zeros_like(value, dtype=torch.uint8) if isinstance(value, Tensor) else value
