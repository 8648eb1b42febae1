"""Clamps and pads of integers against float64."""

from __future__ import annotations

import torch.nn.functional as F

from fxq.backends.plain.clamp_and_pad import Clamp, Pad
from tests.support.kernels import (
    BYTE,
    POSTS,
    agree,
    bytes_,
    real,
)


def test_clamp_and_pad():
    x = bytes_(2, 6, 7, 9)
    for name in ("relu", "relu6", "hardtanh"):
        rule, function = POSTS[name]
        agree(Clamp(BYTE, rule)(x), function(real(x, BYTE)), BYTE)
    agree(Pad(BYTE, (1, 2, 3, 0))(x), F.pad(real(x, BYTE), (1, 2, 3, 0)), BYTE)
    value = 7 * BYTE.s
    agree(Pad(BYTE, (1, 2), value=value)(x), F.pad(real(x, BYTE), (1, 2), value=value), BYTE)
    for mode in ("reflect", "replicate", "circular"):
        agree(Pad(BYTE, (1, 2, 3, 0), mode)(x), F.pad(real(x, BYTE), (1, 2, 3, 0), mode), BYTE)
