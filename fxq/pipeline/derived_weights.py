"""Constants of a graph that were made of the model's own tensors, as they are made again when these were trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fxq.common.metrics import storage_address
from fxq.patterns.fusions.norm import fold, norm_scale
from fxq.rewriting.computed import TrainableConstant


@dataclass(frozen=True)
class FoldedNorm:
    """A batch norm that fold-batch-norm has put into a layer. Tensors go by their paths.

    Attributes:
        weight, bias: what the layer has now.
        own_weight, own_bias: what the model has; the bias may be None.
        mean, var, gamma, beta: of the batch norm; the last two may be None.
        eps: what is added to the variance.
        axis: the output-channel axis of the weight.
        groups: of the layer.
        commutes: whether the integers of the weight are those of the model's own, whatever the batch norm is.
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
        """The layer's weight and bias by path, from the model's tensors by path."""

        def at(path: str | None) -> Tensor | None:
            return tensors[path].detach() if path is not None else None

        layer, norm = (at(self.own_weight), at(self.own_bias)), (at(self.mean), at(self.var))
        weight, bias = fold(*layer, *norm, at(self.gamma), at(self.beta), self.eps, self.axis, self.groups)
        return {self.weight: weight, self.bias: bias}

    def scale(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """What the batch norm multiplies each channel by: float64, (C,)."""
        return norm_scale(tensors[self.var], tensors[self.gamma] if self.gamma is not None else None, self.eps)


@dataclass(frozen=True)
class Recomputed:
    """What was computed of parameters.

    Attributes:
        path: of the constant.
        how: it is computed of the model's tensors, and of constants that are.
    """

    path: str
    how: TrainableConstant

    def made(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The constant by its path, from the model's tensors, and other constants', by path."""
        return {self.path: self.how.value(tensors)}


@dataclass(frozen=True)
class ParameterRows:
    """Some rows of a parameter, as the query's of an attention's three projections.

    Attributes:
        part: path of the constant.
        whole: path of the parameter.
        start, length: which rows, along the first axis.
    """

    part: str
    whole: str
    start: int
    length: int

    @classmethod
    def of(cls, path: str, part: Tensor, tensors: Mapping[str, Tensor]) -> ParameterRows | None:
        """The rows that a constant is, of one of these tensors; None where it shares no memory with any."""
        for whole, tensor in tensors.items():
            same = storage_address(part) == storage_address(tensor) and part.dim() > 0
            if same and (part.stride(), part.shape[1:]) == (tensor.stride(), tensor.shape[1:]):
                start = (part.storage_offset() - tensor.storage_offset()) // (tensor.stride(0) or 1)
                return cls(path, whole, start, len(part))
        return None

    def made(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The constant by its path, from the model's tensors by path."""
        return {self.part: tensors[self.whole].detach().narrow(0, self.start, self.length)}
