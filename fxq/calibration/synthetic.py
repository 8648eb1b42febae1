"""Calibration data without data: inputs that give the statistics that a network's batch norms have recorded."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fxq.common.progress import progress_bar
from fxq.errors import InputError, warn, words_of


def synthetic(
    model: nn.Module,
    shape: Sequence[int],
    *,
    bounds: tuple[float, float] | None = None,
    batches: int = 4,
    steps: int = 60,
    learning_rate: float = 0.1,
    seed: int = 0,
    progress: bool | None = None,
) -> list[Tensor]:
    """Calibration batches for a network with batch norms, where there is no real data.

    Each batch starts as noise. Gradient descent changes it until the channels that the batch norms receive have the
    means and variances that the batch norms recorded in training (Haroush et al. 2020, "The Knowledge Within: Methods
    for Data-Free Model Compression", section 3). Images are sums of noise at several scales, of a different strength in
    each image, and descent changes each scale (an image pyramid, as in Olah et al. 2017, "Feature Visualization"). They
    differ from each other as photographs do. Real data gives better ranges; a warning says so.

    Pass `bounds` for images, whose pixels have a smallest and a largest value. Without them, single values become far
    larger than those of real images, so that the grid of the input is coarse.

    Args:
        model: float model in eval mode that takes one tensor. It is not changed.
        shape: shape of a batch, such as `(8, 3, 224, 224)`.
        bounds: smallest and largest value of real inputs, such as those of black and white after normalization. No
            value of the batches is beyond them. Default: no bounds.
        batches: number of batches.
        steps: steps of gradient descent for each batch.
        learning_rate: learning rate of Adam at each scale, in standard deviations of the noise. The noise has standard
            deviation 1, or with `bounds` a quarter of their distance.
        seed: seed of the noise.
        progress: whether to show a progress bar. Default: only if stderr is a terminal.

    Returns:
        The batches, as float32 tensors of this shape on the CPU.

    Raises:
        InputError: the model has no batch norm with recorded statistics, is in train mode, or does not compute batches
            of this shape; its batch norms do not depend on the batch; or `bounds` are not two finite numbers in
            ascending order.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
        >>> data = synthetic(model, (2, 3, 8, 8), bounds=(0, 1), batches=2, steps=3)
        >>> [tuple(batch.shape) for batch in data]
        [(2, 3, 8, 8), (2, 3, 8, 8)]
    """
    shape = tuple(shape)
    _check_arguments(shape, bounds, batches, steps)
    if model.training:
        raise InputError("the model is in train mode, so that its statistics would change: call model.eval() first.")
    with torch.inference_mode(False):
        network = copy.deepcopy(model).cpu().float().requires_grad_(False)
    norms = [norm for norm in network.modules() if isinstance(norm, _BatchNorm) and norm.running_mean is not None]
    if not norms:
        raise InputError(
            "the model has no batch norm with recorded statistics (a file for inference may have folded them into its "
            "convolutions), so fxq.synthetic has nothing to match: pass real data."
        )
    warn(
        "the calibration data is synthetic: it matches the statistics of the batch norms, but real data, even a "
        "few batches, gives better ranges."
        + ("" if bounds is not None else " If real inputs have a smallest and a largest value, pass them as bounds.")
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode(False), progress_bar("synthetic data", batches * steps, progress) as advance:
        inputs = [_Inputs(shape, bounds, generator) for _ in range(batches)]
        return [_matched(network, norms, batch, steps, learning_rate, advance) for batch in inputs]


def _check_arguments(shape: Sequence[int], bounds: Sequence[float] | None, batches: int, steps: int) -> None:
    """Raise `InputError` if a shape is not that of a batch, bounds do not ascend, or there are too few batches."""
    if len(shape) < 2 or any(type(size) is not int or size < 1 for size in shape):
        raise InputError(f"shape is {shape}, not the shape of a batch such as (8, 3, 224, 224).")
    if batches < 1 or steps < 0:
        raise InputError(f"batches is {batches} and steps is {steps}: at least 1 batch and 0 steps.")
    if bounds is None:
        return
    if len(bounds) != 2 or not all(map(math.isfinite, bounds)) or bounds[0] >= bounds[1]:
        raise InputError(f"bounds is {bounds}, not the smallest and the largest value of inputs such as (0, 1).")


_SCALES = (1, 4, 16, 64)
"""Sizes in pixels of the noise that images are sums of, besides one value for the whole image."""
_LOG_STRENGTH = 0.7
"""Standard deviation of the logarithm of the noise's strength over the images, for each scale."""


class _Inputs:
    """Batch of inputs, in the form that gradient descent changes: noise of several scales.

    Attributes:
        shape: shape of the batch.
        bounds: smallest and largest value; None: no bounds.
        noise: noise of each scale, (N, C, h, w) of a size of its own; of inputs that are no images, one tensor of their
            shape. Its sum starts with standard deviation 1.
    """

    def __init__(self, shape: tuple[int, ...], bounds: tuple[float, float] | None, generator: torch.Generator) -> None:
        self.shape, self.bounds = shape, bounds
        draw = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
        self.noise = [draw(shape)]
        if len(shape) == 4:
            sizes = [tuple(max(1, size // scale) for size in shape[2:]) for scale in _SCALES[1:]]
            self.noise += [2 * draw((*shape[:2], *size)) for size in dict.fromkeys((*sizes, (1, 1)))]
            strengths = (_LOG_STRENGTH * draw((len(self.noise), shape[0], 1, 1, 1))).exp()
            self.noise = [strength * noise for strength, noise in zip(strengths, self.noise, strict=True)]
        deviation = self._sum().std()
        self.noise = [(noise / deviation).requires_grad_() for noise in self.noise]

    def _sum(self) -> Tensor:
        """The noise of all scales, enlarged to the shape of the batch and added."""
        total = self.noise[0]
        for noise in self.noise[1:]:
            total = total + F.interpolate(noise, self.shape[2:], mode="bilinear", align_corners=False)
        return total

    def batch(self) -> Tensor:
        """The inputs, float32, within the bounds. Gradients pass through values at the bounds, too."""
        total = self._sum()
        if self.bounds is None:
            return total
        low, high = self.bounds
        inputs = (low + high) / 2 + (high - low) / 4 * total
        return inputs + (inputs.clamp(low, high) - inputs).detach()


def _matched(
    network: nn.Module,
    norms: Sequence[Any],
    inputs: _Inputs,
    steps: int,
    learning_rate: float,
    advance: Any,
) -> Tensor:
    """Batch after gradient descent on the distance of its statistics from those of the batch norms."""
    losses: list[Tensor] = []

    def record(norm: Any, received: tuple[Tensor, ...]) -> None:
        value = received[0]
        axes = [axis for axis in range(value.dim()) if axis != 1]
        deviation = (norm.running_var + norm.eps).sqrt()
        spread = value.var(axes, unbiased=False).add(norm.eps).sqrt()
        losses.append(((value.mean(axes) - norm.running_mean) / deviation).square().mean())
        losses.append((spread / deviation - 1).square().mean())

    hooks = [norm.register_forward_pre_hook(record) for norm in norms]
    optimizer = torch.optim.Adam(inputs.noise, lr=learning_rate)
    try:
        for _ in range(steps):
            losses.clear()
            with torch.enable_grad():
                batch = inputs.batch()
                try:
                    network(batch)
                except Exception as error:  # a model may raise anything
                    raise InputError(
                        f"the model cannot compute a float batch of shape {tuple(batch.shape)}, as the only input: "
                        f"{type(error).__name__}: {words_of(error)}"
                    ) from error
                if not losses:
                    raise InputError("the model calls none of its batch norms, so fxq.synthetic has nothing to match.")
                total = torch.stack(losses).mean()
                if not total.requires_grad or not total.isfinite():
                    raise InputError(
                        "the distance of the model's statistics from those of its batch norms is not finite, or does "
                        "not depend on the batch (the model computes without "
                        "gradients), so fxq.synthetic cannot change the batch: pass real data."
                    )
            gradients = torch.autograd.grad(total, inputs.noise)
            for noise, gradient in zip(inputs.noise, gradients, strict=True):
                noise.grad = gradient
            optimizer.step()
            advance()
    finally:
        for hook in hooks:
            hook.remove()
    with torch.no_grad():
        batch = inputs.batch()
        return batch if inputs.bounds is None else batch.clamp(*inputs.bounds)  # the sum in `batch` is rounded
