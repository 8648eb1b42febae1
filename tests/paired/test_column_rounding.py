"""Rounding of a block of columns, and its grids: compiled and with PyTorch's ops, against float64 one by one."""

import pytest
import torch

from fxq.backends.loops.code.compiler import loops
from fxq.paired import column_rounding
from fxq.quant.least_error import least_range
from fxq.quant.qparams import choose_qparams
from fxq.quant.spec import TensorSpec

SIZES = [(1, 1, 1), (2, 9, 70), (1, 64, 130)]
"""Groups, columns and rows: fewer and more than the loops take at a time."""


@pytest.fixture(params=["compiled", "ops"])
def engine(request, monkeypatch):
    if request.param == "ops":
        monkeypatch.setattr(column_rounding, "loops_for", lambda *_: None)
    elif loops("rounding_loops") is None:
        pytest.skip("needs Numba")


def one_by_one(target, real, scale, low, high, ahead):
    """Each column after those before it, in float64; integers minus zero points."""
    target, real, scale, ahead = (values.double() for values in (target, real, scale, ahead))
    steps, errors = torch.zeros_like(target), torch.zeros_like(target)
    for i in range(target.shape[0]):
        wanted = real[i] + sum((ahead[i, j] * errors[j] for j in range(i)), torch.zeros_like(real[i]))
        steps[i] = (wanted / scale[i]).round().clamp(low[i], high[i])
        errors[i] = target[i] - steps[i] * scale[i]
    return steps, errors


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("size", SIZES)
def test_each_column_compensates_those_before_it(size):
    torch.manual_seed(0)
    groups, columns, rows = size
    target = torch.randn(groups, columns + 3, rows)[:, 1:-2]  # a part of more columns
    real, scale = target + 0.1 * torch.randn(size), 0.2 + 0.1 * torch.rand(size)
    zero = torch.randint(0, 16, size).float()
    ahead = 0.2 * torch.randn(groups, columns + 2, columns + 2)[:, 2:, :-2]
    steps, errors = column_rounding.round_block(target, real, scale, 0 - zero, 15 - zero, ahead)
    for group in range(groups):
        wanted_steps, wanted_errors = one_by_one(
            *(values[group] for values in (target, real, scale, 0 - zero, 15 - zero, ahead))
        )
        same = (steps[group] == wanted_steps).all(0)
        assert same.float().mean() > 0.98  # ties, and what follows from them
        torch.testing.assert_close(errors[group][:, same].double(), wanted_errors[:, same], rtol=0, atol=1e-4)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spec", [TensorSpec(bits=4), TensorSpec(bits=3, signed=True, symmetric=True)], ids=str)
def test_the_grids_have_as_little_error_as_those_of_the_search(size, spec):
    torch.manual_seed(0)
    values, weights = torch.randn(size), 0.1 + torch.rand(size[:2])
    values[:, :, 0] = 0  # has no range

    def error(scale, zero_point):
        steps = (values / scale[:, None]).round().clamp(*(end - zero_point[:, None] for end in (spec.qmin, spec.qmax)))
        return ((steps * scale[:, None] - values).square() * weights[:, :, None]).sum(1)

    scale, zero_point = column_rounding.block_grid(values, weights, spec)
    assert torch.equal(scale, scale.half().float())  # as it is stored
    rows = values.mT.contiguous()
    ends = least_range(rows, rows.amin(2), rows.amax(2), spec, 2.0, weights[:, None].expand_as(rows), ((-0.6, 0.0, 5),))
    grid = choose_qparams(*ends, spec)
    searched = error(grid.scale, grid.zero_point)
    torch.testing.assert_close(error(scale, zero_point), searched, rtol=0.03, atol=1e-6)  # scales are rounded to half


@pytest.mark.usefixtures("engine")
def test_values_out_of_the_range_of_half_keep_float_scales():
    values = torch.randn(1, 8, 4) * 1e-7
    scale, _ = column_rounding.block_grid(values, torch.ones(1, 8), TensorSpec(bits=4))
    assert float((scale * 15 / (values.amax(1) - values.amin(1).clamp(max=0))).min()) > 0.5
