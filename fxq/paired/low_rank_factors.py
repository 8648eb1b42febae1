"""Product of two thin matrices of 8-bit integers that is close to the error of a rounded weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxq.paired.cholesky import cholesky_factor
from fxq.paired.output_error import OutputError
from fxq.quant.qparams import QParams


@dataclass(frozen=True)
class LowRankFactors:
    """Factors of a low-rank matrix, up @ down, in integers.

    Attributes:
        up: int8, (O, rank).
        up_grid: its grid, with one scale.
        down: int8, (rank, K).
        down_grid: its grid, with a scale for each row.
    """

    up: Tensor
    up_grid: QParams
    down: Tensor
    down_grid: QParams

    def product(self) -> Tensor:
        """The matrix, float32, (O, K)."""
        down = self.down.float() * self.down_grid.scale[:, None]
        return (self.up.float() * self.up_grid.s) @ down

    def as_data(self) -> tuple[Tensor, float, Tensor, Tensor]:
        """The factors as plain data; `from_data` is the inverse."""
        return self.up, self.up_grid.s, self.down, self.down_grid.scale

    @classmethod
    def from_data(cls, up: Tensor, up_scale: float, down: Tensor, down_scale: Tensor) -> LowRankFactors:
        """Factors from plain data, the inverse of `as_data`."""
        up_grid = QParams.per_tensor(up_scale, 0, -_QMAX, _QMAX, torch.int8)
        return cls(up, up_grid, down, _by_row(down_scale))

    @classmethod
    def of(cls, missing: Tensor, rank: int, root: Tensor | None = None) -> LowRankFactors | None:
        """Factors of least error |(missing - up @ down) root|, before `down` is rounded; `up` compensates its rounding.

        Args:
            missing: float32, (O, K), to be approximated.
            rank: number of columns of `up`, less than O and K.
            root: lower triangular float32, (K, K), with root @ root.mT the mean product of each two inputs; None: the
                identity.

        Returns:
            The factors; None if `missing` is zero.
        """
        target = missing if root is None else missing @ root
        directions = _right_vectors(target, rank)
        if directions is None:
            return None
        down = directions
        if root is not None:
            down = torch.linalg.solve_triangular(root, directions, upper=False, left=False)
        scale = (down.abs().amax(1) / _QMAX).clamp(min=_MIN_SCALE)
        integers = (down / scale[:, None]).round_()
        rounded = integers * scale[:, None] if root is None else (integers * scale[:, None]) @ root
        up = torch.linalg.lstsq(rounded.mT, target.mT).solution.mT
        largest = up.abs().amax(0).clamp(min=_MIN_SCALE)
        up_integers, size = (up / largest * _QMAX).round_(), float(largest.log().mean().exp())
        stored_up, stored_down = (values.to(torch.int8).contiguous() for values in (up_integers, integers))
        return cls.from_data(stored_up, size / _QMAX, stored_down, scale * (largest / size))


def root_of(error: OutputError) -> Tensor | None:
    """Lower triangular root of the mean product of each two inputs, (K, K); None if they are not finite."""
    gram = error.gram[0]
    zero = gram.diagonal() <= 0  # inputs that are always 0
    gram = gram + torch.diag(zero.to(gram))
    try:
        return cholesky_factor(gram)
    except ArithmeticError:
        return None


def missing_weight(rounded: Tensor, error: OutputError, root: Tensor) -> Tensor:
    """Difference of the weight of least output error and a rounded weight, (O, K), on inputs of the quantized graph.

    Args:
        rounded: the weight that its integers represent, float32.
        error: error of the output as a function of the weight.
        root: root of the products of the inputs, as `root_of` returns it.
    """
    return error.weight[0] - rounded - torch.cholesky_solve(error.slope[0].mT, root).mT


def _right_vectors(matrix: Tensor, rank: int) -> Tensor | None:
    """Right singular vectors of the largest singular values, (rank, K); None if the matrix is zero."""
    if not bool(matrix.any()):
        return None
    tall = matrix.shape[0] > matrix.shape[1]
    square = matrix.mT @ matrix if tall else matrix @ matrix.mT
    vectors = torch.linalg.eigh(square).eigenvectors[:, -rank:].flip(1).mT
    if tall:
        return vectors
    right = vectors @ matrix
    return right / right.norm(dim=1, keepdim=True).clamp(min=_MIN_SCALE)


def _by_row(scale: Tensor) -> QParams:
    zero = torch.zeros_like(scale, dtype=torch.int32)
    return QParams(scale, zero, -_QMAX, _QMAX, torch.int8, axis=0)


_QMAX = 127
"""Largest integer of the factors, which are symmetric."""
_MIN_SCALE = 1e-30
