"""What a recipe asks of one tensor (`TensorSpec`) and of one layer (`QuantConfig`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch

from fxq.errors import RecipeError, unknown


@dataclass(frozen=True)
class TensorSpec:
    """How one tensor is to be quantized.

    Attributes:
        bits: width of the integer grid, 2 to 8. Storage is always one byte.
        signed: int8 storage if true, uint8 otherwise.
        symmetric: the grid is symmetric around float zero: zero point 0 (signed) or the middle of the range (unsigned).
        per_channel: one scale per output channel instead of one per tensor. The axis is the op's (see `fxq/ops/`).
        observer: name of the observer that finds the range (see `fxq/quant/observers.py`).

    Example:
        >>> TensorSpec(bits=7).qmax, TensorSpec(signed=True, symmetric=True).qmin
        (127, -127)

    Source: Jacob et al. 2018, section 2.1 (affine); Krishnamoorthi 2018, section 2 (symmetric, per channel).
    """

    bits: int = 8
    signed: bool = False
    symmetric: bool = False
    per_channel: bool = False
    observer: str = "histogram"

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise RecipeError(f"TensorSpec: bits is {self.bits!r}; it must be an integer from 2 to 8.")
        for key, kind in (("signed", bool), ("symmetric", bool), ("per_channel", bool), ("observer", str)):
            if not isinstance(getattr(self, key), kind):
                raise RecipeError(f"TensorSpec: {key} is {getattr(self, key)!r}; it must be a {kind.__name__}.")

    @property
    def narrowed(self) -> TensorSpec:
        """The same with a bit less than 8, where there are so many."""
        return replace(self, bits=min(self.bits, NARROW_BITS))

    @property
    def qmin(self) -> int:
        """Smallest integer of the grid. Signed symmetric grids leave out -2**(bits-1), so that -x has a value too."""
        if not self.signed:
            return 0
        return -(2 ** (self.bits - 1)) + (1 if self.symmetric else 0)

    @property
    def qmax(self) -> int:
        """Largest integer of the grid."""
        return 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits - 1

    @property
    def dtype(self) -> torch.dtype:
        """Storage type of the quantized tensor."""
        return torch.int8 if self.signed else torch.uint8

    def __str__(self) -> str:
        parts = [f"{'int' if self.signed else 'uint'}{self.bits}", "symmetric" if self.symmetric else "affine"]
        parts += ["per-channel"] if self.per_channel else []
        return f"{' '.join(parts)} ({self.observer})"


NARROW_BITS = 7
"""The bits of the role that gives one up where products of 8 bits overflow."""


def fits_int16(activation: int, weight: int) -> bool:
    """Whether two products of an unsigned activation and a weight, at most so large, add up in int16.

    Kernels for CPUs without VNNI add pairs (`vpmaddubsw`), and what does not fit saturates.

    Example:
        >>> fits_int16(255, 127), fits_int16(127, 127), fits_int16(255, 64)
        (False, True, True)
    """
    return 2 * activation * weight < 2**15


Role = Literal["activations", "weights"]
ROLES: tuple[Role, ...] = ("activations", "weights")
ACTIVATION = TensorSpec()
WEIGHT = TensorSpec(signed=True, symmetric=True, per_channel=True, observer="minmax")


@dataclass(frozen=True)
class QuantConfig:
    """How one layer is to be quantized: its input activations and its weight. `FLOAT` leaves it alone.

    Attributes:
        activation: spec of the layer's activation inputs; None together with `weight=None` means float.
        weight: spec of the layer's weight, if it has one.

    Example:
        >>> QuantConfig(activation=TensorSpec(observer="minmax")).is_float
        False
    """

    activation: TensorSpec | None = ACTIVATION
    weight: TensorSpec | None = WEIGHT

    def __post_init__(self) -> None:
        if (self.activation is None) != (self.weight is None):
            raise RecipeError("QuantConfig: give both activation and weight, or neither (that is fxq.FLOAT).")
        if self.activation is not None and self.activation.per_channel:
            raise RecipeError("QuantConfig: activations are quantized per tensor; per_channel=True is for weights.")

    @property
    def is_float(self) -> bool:
        """Whether the layer stays in float."""
        return self.activation is None

    @property
    def fits_int16(self) -> bool:
        """Whether two products of the largest activation and the largest weight add up in int16."""
        if self.activation is None or self.weight is None:
            return True
        return fits_int16(self.activation.qmax, self.weight.qmax)

    def to_dict(self) -> dict[str, Any] | str:
        """Plain data for a recipe file: `"float"`, or the two specs as dicts."""
        if self.activation is None or self.weight is None:
            return "float"
        return {"activation": asdict(self.activation), "weight": asdict(self.weight)}

    @classmethod
    def from_dict(cls, data: object) -> QuantConfig:
        """Inverse of `to_dict`. Raises `RecipeError` naming an unknown key."""
        if data == "float":
            return FLOAT
        if not isinstance(data, dict):
            raise RecipeError(f"a quantization config is 'float' or a table with activation and weight, not {data!r}.")
        specs = {key: _spec_from_dict(key, value) for key, value in data.items()}
        return cls(**specs)


def _spec_from_dict(key: str, value: object) -> TensorSpec:
    if key not in ("activation", "weight"):
        raise RecipeError(unknown("quantization config key", key, ["activation", "weight"]))
    if not isinstance(value, dict):
        raise RecipeError(f"{key} must be a table of TensorSpec fields, not {value!r}.")
    known = [f.name for f in fields(TensorSpec)]
    for name in value:
        if name not in known:
            raise RecipeError(unknown(f"field of {key}", name, known))
    return TensorSpec(**value)


FLOAT = QuantConfig(activation=None, weight=None)
