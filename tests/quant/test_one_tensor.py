"""Quantization of one tensor by hand, against numpy in float64."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import fxq

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
BAD = float("nan")


def integers(x, scale, zero_point, qmin=0, qmax=255):
    """The formula of quantize_tensor, after a division in float32."""
    steps = (x.numpy() / np.asarray(scale, dtype=np.float32)).astype(np.float64)
    return np.clip(np.rint(steps) + zero_point, qmin, qmax)


# ---- make_observer


def test_affine_per_tensor():
    obs = fxq.extend.make_observer("minmax")
    for part in X:
        assert obs(part) is part
    low, high = float(X.min()), float(X.max())
    qp = obs.qparams()
    assert (qp.qmin, qp.qmax, qp.dtype, qp.axis) == (0, 255, torch.uint8, None)
    assert qp.s == pytest.approx((high - low) / 255, rel=1e-6) and qp.z == round(-low / qp.s)


def test_symmetric_per_channel():
    obs = fxq.extend.make_observer("minmax", axis=1, bits=4, signed=True, symmetric=True)
    obs(X)
    qp = obs.qparams()
    assert (qp.qmin, qp.qmax, qp.dtype, qp.axis) == (-7, 7, torch.int8, 1)
    torch.testing.assert_close(qp.scale, X.abs().amax(0) / 7, rtol=1e-6, atol=0)
    assert qp.zero_point.tolist() == [0] * 6


def test_kinds_and_their_options():
    assert type(fxq.extend.make_observer()).__name__ == "Histogram"
    assert fxq.extend.make_observer("percentile:99").percent == 99.0
    outlier = torch.cat([X.flatten(), torch.tensor([1000.0])])
    ends = {kind: fxq.extend.make_observer(kind) for kind in ("minmax", "percentile:90")}
    for obs in ends.values():
        obs(outlier)
    assert float(ends["minmax"].qparams().high) == pytest.approx(1000, rel=0.01)
    assert float(ends["percentile:90"].qparams().high) < 4


def test_observers_that_are_refused():
    for arguments, message in (
        ({"kind": "histgram"}, "unknown observer 'histgram'; did you mean 'histogram'"),
        ({"kind": 3}, "observer is 3; it must be a str"),
        ({"bits": 9}, "bits is 9; it must be an integer from 2 to 8"),
        ({"kind": "histogram", "axis": 0}, "the tensor: the 'histogram' observer has one range per tensor"),
        ({"kind": "minmax", "axis": "rows"}, "axis is 'rows'"),
    ):
        with pytest.raises(fxq.RecipeError, match=message):
            fxq.extend.make_observer(**arguments)


def test_what_an_observer_by_itself_says_of_bad_data():
    obs = fxq.extend.make_observer("minmax", axis=2)
    with pytest.raises(
        fxq.CalibrationError, match=r"the tensor has seen no data\. Call the observer on a tensor first\."
    ):
        obs.qparams()
    with pytest.raises(fxq.InputError, match=r"is \[1\.0\] \(list\); an observer takes a tensor"):
        obs([1.0])
    with pytest.raises(fxq.CalibrationError, match=r"torch.int64; only floating point .* Pass x\.float\(\)"):
        obs(torch.ones(2, dtype=torch.int64))
    with pytest.raises(fxq.CalibrationError, match=r"shape \(4, 6\), and has no axis 2"):
        obs(X)
    with pytest.raises(fxq.CalibrationError, match="holds NaN or Inf"):
        fxq.extend.make_observer()(torch.tensor([1.0, BAD]))


# ---- to integers and back


def test_one_scale():
    q = fxq.extend.quantize_tensor(X, 0.03, 120)
    assert q.dtype == torch.uint8 and np.array_equal(q.numpy(), integers(X, 0.03, 120))
    back = fxq.extend.dequantize_tensor(q, 0.03, 120)
    np.testing.assert_allclose(back.numpy(), (q.numpy().astype(np.float64) - 120) * 0.03, rtol=1e-6)
    inside = (X.numpy() > -119 * 0.03) & (X.numpy() < 134 * 0.03)
    assert (back - X).abs().numpy()[inside].max() <= 0.015 * 1.0001


def test_ties_round_to_even_and_infinity_to_the_ends():
    x = torch.tensor([0.5, 1.5, 2.5, math.inf, -math.inf])
    assert fxq.extend.quantize_tensor(x, 1, 0, qmin=-8, qmax=7).tolist() == [0, 2, 2, 7, -8]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_scale_for_each_channel(axis):
    scale = torch.rand(X.shape[axis]) / 50 + 0.01
    zero = torch.arange(X.shape[axis], dtype=torch.int32)
    shape = (-1, 1) if axis == 0 else (1, -1)
    q = fxq.extend.quantize_tensor(X, scale, zero, qmin=-128, qmax=127, axis=axis)
    want = integers(X, scale.reshape(shape).numpy(), zero.reshape(shape).numpy(), -128, 127)
    assert q.dtype == torch.int8 and np.array_equal(q.numpy(), want)
    back = fxq.extend.dequantize_tensor(q, scale, zero, axis=axis)
    real = (want - zero.reshape(shape).numpy()) * scale.reshape(shape).double().numpy()
    np.testing.assert_allclose(back.numpy(), real, rtol=1e-6, atol=1e-9)


def test_a_scale_for_each_block_the_last_one_shorter():
    scale = torch.rand(4, 2) + 0.2
    q = fxq.extend.quantize_tensor(X, scale, 0, qmin=-7, qmax=7, axis=1, block=4)
    full = scale.repeat_interleave(4, 1)[:, :6]
    assert np.array_equal(q.numpy(), integers(X, full.numpy(), 0, -7, 7))
    back = fxq.extend.dequantize_tensor(q, scale, 0, axis=1, block=4)
    torch.testing.assert_close(back, q.float() * full, rtol=1e-6, atol=0)


def test_what_an_observer_found_says_all():
    obs = fxq.extend.make_observer("minmax", axis=0, signed=True, symmetric=True)
    qp = obs(X) is X and obs.qparams()
    q = fxq.extend.quantize_tensor(X, qp)
    assert torch.equal(q, fxq.extend.quantize_tensor(X, qp.scale, qp.zero_point, qmin=-127, qmax=127, axis=0))
    assert (fxq.extend.dequantize_tensor(q, qp) - X).abs().max() <= float(qp.scale.max()) / 2 * 1.0001


def test_parameters_and_other_floating_types():
    weight = nn.Parameter(X.clone())
    assert torch.equal(fxq.extend.quantize_tensor(weight, 0.1, 50), fxq.extend.quantize_tensor(X, 0.1, 50))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        x = torch.tensor([-1.0, 0.5, 0.25], dtype=dtype)
        assert fxq.extend.quantize_tensor(x, 0.25, 8).tolist() == [4, 10, 9]


def test_an_int32_bias_comes_back():
    bias = torch.tensor([100000, -7], dtype=torch.int32)
    assert fxq.extend.dequantize_tensor(bias, torch.tensor([0.5, 2.0]), 0, axis=0).tolist() == [50000.0, -14.0]


REFUSED = {
    "no tensor": (([1.0], 0.1, 0), {}, r"floating point tensor, not \[1\.0\] \(list\)"),
    "integers": ((torch.ones(2).int(), 0.1, 0), {}, "floating point tensor, not a tensor of int32"),
    "NaN": ((torch.tensor([BAD]), 0.1, 0), {}, "x has NaN"),
    "scale of 0": ((X, 0.0, 0), {}, "finite and more than 0; it is 0"),
    "negative scale": ((X, torch.tensor([0.5, -1.0, 1, 1]), 0), {"axis": 0}, "more than 0; it is -1"),
    "endless scale": ((X, math.inf, 0), {}, "finite"),
    "scale of text": ((X, "0.1", 0), {}, r"scale is a number, .* not '0\.1' \(str\)"),
    "no zero point": ((X, 0.1), {}, "zero_point must be an integer, not nothing"),
    "zero point of floats": ((X, 0.1, 0.5), {}, r"not 0\.5 \(float\)"),
    "zero point outside": ((X, 0.1, 300), {}, "zero_point must be from qmin to qmax, which are 0 and 255"),
    "range": ((X, 0.1, 0), {"qmin": -128, "qmax": 255}, "qmin is -128 and qmax 255"),
    "empty range": ((X, 0.1, 0), {"qmin": 4, "qmax": 4}, "qmin is 4 and qmax 4"),
    "range of floats": ((X, 0.1, 0), {"qmax": 7.5}, r"integers, not 0 and 7\.5"),
    "no axis": (
        (X, torch.ones(4), 0),
        {},
        r"scale has shape \(4,\), and must have \(\) for a tensor of shape \(4, 6\)",
    ),
    "other axis": ((X, torch.ones(4), 0), {"axis": 1}, r"scale has shape \(4,\), and must have \(6,\)"),
    "axis out of range": ((X, torch.ones(4), 0), {"axis": 2}, r"there is no axis 2 in a tensor of shape \(4, 6\)"),
    "block without axis": ((X, 0.1, 0), {"block": 2}, "block needs axis"),
    "block of 0": ((X, torch.ones(4, 6), 0), {"axis": 1, "block": 0}, "block is 0"),
    "zero points of another shape": (
        (X, torch.ones(4), torch.zeros(3, dtype=torch.int32)),
        {"axis": 0},
        r"zero_point has shape \(3,\), and must have \(4,\)",
    ),
    "twice": ((X, fxq.extend.QParams.per_tensor(0.1, 0), 0), {}, "leave those out"),
    "twice, by name": ((X, fxq.extend.QParams.per_tensor(0.1, 0)), {"qmax": 127}, "leave those out"),
}


@pytest.mark.parametrize("function", [fxq.extend.quantize_tensor, fxq.extend.quantization_error])
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(function, case):
    arguments, options, message = REFUSED[case]
    with pytest.raises(fxq.InputError, match=f"^{function.__name__}: .*{message}"):
        function(*arguments, **options)


@pytest.mark.parametrize("q", [X, torch.ones(2, dtype=torch.bool), 3])
def test_only_integers_are_dequantized(q):
    with pytest.raises(fxq.InputError, match="dequantize_tensor: takes a tensor of integers, not"):
        fxq.extend.dequantize_tensor(q, 0.1, 0)


# ---- what a scale costs


def test_the_error_of_a_scale():
    x = torch.tensor([-1.0, 0.0, 0.26, 1.0, 3.0])
    errors = fxq.extend.quantization_error(x, 0.25, 4, qmax=8)  # reaches from -1 to 1
    error = np.array([0.0, 0.0, 0.01, 0.0, 2.0])
    assert errors.sqnr == pytest.approx(10 * math.log10(float((x.double() ** 2).sum()) / (error**2).sum()), rel=1e-6)
    assert (errors.max_error, errors.clipped) == (2.0, 0.2)
    assert str(errors) == "SQNR 4.4 dB, largest error 2, 20.00% clipped"


def test_a_bit_is_6_dB():
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    errors = [fxq.extend.quantization_error(x, 1 / (2**bits - 1), 0, qmax=2**bits - 1).sqnr for bits in (4, 5, 6, 7, 8)]
    assert np.diff(errors) == pytest.approx([6.02] * 4, abs=0.4)


def test_the_histogram_clips_where_it_pays():
    x = torch.cat([X.flatten().repeat(100), torch.tensor([30.0])])
    costs = {}
    for kind in ("minmax", "histogram"):
        obs = fxq.extend.make_observer(kind, bits=4)
        obs(x)
        costs[kind] = fxq.extend.quantization_error(x, obs.qparams())
    assert costs["minmax"].clipped == 0 < costs["histogram"].clipped
    assert costs["histogram"].sqnr > costs["minmax"].sqnr + 1
    assert costs["histogram"].max_error > costs["minmax"].max_error


def test_a_scale_for_each_channel_costs_less():
    x = X * torch.tensor([1.0, 10.0, 100.0, 1000.0])[:, None]
    whole, rows = (fxq.extend.make_observer("minmax", axis, signed=True, symmetric=True) for axis in (None, 0))
    for obs in (whole, rows):
        obs(x)
    scales = rows.qparams().scale
    smallest = x[0], x[0, None]
    assert (
        fxq.extend.quantization_error(smallest[0], whole.qparams()).sqnr < 5
    )  # one scale leaves the smallest row nothing
    assert fxq.extend.quantization_error(smallest[1], scales[:1], 0, qmin=-127, qmax=127, axis=0).sqnr > 35
    assert (
        fxq.extend.quantization_error(x, rows.qparams()).sqnr > fxq.extend.quantization_error(x, whole.qparams()).sqnr
    )


def test_nothing_and_what_is_exact_cost_nothing():
    for x in (torch.empty(0), torch.tensor([0.0, 0.5, 1.0])):
        assert fxq.extend.quantization_error(x, 0.5, 0) == fxq.results.QuantizationNoise(math.inf, 0.0, 0.0)


def test_the_error_of_infinity_is_refused():
    with pytest.raises(fxq.InputError, match="x has infinities"):
        fxq.extend.quantization_error(torch.tensor([math.inf]), 0.1, 0)
