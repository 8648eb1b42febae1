"""Padding of floats and integers, in ONNX Runtime and in OpenVINO, against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.onnx.dequantized import dequantize_node
from fxq.onnx.graph import write_onnx
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.onnx.padding_nodes import padded
from fxq.onnx.writer import Writer
from tests.support.onnx_runs import call, in_both, normal, run_onnxruntime, run_openvino, single

pytestmark = pytest.mark.any_cpu

X = normal(2, 3, 5, 7)
PAD = (1, 2, 0, 3)

CALLS = [
    *(call("pad", X, pad=PAD, mode=mode) for mode in ("constant", "reflect", "replicate", "circular")),
    call("pad", X, pad=(1, 0), value=-2.5),
    call("pad", X, pad=(-1, 2, 1, -2)),
    call("pad", X, pad=(1, 1), value=-torch.inf),
    call("pad", X.int(), pad=PAD, value=3),
    call("pad", X.to(torch.int8), pad=PAD, mode="replicate"),
]


@pytest.mark.one_in(3)
@in_both(CALLS)
def test_an_engine_gives_what_torch_gives(call, engine):
    call.check(engine, rtol=0)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_that_cuts_is_refused(mode):
    with pytest.raises(NotInOnnx, match="it crops"):
        write_onnx(single("pad", X, pad=(-1, 2, 0, 0), mode=mode), [X])


def written(zero: int, scale: float, mode: str, value: float) -> tuple[Writer, object, bool]:
    """Writer and padded value of dequantized integers, and whether the integers are padded."""
    w = Writer()
    x = w.input("x", torch.empty(1, 2, 6, dtype=torch.uint8))
    grid = torch.tensor(scale), torch.tensor(zero, dtype=torch.uint8)
    real = type(x)(w.emit("DequantizeLinear", x, *grid), x.like.float())
    padding = padded(w, real, (2, 1), mode, value)
    return w, padding, dequantize_node(w, padding) is not None


@settings(max_examples=10, deadline=None)
@given(
    zero=st.integers(0, 255),
    scale=st.floats(2**-10, 10, width=32),
    mode=st.sampled_from(["constant", "reflect", "replicate", "circular"]),
    steps=st.integers(-300, 300),
    off=st.sampled_from([0.0, 0.25]),
)
def test_integers_are_padded_where_one_stands_for_the_value(zero, scale, mode, steps, off):
    step = torch.tensor(scale)
    value = float((torch.tensor(float(steps)) + off) * step)
    w, padding, on_integers = written(zero, scale, mode, value)
    assert on_integers == (mode != "constant" or (off == 0 and 0 <= steps + zero <= 255))
    q = torch.randint(0, 256, (1, 2, 6), generator=torch.Generator().manual_seed(zero), dtype=torch.uint8)
    real = (q.float() - zero) * step
    wanted = torch.nn.functional.pad(real, (2, 1), mode, value if mode == "constant" else None)
    assert torch.equal(run_onnxruntime(w.model([padding]), [q])[0], wanted)


@pytest.mark.parametrize("value", [0.0, 0.6])
def test_openvino_pads_integers_before_a_layer(value):
    """OpenVINO is wrong for a Pad of a dequantized value before a convolution; 0.6 is not on a grid of step 0.5."""
    w, padding, _ = written(110, 0.5, "constant", value)
    kernel = torch.randint(-60, 60, (4, 2, 1), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    weight = w.emit("DequantizeLinear", kernel, torch.full((4,), 0.01), torch.zeros(4, dtype=torch.int8), axis=0)
    like = torch.empty(1, 4, 9)
    model = w.model([type(padding)(w.emit("Conv", padding, weight, kernel_shape=[1]), like)])
    q = torch.randint(0, 256, (1, 2, 6), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    torch.testing.assert_close(run_openvino(model, [q])[0], run_onnxruntime(model, [q])[0], rtol=1e-5, atol=1e-4)
