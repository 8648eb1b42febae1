"""Whether a kernel returns what its region computes, up to what rounding explains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from fxq.graph.query import CONVERSIONS, arguments_of, is_op, options_of
from fxq.graph.region import Region, UnitRegion
from fxq.graph.region_run import Result, run_region
from fxq.graph.run import value_of
from fxq.graph.unit import inputs_of
from fxq.ops.recurrent import states_rounded

CHANCE = 1e-3
"""At most how often a right kernel that rounds inside may be called wrong, if all near a tie went the other way.

In a real one far less does: a value counts as near a tie up to `Limits.tolerance`, which is many times what arithmetic
in float32 is off.
"""


FLOAT32 = torch.finfo(torch.float32).max
LARGE = FLOAT32 / 2**24
"""Values from which on a kernel may leave float32: it may multiply an int32 sum by a scale, a 127th of the largest."""


EXACT_TERMS = 256
"""Terms of a float32 sum whose rounding error `Limits.sum_tolerance` covers; the error of longer sums is proportional.

PyTorch's products use at least 16 partial sums, so the error is at most K / 16 * 2**-24 of the terms' magnitudes.
Source: Higham 1993, section 3.
"""


class Limits(Protocol):
    """How far a kernel may be off, see `fxq.passes.VerifyLowering`."""

    @property
    def tolerance(self) -> float:
        """In steps, beside the half of one."""

    @property
    def float_tolerance(self) -> float:
        """Of float results, relative to the largest."""

    @property
    def sum_tolerance(self) -> float:
        """Relative to the terms that are added up."""


def difference(
    gm: fx.GraphModule,
    region: Region,
    values: Mapping[fx.Node, Any],
    expected: Sequence[Result],
    got: Any,
    limits: Limits,
) -> str | None:
    """How what a kernel returns differs from its region beyond rounding; None where it does not.

    A unit rounds once, at its end. In a region of several, and in a recurrent layer, a value near a tie may be rounded
    either way, and what comes behind follows: how far that carries, two more runs show, in which each such value goes
    the other way once.

    To first order, an element of the result is off by a sum over the values that went the other way: of each, a step up
    or down by the side of the tie that it was on, times its weight. These signs are independent, so the sum exceeds
    `sigma * sqrt(2 * log(2 / p))` with at most the probability p, where `sigma ** 2` is the sum of the squares. The two
    runs share out all values near a tie between them: what the elements are off by in both, squared and added, is that
    on average. For the largest of n elements p is `CHANCE / n`. For their mean it is `CHANCE`: they may all be off for
    the same reason. In a small region few values are near a tie, and most elements are not moved at all: `sigma` says
    little of the others then. Of these, each is off by no more than in both runs together if one value has moved it.
    Source: Hoeffding 1963, theorem 2, and the union bound.

    Args:
        gm: the module of the region's graph.
        region: the region.
        values: what the kernel was run on, by input of the region.
        expected: what the region computes on them.
        got: what the kernel returned.
        limits: how far it may be off.
    """
    made = got if len(expected) > 1 and isinstance(got, tuple) else (got,)
    if len(made) != len(expected):
        return f"it returns {type(got).__name__} instead of a tuple of {len(expected)}"
    once = isinstance(region, UnitRegion) and not region.calls[0].rounds_its_state
    runs = [] if once else list(_rounded_otherwise(gm, region, values, limits.tolerance))
    for i, (want, value) in enumerate(zip(expected, made, strict=True)):
        why = disagreement(want, value, limits, lambda: magnitude(gm, region, values), [run[i] for run in runs])
        if why is not None:
            return why if len(expected) == 1 else f"%{region.outputs[i].name}, its output {i}: {why}"
    return None


def _rounded_otherwise(
    gm: fx.GraphModule, region: Region, values: Mapping[fx.Node, Any], by: float
) -> Iterator[list[Result]]:
    """The region twice more, with every value that it rounds inside moved by so many steps, up or down, and back."""
    for sign in (by, -by):
        drawn = torch.Generator().manual_seed(0)

        def moved(steps: Tensor, sign: float = sign, drawn: torch.Generator = drawn) -> Tensor:
            move = torch.randint(0, 2, steps.shape, generator=drawn).mul_(2).sub_(1).to(steps.device)
            return (steps + sign * move).round_()

        def rounded(result: Result, moved: Callable[[Tensor], Tensor] = moved) -> Tensor:
            steps, last = result.steps, result.last
            if steps is None or last is None:
                return result.value
            grid = options_of(last)
            return moved(steps).clamp_(grid["qmin"], grid["qmax"]).to(grid["dtype"])

        with states_rounded(moved):
            run = run_region(gm, region, values, rounded)
        yield run


def largest_value(gm: fx.GraphModule, region: Region, values: Mapping[fx.Node, Any]) -> float:
    """The largest absolute value, infinity aside, among the floats that a region reads and computes."""
    return _largest_float(_computed(gm, region, values))


def _computed(gm: fx.GraphModule, region: Region, values: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
    """Values that a region reads and computes, by node."""
    env = dict(values)
    for step in region.steps:
        env[step.node] = value_of(gm, step, env)
    return env


def _largest_float(env: Mapping[fx.Node, Any]) -> float:
    real = [v for v in env.values() if isinstance(v, Tensor) and v.is_floating_point()]
    return max((largest(_finite(value)) for value in real), default=0.0)


def magnitude(gm: fx.GraphModule, region: Region, values: Mapping[fx.Node, Any]) -> float:
    """How large the terms are that the first op of a unit adds up, and what later ones add to it.

    That is what float32 rounds: terms that cancel leave the rounding of what they were. A kernel may add up the
    integers as they are and take the zero point away behind, in the padding as well. Of a region of several units, the
    largest value that it computes with. Grows in proportion to the length of sums of more than `EXACT_TERMS` terms.
    """
    if not isinstance(region, UnitRegion):
        env = _computed(gm, region, values)
        return _largest_float(env) * max(1.0, _longest_sum(region, env) / EXACT_TERMS)
    if is_op(region.node, *CONVERSIONS):
        return 0.0
    call, env = region.calls[0], {node: _size_of(value) for node, value in values.items()}
    zeros: dict[Any, float] = {}
    for step in region.steps:
        if step.node is region.node:
            break
        env[step.node] = _size_of(value_of(gm, step, env))
        if is_op(step, "dequantize") and "axis" not in step.kwargs:
            grid = arguments_of(step, env)[1]
            zero = torch.as_tensor(abs(grid["zero_point"]) * grid["scale"])
            zeros[step.node] = largest(zero)
            env[step.node] += zero
    read, most = call.tensors.get(call.op.traits.weight or ""), 0.0
    if isinstance(read, fx.Node):
        rows = env[read].movedim(call.op.traits.axis or 0, 0).flatten(1).sum(1)
        most = zeros.get(call.tensors[call.op.traits.inputs[0]], 0.0) * largest(rows)
    for sign in (1, -1):  # of a sum and of a difference
        tensors = {name: fx.node.map_arg(value, env.__getitem__) for name, value in call.tensors.items()}
        if len(call.op.traits.inputs) > 1 and isinstance(tensors[call.op.traits.inputs[1]], Tensor):
            tensors[call.op.traits.inputs[1]] = sign * tensors[call.op.traits.inputs[1]]
        most = max(most, largest(call.op.target(**tensors, **call.options)))
    others = [read.node for read in inputs_of(region.calls) if read.call > 0 and read.role == "activation"]
    length = max(1.0, _longest_sum(region, env) / EXACT_TERMS)
    return length * most + sum(largest(env[node]) for node in dict.fromkeys(others))


def _longest_sum(region: Region, env: Mapping[fx.Node, Any]) -> int:
    """Largest number of products per output element, over the layers with per-channel scales."""
    weights = [(env[s.node], s.kwargs["axis"]) for s in region.steps if is_op(s, "dequantize") and "axis" in s.kwargs]
    return max((weight.numel() // max(weight.shape[axis], 1) for weight, axis in weights), default=1)


def _size_of(value: Any) -> Any:
    return value.abs() if isinstance(value, Tensor) and value.is_floating_point() else value


def disagreement(
    expected: Result, got: Tensor, limits: Limits, size: Callable[[], float], others: Sequence[Result] = ()
) -> str | None:
    """How `got` differs from what is expected beyond rounding; None when it does not.

    Integers with a known real value must be the nearest ones: a tie may go either way. Other integers must be equal.

    Args:
        expected: what the qdq form computes, any shape, integer or float.
        got: what the kernel computes.
        limits: how far it may be off.
        size: the magnitude of the terms that both add up; asked for where that decides.
        others: what the qdq form computes where values before it are rounded otherwise, each in one of these; how far
            `got` may be off for that at most and on average, see `difference`.
    """
    if got.shape != expected.raw.shape or got.dtype != expected.dtype:
        return f"it returns {got.dtype} {list(got.shape)} instead of {expected.dtype} {list(expected.raw.shape)}"
    if got.numel() == 0:
        return None
    real, (want, limit) = got.dtype.is_floating_point, _limited(expected, limits)
    distance = _apart(want, got) if real else _apart(want, got).nan_to_num_(0.0)  # NaN has no integer: any will do
    moved = [_apart(want, _limited(other, limits)[0]).nan_to_num_(0.0) for other in others]
    sigma = math.sqrt(sum(float(by.square().mean()) for by in moved))
    mean = limit + sigma * math.sqrt(2 * math.log(2 / CHANCE))
    together = largest(sum(moved, torch.zeros(())))
    limit += max(together, sigma * math.sqrt(2 * math.log(2 * got.numel() / CHANCE)))
    most = largest(distance)
    if not most <= limit and (real or expected.last is not None):
        scale = 1.0 if expected.last is None else options_of(expected.last)["scale"]
        terms = limits.sum_tolerance * min(size(), FLOAT32) / float(torch.as_tensor(scale).min())
        limit, mean = limit + terms, mean + terms
    if most <= limit:
        usual = float(distance.mean()) if moved else 0.0
        return f"off by {usual:.3g} on average, more than {mean:.3g}" if usual > mean else None
    if real:
        return f"off by {most:.3g}, more than {limit:.3g}"
    share = 100 * float((distance > limit).double().mean())
    return f"off by up to {most:.3g} steps, more than rounding in {share:.3g} % of the elements"


def _limited(expected: Result, limits: Limits) -> tuple[Tensor, float]:
    """What is expected, in steps where it is rounded, and how far from it is right."""
    if expected.steps is not None:
        return expected.steps, 0.5 + limits.tolerance
    value = expected.value
    return value, limits.float_tolerance * largest(_finite(value)) if value.dtype.is_floating_point else 0.0


def _apart(want: Tensor, got: Tensor) -> Tensor:
    """How far two tensors are apart, element by element; not at all where both are the same infinity, or both NaN."""
    distance = (want.float() - got.float()).abs_()
    if not math.isfinite(float(distance.sum())):
        distance.masked_fill_((want == got) | (want.isnan() & got.isnan()), 0.0)
    return distance


def _finite(value: Tensor) -> Tensor:
    return value.nan_to_num(0.0, 0.0, 0.0)


def largest(value: Tensor) -> float:
    """The largest absolute value, 0 of an empty tensor."""
    return float(value.abs().max()) if value.numel() else 0.0
