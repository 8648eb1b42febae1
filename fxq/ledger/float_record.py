"""What was seen of the float model while it was quantized, and cannot be seen later: numbers, no tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fxq.common.checksums import checksum, stride
from fxq.common.data import Batch
from fxq.common.metrics import nbytes
from fxq.quant.qparams import QParams

BINS = 64

Range = tuple[float, float]


@dataclass(frozen=True)
class Distribution:
    """How the float values of one op were distributed on recorded samples.

    Attributes:
        low, high: the smallest and the largest value.
        counts: how many of the values looked at lie in each of 64 bins of equal width between the two.
        clip: what its integers can stand for, from the smallest to the largest; None where the value stays float.
        outside: share of the values, 0 to 1, that are clipped: more than half a step outside of `clip`.
    """

    low: float
    high: float
    counts: tuple[int, ...]
    clip: Range | None = None
    outside: float = 0.0


@dataclass(frozen=True)
class RecordedInput:
    """Recorded input of the float model, or an item of one.

    Attributes:
        name: keyword or dict key; empty for positional inputs and items of sequences.
        shape, dtype: of the example's; None when that was no plain tensor.
        kind: type of the input; "plain" is a number, bool, string or None.
        parts: items of a container, in order.
        value: value of a plain input.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    kind: Literal["tensor", "tuple", "list", "dict", "plain", "other"] = "tensor"
    parts: tuple[RecordedInput, ...] = ()
    value: bool | int | float | str | None = None


@dataclass(frozen=True)
class FloatRecord:
    """What a quantized model knows of the float model that it was made from.

    Attributes:
        values: the distribution of each op's value, by its name in the ledger: of those that are float tensors. An op
            that ends a node of the final graph has the value of that node: a convolution the one behind its batch norm.
        inputs: the inputs of the example, in order.
        float_bytes: size of the float model's parameters and buffers.
        name: the float model's class.
        weights: a checksum of each of its parameters, by name, see `checksums`.
    """

    values: Mapping[str, Distribution]
    inputs: tuple[RecordedInput, ...]
    float_bytes: int
    name: str
    weights: Mapping[str, int]


def record_of(model: nn.Module, example: Batch, values: Mapping[str, Distribution]) -> FloatRecord:
    """The record of a float model, from the inputs that shapes were found with and the values of its ops."""
    given = [("", value) for value in example.args] + list(example.kwargs.items())
    inputs = tuple(_input(name, value) for name, value in given)
    return FloatRecord(values, inputs, nbytes(model), type(model).__name__, checksums(model))


def checksums(model: nn.Module) -> dict[str, int]:
    """For each parameter, by name, a number that tells other values from these; of a large one, of some at distances.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> before = checksums(layer)
        >>> _ = layer.weight.data.mul_(2)
        >>> checksums(layer) == before
        False
    """
    return {name: checksum(tensor) for name, tensor in model.named_parameters()}


def _input(name: str, value: Any) -> RecordedInput:
    if isinstance(value, Tensor):
        return RecordedInput(name, tuple(value.shape), value.dtype)
    if type(value) in (tuple, list):
        parts = tuple(_input("", part) for part in value)
        return RecordedInput(name, kind="tuple" if isinstance(value, tuple) else "list", parts=parts)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return RecordedInput(name, kind="dict", parts=tuple(_input(key, part) for key, part in value.items()))
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return RecordedInput(name, kind="plain", value=value)
    return RecordedInput(name, kind="other")


def distribution(value: Any, grid: QParams | None = None) -> Distribution | None:
    """The distribution of a value; None when it is no float tensor, or holds no finite number.

    Args:
        value: a tensor of any shape.
        grid: that of its integers, per tensor; None where it stays float.

    Example:
        >>> distribution(torch.tensor([0.0, 1.0, 1.0, 2.0]), QParams.per_tensor(0.25, 0, 0, 4)).outside
        0.25
    """
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() == 0:
        return None
    low, high = (float(end) for end in value.aminmax())
    some = value.detach().reshape(-1)[:: stride(value.numel())].double()
    if not (math.isfinite(low) and math.isfinite(high)):
        some = some[some.isfinite()]
        if some.numel() == 0:
            return None
        low, high = float(some.min()), float(some.max())
    per_unit = BINS / (high - low) if high > low else 0.0
    bins = some.sub(low).mul_(per_unit).to(torch.int32).clamp_(max=BINS - 1)
    counts = tuple(torch.bincount(bins, minlength=BINS).tolist())
    if grid is None or grid.axis is not None:
        return Distribution(low, high, counts)
    clip, half = (float(grid.low), float(grid.high)), grid.s / 2
    clipped = (some < clip[0] - half) | (some > clip[1] + half)
    return Distribution(low, high, counts, clip, float(clipped.double().mean()))
