"""Rounding to a grid through which gradients pass.

Large tensors are worked on in pieces, so that memory for whole ones is not needed on the way. What depends on where a
value is, is computed without comparisons and masks of bool, which are slower than arithmetic on CPUs. Gradients have
gradients themselves, those of learned scales aside, which are refused.

Source: Bengio et al. 2013, section 4 (straight-through); Esser et al. 2020, section 2.1 (for scales that are learned).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fxq.quant.tensor_range import flat

PIECE = 131072
"""Elements that a thread works on at a time; what is computed of them on the way stays in its core's L2 cache."""
PARTS, OUTSIDE, LIMIT = 64000, 32500, 32250
"""Of what rounding adds to a value: parts of a step; what stands for a value outside of the grid; a number between."""
FAR = 2.0**20
"""Steps that are outside of every grid; what makes of the smallest distance from a grid that counts more than one."""
LEAST = 1e-3
"""The smallest factor of a learned scale: where a step of the optimizer was too large."""


class Rounded(torch.autograd.Function):
    """Values on one grid. The gradient of what is inside of it passes; for scale and zero point there is none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
        out, kept = torch.empty_like(x), torch.empty_like(x, dtype=torch.int8)  # -1, 0, 1: below, inside, above
        zero_point = zero_point.to(torch.float32)
        for values, rounded, sides in _pieces(_laid_out_as(out, x), out, kept):
            steps = (values / scale).round_().add_(zero_point)
            torch.clamp(steps, qmin, qmax, out=rounded)
            sides.copy_(steps.sub_(rounded).clamp_(-1, 1))
            rounded.sub_(zero_point).mul_(scale)
        ctx.save_for_backward(kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        if grad.requires_grad:
            return grad * (kept == 0), None, None, None, None
        grad = _laid_out_as(kept, grad)
        passed = torch.empty_like(grad)
        for given, passing, sides in _pieces(grad, passed, kept):
            _pass_inside(given, sides.to(torch.float32), 0.5, passing)
        return passed, None, None, None, None


class RoundedInside(torch.autograd.Function):
    """The same, of values whose own range the grid has: all gradients pass, and nothing is kept for them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
        zero_point = zero_point.to(torch.float32)
        return (x / scale).round_().add_(zero_point).clamp_(qmin, qmax).sub_(zero_point).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None, None, None


class RoundedByLearnedScale(torch.autograd.Function):
    """The same, on the grid of a scale that is learned: `start` times the magnitude of `factor`, which has a gradient.

    Descent moves the scale as LSQ does, with this gradient scale. What a parameter needs for it is computed of the
    parameter, which is there anyway; other values, which are on one grid, keep it, in int16.

    Source: Esser et al. 2020, section 2.1, equations 3 and 5; section 2.2 for the gradient scale.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        factor: Tensor,
        start: Tensor,
        zero_point: Tensor,
        qmin: int,
        qmax: int,
        gradient_scale: float,
        parameter: bool,
    ) -> Tensor:
        scale, zero_point = magnitude(factor).mul_(start), zero_point.to(torch.float32)
        ctx.constants = qmin, qmax, gradient_scale, parameter
        if parameter:
            ctx.save_for_backward(x, factor, start, zero_point)
            return (x / scale).round_().add_(zero_point).clamp_(qmin, qmax).sub_(zero_point).mul_(scale)
        out, kept = torch.empty_like(x), torch.empty_like(x, dtype=torch.int16)
        for values, rounded, parts in _pieces(_laid_out_as(out, x), out, kept):
            exact = _in_steps(values, scale)
            torch.round(exact, out=rounded)
            parts.copy_(_parts(exact, rounded, zero_point, qmin, qmax).round_())
            rounded.add_(zero_point).clamp_(qmin, qmax).sub_(zero_point).mul_(scale)
        ctx.save_for_backward(kept, factor, start, zero_point)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        kept, factor, start, zero_point = ctx.saved_tensors
        qmin, qmax, gradient_scale, parameter = ctx.constants
        grad = _laid_out_as(kept, grad)
        passed = torch.empty_like(grad)
        if parameter:
            exact = _in_steps(kept, magnitude(factor).mul_(start))
            parts = _parts(exact, exact.round(), zero_point, qmin, qmax)
            _pass_inside(grad, parts, LIMIT, passed)
            cut = grad - passed
            inside, sides, outside = (t.sum_to_size(start.shape) for t in (passed * parts, parts.mul_(cut), cut))
        else:
            found: list[Tensor] = []
            for given, passing, short in _pieces(grad, passed, kept):
                parts = short.to(torch.float32)
                _pass_inside(given, parts, LIMIT, passing)
                cut = given - passing
                found += passing.dot(parts), cut.dot(parts), cut.sum()
            inside, sides, outside = torch.stack(found).reshape(-1, 3).sum(0)
        sides = sides / OUTSIDE  # above less below
        by_scale = (outside - sides) * (qmin - zero_point) + (outside + sides) * (qmax - zero_point)
        by_scale = (inside / PARTS).add(by_scale, alpha=0.5)
        by_factor = by_scale * gradient_scale / start * (factor / LEAST).trunc_().clamp_(-1, 1)
        return passed, by_factor, *[None] * 6


def magnitude(factor: Tensor) -> Tensor:
    """What a learned scale is, in times of what it was at the start: a new tensor."""
    return factor.abs().clamp_(min=LEAST)


def _in_steps(x: Tensor, scale: Tensor) -> Tensor:
    """Values in steps of a scale; infinity as a number that is outside of every grid, as what rounding adds is none."""
    return (x / scale).clamp_(-FAR, FAR)


def _parts(exact: Tensor, steps: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    """What rounding adds to each value, in parts of a step; -OUTSIDE and OUTSIDE for values outside of the grid.

    Args:
        exact: values in steps; overwritten.
        steps: the same, rounded.
        zero_point: float32.
        qmin: the smallest of the integers.
        qmax: the largest.
    """
    added = steps - exact
    beyond = exact.add_(zero_point - (qmin + qmax) / 2)  # then by how much it is, away from the middle of the grid
    half = (qmax - qmin) / 2 - 16 / FAR  # the ends are outside
    torch.ops.aten.softshrink.out(beyond, half, out=beyond)
    return added.add_(beyond, alpha=FAR).clamp_(-OUTSIDE / PARTS, OUTSIDE / PARTS).mul_(PARTS)


def _pass_inside(grad: Tensor, where: Tensor, limit: float, out: Tensor) -> None:
    """Write the gradient where numbers are between -limit and limit, and zero elsewhere."""
    torch.ops.aten.hardtanh_backward.grad_input(grad, where, -limit, limit, grad_input=out)


def _laid_out_as(other: Tensor, x: Tensor) -> Tensor:
    """`x`, in memory as another tensor of its shape is."""
    return x if x.stride() == other.stride() else torch.empty_like(other, dtype=x.dtype).copy_(x)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Dense tensors that are in memory alike, in pieces of one dimension; whole where PyTorch compiles, and on GPUs."""
    lines = [flat(t) for t in tensors]
    whole = torch.compiler.is_compiling() or lines[0].device.type != "cpu"
    if whole or len(lines[0]) <= (size := PIECE * torch.get_num_threads()):
        return iter([tuple(lines)])
    return zip(*(line.split(size) for line in lines), strict=True)
