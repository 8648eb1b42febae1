"""Record of the float model that a quantized model keeps: distributions of values, inputs, sizes. It has no tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fxq.common.checksums import checksum, stride
from fxq.common.data import Batch
from fxq.common.metrics import nbytes
from fxq.quant.qparams import QParams

BINS = 64
"""Number of bins of a distribution."""
Range = tuple[float, float]


@dataclass(frozen=True)
class Distribution:
    """Distribution of the float values of one op on recorded samples.

    Attributes:
        low, high: smallest and largest value.
        counts: number of the sampled values in each of 64 bins of equal width from `low` to `high`.
        clip: smallest and largest value that its grid can represent; None if the value stays float.
        outside: share of the values, 0 to 1, that are clipped: more than half a step outside `clip`.
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
        shape, dtype: shape and dtype in the example; None if it is not a plain tensor.
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
    """Facts about the float model that a quantized model was made from, and about its own tensors at first.

    Attributes:
        values: distribution of each op's value, by its name in the ledger; float tensors only. The last op of a node of
            the final graph has the value of that node: a convolution has that after its batch norm.
        inputs: inputs of the example, in order.
        float_bytes: bytes of the float model's parameters and buffers.
        name: name of the float model's class.
        weights: checksum of each of its parameters, by name, see `checksums`.
        scaled: names in the ledger of ops whose values the quantized model has divided by factors that depend on data.
        stored: checksum of each tensor of the quantized model's kernels and of its constants, by name, when they were
            last set; None for models of earlier versions.
    """

    values: Mapping[str, Distribution]
    inputs: tuple[RecordedInput, ...]
    float_bytes: int
    name: str
    weights: Mapping[str, int]
    scaled: tuple[str, ...] = ()
    stored: Mapping[str, int] | None = None


def record_of(
    model: nn.Module, example: Batch, values: Mapping[str, Distribution], scaled: tuple[str, ...] = ()
) -> FloatRecord:
    """Return the record of a float model.

    Args:
        model: the float model.
        example: batch that shapes were inferred from.
        values: distributions of the values of its ops, by name.
        scaled: names of ops, see `FloatRecord`.
    """
    named_inputs = [("", value) for value in example.args] + list(example.kwargs.items())
    inputs = tuple(_input(name, value) for name, value in named_inputs)
    return FloatRecord(values, inputs, nbytes(model), type(model).__name__, checksums(model), scaled)


def checksums(model: nn.Module) -> dict[str, int]:
    """Return a checksum of the values of each parameter, by name. Large parameters are sampled at regular distances.

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
    """Return the distribution of a value; None if it is not a float tensor, or has no finite number.

    Args:
        value: tensor of any shape.
        grid: grid of its integers; None if it stays float. Clipping is only counted for grids per tensor.

    Example:
        >>> distribution(torch.tensor([0.0, 1.0, 1.0, 2.0]), QParams.per_tensor(0.25, 0, 0, 4)).outside
        0.25
    """
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() == 0:
        return None
    low, high = (float(end) for end in value.aminmax())
    sampled = value.detach().reshape(-1)[:: stride(value.numel())].to("cpu", torch.float64)
    if not (math.isfinite(low) and math.isfinite(high)):
        sampled = sampled[sampled.isfinite()]
        if sampled.numel() == 0:
            return None
        low, high = float(sampled.min()), float(sampled.max())
    per_unit = BINS / (high - low) if high > low else 0.0
    bins = sampled.sub(low).mul_(per_unit).numpy().astype(np.int64)  # the bins of NumPy take less time for few values
    counts = tuple(np.bincount(np.minimum(bins, BINS - 1, out=bins), minlength=BINS).tolist())
    if grid is None or grid.axis is not None:
        return Distribution(low, high, counts)
    clip, half = (float(grid.low), float(grid.high)), grid.s / 2
    clipped = (sampled < clip[0] - half) | (sampled > clip[1] + half)
    return Distribution(low, high, counts, clip, float(clipped.double().mean()))
