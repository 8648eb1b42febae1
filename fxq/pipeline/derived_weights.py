"""Constants of a graph that are computed from the model's tensors, and are computed again after training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fxq.common.metrics import storage_address
from fxq.patterns.fusions.norm import fold, norm_scale
from fxq.rewriting.computed import TrainableConstant


@dataclass(frozen=True)
class FoldedNorm:
    """Weight and bias of a layer with a folded batch norm. Tensors are given by their paths.

    Attributes:
        weight: folded weight.
        bias: folded bias.
        own_weight: weight of the model's layer.
        own_bias: bias of the model's layer, or None.
        mean: running mean of the batch norm.
        var: running variance of the batch norm.
        gamma: weight of the batch norm, or None.
        beta: bias of the batch norm, or None.
        eps: added to the variance.
        axis: output-channel axis of the weight.
        groups: groups of the layer.
        commutes: whether folding leaves the integers of the weight as they are, as with per-channel scales.
    """

    weight: str
    bias: str
    own_weight: str
    own_bias: str | None
    mean: str
    var: str
    gamma: str | None
    beta: str | None
    eps: float
    axis: int
    groups: int
    commutes: bool

    def made(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Folded weight and bias by path, from the model's tensors by path."""

        def at(path: str | None) -> Tensor | None:
            return tensors[path].detach() if path is not None else None

        layer, norm = (at(self.own_weight), at(self.own_bias)), (at(self.mean), at(self.var))
        weight, bias = fold(*layer, *norm, at(self.gamma), at(self.beta), self.eps, self.axis, self.groups)
        return {self.weight: weight, self.bias: bias}

    def scale(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Factor of the batch norm for each channel, float64, (C,)."""
        return norm_scale(tensors[self.var], tensors[self.gamma] if self.gamma is not None else None, self.eps)


@dataclass(frozen=True)
class ComputedConstant:
    """Constant that is computed from parameters.

    Attributes:
        path: path of the constant.
        how: its computation from the model's tensors and other computed constants.
    """

    path: str
    how: TrainableConstant

    def made(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Constant by its path, from tensors by path: the model's, and other computed constants."""
        return {self.path: self.how.value(tensors)}


@dataclass(frozen=True)
class ParameterRows:
    """Rows of a parameter, such as the query projection in the input projection of attention.

    Attributes:
        part: path of the constant that holds the rows.
        whole: path of the parameter.
        start: first row.
        length: number of rows.
    """

    part: str
    whole: str
    start: int
    length: int

    @classmethod
    def of(cls, path: str, part: Tensor, tensors: Mapping[str, Tensor]) -> ParameterRows | None:
        """Rows of one of the `tensors` that the constant `part` is a view of; None if it is not such a view."""
        for whole, tensor in tensors.items():
            same = storage_address(part) == storage_address(tensor) and part.dim() > 0
            if same and (part.stride(), part.shape[1:]) == (tensor.stride(), tensor.shape[1:]):
                start = (part.storage_offset() - tensor.storage_offset()) // (tensor.stride(0) or 1)
                return cls(path, whole, start, len(part))
        return None

    def made(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Constant by its path, from the model's tensors by path."""
        return {self.part: tensors[self.whole].detach().narrow(0, self.start, self.length)}
