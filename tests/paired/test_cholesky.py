"""Cholesky factors that a library computes wrongly are computed again in float64."""

import pytest
import torch

from fxq.paired.cholesky import cholesky_factor


def matrices(size):
    x = torch.randn(2, 3 * size, size, generator=torch.Generator().manual_seed(size))
    return x.mT @ x / size + 0.01 * torch.eye(size)


@pytest.mark.parametrize("size", [1, 7, 64, 300])
def test_a_factor_is_that_of_float64(size):
    matrix = matrices(size)
    torch.testing.assert_close(
        cholesky_factor(matrix).double(), torch.linalg.cholesky(matrix.double()), rtol=1e-4, atol=1e-4
    )


FAULTS = {
    "wrong": lambda lower, failed: (lower * 1.1, failed),
    "nan": lambda lower, failed: (lower * torch.nan, failed),
    "said to fail": lambda lower, failed: (lower, failed + 1),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_wrong_factor_is_noticed(fault, monkeypatch):
    right, dtypes = torch.linalg.cholesky_ex, []

    def faulty(matrix):
        dtypes.append(matrix.dtype)
        return right(matrix) if matrix.dtype == torch.float64 else fault(*right(matrix))

    monkeypatch.setattr(torch.linalg, "cholesky_ex", faulty)
    matrix = matrices(48)
    lower = cholesky_factor(matrix)
    torch.testing.assert_close(lower @ lower.mT, matrix, rtol=1e-5, atol=1e-5)
    assert dtypes == [torch.float32, torch.float64] and lower.dtype == torch.float32


@pytest.mark.parametrize("factor", [-1.0, torch.inf, torch.nan])
def test_a_matrix_without_a_factor(factor):
    with pytest.raises(ArithmeticError, match="not positive definite"):
        cholesky_factor(factor * matrices(8))
