"""Comparison of a kernel's result with the reference run of its region, up to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor, fx

from fxq.graph.query import CONVERSIONS, arguments_of, is_op, options_of
from fxq.graph.region import Region
from fxq.graph.region_run import RegionOutput, run_region
from fxq.graph.run import value_of
from fxq.graph.unit import inputs_of
from fxq.ops.recurrent import states_rounded

MAX_FALSE_ALARM_RATE = 1e-3
"""Upper bound of the probability that a correct kernel with rounding inside is called wrong, if every value near a tie
were rounded the other way.

Real kernels round far fewer values the other way: a value counts as near a tie up to `Tolerances.tolerance`, which is
many times the error of float32 arithmetic.
"""


FLOAT32 = torch.finfo(torch.float32).max
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
"""Floats below it may be 0 in a kernel."""
MAX_KERNEL_VALUE = FLOAT32 / 2**24
"""Values from which on a kernel may overflow float32: it may multiply an int32 sum by a scale, 1/127 of the largest."""


EXACT_TERMS = 256
"""Number of terms of a float32 sum whose rounding error `Tolerances.sum_tolerance` covers.

The tolerance of longer sums grows in proportion to their length.
PyTorch's products use at least 16 partial sums, so the error is at most K / 16 * 2**-24 of the terms' magnitudes.
Source: Higham 1993, section 3.
"""


class Tolerances(Protocol):
    """Tolerated differences between a kernel and its region, see `fxq.passes.VerifyLowering`."""

    @property
    def tolerance(self) -> float:
        """Tolerance of integer results in steps, in addition to half a step of rounding."""

    @property
    def float_tolerance(self) -> float:
        """Tolerance of float results, relative to the largest."""

    @property
    def sum_tolerance(self) -> float:
        """Tolerance relative to the magnitude of the terms that are added up."""


@dataclass(frozen=True)
class DefaultTolerances:
    """Tolerances where a recipe gives no others."""

    tolerance: float = 0.01
    float_tolerance: float = 1e-4
    sum_tolerance: float = 1e-6


def difference(
    gm: fx.GraphModule,
    region: Region,
    values: Mapping[fx.Node, Any],
    expected: Sequence[RegionOutput],
    got: Any,
    limits: Tolerances,
    rounded: list[RegionOutput] | None = None,
) -> str | None:
    """Difference between a kernel's result and its region beyond rounding, as text; None if there is none.

    A unit rounds once, at its end. In a region of several units, and in a recurrent layer, a value near a tie may be
    rounded either way, and later values follow. Two more runs of the region, in each of which half of these values are
    rounded the other way, show how far the result may differ.

    To first order, the error of an element is a sum over the values that were rounded the other way: for each, one step
    up or down, depending on its side of the tie, times its weight. These signs are independent, so the sum exceeds
    `sigma * sqrt(2 * log(2 / p))` with probability at most p, where `sigma ** 2` is the sum of the squared terms. Each
    value near a tie is rounded the other way in one of the two runs, so the squared errors of both runs, added, average
    to `sigma ** 2`. For the largest of n elements, p is `MAX_FALSE_ALARM_RATE / n`; for their mean, whose errors may
    have a common cause, it is `MAX_FALSE_ALARM_RATE`. In a small region, few values are near a tie and most elements do
    not change, so `sigma` underestimates the error of the others. An element that one value has changed is off by no
    more than in both runs together.
    Source: Hoeffding 1963, theorem 2, and the union bound.

    Args:
        gm: module of the region's graph.
        region: the region.
        values: inputs of the kernel, by input node of the region.
        expected: outputs of the region for these inputs.
        got: result of the kernel.
        limits: the tolerances.
        rounded: outputs of the region with the roundings of a kernel that computes in less than float32; `got` may be
            as far from `expected` as these are, see `Kernel.rounded_result`.
    """
    outputs = got if len(expected) > 1 and isinstance(got, tuple) else (got,)
    if len(outputs) != len(expected):
        return f"it returns {type(got).__name__} instead of a tuple of {len(expected)}"
    rounds_once = region.calls and not region.calls[0].rounds_its_state
    pairs = list(zip(expected, outputs, strict=True))
    if not rounds_once and all(disagreement(*pair, limits, lambda: 0.0) is None for pair in pairs):
        return None  # further runs only add to the limits
    runs = [] if rounds_once else list(_rounded_otherwise(gm, region, values, limits.tolerance))
    runs += [] if rounded is None else [rounded]
    for i, (want, value) in enumerate(pairs):
        why = disagreement(want, value, limits, lambda: magnitude(gm, region, values), [run[i] for run in runs])
        if why is not None:
            return why if len(expected) == 1 else f"%{region.outputs[i].name}, its output {i}: {why}"
    return None


def _rounded_otherwise(
    gm: fx.GraphModule, region: Region, values: Mapping[fx.Node, Any], shift: float
) -> Iterator[list[RegionOutput]]:
    """Run the region twice with every value shifted before it is rounded: by plus or minus `shift` steps, at random.

    The second run shifts each value the opposite way.
    """
    for sign in (shift, -shift):
        drawn = torch.Generator().manual_seed(0)

        def moved(steps: Tensor, sign: float = sign, drawn: torch.Generator = drawn) -> Tensor:
            return (steps + _signs(steps, drawn).mul_(sign)).round_()

        def rounded(result: RegionOutput, moved: Callable[[Tensor], Tensor] = moved) -> Tensor:
            steps, last = result.in_steps, result.last
            if steps is None or last is None:
                return result.value
            grid = options_of(last)
            return moved(steps).clamp_(grid["qmin"], grid["qmax"]).to(grid["dtype"])

        with states_rounded(moved):
            run = run_region(gm, region, values, rounded)
        yield run


def _signs(like: Tensor, drawn: torch.Generator) -> Tensor:
    """Random signs, 1.0 or -1.0, for the values of a tensor. A random byte gives eight of them."""
    drawn_bytes = torch.randint(0, 256, (-(-like.numel() // 8),), dtype=torch.uint8, generator=drawn)
    bits = torch.from_numpy(numpy.unpackbits(drawn_bytes.numpy(), count=like.numel()))
    return bits.to(like.device, like.dtype).mul_(2).sub_(1).view(like.shape)


def largest_value(gm: fx.GraphModule, region: Region, values: Mapping[fx.Node, Any]) -> float:
    """Largest finite magnitude among the floats that a region reads and computes."""
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
    """Magnitude of the terms that a region adds up, which determines its float32 rounding error.

    For a unit: the sum of the magnitudes of the first op's terms, plus those that later ops add. Terms that cancel
    still leave their rounding error. Zero points are included, since a kernel may sum the raw integers and subtract
    the zero point afterwards, also in the padding. For a region of several units: the largest value that it computes.
    For sums of more than `EXACT_TERMS` terms, the result grows in proportion to their length.
    """
    if not region.calls:
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
    weight, total = call.tensors.get(call.op.traits.weight or ""), 0.0
    if isinstance(weight, fx.Node):
        rows = env[weight].movedim(call.op.traits.axis or 0, 0).flatten(1).sum(1)
        total = zeros.get(call.tensors[call.op.traits.inputs[0]], 0.0) * largest(rows)
    for sign in (1, -1):  # the terms of a sum and of a difference
        tensors = {name: fx.node.map_arg(value, env.__getitem__) for name, value in call.tensors.items()}
        if len(call.op.traits.inputs) > 1 and isinstance(tensors[call.op.traits.inputs[1]], Tensor):
            tensors[call.op.traits.inputs[1]] = sign * tensors[call.op.traits.inputs[1]]
        total = max(total, largest(call.op.target(**tensors, **call.options)))
    others = [read.node for read in inputs_of(region.calls) if read.call > 0 and read.role == "activation"]
    length = max(1.0, _longest_sum(region, env) / EXACT_TERMS)
    return length * total + sum(largest(env[node]) for node in dict.fromkeys(others))


def _longest_sum(region: Region, env: Mapping[fx.Node, Any]) -> int:
    """Largest number of products per output element, over the layers with per-channel scales."""
    weights = [(env[s.node], s.kwargs["axis"]) for s in region.steps if is_op(s, "dequantize") and "axis" in s.kwargs]
    return max((weight.numel() // max(weight.shape[axis], 1) for weight, axis in weights), default=1)


def _size_of(value: Any) -> Any:
    return value.abs() if isinstance(value, Tensor) and value.is_floating_point() else value


def disagreement(
    expected: RegionOutput,
    got: Tensor,
    limits: Tolerances,
    size: Callable[[], float],
    others: Sequence[RegionOutput] = (),
) -> str | None:
    """Difference between an output of a kernel and the expected one beyond rounding, as text; None if there is none.

    Integers that are rounded from known real values must be the nearest ones; a tie may be rounded either way. Other
    integers must be equal.

    Args:
        expected: output of the q/dq form, any shape, integer or float.
        got: output of the kernel.
        limits: the tolerances.
        size: returns the magnitude of the terms that are added up; called only if it decides.
        others: outputs of the q/dq form with values inside rounded the other way; they bound the largest and the mean
            difference of `got`, see `difference`.
    """
    if got.shape != expected.raw.shape or got.dtype != expected.dtype:
        return f"it returns {got.dtype} {list(got.shape)} instead of {expected.dtype} {list(expected.raw.shape)}"
    if got.numel() == 0:
        return None
    real, (want, limit) = got.dtype.is_floating_point, _limited(expected, limits)
    distance = _apart(want, got) if real else _apart(want, got).nan_to_num_(0.0)  # NaN has no integer: any will do
    shifts = [_apart(want, _limited(output, limits)[0]).nan_to_num_(0.0) for output in others]
    sigma = math.sqrt(sum(float(shift.square().mean()) for shift in shifts))
    mean_limit = limit + sigma * math.sqrt(2 * math.log(2 / MAX_FALSE_ALARM_RATE))
    shift_sum = largest(sum(shifts, torch.zeros(())))
    limit += max(shift_sum, sigma * math.sqrt(2 * math.log(2 * got.numel() / MAX_FALSE_ALARM_RATE)))
    worst = largest(distance)
    if not worst <= limit and (real or expected.last is not None):
        scale = 1.0 if expected.last is None else options_of(expected.last)["scale"]
        terms = limits.sum_tolerance * min(size(), FLOAT32) / float(torch.as_tensor(scale).min())
        limit, mean_limit = limit + terms, mean_limit + terms
    if worst <= limit:
        mean = float(distance.mean()) if shifts else 0.0
        return f"off by {mean:.3g} on average, more than {mean_limit:.3g}" if mean > mean_limit else None
    if real:
        return f"off by {worst:.3g}, more than {limit:.3g}"
    share = 100 * float((distance > limit).double().mean())
    return f"off by up to {worst:.3g} steps, more than rounding in {share:.3g} % of the elements"


def _limited(expected: RegionOutput, limits: Tolerances) -> tuple[Tensor, float]:
    """Expected output before its last rounding, in steps if it is quantized, and the tolerated distance from it."""
    if expected.in_steps is not None:
        return expected.in_steps, 0.5 + limits.tolerance
    value, rounded = expected.value, expected.rounded
    if rounded is not None and rounded.last is not None and rounded.in_steps is not None:
        grid = options_of(rounded.last)
        if not isinstance(grid["scale"], Tensor):
            return (rounded.in_steps - grid["zero_point"]) * grid["scale"], (0.5 + limits.tolerance) * grid["scale"]
    if not value.dtype.is_floating_point:
        return value, 0.0
    return value, limits.float_tolerance * largest(_finite(value)) + _SMALLEST_NORMAL


def _apart(want: Tensor, got: Tensor) -> Tensor:
    """Elementwise distance of two tensors; 0 if both elements are the same infinity or both are NaN."""
    distance = (want.float() - got.float()).abs_()
    if not math.isfinite(float(distance.sum())):
        distance.masked_fill_((want == got) | (want.isnan() & got.isnan()), 0.0)
    return distance


def _finite(value: Tensor) -> Tensor:
    return value.nan_to_num(0.0, 0.0, 0.0)


def largest(value: Tensor) -> float:
    """Largest absolute value; 0 for an empty tensor."""
    return float(value.abs().max()) if value.numel() else 0.0
