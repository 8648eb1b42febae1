import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.common.metrics import MAX_COUNTED_SQNR_DB, Agreement, loss, nbytes, sqnr, tensors
from tests.support.helpers import REFERENCE

numbers = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20)


@given(numbers, st.floats(-10, 10, width=32).filter(lambda x: abs(x) > 1e-3))
def test_sqnr_is_the_ratio_of_energies(values, error):
    signal = np.array(values, dtype=np.float32)
    noisy = (signal + np.float32(error)).astype(np.float32)
    noise = noisy.astype(np.float64) - signal.astype(np.float64)
    got = sqnr(torch.from_numpy(signal), torch.from_numpy(noisy))
    energy, noise_energy = float((signal.astype(np.float64) ** 2).sum()), float((noise**2).sum())
    if noise_energy == 0:
        assert got == math.inf
    elif energy == 0:
        assert got == -math.inf
    else:
        assert got == pytest.approx(10 * np.log10(energy / noise_energy), rel=1e-9, abs=1e-9)


@given(st.lists(numbers, min_size=1, max_size=5))
def test_sums_over_parts_are_those_of_the_whole(parts):
    parts = [torch.tensor(part) for part in parts]
    others = [part * 1.01 - 0.5 for part in parts]
    apart, together = Agreement(), Agreement()
    for part, partner in zip(parts, others, strict=True):
        apart.add(part, partner)
    together.add(torch.cat(parts), torch.cat(others))
    want, got = torch.cat(parts).double(), torch.cat(others).double()
    noise = want - got
    exact = (float(want @ want), float(got @ got), float(want @ got), float(noise @ noise), float(noise.abs().max()))
    for agreement in (apart, together):
        sums = (agreement.signal, agreement.energy, agreement.cross, agreement.noise, agreement.largest)
        assert sums == pytest.approx(exact, rel=1e-12, abs=1e-9)
    assert apart.max_error == together.max_error


def test_a_tensor_larger_than_what_is_summed_at_once():
    want = torch.randn(3, 50_001, generator=torch.Generator().manual_seed(0))
    got = (want + 0.1).t().contiguous().t()  # in another order in memory
    agreement = Agreement()
    agreement.add(want, got)
    a, b = want.double().flatten(), got.double().flatten()
    assert agreement.sqnr == pytest.approx(10 * math.log10(float((a @ a) / ((a - b) @ (a - b)))), abs=1e-9)
    assert agreement.cosine == pytest.approx(float(a @ b / (a.norm() * b.norm())), abs=1e-12)
    assert agreement.max_error == float((a - b).abs().max())


def test_cosine_and_largest_error_at_the_ends():
    def found(want, got):
        agreement = Agreement()
        agreement.add(torch.tensor(want), torch.tensor(got))
        return agreement.cosine, agreement.max_error

    assert found([1.0, 2.0], [1.0, 2.0]) == (1.0, 0.0)
    assert found([1.0, 0.0], [-2.0, 0.0]) == (-1.0, 3.0)
    assert found([0.0, 0.0], [0.0, 2.0]) == (0.0, 2.0)
    assert found([0.0], [0.0]) == (1.0, 0.0)
    cosine, largest = found([1.0, 1.0], [math.nan, 0.0])
    assert math.isnan(cosine) and math.isnan(largest)
    assert found([1.0], [math.inf])[1] == math.inf


def test_halving_a_signal_loses_all_but_six_decibels():
    assert sqnr(torch.ones(10), torch.full((10,), 0.5)) == pytest.approx(20 * math.log10(2), abs=1e-12)


def test_all_tensors_count_together():
    reference = {"a": torch.full((3,), 2.0), "b": [torch.ones(4), (torch.zeros(2),)]}
    value = {"a": torch.full((3,), 2.0), "b": [torch.ones(4) * 1.1, (torch.zeros(2),)]}
    noise = 4 * (float(torch.tensor(1.1)) - 1) ** 2  # 1.1 as float32 holds it
    assert sqnr(reference, value) == pytest.approx(10 * math.log10((3 * 4 + 4) / noise), rel=1e-6)


def test_the_ends_of_the_scale():
    x = torch.arange(4.0)
    assert sqnr(x, x.clone()) == math.inf
    assert sqnr(torch.zeros(4), x) == -math.inf
    assert math.isnan(sqnr(x, torch.full((4,), math.nan)))
    assert math.isnan(sqnr(x, torch.full((4,), math.inf)))


def test_large_values_do_not_overflow():
    x = torch.full((4,), 1e30)
    assert sqnr(x, x * 0.5) == pytest.approx(20 * math.log10(2), abs=1e-6)


def test_integers_and_half_precision_are_measured_in_float64():
    assert sqnr(torch.tensor([200], dtype=torch.uint8), torch.tensor([255], dtype=torch.uint8)) == pytest.approx(
        10 * math.log10(200**2 / 55**2), abs=1e-9
    )
    assert sqnr(torch.tensor([1.0]), torch.tensor([0.5], dtype=torch.float16)) == pytest.approx(6.0206, abs=1e-4)


def test_results_of_another_structure_are_not_compared():
    with pytest.raises(ValueError, match="zip"):
        sqnr([torch.ones(2)], [torch.ones(2), torch.ones(2)])
    with pytest.raises(RuntimeError):
        sqnr(torch.ones(2), torch.ones(3))


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        (math.inf, 40.0, MAX_COUNTED_SQNR_DB - 40.0),
        (math.inf, 120.0, 0.0),  # float noise
        (40.0, 25.0, 15.0),
        (25.0, 40.0, -15.0),
        (30.0, -math.inf, math.inf),
        (30.0, math.nan, math.inf),
    ],
)
def test_loss_is_counted_below_the_ceiling(before, after, lost):
    assert loss(before, after) == lost


def test_tensors_in_order_whatever_they_are_nested_in():
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    assert [id(t) for t in tensors({"x": [a, (b, None)], "y": 3, "z": {"w": c}})] == [id(a), id(b), id(c)]
    assert list(tensors(None)) == list(tensors("text")) == []


def test_counts_parameters_and_buffers():
    norm = nn.BatchNorm1d(4)  # weight, bias, mean and variance of 4 floats, and an int64
    assert nbytes(norm) == 4 * 4 * 4 + 8


def test_counts_what_is_shared_once():
    layer = nn.Linear(8, 8, bias=False)
    assert nbytes(nn.ModuleList([layer, nn.Linear(8, 8, bias=False), layer])) == 2 * 8 * 8 * 4
    tied = nn.Linear(8, 8, bias=False)
    tied.weight = nn.Parameter(layer.weight.detach())  # another parameter on the same memory
    assert nbytes(nn.ModuleList([layer, tied])) == 8 * 8 * 4


def test_a_model_without_tensors_takes_nothing():
    assert nbytes(nn.ReLU()) == 0


def test_int8_weights_take_a_quarter():
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval()
    qmodel = fxq.quantize(model, REFERENCE, data=[torch.rand(4, 256)])
    weights = 2 * 256 * 256
    assert weights <= nbytes(qmodel) <= 1.1 * weights  # scales and biases come on top
    assert nbytes(model) >= 4 * weights


def test_infinity_where_it_should_be_is_no_error():
    agreement, want = Agreement(), torch.tensor([3.0, -math.inf, 4.0, math.inf])
    agreement.add(want, torch.tensor([3.0, -math.inf, 4.5, math.inf]))
    assert (agreement.sqnr, agreement.max_error) == (20.0, 0.5)
    agreement.add(want, -want)
    assert math.isnan(agreement.sqnr)


def test_sqnr_is_that_of_the_sums():
    want = [torch.randn(3, 5), torch.tensor([1.0, math.inf]), torch.tensor([0.5, math.nan])]
    got = [want[0] + 0.01 * torch.randn(3, 5), want[1] + 0.1, want[2] - 0.1]
    agreement = Agreement()
    for a, b in zip(want, got, strict=True):
        agreement.add(a, b)
    assert sqnr(want, got) == agreement.sqnr
    assert sqnr(want[:2], want[:2]) == sqnr(want, want) == math.inf
    assert math.isnan(sqnr(want[0], torch.full((3, 5), math.inf)))
