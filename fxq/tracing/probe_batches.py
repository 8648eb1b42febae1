"""Variations of the example, which show whether a model's state affects its outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxq.common.data import Batch, first_of, samples_in
from fxq.common.trees import mapped


def variations(example: Batch) -> list[Batch]:
    """Return the example, and batches with other values and sizes.

    One is mirrored, one has larger values, and one has smaller random values (integers stay within their range). If the
    first axis of all tensors has one size, one has half as many samples and one twice as many. After them, state such
    as a running maximum, the first call's mean or a cache by batch size differs.
    """
    generator = torch.Generator().manual_seed(0)
    batches = [
        example,
        _mapped(example, _mirrored),
        _mapped(example, lambda t: _mirrored(t) * 3 if t.is_floating_point() else _mirrored(t)),
        _mapped(example, lambda t: _random(t, generator)),
    ]
    samples = samples_in(example)
    if samples is not None and samples > 1:
        batches.append(first_of(example, samples // 2))
    if samples:
        batches.append(_mapped(example, lambda t: torch.cat([t, t]) if t.dim() else t))
    return batches


def _mapped(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    def changed(leaf: Any) -> Any:
        return change(leaf.detach()) if isinstance(leaf, Tensor) and leaf.layout is torch.strided else leaf

    return Batch(mapped(batch.args, changed), mapped(dict(batch.kwargs), changed))


def _mirrored(tensor: Tensor) -> Tensor:
    """Tensor flipped along its axes of size above 1."""
    axes = [i for i, size in enumerate(tensor.shape) if size > 1]
    return tensor.flip(axes) if axes else tensor


def _random(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Random tensor with half the standard deviation of a float tensor, or within the range of an integer one."""
    if tensor.numel() == 0 or tensor.dtype is torch.bool or tensor.is_complex():
        return tensor
    if not tensor.is_floating_point():
        low, high = int(tensor.min()), int(tensor.max())
        return torch.randint(low, high + 1, tensor.shape, generator=generator).to(tensor)
    scale = tensor.float().square().mean().sqrt() / 2
    return (torch.randn(tensor.shape, generator=generator) * scale.cpu()).to(tensor) if scale.isfinite() else tensor
