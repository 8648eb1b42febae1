"""Cholesky factors of Hessians, checked: float32 kernels of some libraries are wrong on some CPUs."""

from __future__ import annotations

import torch
from torch import Tensor


def cholesky_factor(matrix: Tensor) -> Tensor:
    """Lower Cholesky factor of positive definite matrices, float32, (G, K, K).

    It is multiplied with a vector, as the matrices are. Where both products differ, or the kernel finds a matrix not
    positive definite, the factor is computed in float64 instead.

    Raises:
        ArithmeticError: a matrix is not positive definite, or has values that are not finite.
    """
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed.any()) or not _is_factor(lower, matrix):
        exact, failed = torch.linalg.cholesky_ex(matrix.double())
        lower = exact.to(matrix)
        if bool(failed.any()) or not bool(lower.isfinite().all()):
            raise ArithmeticError("a matrix is not positive definite, or has values that are not finite.")
    return lower


def _is_factor(lower: Tensor, matrix: Tensor) -> bool:
    """Whether lower @ lower.mT is the matrix, up to rounding."""
    vector = torch.linspace(1, 2, matrix.shape[-1], device=matrix.device, dtype=matrix.dtype)[:, None]
    error = torch.linalg.vector_norm(lower @ (lower.mT @ vector) - matrix @ vector, dim=(-2, -1))
    scale = torch.linalg.matrix_norm(matrix) * torch.linalg.vector_norm(vector)
    return bool((error <= _MAX_ERROR * scale).all())


_MAX_ERROR = 1e-4
"""Largest error of a product with the factor, relative to the norms of the matrix and of the vector.

Rounding makes it about 1e-6; wrong kernels have made it 0.1.
"""
