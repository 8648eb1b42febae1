"""Factors of a low-rank correction: against the least error that a matrix of their rank can have, in float64."""

import pytest
import torch

from fxq.paired.low_rank_factors import LowRankFactors, missing_weight, root_of
from fxq.paired.output_error import InputProducts, OutputError

RANK = 5


def patches(count, inputs):
    """Patches whose values depend on each other, of very different sizes."""
    g = torch.Generator().manual_seed(3)
    sizes = torch.logspace(-1.5, 1, inputs)
    return torch.randn(count, inputs, generator=g) @ torch.randn(inputs, inputs, generator=g) * sizes


@pytest.mark.parametrize(("outputs", "inputs"), [(40, 24), (24, 40)])
@pytest.mark.parametrize("has_inputs", [False, True])
def test_no_matrix_of_the_rank_has_a_smaller_error(outputs, inputs, has_inputs):
    torch.manual_seed(0)
    missing, x = torch.randn(outputs, inputs), patches(500, inputs)
    root = torch.linalg.cholesky(x.T @ x / len(x)) if has_inputs else None
    factors = LowRankFactors.of(missing, RANK, root)
    shapes = (tuple(factors.up.shape), tuple(factors.down.shape))
    assert shapes == ((outputs, RANK), (RANK, inputs)) and factors.up.dtype == factors.down.dtype == torch.int8
    weights = x.double().T / len(x) ** 0.5 if has_inputs else torch.eye(inputs, dtype=torch.float64)
    least = torch.linalg.svdvals(missing.double() @ weights)[RANK:].square().sum().sqrt()
    error = ((missing - factors.product()).double() @ weights).norm()
    assert least * (1 - 1e-4) < error < least * 1.01  # what rounding to 8 bits adds


def test_it_is_for_the_outputs_of_the_float_inputs():
    """Against the best weight for the outputs that the float model has: a least squares fit of all patches."""
    torch.manual_seed(0)
    weight, real = torch.randn(12, 16), patches(800, 16)
    x = real + 0.1 * patches(800, 16).flip(0)
    rounded = weight + 0.05 * torch.randn(12, 16)
    products = InputProducts()
    products.add(x[None], real[None])
    error = OutputError(products, weight[None])
    missing = missing_weight(rounded, error, root_of(error))
    best = torch.linalg.lstsq(x.double(), (real @ weight.T).double()).solution.T
    torch.testing.assert_close(rounded + missing, best.float(), rtol=2e-3, atol=2e-3)


def test_inputs_that_are_always_zero_or_not_finite():
    x = patches(100, 6)
    x[:, 2] = 0
    products = InputProducts()
    products.add(x[None])
    error = OutputError(products, torch.ones(1, 4, 6))
    assert LowRankFactors.of(torch.randn(4, 6), 2, root_of(error)).product().isfinite().all()
    products.add(torch.full((1, 1, 6), float("inf")))
    assert root_of(OutputError(products, torch.ones(1, 4, 6))) is None


def test_errors_of_a_lower_rank_are_corrected_whole():
    """Also by more columns than they need; without an error, there are no factors."""
    torch.manual_seed(0)
    missing = torch.randn(30, 1) @ torch.randn(1, 20)
    torch.testing.assert_close(LowRankFactors.of(missing, 4).product(), missing, rtol=0, atol=0.05)
    assert LowRankFactors.of(torch.zeros(30, 20), 4) is None
