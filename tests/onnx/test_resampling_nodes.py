"""Interpolation, shuffles and windows, in ONNX Runtime and in OpenVINO, against torch."""

from __future__ import annotations

import pytest
import torch

from fxq.onnx.graph import write_onnx
from fxq.onnx.onnx_objects import NotInOnnx
from tests.support.onnx_runs import call, in_both, normal, single

pytestmark = pytest.mark.any_cpu

X = normal(2, 3, 5, 7)
LINE = normal(2, 3, 9)
VOLUME = normal(1, 2, 3, 4, 5)
BYTES = (20 * X + 100).clamp(0, 255).to(torch.uint8)
GRID = normal(2, 4, 6, 2).clamp(-1.3, 1.3)
SIZES = ((5, 7), (10, 14), (8, 11), (3, 4), (1, 1), (15, 7))

CALLS = [
    *(call("interpolate", X, size=size, mode=mode) for mode in ("nearest", "nearest-exact") for size in SIZES),
    *(call("interpolate", LINE, size=size) for size in (3, 7, 10, 13, 27, 31)),
    *(call("interpolate", LINE, scale_factor=factor) for factor in (0.5, 1.3, 1.7, 2.0, 3)),
    call("interpolate", LINE, scale_factor=1.7, recompute_scale_factor=True),
    call("interpolate", X, scale_factor=(2.0, 1.4)),
    call("interpolate", BYTES, scale_factor=2),
    call("interpolate", BYTES, size=(7, 9)),
    call("interpolate", VOLUME, scale_factor=2),
    *(
        call("interpolate", X, size=size, mode=mode, align_corners=align)
        for mode in ("bilinear", "bicubic")
        for align in (False, True)
        for size in SIZES
    ),
    *(call("interpolate", X, scale_factor=factor, mode="bilinear") for factor in (2, 1.4, 0.6)),
    call("interpolate", X, scale_factor=1.4, mode="bilinear", recompute_scale_factor=True),
    *(call("interpolate", LINE, size=14, mode="linear", align_corners=align) for align in (False, True)),
    *(call("interpolate", VOLUME, size=(5, 4, 9), mode="trilinear", align_corners=align) for align in (False, True)),
    call("interpolate", X, size=(2, 3), mode="area"),
    *(
        call("grid_sample", X, GRID, mode=mode, padding_mode=padding, align_corners=align)
        for mode in ("bilinear", "nearest", "bicubic")
        for padding in ("zeros", "border", "reflection")
        for align in (False, True)
    ),
    call("grid_sample", VOLUME, normal(1, 2, 3, 4, 3).clamp(-1, 1), align_corners=False),
    call("pixel_shuffle", normal(2, 12, 3, 4), upscale_factor=2),
    call("pixel_unshuffle", normal(2, 3, 6, 4), downscale_factor=2),
    call("channel_shuffle", normal(2, 6, 3, 4), groups=3),
    call("channel_shuffle", normal(2, 6), groups=2),
    call("unfold", X, kernel_size=(3, 2), dilation=(1, 2), padding=(1, 0), stride=(2, 1)),
    call("unfold", X, kernel_size=(2, 2)),
    call("unfold", X, kernel_size=(1, 1), stride=(2, 2)),
    call("fold", normal(2, 12, 9), output_size=(4, 4), kernel_size=(2, 2)),
    call(
        "fold",
        normal(2, 24, 21),
        output_size=(7, 9),
        kernel_size=(3, 2),
        dilation=(1, 2),
        padding=(1, 0),
        stride=(3, 1),
    ),
]


LACKING = {"openvino-grid_sample-(1,2,3,4,5)": "OpenVINO samples images only"}


@pytest.mark.one_in(24)
@in_both(CALLS, LACKING)
def test_an_engine_gives_what_torch_gives(call, engine):
    call.check(engine, rtol=5e-6)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (call("interpolate", X, size=(3, 3), mode="bilinear", antialias=True), "antialias"),
        (call("fold", normal(12, 9), output_size=(4, 4), kernel_size=(2, 2)), "no batch"),
        (call("pixel_shuffle", normal(12, 3, 4), upscale_factor=2), "not a batch of images"),
        (call("unfold", normal(3, 5, 7), kernel_size=(2, 2)), "not a batch of images"),
    ],
    ids=str,
)
def test_refusals(refused, reason):
    with pytest.raises(NotInOnnx, match=reason):
        write_onnx(single(refused.op, *refused.values, **refused.options), refused.inputs)
