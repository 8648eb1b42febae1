"""adaround: learn whether to round each weight up or down. Optional."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fxq.paired.output_error import OutputError, WeightRows
from fxq.paired.reconstruction import Reconstruction
from fxq.recipe.pass_base import Stage


@dataclass(frozen=True)
class AdaRound(Reconstruction):
    """Round each weight up or down, whichever brings the layer's output closer to its float output.

    Before: conv2d(x, dequantize(w_int8), b)
    After: conv2d(x, dequantize(w_int8'), b), where each integer is the one below or above its float value
    Keeps: the grids of the weights, except for per-channel scales, which may be fitted again (`scales`). A channel
    keeps its integers if its error does not become smaller.

    Gradient descent learns all roundings of a layer together, as numbers between 0 (down) and 1 (up). A regularizer,
    which sets in after the first steps, pushes them to 0 or 1. Finally single weights are flipped while that lowers the
    error.
    Insert it after insert-qdq: `Recipe.static(...).insert_pass(fxq.passes.AdaRound(), after="smooth")`. Needs data.
    Source: Nagel et al. 2020 (arXiv 2004.10568), sections 3.2 and 3.3 (rectified sigmoid, annealed regularizer, inputs
    from the partly quantized graph). Unlike there, the error is taken before the activation function: it is then a
    quadratic form of the weight, and a step takes the same time for any number of samples.

    Args:
        samples: number of recorded samples to use.
        trust: weight of the float weight in the fit where there are few patches, see `Reconstruction`.
        scales: whether to fit per-channel scales as well.
        iterations: steps of gradient descent for each layer.
        rate: learning rate of Adam.
        regular: weight of the regularizer, in units of the error of a weight that is rounded at random.
        warm: share of the steps, 0 to 1, that run before the regularizer sets in.

    Example:
        >>> weight = fxq.TensorSpec(bits=4, signed=True, symmetric=True, per="channel", observer="mse")
        >>> recipe = fxq.Recipe.static(weight=weight, backend="reference")
        >>> recipe = recipe.insert_pass(fxq.passes.AdaRound(), after="smooth")
        >>> model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()).eval()
        >>> qmodel = fxq.quantize(model, recipe, data=[torch.rand(4, 8, 8, 8) for _ in range(4)])
        >>> [edit.rule for edit in qmodel.history["adaround"].edits]
        ['adaround']
    """

    iterations: int = 100
    rate: float = 0.1
    regular: float = 0.2
    warm: float = 0.2

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        **Reconstruction.bounds,
        "iterations": (1, math.inf),
        "rate": (1e-6, 1.0),
        "regular": (0.0, math.inf),
        "warm": (0.0, 0.99),
    }
    name: ClassVar[str] = "adaround"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    def choose(self, layer: WeightRows, error: OutputError) -> tuple[WeightRows, Tensor]:
        """Grid and integers of a weight, (groups, outputs, inputs): each rounded up where that was learned."""
        steps, gram, cross = layer.steps(), error.gram, error.cross.mT
        below = steps.floor()
        low, high = (end.clamp(layer.qmin, layer.qmax) for end in (below, below + 1))
        rounding = _Rounding((steps - below).clamp(0, 1))
        reach = layer.scale * (high - low)  # how far a weight moves; 0 where both ends are clamped to one
        usual = (layer.scale.square() * gram.diagonal(dim1=1, dim2=2)[:, None]).mean(2, keepdim=True) / 6
        relative_reach = reach / usual.clamp(min=_MIN_ERROR)
        for i in range(self.iterations):
            weight = layer.real(low) + rounding.up * reach
            slope = (weight @ gram - cross).mul_(2 * relative_reach)
            remaining = (1 - i / self.iterations) / (1 - self.warm)
            if remaining <= 1:
                power = _LAST_POWER + (_FIRST_POWER - _LAST_POWER) * remaining
                slope += self.regular * rounding.regularizer_gradient(power)
            rounding.step(slope, self.rate)
        up = _flip_single_weights(rounding.up >= 0.5, layer.real(low), reach, gram, cross)
        return layer, torch.where(up, high, low)


def _flip_single_weights(up: Tensor, low: Tensor, reach: Tensor, gram: Tensor, cross: Tensor) -> Tensor:
    """Flip the rounding of single weights while that lowers the error.

    Args:
        up: bool, (groups, outputs, inputs): where a weight is rounded up.
        low: the weight with all values rounded down, same shape.
        reach: increase of a weight that is rounded up, same shape.
        gram: of `OutputError`, (groups, inputs, inputs).
        cross: of `OutputError`, transposed to the shape of the weight.

    Returns:
        `up` after the flips.
    """
    up = up.clone()
    slope = (low + up * reach) @ gram - cross  # half of the gradient
    for _ in range(_SWEEPS):
        previous = up.clone()
        for start in range(0, up.shape[2], _GROUP):
            part = slice(start, start + _GROUP)
            moves = torch.where(up[:, :, part], -reach[:, :, part], reach[:, :, part])
            slope_of_part, gram_of_part = slope[:, :, part].clone(), gram[:, part, part]
            for i in range(moves.shape[2]):
                gain = moves[:, :, i] * gram_of_part[:, None, i, i] + 2 * slope_of_part[:, :, i]
                moves[:, :, i] *= moves[:, :, i] * gain < 0
                slope_of_part += moves[:, :, i, None] * gram_of_part[:, None, i]
            slope += moves @ gram[:, part]
            up[:, :, part] ^= moves != 0
        if torch.equal(up, previous):
            break
    return up


_SWEEPS = 5
_GROUP = 128
"""Number of inputs after which the gradient of the other inputs is updated."""
_FIRST_POWER, _LAST_POWER = 20.0, 2.0
"""Power of the regularizer at its first and last step. A high power only pushes values that are close to 0 or 1."""
_MIN_ERROR = 1e-30


class _Rounding:
    """Learned roundings, from 0 (down) to 1 (up): a sigmoid that is stretched and clipped, so that it reaches both.

    Attributes:
        up: the roundings, of the shape of the weight.
    """

    def __init__(self, up: Tensor) -> None:
        self._at = torch.logit((up - _LOW) / (_HIGH - _LOW))
        self._mean, self._square, self._steps = torch.zeros_like(up), torch.zeros_like(up), 0
        self.up = up

    def regularizer_gradient(self, power: float) -> Tensor:
        """Gradient of the regularizer 1 - |2 up - 1| ** power with respect to `up`."""
        apart = 2 * self.up - 1
        return apart.abs().pow_(power - 1).mul_(apart.sign()).mul_(-2 * power)

    def step(self, slope: Tensor, rate: float) -> None:
        """Take one step of Adam, for a gradient with respect to `up`."""
        sigmoid = torch.sigmoid(self._at)
        slope = slope.mul_(sigmoid * (1 - sigmoid) * (_HIGH - _LOW)).mul_((self.up > 0) & (self.up < 1))
        self._steps += 1
        self._mean.lerp_(slope, 1 - _BETAS[0])
        self._square.lerp_(slope * slope, 1 - _BETAS[1])
        mean = self._mean / (1 - _BETAS[0] ** self._steps)
        spread = (self._square / (1 - _BETAS[1] ** self._steps)).sqrt_()
        self._at -= rate * mean / (spread + 1e-8)
        self.up = (torch.sigmoid(self._at) * (_HIGH - _LOW) + _LOW).clamp_(0, 1)


_LOW, _HIGH = -0.1, 1.1
_BETAS = 0.9, 0.999
