"""adaround: each weight is rounded up or down as its layer's output asks for. Optional."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fxq.paired.reconstruction import OutputError, Reconstruction, WeightGrid
from fxq.recipe.pass_base import Stage


@dataclass(frozen=True)
class AdaRound(Reconstruction):
    """Round each weight up or down, to whichever of the two lets the layer's output come closer to the float one.

    Before: conv2d(x, dequantize(w_int8), b)    After: conv2d(x, dequantize(w_int8'), b), with integers that suit the
    layer: of each value, the one below or the one above it on its grid
    Keeps: the grids of the weights, but the scales of channels. How far a value is rounded up is a number from 0 to 1,
    and gradient descent finds all of a layer together. At first it is free; then what lies in between is made to cost
    more and more. In the end one input after the other changes sides where that makes the error less. What the weights
    of a channel do not reach better than rounded to the nearest stays as it was.
    Behind insert-qdq: `Recipe.static(...).insert_pass(fxq.passes.AdaRound(), after="smooth")`. Needs data.
    Source: Nagel et al. 2020 (arXiv 2004.10568), sections 3.2 and 3.3 (rectified sigmoid, annealed regularizer, inputs
    of the graph as it is so far); without the activation function behind a layer, so that the error is a square form of
    the weight: each step takes all samples, and costs no more with more of them.

    Args:
        samples: how many recorded samples it looks at.
        trust: how much the float weight is trusted where there are few patches, see `Reconstruction`.
        scales: whether weights with a scale for each channel get other scales.
        iterations: steps of gradient descent for each layer.
        rate: the step width, as Adam takes it.
        regular: what rounding that is undecided costs, in units of the error that a weight rounded at random makes.
        warm: the share of the steps before that cost sets in.

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

    def choose(self, layer: WeightGrid, error: OutputError) -> Tensor:
        """The integers below, and one more where rounding up came out."""
        steps, gram, cross = layer.steps(), error.gram, error.cross.mT
        below = steps.floor()
        low, high = (end.clamp(layer.qmin, layer.qmax) for end in (below, below + 1))
        rounding = _Rounding((steps - below).clamp(0, 1))
        reach = layer.scale * (high - low)  # how far a weight moves; 0 where both ends are clamped to one
        usual = (layer.scale.square() * gram.diagonal(dim1=1, dim2=2)[:, None]).mean(2, keepdim=True) / 6
        reach_in_units = reach / usual.clamp(min=_SMALLEST)
        for i in range(self.iterations):
            weight = layer.real(low) + rounding.up * reach
            slope = (weight @ gram - cross).mul_(2 * reach_in_units)
            left = (1 - i / self.iterations) / (1 - self.warm)
            if left <= 1:
                slope += self.regular * rounding.slope_of_indecision(_LAST + (_FIRST - _LAST) * left)
            rounding.step(slope, self.rate)
        up = _settled(rounding.up >= 0.5, layer.real(low), reach, gram, cross)
        return torch.where(up, high, low)


def _settled(up: Tensor, low: Tensor, reach: Tensor, gram: Tensor, cross: Tensor) -> Tensor:
    """Let one input after the other change sides where that makes the error less, until none does.

    Args:
        up: where a weight is rounded up.
        low: the weight where none is.
        reach: how much more a value is that is rounded up.
        gram: of the error.
        cross: of the error, transposed: of the shape of the weight.
    """
    up = up.clone()
    slope = (low + up * reach) @ gram - cross  # half of it
    for _ in range(_SWEEPS):
        before = up.clone()
        for start in range(0, up.shape[2], _GROUP):
            part = slice(start, start + _GROUP)
            moves = torch.where(up[:, :, part], -reach[:, :, part], reach[:, :, part])
            here, among = slope[:, :, part].clone(), gram[:, part, part]
            for i in range(moves.shape[2]):
                gain = moves[:, :, i] * among[:, None, i, i] + 2 * here[:, :, i]
                moves[:, :, i] *= moves[:, :, i] * gain < 0
                here += moves[:, :, i, None] * among[:, None, i]
            slope += moves @ gram[:, part]
            up[:, :, part] ^= moves != 0
        if torch.equal(up, before):
            break
    return up


_SWEEPS = 5
_GROUP = 128
"""Inputs whose changes are passed on to the others together."""
_FIRST, _LAST = 20.0, 2.0
"""The power of the regularizer: while it is high, only what is nearly decided is pushed."""
_SMALLEST = 1e-30


class _Rounding:
    """How far each value is rounded up, from 0 to 1: a sigmoid that is stretched and cut off, so that it gets there.

    Attributes:
        up: that, of the shape of the weight.
    """

    def __init__(self, up: Tensor) -> None:
        self._at = torch.logit((up - _LOW) / (_HIGH - _LOW))
        self._mean, self._square, self._steps = torch.zeros_like(up), torch.zeros_like(up), 0
        self.up = up

    def slope_of_indecision(self, power: float) -> Tensor:
        """The slope of 1 - |2 up - 1| ** power along `up`."""
        apart = 2 * self.up - 1
        return apart.abs().pow_(power - 1).mul_(apart.sign()).mul_(-2 * power)

    def step(self, slope: Tensor, rate: float) -> None:
        """One step of Adam against a slope along `up`."""
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
