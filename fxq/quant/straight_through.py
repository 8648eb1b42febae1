"""Rounding to a grid with straight-through gradients.

Large tensors are processed in pieces, without temporary tensors of full size. Whether a value is inside of the grid is
computed by arithmetic, which is faster on CPUs than comparisons and bool masks. Second derivatives work, except for
learned scales, where PyTorch raises an error.

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
"""Elements per thread and piece; the temporary results of a piece fit in the L2 cache of a core."""
PARTS, OUTSIDE, LIMIT = 64000, 32500, 32250
"""Format of saved rounding errors, int16: parts per step; mark of values outside of the grid; number between them."""
MAX_STEPS = 2.0**20
"""Number of steps outside of every grid. Times this number, any distance from the grid that counts is more than one."""
MIN_FACTOR = 1e-3
"""Smallest factor of a learned scale, if a step of the optimizer was too large."""


class Rounded(torch.autograd.Function):
    """Rounding to a grid. Gradients pass for values inside of it; scale and zero point have none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
        out, saved = torch.empty_like(x), torch.empty_like(x, dtype=torch.int8)  # -1, 0, 1: below, inside, above
        zero_point = zero_point.to(torch.float32)
        for values, rounded, sides in _pieces(_laid_out_as(out, x), out, saved):
            steps = (values / scale).round_().add_(zero_point)
            torch.clamp(steps, qmin, qmax, out=rounded)
            sides.copy_(steps.sub_(rounded).clamp_(-1, 1))
            rounded.sub_(zero_point).mul_(scale)
        ctx.save_for_backward(saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        if grad.requires_grad:
            return grad * (saved == 0), None, None, None, None
        grad = _laid_out_as(saved, grad)
        passed = torch.empty_like(grad)
        for upstream, passing, sides in _pieces(grad, passed, saved):
            _pass_inside(upstream, sides.to(torch.float32), 0.5, passing)
        return passed, None, None, None, None


class RoundedInside(torch.autograd.Function):
    """Rounding to a grid that covers all values: all gradients pass, and no tensor is saved for them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
        zero_point = zero_point.to(torch.float32)
        return (x / scale).round_().add_(zero_point).clamp_(qmin, qmax).sub_(zero_point).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None, None, None


class RoundedByLearnedScale(torch.autograd.Function):
    """Rounding to a grid with a learned scale: `start` times the magnitude of `factor`, which has a gradient.

    Gradient descent on `factor` moves the scale as in LSQ, with `gradient_scale`. For a parameter (`parameter`), the
    backward recomputes the rounding errors; for activations, they are saved in int16.

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
        out, saved = torch.empty_like(x), torch.empty_like(x, dtype=torch.int16)
        for values, rounded, parts in _pieces(_laid_out_as(out, x), out, saved):
            exact = _in_steps(values, scale)
            torch.round(exact, out=rounded)
            parts.copy_(_parts(exact, rounded, zero_point, qmin, qmax).round_())
            rounded.add_(zero_point).clamp_(qmin, qmax).sub_(zero_point).mul_(scale)
        ctx.save_for_backward(saved, factor, start, zero_point)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved, factor, start, zero_point = ctx.saved_tensors
        qmin, qmax, gradient_scale, parameter = ctx.constants
        grad = _laid_out_as(saved, grad)
        passed = torch.empty_like(grad)
        if parameter:
            exact = _in_steps(saved, magnitude(factor).mul_(start))
            parts = _parts(exact, exact.round(), zero_point, qmin, qmax)
            _pass_inside(grad, parts, LIMIT, passed)
            cut = grad - passed
            inside, sides, outside = (t.sum_to_size(start.shape) for t in (passed * parts, parts.mul_(cut), cut))
        else:
            sums: list[Tensor] = []
            for upstream, passing, saved_parts in _pieces(grad, passed, saved):
                parts = saved_parts.to(torch.float32)
                _pass_inside(upstream, parts, LIMIT, passing)
                cut = upstream - passing
                sums += passing.dot(parts), cut.dot(parts), cut.sum()
            inside, sides, outside = torch.stack(sums).reshape(-1, 3).sum(0)
        sides = sides / OUTSIDE  # sum above the grid minus sum below it
        by_scale = (outside - sides) * (qmin - zero_point) + (outside + sides) * (qmax - zero_point)
        by_scale = (inside / PARTS).add(by_scale, alpha=0.5)
        by_factor = by_scale * gradient_scale / start * (factor / MIN_FACTOR).trunc_().clamp_(-1, 1)
        return passed, by_factor, *[None] * 6


def magnitude(factor: Tensor) -> Tensor:
    """Return the ratio of a learned scale to its start, from its factor: a new tensor, same shape."""
    return factor.abs().clamp_(min=MIN_FACTOR)


def _in_steps(x: Tensor, scale: Tensor) -> Tensor:
    """Return values in steps of a scale; infinity becomes a finite number outside of every grid."""
    return (x / scale).clamp_(-MAX_STEPS, MAX_STEPS)


def _parts(exact: Tensor, steps: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    """Return the rounding error of each value, in parts of a step; -OUTSIDE and OUTSIDE outside of the grid.

    Args:
        exact: values in steps, float32; overwritten.
        steps: `exact` rounded to integers.
        zero_point: float32, broadcasts with `exact`.
        qmin: smallest integer of the grid.
        qmax: largest integer of the grid.
    """
    errors = steps - exact
    beyond = exact.add_(zero_point - (qmin + qmax) / 2)  # distance from the middle, then from the end, of the grid
    half = (qmax - qmin) / 2 - 16 / MAX_STEPS  # the ends count as outside
    torch.ops.aten.softshrink.out(beyond, half, out=beyond)
    return errors.add_(beyond, alpha=MAX_STEPS).clamp_(-OUTSIDE / PARTS, OUTSIDE / PARTS).mul_(PARTS)


def _pass_inside(grad: Tensor, where: Tensor, limit: float, out: Tensor) -> None:
    """Write `grad` to `out` for elements with `where` between -limit and limit, and zero for others."""
    torch.ops.aten.hardtanh_backward.grad_input(grad, where, -limit, limit, grad_input=out)


def _laid_out_as(example: Tensor, x: Tensor) -> Tensor:
    """Return `x` with the memory layout of `example`, a tensor of its shape; a copy if it has another layout."""
    return x if x.stride() == example.stride() else torch.empty_like(example, dtype=x.dtype).copy_(x)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return 1-d pieces of dense tensors with one memory layout; a single piece under compile and on GPUs."""
    flattened = [flat(t) for t in tensors]
    one_piece = torch.compiler.is_compiling() or flattened[0].device.type != "cpu"
    if one_piece or len(flattened[0]) <= (size := PIECE * torch.get_num_threads()):
        return iter([tuple(flattened)])
    return zip(*(t.split(size) for t in flattened), strict=True)
