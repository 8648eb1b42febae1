"""Pooling and reductions, in ONNX Runtime and in OpenVINO, against torch."""

from __future__ import annotations

import pytest
import torch

import fxq
from fxq.onnx.graph import write_onnx
from fxq.onnx.onnx_objects import NotInOnnx
from tests.support.onnx_runs import call, in_both, normal, run_onnxruntime, single

pytestmark = pytest.mark.any_cpu

X = normal(2, 3, 9, 7)
BYTES = (20 * X + 100).clamp(0, 255).to(torch.uint8)
TWO, ONE, NONE = (2, 2), (1, 1), (0, 0)

CALLS = [
    call("max_pool1d", normal(2, 3, 9), kernel_size=(3,), stride=(2,), padding=(1,)),
    call("max_pool2d", X, kernel_size=(3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
    call("max_pool2d", X, kernel_size=(3, 3), stride=(2, 3), ceil_mode=True),
    call("max_pool2d", X, kernel_size=(2, 3), stride=TWO, padding=(1, 1), ceil_mode=True),
    call("max_pool2d", -X.abs() - 5, kernel_size=(3, 3), stride=TWO, padding=ONE),
    call("max_pool3d", normal(1, 2, 4, 5, 6), kernel_size=(2, 2, 3), stride=(2, 2, 3)),
    call("avg_pool1d", normal(2, 3, 9), kernel_size=(3,), stride=(2,), padding=(1,)),
    *(
        call("avg_pool2d", X, kernel_size=(3, 2), stride=TWO, padding=ONE, count_include_pad=c, divisor_override=d)
        for c in (True, False)
        for d in (None, 5)
    ),
    call("avg_pool2d", X, kernel_size=(3, 3), stride=TWO, ceil_mode=True),
    call("avg_pool2d", X, kernel_size=TWO, stride=TWO, ceil_mode=True),
    call("avg_pool2d", X, kernel_size=TWO, stride=TWO, ceil_mode=True, divisor_override=3),
    call("avg_pool2d", X, kernel_size=(4, 4), stride=(3, 3), padding=ONE, ceil_mode=True, count_include_pad=False),
    call("avg_pool2d", X, kernel_size=(3, 3), stride=TWO, padding=ONE, ceil_mode=True),
    call("avg_pool3d", normal(1, 2, 4, 5, 6), kernel_size=(2, 2, 3), stride=(2, 2, 3), padding=(1, 0, 1)),
    *(call(f"adaptive_{kind}_pool1d", normal(2, 3, 9), output_size=(n,)) for kind in ("avg", "max") for n in (1, 3, 4)),
    *(
        call(f"adaptive_{kind}_pool2d", X, output_size=size)
        for kind in ("avg", "max")
        for size in ((1, 1), (3, None), (2, 7), (4, 3), (12, 2), (1, 4))
    ),
    call("adaptive_avg_pool3d", normal(1, 2, 4, 5, 6), output_size=(2, 2, 1)),
    *(call(name, X, dim=dim) for name in ("mean", "sum", "amax", "amin") for dim in (1, (2, 3), (0, -1))),
    *(call(name, X, dim=(2, 3), keepdim=True) for name in ("mean", "sum", "amax", "amin")),
    *(call(name, BYTES, dim=1) for name in ("amax", "amin")),
    call("cumsum", X, dim=-2),
    call("cumsum", BYTES.to(torch.int32), dim=1),
    call("cumsum", BYTES > 100, dim=1),
]


@pytest.mark.one_in(2)
@in_both(CALLS)
def test_an_engine_gives_what_torch_gives(call, engine):
    call.check(engine)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (call("max_pool2d", normal(3, 9, 7), kernel_size=TWO, stride=TWO), "no batch axis"),
        (call("adaptive_avg_pool2d", normal(3, 9, 7), output_size=TWO), "no batch axis"),
        (
            call("max_pool1d", normal(1, 1, 9), kernel_size=(2,), stride=(4,), dilation=(6,), ceil_mode=True),
            "its last windows lie outside of the input",
        ),
        (
            call("avg_pool1d", normal(1, 1, 9), kernel_size=(4,), stride=(3,), padding=(1,), ceil_mode=True),
            "its last windows reach beyond",
        ),
        (call("amax", BYTES > 3, dim=1), "its input is bool"),
    ],
    ids=str,
)
def test_refusals(refused, reason):
    with pytest.raises(NotInOnnx, match=reason):
        write_onnx(single(refused.op, *refused.values, **refused.options), refused.inputs)


@pytest.mark.parametrize("side", [2901, 2902])
def test_means_of_integers_stay_within_int32(side):
    """ONNX Runtime sums all pixels in int32; if that could overflow, they are summed in float."""
    program = f"""
        x: uint8[1, 1, {side}, {side}] = input()
        x_dq: float32[1, 1, {side}, {side}] = dequantize(x, scale=0.5, zero_point=0, qmax=255)
        y = mean(x_dq, dim=(2, 3))
        y_q = quantize(y, scale=0.5, zero_point=0, qmin=0, qmax=255)
        return y_q
    """
    x = torch.full((1, 1, side, side), 255, dtype=torch.uint8)
    (got,) = run_onnxruntime(write_onnx(fxq.extend.read_graph(program, {}), [x]).model, [x], optimized=True)
    assert got.tolist() == [[255]]
