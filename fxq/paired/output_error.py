"""Error of a layer's output as a function of its weight, from products of its inputs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeightRows:
    """Weight as rows, (G, R, K) as in `LayerMatrix.rows`, with the grid of each value.

    Attributes:
        weight: float weight, (G, R, K).
        scale: scale of each value, (G, R, K).
        zero_point: zero point of each value, (G, R, K).
        qmin: smallest integer.
        qmax: largest integer.
        block: number of neighbouring values of a row that share a scale; None: scales are per channel or tensor.
        symmetric: `is_symmetric` of the whole weight, if these are some of its rows.
    """

    weight: Tensor
    scale: Tensor
    zero_point: Tensor
    qmin: int
    qmax: int
    block: int | None = None
    symmetric: bool | None = None

    @property
    def is_symmetric(self) -> bool:
        """Whether all zero points are in the middle of the integers."""
        if self.symmetric is not None:
            return self.symmetric
        return bool((self.zero_point == (self.qmin + self.qmax + 1) // 2).all())

    def some_rows(self, rows: Tensor | slice) -> WeightRows:
        """Only some rows, by index."""
        parts = {name: getattr(self, name)[:, rows] for name in ("weight", "scale", "zero_point")}
        return replace(self, symmetric=self.is_symmetric, **parts)

    def real(self, integers: Tensor) -> Tensor:
        """Weight that integers represent, (G, R, K)."""
        return (integers - self.zero_point) * self.scale

    def steps(self) -> Tensor:
        """Float weight in integer steps, (G, R, K), neither rounded nor clamped."""
        return self.weight / self.scale + self.zero_point

    def nearest(self) -> Tensor:
        """Nearest integers of the float weight, (G, R, K)."""
        return self.steps().round_().clamp_(self.qmin, self.qmax)

    def rescaled(self, error: OutputError) -> WeightRows:
        """Grid with the scale of each row, among smaller and larger ones, that has the least error with rounding."""
        factors = torch.logspace(*_SCALE_OCTAVES, _SCALE_COUNT, base=2).to(self.scale)
        grids = [replace(self, scale=self.scale * factor) for factor in factors]
        best = torch.stack([error(grid.real(grid.nearest())) for grid in grids]).argmin(0)
        return replace(self, scale=self.scale * factors[best][:, :, None])

    def fitted(self, integers: Tensor, error: OutputError) -> WeightRows:
        """Grid with scales of least error for these integers. A row keeps its scale if the new one is far from it."""
        weight = self.real(integers)
        power = ((weight @ error.gram) * weight).sum(2)
        factor = (weight * error.cross.mT).sum(2) / power.clamp(min=_MIN_POWER)
        factor = torch.where((factor - 1).abs() < _MAX_SCALE_CHANGE, factor, 1.0)
        return replace(self, scale=self.scale * factor[:, :, None])


_SCALE_OCTAVES = -1.2, 0.2
"""Smallest and largest factor of a scale that is tried, as powers of 2."""
_SCALE_COUNT = 29
"""Number of factors that are tried."""
_MAX_SCALE_CHANGE = 0.3
"""Largest |factor - 1| of a scale. Larger ones follow noise."""
_MIN_POWER = 1e-30
_ALL = slice(None)


class InputProducts:
    """Gram matrix of a layer's inputs, products with their errors against the float model, and sums of both inputs.

    All are summed over patches. A layer should return for its inputs what the float weight returns for the inputs in
    the float model. Layers that read one value share the products.

    Args:
        weight: float weight, (G, R, K), of the only layer that reads the inputs. The errors are then those of its
            outputs, which is less work if there are fewer outputs than inputs. None: the errors of the inputs.

    Attributes:
        count: number of patches.
        derived: cache of what passes compute from the products alone, by keys of the passes.
    """

    def __init__(self, weight: Tensor | None = None) -> None:
        self.count, self.derived = 0, dict[Hashable, Any]()
        self._weight, self._sums = weight, dict[str, Tensor]()
        self._gram: Tensor | None = None

    def add(self, x: Tensor, real: Tensor | None = None, counts: Tensor | None = None) -> None:
        """Add patches.

        Args:
            x: patches of the inputs, float32, (G, n, K).
            real: patches of the float inputs, same shape; None: the same values.
            counts: weights of the patches, (n,), on average 1; None: all equal.
        """
        self.count, self._gram = self.count + x.shape[1], None
        weighted = x if counts is None else x * counts[:, None]
        total = x.sum(1) if counts is None else counts @ x
        sums = {"gram": _symmetric(weighted, x), "x": total, "real": total.clone()}
        if real is not None:
            error = x - real
            error = error if self._weight is None else error @ self._weight.mT
            sums["error"] = error.mT @ weighted
            sums["real"] = real.sum(1) if counts is None else counts @ real
        for name, value in sums.items():
            self._sums[name] = self._sums[name].add_(value) if name in self._sums else value

    @property
    def is_finite(self) -> bool:
        """Whether the products of each input with itself are finite."""
        gram = self._sums.get("gram")
        return gram is None or bool(gram.diagonal(dim1=1, dim2=2).isfinite().all())

    def merged(self, other: InputProducts) -> InputProducts:
        """Products over the patches of both, which get no more patches: the result may share their memory."""
        both = InputProducts(self._weight)
        both.count = self.count + other.count
        for name in {**self._sums, **other._sums}:
            parts = [products._sums[name] for products in (self, other) if name in products._sums]
            both._sums[name] = torch.add(*parts) if len(parts) == 2 else parts[0]
        return both

    def tensors(self) -> dict[str, Tensor]:
        """The sums and the number of patches, by name; `from_tensors` is the inverse."""
        return {**self._sums, "count": torch.tensor(self.count)}

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> InputProducts:
        """Products of the same inputs, with other sums and another number of patches."""
        products = InputProducts(self._weight)
        products._sums = {name: tensor for name, tensor in tensors.items() if name != "count"}
        products.count = int(tensors["count"])
        return products

    def trusting(self, patches: float) -> InputProducts:
        """Products with artificial patches added, of independent inputs of average size, equal in the float model.

        The result shares memory with these products, which get no more patches.

        Args:
            patches: number of patches for each input of the weight.
        """
        gram = self._sums["gram"]
        size = patches * gram.shape[2] * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None] / max(self.count, 1)
        products, gram = InputProducts(self._weight), gram.clone()
        gram.diagonal(dim1=1, dim2=2).add_(size)
        products.count, products._sums = self.count, {**self._sums, "gram": gram}
        return products

    def gram(self) -> Tensor:
        """Mean product of each two inputs, (G, K, K); computed once for layers with the same inputs."""
        if self._gram is None:
            self._gram = self._sums["gram"] / max(self.count, 1)
        return self._gram

    def means(self) -> tuple[Tensor, Tensor]:
        """Means of the inputs and of the float inputs, (G, K)."""
        return self._sums["x"] / max(self.count, 1), self._sums["real"] / max(self.count, 1)

    def errors(self, weight: Tensor, rows: slice = _ALL) -> Tensor:
        """Mean product of each output's error and each input, (G, R, K).

        Args:
            weight: the float weight, (G, R, K); those rows of it.
            rows: which rows of the layer's weight these are.
        """
        if "error" not in self._sums:
            return torch.zeros_like(weight)
        if self._weight is None:
            return weight @ (self._sums["error"] / max(self.count, 1))
        return self._sums["error"][:, rows] / max(self.count, 1)


def _symmetric(a: Tensor, b: Tensor) -> Tensor:
    """a.mT @ b for (G, n, K) each, if that is symmetric: only a part is computed, and the rest copied."""
    size = a.shape[2]
    if size < _MIN_DIVIDED:
        return a.mT @ b
    half = size // 2
    product = a.new_empty(a.shape[0], size, size)
    product[:, :half, :half] = _symmetric(a[:, :, :half], b[:, :, :half])
    product[:, half:, half:] = _symmetric(a[:, :, half:], b[:, :, half:])
    product[:, :half, half:] = a[:, :, :half].mT @ b[:, :, half:]
    product[:, half:, :half] = product[:, :half, half:].mT
    return product


_MIN_DIVIDED = 512
"""Number of inputs from which a Gram matrix is divided. Products of smaller parts are slower."""


class OutputError:
    """Squared error of a layer's output as a function of its weight, beyond that of the float weight.

    Attributes:
        inputs: products of the inputs.
        weight: float weight, (G, R, K).
        centred: whether the mean error of each channel is left out, since the bias corrects it.
        rows: which rows of the layer's weight `weight` has.
    """

    def __init__(self, inputs: InputProducts, weight: Tensor, centred: bool = False, rows: slice = _ALL) -> None:
        self.inputs, self.weight, self.centred, self.rows = inputs, weight, centred, rows

    @cached_property
    def gram(self) -> Tensor:
        """Mean product of each two inputs, (G, K, K); their covariance if `centred`."""
        gram, (x, _) = self.inputs.gram(), self.inputs.means()
        return gram - x[:, :, None] * x[:, None] if self.centred else gram

    @cached_property
    def slope(self) -> Tensor:
        """Half of the gradient of the error at the float weight, (G, R, K): not 0 where inputs differ from float."""
        errors, (x, real) = self.inputs.errors(self.weight, self.rows), self.inputs.means()
        return errors - self.weight @ (x - real)[:, :, None] * x[:, None] if self.centred else errors

    @property
    def cross(self) -> Tensor:
        """Mean product of each input and each wanted output, (G, K, R); their covariance if `centred`."""
        return (self.weight @ self.gram - self.slope).mT

    def __call__(self, weight: Tensor, other: Tensor | None = None) -> Tensor:
        """Mean squared error by channel, (G, R), with a weight (G, R, K), beyond that with another.

        `other` is the float weight by default.
        """
        change, total = weight - self.weight, weight - self.weight
        if other is not None:
            change, total = weight - other, total + (other - self.weight)
        return (change * torch.baddbmm(self.slope, total, self.gram, beta=2)).sum(2)

    def shift(self, weight: Tensor) -> Tensor:
        """Mean of the wanted minus the actual output by channel, (G, R), with a weight (G, R, K)."""
        x, real = self.inputs.means()
        return (self.weight @ real[:, :, None] - weight @ x[:, :, None])[:, :, 0]
