"""What a recipe asks of one tensor (`TensorSpec`) and of the tensors of one layer, by role (`QuantConfig`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

import torch

from fxq.errors import RecipeError, unknown

PER = ("tensor", "channel", "row")
Range = Literal["calibrated", "dynamic", "fixed", "learned"]
Format = Literal["integer", "float16"]


@dataclass(frozen=True)
class TensorSpec:
    """How one tensor is to be quantized. What is not built yet of this is refused where a recipe is made.

    Attributes:
        bits: width of the integer grid, 2 to 8. A value takes a byte; where the weight alone is in integers, of 4 bits
            or fewer, two share one.
        signed: int8 storage if true, uint8 otherwise.
        symmetric: the grid is symmetric around float zero: zero point 0 (signed) or the middle of the range (unsigned).
        per: what has a scale of its own: the whole "tensor"; each output "channel" (the axis is the op's, see
            `fxq/ops/`); each "row", which is a token; or each block of about that many values along the input
            channels: whole channels of a kernel, and what is left over at the end.
        observer: the observer that finds a calibrated range, with its options: "minmax", "moving_average:0.01",
            "histogram", "percentile:99.99", "entropy", for weights "mse:2", or the import path of one of your own,
            "my_package.ranges:MyObserver" (see `fxq/quant/observers.py`).
        range: where the range comes from: "calibrated" (an observer on calibration data, or on a weight itself),
            "dynamic" at run time, "fixed", or "learned" in training.
        format: "integer"; or "float16", for weights that are kept so: then nothing else of the spec has a meaning.

    Raises:
        RecipeError: a value that no spec can have.

    Example:
        >>> TensorSpec(bits=7).qmax, TensorSpec(signed=True, symmetric=True, per="channel").qmin
        (127, -127)

    Source: Jacob et al. 2018, section 2.1 (affine); Krishnamoorthi 2018, section 2 (symmetric, per channel).
    """

    bits: int = 8
    signed: bool = False
    symmetric: bool = False
    per: Literal["tensor", "channel", "row"] | int = "tensor"
    observer: str = "histogram"
    range: Range = "calibrated"
    format: Format = "integer"

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise RecipeError(f"TensorSpec: bits is {self.bits!r}; it must be an integer from 2 to 8.")
        for key, kind in (("signed", bool), ("symmetric", bool), ("observer", str)):
            if not isinstance(getattr(self, key), kind):
                raise RecipeError(f"TensorSpec: {key} is {getattr(self, key)!r}; it must be a {kind.__name__}.")
        if self.per not in PER and (type(self.per) is not int or self.per < 1):
            raise RecipeError(f"{unknown('value of per in TensorSpec', self.per, PER)} Or a block size, such as 64.")
        if self.range not in get_args(Range):
            raise RecipeError(unknown("value of range in TensorSpec", self.range, get_args(Range)))
        if self.format not in get_args(Format):
            raise RecipeError(unknown("value of format in TensorSpec", self.format, get_args(Format)))

    @property
    def reduced_range(self) -> TensorSpec:
        """This spec with at most 7 bits, see `Recipe.reduce_range`."""
        return replace(self, bits=min(self.bits, REDUCED_RANGE_BITS))

    @property
    def of_table(self) -> TensorSpec:
        """The same for the table of an embedding: blocks of a row have scales where channels of a layer would."""
        by_channel = self.per == "channel" and self.format == "integer"
        return replace(self, per=TABLE_BLOCK) if by_channel else self

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
        if self.format == "float16":
            return torch.float16
        return torch.int8 if self.signed else torch.uint8

    @property
    def block(self) -> int | None:
        """How many values share a scale, where blocks have one each."""
        return self.per if isinstance(self.per, int) else None

    def __str__(self) -> str:
        if self.format != "integer":
            return self.format
        parts = [f"{'int' if self.signed else 'uint'}{self.bits}", "symmetric" if self.symmetric else "affine"]
        parts += [f"per-{self.per}" if self.block is None else f"blocks of {self.per}"] if self.per != "tensor" else []
        return f"{' '.join(parts)} ({self.observer if self.range == 'calibrated' else self.range})"


TABLE_BLOCK = 64
"""How many values of a row of an embedding's table share a scale, unless a recipe says it.

A row's values are not summed up as a layer's are, so that they keep the error of their rounding, and the largest of a
block is smaller than that of a row. The scales take a sixteenth of what the integers do.
"""
REDUCED_RANGE_BITS = 7
"""The bits of the role that gives one up where products of 8 bits overflow."""


def fits_int16(activation: int, weight: int) -> bool:
    """Whether two products of an unsigned activation and a weight, at most so large, add up in int16.

    Kernels for CPUs without VNNI add pairs (`vpmaddubsw`), and what does not fit saturates.

    Example:
        >>> fits_int16(255, 127), fits_int16(127, 127), fits_int16(255, 64)
        (False, True, True)
    """
    return 2 * activation * weight < 2**15


ReducibleRole = Literal["activations", "weights"]
REDUCIBLE_ROLES: tuple[ReducibleRole, ...] = get_args(ReducibleRole)
"""What can give up a bit."""

Role = Literal["activation", "weight", "bias", "state"]
ROLES: tuple[Role, ...] = get_args(Role)
"""What a tensor is to the op that reads it, as its row in the op table says."""

ACTIVATION = TensorSpec()
TRAINED = TensorSpec(observer="moving_average")
DYNAMIC = TensorSpec(per="row", range="dynamic")
DYNAMIC_STATE = replace(DYNAMIC, symmetric=True)
STATE = TensorSpec(symmetric=True)
AS_ACTIVATION = TensorSpec(symmetric=True)
"""For a state, where nothing is said of it: `STATE` where activations are calibrated, else `DYNAMIC_STATE`."""
WEIGHT = TensorSpec(signed=True, symmetric=True, per="channel", observer="minmax")
WEIGHT4 = TensorSpec(bits=4, per=64, observer="minmax")
"""Affine, which is closer than symmetric with so few integers, most of all where weights have outliers."""
FLOAT16 = TensorSpec(signed=True, symmetric=True, observer="minmax", format="float16")


def weight_spec(bits: int, per: Any, dtype: torch.dtype | None) -> TensorSpec:
    """The spec of weights that are stored in so many bits, or as float16.

    Args:
        bits: 4 or fewer: affine in blocks; more: symmetric, per channel.
        per: what has a scale; None: as said.
        dtype: torch.float16, or None for integers.

    Raises:
        RecipeError: another dtype, or bits or scales of float16.
    """
    if dtype not in (None, torch.float16):
        raise RecipeError(f"weight_only: dtype is {dtype}; it must be torch.float16, or None for integers.")
    if dtype is not None and (bits, per) != (8, None):
        raise RecipeError("weight_only: float16 has neither bits nor scales; leave bits and per out.")
    if dtype is not None:
        return FLOAT16
    usual = WEIGHT4 if bits in (2, 3, 4) else WEIGHT
    return replace(usual, bits=bits, per=usual.per if per is None else per)


@dataclass(frozen=True)
class QuantConfig:
    """How one layer is to be quantized: a spec for each role, or None for float. `FLOAT` leaves the layer alone.

    Attributes:
        activation: of the layer's inputs. None, and a spec for the weight: the layer computes in float with a weight
            that is kept in integers.
        weight: of the layer's weight, if it has one; also of the table of an embedding, which has scales for blocks of
            64 values of a row where a layer has one for each channel (but not where a layer has the table for a weight,
            too). For one for each row: `per` its length.
        bias: of its bias. None: as the kernel takes it, int32 with the product of the two scales, or float.
        state: of what a recurrent layer hands on from step to step, where it reads integers. Its range is measured; or,
            which is faster, "calibrated", as that of the layer's input; or "fixed", which is -1..1. It is measured all
            the same where the last cell state of an LSTM is read, too, where that has a projection, or the first state
            is larger than all others (calibrated), and where the layer does not keep its state in -1..1 (fixed). The
            default is as the range of activations is found: calibrated, or measured.

    Example:
        >>> QuantConfig(activation=TensorSpec(observer="minmax")).is_float
        False
    """

    activation: TensorSpec | None = ACTIVATION
    weight: TensorSpec | None = WEIGHT
    bias: TensorSpec | None = None
    state: TensorSpec | None = AS_ACTIVATION

    def __post_init__(self) -> None:
        if self.state is AS_ACTIVATION:
            is_calibrated = isinstance(self.activation, TensorSpec) and self.is_calibrated
            object.__setattr__(self, "state", STATE if is_calibrated else DYNAMIC_STATE)
        for role in ROLES:
            if not isinstance(self.of(role), TensorSpec | None):
                raise RecipeError(f"QuantConfig: {role} is a fxq.TensorSpec or None, not {self.of(role)!r}.")

    def of(self, role: Role) -> TensorSpec | None:
        """The spec for a role; None for float."""
        spec: TensorSpec | None = getattr(self, role)
        return spec

    @property
    def is_float(self) -> bool:
        """Whether the layer stays in float."""
        return all(self.of(role) is None for role in ROLES if role != "state")

    @property
    def is_calibrated(self) -> bool:
        """Whether ranges of activations are found on calibration data."""
        return self.activation is not None and self.activation.range == "calibrated"

    @property
    def fits_int16(self) -> bool:
        """Whether two products of the largest activation and the largest weight add up in int16."""
        if self.activation is None or self.weight is None:
            return True
        return fits_int16(self.activation.qmax, self.weight.qmax)

    def to_dict(self) -> dict[str, Any] | str:
        """Plain data for a recipe file: `"float"`, or by role a spec as a dict, or `"float"`."""
        if self.is_float:
            return "float"
        usual = QuantConfig(self.activation)
        written = [role for role in ROLES if role in ("activation", "weight") or self.of(role) != usual.of(role)]
        return {role: asdict(spec) if (spec := self.of(role)) is not None else "float" for role in written}

    @classmethod
    def from_dict(cls, data: object) -> QuantConfig:
        """Inverse of `to_dict`; takes `per_channel` of older files, too. Raises `RecipeError` naming an unknown key."""
        if data == "float":
            return FLOAT
        if not isinstance(data, dict):
            raise RecipeError(f"a quantization config is 'float' or a table with a table for each role, not {data!r}.")
        return cls(**{key: _spec_from_dict(key, value) for key, value in data.items()})


def without_usual_state(config: QuantConfig) -> QuantConfig:
    """The config with float states, where the state is one that nobody asked for."""
    return replace(config, state=None) if config.state in (STATE, DYNAMIC_STATE) else config


def _spec_from_dict(role: str, value: object) -> TensorSpec | None:
    if role not in ROLES:
        raise RecipeError(unknown("quantization config key", role, ROLES))
    if value == "float":
        return None
    if not isinstance(value, dict):
        raise RecipeError(f"{role} must be a table of TensorSpec fields, or 'float', not {value!r}.")
    value = dict(value)
    if "per_channel" in value and "per" not in value:  # how files of version 0.1 say it
        old = value.pop("per_channel")
        value["per"] = {"True": "channel", "False": "tensor"}.get(str(old), old)
    known = [f.name for f in fields(TensorSpec)]
    for name in value:
        if name not in known:
            raise RecipeError(unknown(f"field of {role}", name, known))
    return TensorSpec(**value)


OF_PRESET = QuantConfig()
"""In a recipe that names no config: the preset's."""
FLOAT = QuantConfig(activation=None, weight=None, state=None)
