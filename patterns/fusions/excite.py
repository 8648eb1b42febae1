"""Fusion of squeeze-and-excitation: a factor per channel, computed from the channels' means.

The values inside stay in float, since there are few, and each conversion would cost as much as the ops. The weights are
integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fxq.ops import OPS
from fxq.rewriting.pattern import fusion

FUNCTIONS = OPS.fused_after("excite")
GATES = OPS.fused_after("gate")


def _excite(op, x, mean, layers, act: str, gate: str):
    w1, b1, w2, b2 = layers
    squeezed = op[act](op.conv2d(mean, w1, b1, padding=(0, 0), groups=1))
    return op.mul(op[gate](op.conv2d(squeezed, w2, b2, padding=(0, 0), groups=1)), x)


@fusion("squeeze_excite_{act}_{gate}", act=FUNCTIONS, gate=GATES)
def squeeze_excite(op, x, squeeze_weight, squeeze_bias, excite_weight, excite_bias, *, act: str, gate: str):
    mean = op.adaptive_avg_pool2d(x, output_size=(1, 1))
    return _excite(op, x, mean, (squeeze_weight, squeeze_bias, excite_weight, excite_bias), act, gate)


@fusion("squeeze_excite_mean_{act}_{gate}", act=FUNCTIONS, gate=GATES)
def squeeze_excite_mean(op, x, squeeze_weight, squeeze_bias, excite_weight, excite_bias, *, act: str, gate: str):
    mean = op.mean(x, keepdim=True)
    return _excite(op, x, mean, (squeeze_weight, squeeze_bias, excite_weight, excite_bias), act, gate)


@squeeze_excite_mean.unless
def mean_is_not_over_height_and_width(m):
    return not is_over_image(m.options("mean")["dim"])


def is_over_image(dim: Any) -> bool:
    """Whether `dim` of a call selects exactly H and W of (N, C, H, W)."""
    dims = dim if isinstance(dim, Sequence) else (dim,)
    return all(isinstance(d, int) for d in dims) and {d % 4 for d in dims} == {2, 3}


@squeeze_excite.unless
@squeeze_excite_mean.unless
def gate_is_not_one_value_per_channel(m):
    """Refuse other shapes: the kernel computes the layers as matrix products of (N, C), for images (N, C, H, W)."""
    image, first, second = m.x.shape, m.squeeze_weight.shape, m.excite_weight.shape
    if image is None or len(image) != 4 or not first:
        return True
    return first[1:] != (image[1], 1, 1) or second != (image[1], first[0], 1, 1)
