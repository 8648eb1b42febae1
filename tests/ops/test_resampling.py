"""Padding, interpolation and shuffles."""

import pytest
import torch

from fxq.ops.resampling import interpolate

pytestmark = pytest.mark.any_cpu


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 4, 5), (1, 2, 3, 4, 5)])
def test_nearest_modes_move_integers_with_a_sign(mode, shape):
    x = torch.randint(-128, 128, shape).to(torch.int8)
    for size in ({"scale_factor": 2.0}, {"size": 7}):
        resized = interpolate(x, mode=mode, **size)
        assert resized.dtype == torch.int8 and torch.equal(resized.float(), interpolate(x.float(), mode=mode, **size))
