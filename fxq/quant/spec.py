"""Quantization of one tensor (`TensorSpec`) and of the tensors of one layer, by role (`QuantConfig`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

import torch

from fxq.errors import RecipeError, unknown

PER = ("tensor", "channel", "row")
Range = Literal["calibrated", "dynamic", "fixed", "learned"]
Format = Literal["integer", "float16"]
Compute = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class TensorSpec:
    """Quantization of one tensor: bits, sign, granularity, and the source of its range. A frozen dataclass.

    A recipe refuses combinations that are not supported yet, with the reason.

    Attributes:
        bits: width of the integers, 2 to 8. A value takes a byte; weights with 6 bits or fewer of weight-only layers
            take as many bits as they have, and so do those of linear layers with dynamic ranges if they have at most 4
            bits, or scales per block. A state that grows takes as many bits as it has if they are 6 or fewer.
        signed: True: stored as int8; False: as uint8.
        symmetric: whether the zero point is fixed: at 0 if signed, else at the middle of the integers. False: affine,
            the zero point is chosen with the scale.
        per: granularity of the scales. "tensor": one scale. "channel": one per output channel (the axis depends on the
            op). "row": one per row (token). An integer: one per block of that many values along the input channels; a
            block of a convolution's weight has whole kernels, and the last block may be shorter. For a state that
            grows, blocks divide its rows.
        observer: name of the observer that finds a calibrated range, with its options: "minmax", "moving_average:0.01",
            "histogram", "percentile:99.99", "entropy", for weights also "mse:2"; or the import path of your own
            class, "my_package.ranges:MyObserver".
        range: source of the range: "calibrated" (an observer sees calibration data, or the weight), "dynamic"
            (computed at each call), "fixed" (-1..1), or "learned" in training.
        format: "integer", or "float16" for weights that are stored as float16; the other fields then have no effect.

    Raises:
        RecipeError: a field has an invalid value.

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
    def for_embedding(self) -> TensorSpec:
        """This spec for the table of an embedding: per block of a row instead of per channel."""
        by_channel = self.per == "channel" and self.format == "integer"
        return replace(self, per=EMBEDDING_BLOCK_SIZE) if by_channel else self

    @property
    def qmin(self) -> int:
        """Smallest integer of the grid: without -2**(bits-1) if signed and symmetric, so that -x is on it if x is."""
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
        """Number of values that share a scale, for a spec per block; else None."""
        return self.per if isinstance(self.per, int) else None

    @property
    def is_for_growing_states(self) -> bool:
        """Whether it is a spec that states that grow are stored with: `CACHE`, with any bits, per row or per block."""
        per = CACHE.per if self.block is None else self.block
        return self == replace(CACHE, bits=self.bits, observer=self.observer, per=per)

    def __str__(self) -> str:
        if self.format != "integer":
            return self.format
        parts = [f"{'int' if self.signed else 'uint'}{self.bits}", "symmetric" if self.symmetric else "affine"]
        parts += [f"per-{self.per}" if self.block is None else f"blocks of {self.per}"] if self.per != "tensor" else []
        return f"{' '.join(parts)} ({self.observer if self.range == 'calibrated' else self.range})"


EMBEDDING_BLOCK_SIZE = 64
"""Default number of values of a row of an embedding's table that share a scale.

A layer sums products with its weight, so that their rounding errors average out. An embedding returns the rows of its
table, with their rounding errors; so each block has a scale of its own, at most that of the row. The scales add 1/16 to
the size of the integers.
"""
REDUCED_RANGE_BITS = 7
"""Bits of the role that `Recipe.reduce_range` selects, where sums of 8-bit products saturate, see `fits_int16`."""


def fits_int16(activation: int, weight: int) -> bool:
    """Whether the sum of two products of these largest integers fits into int16.

    Kernels for CPUs without VNNI add products in pairs (`vpmaddubsw`); a sum that does not fit saturates.

    Args:
        activation: largest unsigned integer of the activation.
        weight: largest magnitude of the weight.

    Example:
        >>> fits_int16(255, 127), fits_int16(127, 127), fits_int16(255, 64)
        (False, True, True)
    """
    return 2 * activation * weight < 2**15


ReducibleRole = Literal["activations", "weights"]
REDUCIBLE_ROLES: tuple[ReducibleRole, ...] = get_args(ReducibleRole)
"""Roles that can have 7 bits, see `Recipe.reduce_range`."""

Role = Literal["activation", "weight", "bias", "state"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Parts that a tensor can play for the op that reads it; the op table has them."""

ACTIVATION = TensorSpec()
TRAINED = TensorSpec(observer="moving_average")
DYNAMIC = TensorSpec(per="row", range="dynamic")
DYNAMIC_STATE = replace(DYNAMIC, symmetric=True)
STATE = TensorSpec(symmetric=True)
DEFAULT_STATE = TensorSpec(symmetric=True)
"""Placeholder: `QuantConfig` replaces it by `STATE` if activations are calibrated, else by `DYNAMIC_STATE`."""
CACHE = TensorSpec(per="row", range="dynamic")
"""Spec of a state that grows, such as a key-value cache, in integers: a grid for each row, so per token and head.

It is affine, since some values of a key are large and of one sign in all tokens.
"""
CACHE_TEXT = 'fxq.TensorSpec(per="row", range="dynamic")'
"""Code of `CACHE`, for messages."""
WEIGHT = TensorSpec(signed=True, symmetric=True, per="channel", observer="minmax")
WEIGHT4 = TensorSpec(bits=4, per=64, observer="mse:emphasis=4")
"""Default of 4-bit weights. Affine, since with 16 integers it has a smaller error than symmetric.

Ranges of plain least squares clip the largest weights, which lose more in the output than their squared error says.
"""
WEIGHT3 = TensorSpec(bits=3, per=64, observer="mse")
"""Default of weights of 2 and 3 bits, with so few integers that clipping gains more than it loses."""
FLOAT16 = TensorSpec(signed=True, symmetric=True, observer="minmax", format="float16")


def is_low_bit(spec: TensorSpec | None) -> bool:
    """Whether a spec has integers of 4 bits or fewer."""
    return spec is not None and spec.format == "integer" and spec.bits <= LOW_BITS


LOW_BITS = 4
"""Bits of a weight up to which rounding to nearest loses much."""


def weight_spec(bits: int, per: Any, dtype: torch.dtype | None) -> TensorSpec:
    """Spec of the weights of `Recipe.weight_only`.

    Args:
        bits: 2 to 4: affine, per block of 64; 5 to 8: symmetric, per channel.
        per: granularity of the scales as in `TensorSpec`; None: as above.
        dtype: torch.float16, or None for integers.

    Raises:
        RecipeError: another dtype, or float16 with `bits` or `per`.
    """
    if dtype not in (None, torch.float16):
        raise RecipeError(f"weight_only: dtype is {dtype}; it must be torch.float16, or None for integers.")
    if dtype is not None and (bits, per) != (8, None):
        raise RecipeError("weight_only: float16 weights have no scales; leave out bits and per.")
    if dtype is not None:
        return FLOAT16
    default = {2: WEIGHT3, 3: WEIGHT3, 4: WEIGHT4}.get(bits, WEIGHT)
    return replace(default, bits=bits, per=default.per if per is None else per)


@dataclass(frozen=True)
class QuantConfig:
    """Quantization of one layer: a spec for each role, or None for float. `fxq.FLOAT` keeps the whole layer in float.

    Attributes:
        activation: spec of the layer's inputs. None with a spec for the weight: weight-only, the layer computes in
            float with a weight that is stored as integers.
        weight: spec of the layer's weight, or of an embedding's table. If the spec is per channel, a table has one
            scale per block of 64 values of a row, unless a layer that reads integers uses the table as its weight, too.
            For one scale per row, set `per` to the length of a row.
        bias: spec of the bias. None: the format of the kernel, int32 (scale: product of the scales of input and weight)
            or float.
        state: spec of the states of the layer. For a state that grows from call to call, such as a key-value cache,
            TensorSpec(per="row", range="dynamic") stores it as integers, with a scale and a zero point for each row
            (token and head), and TensorSpec(bits=4, per=32, range="dynamic") for each 32 values of a row; with any
            other spec, it stays in float. For the hidden state of a recurrent layer that
            reads integers, the range is "dynamic", "calibrated" (faster), or "fixed" (-1..1). Default: "calibrated" if
            the range of activations is, else "dynamic". A range that would be wrong is replaced by a dynamic one: a
            calibrated range for an LSTM with a projection, for an LSTM whose last cell state is read, and where the
            first state is larger than all later ones; a fixed range where the state can leave -1..1.
        compute: "bfloat16" allows a weight-only linear layer to multiply in bfloat16, where its kernels are faster on
            this machine: inputs and sums are rounded to 8 bits. "float32" does not.

    Example:
        >>> QuantConfig(activation=TensorSpec(observer="minmax")).is_float
        False
    """

    activation: TensorSpec | None = ACTIVATION
    weight: TensorSpec | None = WEIGHT
    bias: TensorSpec | None = None
    state: TensorSpec | None = DEFAULT_STATE
    compute: Compute = "float32"

    def __post_init__(self) -> None:
        if self.compute not in get_args(Compute):
            raise RecipeError(unknown("value of compute in QuantConfig", self.compute, get_args(Compute)))
        if self.state is DEFAULT_STATE:
            is_calibrated = isinstance(self.activation, TensorSpec) and self.is_calibrated
            object.__setattr__(self, "state", STATE if is_calibrated else DYNAMIC_STATE)
        for role in ROLES:
            if not isinstance(self.of(role), TensorSpec | None):
                raise RecipeError(f"QuantConfig: {role} is a fxq.TensorSpec or None, not {self.of(role)!r}.")

    def of(self, role: Role) -> TensorSpec | None:
        """Spec of a role; None for float."""
        spec: TensorSpec | None = getattr(self, role)
        return spec

    @property
    def is_float(self) -> bool:
        """Whether the layer stays in float."""
        return all(self.of(role) is None for role in ROLES if role != "state")

    @property
    def is_calibrated(self) -> bool:
        """Whether the ranges of activations come from calibration data."""
        return self.activation is not None and self.activation.range == "calibrated"

    @property
    def fits_int16(self) -> bool:
        """Whether the sum of two products of the largest activation and weight fits into int16."""
        if self.activation is None or self.weight is None:
            return True
        return fits_int16(self.activation.qmax, self.weight.qmax)

    def to_dict(self) -> dict[str, Any] | str:
        """Plain data for a recipe file: `"float"`, or for each role the spec as a dict or `"float"`, and `compute`."""
        if self.is_float and (self.state is None or without_default_state(self).state is None):
            return "float"
        default = QuantConfig(self.activation)
        written = [role for role in ROLES if role in ("activation", "weight") or self.of(role) != default.of(role)]
        specs: dict[str, Any] = {
            role: asdict(spec) if (spec := self.of(role)) is not None else "float" for role in written
        }
        return specs if self.compute == default.compute else {**specs, "compute": self.compute}

    @classmethod
    def from_dict(cls, data: object) -> QuantConfig:
        """Inverse of `to_dict`; reads `per_channel` of version 0.1, too. Raises `RecipeError` for an unknown key."""
        if data == "float":
            return FLOAT
        if not isinstance(data, dict):
            raise RecipeError(f"a quantization config is 'float' or a table with one table per role, not {data!r}.")
        specs = {key: _spec_from_dict(key, value) for key, value in data.items() if key != "compute"}
        return cls(**specs, compute=data.get("compute", "float32"))


def without_default_state(config: QuantConfig) -> QuantConfig:
    """The config with a float state, unless the state has a spec other than the defaults."""
    return replace(config, state=None) if config.state in (STATE, DYNAMIC_STATE) else config


def _spec_from_dict(role: str, value: object) -> TensorSpec | None:
    if role not in ROLES:
        raise RecipeError(unknown("quantization config key", role, (*ROLES, "compute")))
    if value == "float":
        return None
    if not isinstance(value, dict):
        raise RecipeError(f"{role} must be a table of TensorSpec fields, or 'float', not {value!r}.")
    value = dict(value)
    if "per_channel" in value and "per" not in value:  # files of version 0.1
        old = value.pop("per_channel")
        value["per"] = {"True": "channel", "False": "tensor"}.get(str(old), old)
    field_names = [f.name for f in fields(TensorSpec)]
    for name in value:
        if name not in field_names:
            raise RecipeError(unknown(f"field of {role}", name, field_names))
    return TensorSpec(**value)


PRESET_CONFIG = QuantConfig()
"""Placeholder: `Recipe` replaces it by the config of its preset."""
FLOAT = QuantConfig(activation=None, weight=None, state=None)
