"""`Observer`, the base class of modules that find the range of a tensor during calibration."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fxq.errors import CalibrationError, InputError, RecipeError, unknown
from fxq.quant.qparams import QParams, choose_qparams
from fxq.quant.spec import TensorSpec
from fxq.quant.tensor_range import range_of


class Observer(nn.Module, ABC):
    """Module that records the range of a tensor, and returns its input unchanged. Base class of all observers.

    The state is in buffers, which usually do not grow with the data. Observers that saw different parts of the
    calibration data, in different processes for example, can be merged.

    A subclass implements `observe` (record a batch) and `absorb` (merge another observer of the same tensor). It may
    override `unite` (merge an observer of another tensor; default: `absorb`) and `clipped` (clip the range; default:
    no clipping). It registers buffers for any other state. A spec names it by import path:
    `TensorSpec(observer="my_package.ranges:MyObserver")`.

    Attributes:
        options: smallest and largest value of each option, by name. An option is a number, with its default in a class
            attribute of that name. A spec sets options by position or by name, with commas between them:
            "percentile:99.9" or "percentile:percent=99.9".
        per_channel: whether this observer supports an axis.
        keeps_data: whether its buffers hold all values, too many for calibration data.

    The buffers `minimum` and `maximum` are the smallest and the largest value seen, float32, of shape (), (C,), or per
    block that of `QParams.scale`; +inf and -inf before any data. The buffer `met`, bool (number of constants,), says
    whether each constant was seen.

    Args:
        spec: the spec of the tensor.
        axis: the channel axis for one range per channel, the axis that is cut into blocks, or None for one range.
        name: name of the tensor in errors, such as "the input of layer1.conv2".
        constants: fill constants, such as those of masks. Elements equal to one of them are left out of the range. Per
            tensor only.
        **options: values for the options of the class.

    Raises:
        RecipeError: `axis` for a class without `per_channel`, an unknown option, or a value out of its bounds.

    Example:
        >>> observer = fxq.quant.observers.MinMax(TensorSpec(), name="the input of conv1")
        >>> _ = observer(torch.tensor([-1.0, 1.55]))
        >>> observer.qparams().z
        100
    """

    per_channel: ClassVar[bool] = True
    keeps_data: ClassVar[bool] = False
    options: ClassVar[Mapping[str, tuple[float, float]]] = {}

    minimum: Tensor
    maximum: Tensor
    met: Tensor

    def __init__(
        self,
        spec: TensorSpec,
        axis: int | None = None,
        name: str = "",
        constants: Sequence[float] = (),
        **options: float,
    ) -> None:
        super().__init__()
        for key, value in options.items():
            setattr(self, key, self.check_option(key, value))
        self.spec, self.axis, self.name, self.paused, self.met_empty = spec, axis, name, False, False
        self.block: int | None = None
        self.constants = tuple(constants)
        if axis is not None and not self.per_channel:
            raise RecipeError(
                f"{self._tensor}: the {spec.observer!r} observer has one range per tensor, not one per channel. "
                "Set observer='minmax' or 'mse', or per='tensor'."
            )
        self.register_buffer("minimum", torch.tensor(math.inf))
        self.register_buffer("maximum", torch.tensor(-math.inf))
        self.register_buffer("met", torch.zeros(len(self.constants), dtype=torch.bool))

    @classmethod
    def options_from(cls, text: str) -> dict[str, float]:
        """Return the options, by name, from the text after the observer's name in a spec, such as "percent=99.9".

        Raises:
            RecipeError: an unknown option (the message has the nearest names), or a value out of its bounds.
        """
        options: dict[str, float] = {}
        names = list(cls.options)
        for position, part in enumerate(text.split(",") if text else ()):
            key, named, value = part.strip().rpartition("=")
            if not named and position < len(names):
                key = names[position]
            options[key] = cls.check_option(key or value, value)
        return options

    @classmethod
    def check_option(cls, key: str, value: float | str) -> float:
        """Return the value of an option as a number. Raises `RecipeError` as `options_from` does."""
        if key not in cls.options:
            raise RecipeError(unknown(f"option of the observer {cls.__name__}", key, cls.options))
        smallest, largest = cls.options[key]
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not smallest <= number <= largest:
            raise RecipeError(
                f"observer {cls.__name__}: {key} is {value!r}; it must be from {smallest:g} to {largest:g}."
            )
        return number

    def forward(self, x: Tensor) -> Tensor:
        """Record the values of `x` (floating point, any shape) and return it unchanged.

        Empty tensors, tensors on the meta device, and all tensors while `paused` is true are not recorded.

        Raises:
            CalibrationError: `x` is not floating point, has NaN or Inf, or another number of channels than before.
            InputError: `x` is not a tensor.
        """
        if not isinstance(x, Tensor):
            raise InputError(f"{self._tensor} is {x!r} ({type(x).__name__}); an observer takes a tensor.")
        if not x.is_floating_point():
            raise CalibrationError(
                f"{self._tensor} is {x.dtype}; only floating point tensors can be quantized. "
                f"{'Set the layer to float in the recipe.' if self.name else 'Pass x.float().'}"
            )
        if x.numel() and not x.is_meta and not self.paused:
            with torch.no_grad():
                data = self._data_of(x.detach()) if self.constants else x.detach()
                if data.numel():
                    self.observe(data)
        self.met_empty = self.met_empty or x.numel() == 0
        return x

    def on(self, spec: TensorSpec) -> Observer:
        """Return this observer for the grid of another spec. Shares the buffers, which do not depend on the spec."""
        copied = copy.copy(self)
        copied.spec = spec
        return copied

    def answer_as(self, other: Observer) -> Observer | None:
        """Return an observer of the class and spec of `other` with the data of this one, without a new calibration.

        Its results are the same, bit for bit, as if it had seen the data itself. It shares the buffers. None, if its
        state does not follow from the buffers of this observer.

        Args:
            other: an observer of the same tensor, perhaps of another class or spec.

        Example:
            >>> seen = fxq.quant.observers.Histogram(TensorSpec())
            >>> _ = seen(torch.arange(1000.0))
            >>> asked = fxq.quant.observers.Percentile(TensorSpec(), percent=99.0)
            >>> seen.answer_as(asked).qparams().s < seen.qparams().s, asked.seen
            (True, False)
        """
        same_tensor = (self.axis, self.constants) == (other.axis, other.constants)
        if not same_tensor or not self._records_as(other) or not set(self._buffers).issuperset(other._buffers):
            return None
        answer = copy.copy(other)
        answer._buffers = {name: self._buffers[name] for name in other._buffers}
        answer.met_empty, answer.block = self.met_empty, self.block
        return answer

    def _records_as(self, other: Observer) -> bool:
        """Whether this observer records all that `other` would record of a batch."""
        return type(self) is type(other) and all(getattr(self, key) == getattr(other, key) for key in self.options)

    def merge(self, other: Observer) -> None:
        """Add the data that `other` saw of the same tensor; `other` stays unchanged.

        For an observer of another tensor on the same grid, use `join`.

        Raises:
            InputError: the two differ in class, spec or axis.
            CalibrationError: the two have seen different numbers of channels.
        """
        self._check_same_kind(other)
        self._merge_constants(other)
        if other.seen:
            self.absorb(other)

    def join(self, other: Observer) -> None:
        """Add the data that `other` saw of another tensor on the same grid; `other` stays unchanged.

        A moving average, for example, becomes the union of the two ranges, where `merge` takes their mean.

        Raises:
            InputError, CalibrationError: as for `merge`.
        """
        self._check_same_kind(other)
        self._merge_constants(other)
        if other.seen:
            self.unite(other)

    def _data_of(self, x: Tensor) -> Tensor:
        """Return the elements of `x` that are not constants, and record the constants seen."""
        low, high = range_of(x)
        for i, value in enumerate(self.constants):
            if low <= value <= high:
                equal = x == value
                self.met = self.met | (torch.arange(len(self.constants), device=self.met.device) == i) & equal.any()
                x = x[~equal]
        return x

    def _merge_constants(self, other: Observer) -> None:
        """Add the constants of another observer, which of them it has seen, and its block size."""
        met = dict.fromkeys([*self.constants, *other.constants], False)
        for observer in (self, other):
            for value, seen in zip(observer.constants, observer.met.tolist(), strict=True):
                met[value] = met[value] or seen
        self.constants = tuple(met)
        self.met = torch.tensor(list(met.values()), dtype=torch.bool, device=self.met.device)
        self.met_empty = self.met_empty or other.met_empty
        self.block = other.block if self.block is None else self.block

    def _check_same_kind(self, other: Observer) -> None:
        if (type(self), self.spec, self.axis) != (type(other), other.spec, other.axis):
            raise InputError(
                f"{self._tensor}: cannot merge a {type(other).__name__} observer for {other.spec} on axis {other.axis} "
                f"into a {type(self).__name__} one for {self.spec} on axis {self.axis}; prepare both with one recipe."
            )

    def qparams(self, besides: Sequence[float] = ()) -> QParams:
        """Return scale and zero point for the data seen, on the CPU.

        Args:
            besides: numbers that the grid must cover as well, after clipping.

        Raises:
            CalibrationError: the observer has seen no data, or its `range` or `clipped` returns no range.
        """
        seen = self.checked_range()
        low, high = self._checked("clipped", self.clipped(*seen), seen[0].shape)
        low, high = low.clamp(max=min(besides, default=math.inf)), high.clamp(min=max(besides, default=-math.inf))
        return choose_qparams(low, high, self.spec, self.axis, self.block)

    def _checked(self, method: str, returned: Any, shape: torch.Size | None = None) -> tuple[Tensor, Tensor]:
        """Return what a method of the user's observer returned if it is a range; None as shape: of any shape."""
        where = f"{self._tensor}: {method}() of the observer {type(self).__qualname__!r} returned"
        match returned:
            case (Tensor() as low, Tensor() as high):
                shape = low.shape if shape is None else shape
                if low.shape != shape or high.shape != shape:
                    shapes = f"{list(low.shape)} and {list(high.shape)}"
                    raise CalibrationError(f"{where} tensors of the shapes {shapes}, and not {list(shape)}.")
                if bool((low <= high).all()) and bool(torch.isfinite(torch.stack([low.min(), high.max()])).all()):
                    return low, high
                raise CalibrationError(f"{where} {low} and {high}, no finite range.")
        raise CalibrationError(f"{where} {returned!r}, and not two tensors: smallest and largest value.")

    def checked_range(self) -> tuple[Tensor, Tensor]:
        """Return `range()`, if it is a finite range.

        Raises:
            CalibrationError: it is none, in an observer of the user's; or the observer has seen no data.
        """
        return self._checked("range", self.range())

    def range(self) -> tuple[Tensor, Tensor]:
        """Return the smallest and largest value: float32, 0-d (per tensor) or (C,) (per channel), on the CPU.

        It is 0 to 0 if all values were constants.

        Raises:
            CalibrationError: the observer has seen no data.
        """
        if not self.seen and self.met_constants:
            return torch.zeros(()), torch.zeros(())
        if not self.seen:
            reason = ": all its tensors were empty, such as batches of size 0" if self.met_empty else ""
            remedy = "Calibrate with inputs that reach this layer, or set it to float."
            if not self.name:  # made by `make_observer`
                remedy = "Call the observer on a tensor first."
            raise CalibrationError(f"{self._tensor} has seen no data{reason}. {remedy}")
        return self.minimum.float().cpu(), self.maximum.float().cpu()

    @property
    def met_constants(self) -> tuple[float, ...]:
        """Constants that were seen."""
        return tuple(value for value, met in zip(self.constants, self.met.tolist(), strict=True) if met)

    @property
    def seen_only_zeros(self) -> bool:
        """Whether there was data, and all of it zero."""
        return self.seen and not bool(self.minimum.any() or self.maximum.any())

    def share_up_to(self, bound: float) -> float | None:
        """Return an upper limit of the share of nonzero values, 0 to 1, whose magnitude is at most `bound`.

        It is None if the observer does not know it: only histograms do, and only if no fill constant, which they do not
        count, is that small.

        Args:
            bound: magnitude, in the unit of the values, at least 0.
        """
        return None

    def gap(self) -> tuple[float, float]:
        """Return the widest interval between two values seen that has no value in it; (0.0, 0.0) if not known."""
        return 0.0, 0.0

    def extra_repr(self) -> str:
        return f"{self.spec}" if self.axis is None else f"{self.spec}, axis={self.axis}"

    @property
    def seen(self) -> bool:
        """Whether there was data, constants not counted."""
        return bool((self.minimum <= self.maximum).all())

    @property
    def _tensor(self) -> str:
        return self.name or "the tensor"

    @abstractmethod
    def observe(self, x: Tensor) -> None:
        """Record a batch, floating point, any shape, not empty, on any device."""

    @abstractmethod
    def absorb(self, other: Observer) -> None:
        """Add the data of another observer of the same tensor, of this class and spec."""

    def unite(self, other: Observer) -> None:
        """Add the data of an observer of another tensor on the same grid, of this class and spec."""
        self.absorb(other)

    def clipped(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the range to quantize within the range seen, `low` to `high`: float32, 0-d or (C,), on the CPU."""
        return low, high

    def batch_range(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and largest value of `x`: float32, 0-d or (C,), on the device of the buffers.

        Raises:
            CalibrationError: `x` has NaN or Inf, no such axis, or another number of channels than before.
        """
        if self.axis is not None:
            if not -x.dim() <= self.axis < x.dim():
                raise CalibrationError(f"{self._tensor} has shape {tuple(x.shape)}, and has no axis {self.axis}.")
            if self.spec.block is not None:
                self.block = max(self.spec.block // math.prod(x.shape[2:]), 1)
        low, high = range_of(x, self.axis, self.block)
        low, high = low.to(self.minimum.device, torch.float32), high.to(self.minimum.device, torch.float32)
        smallest, largest = float(low.min()), float(high.max())  # NaN propagates through all of these
        if not (math.isfinite(smallest) and math.isfinite(largest)):
            raise CalibrationError(
                f"{self._tensor} holds NaN or Inf, or values beyond float32 (min {smallest}, max {largest}). Look for "
                f"them in the calibration data, or run the float model on it to find the first layer that produces "
                f"them; leave out that data, or set that layer to float."
            )
        self.check_channels(low)
        return low, high

    def check_channels(self, low: Tensor) -> None:
        """Raise `CalibrationError` if the end of a range (0-d or (C,)) has another number of channels than before."""
        if self.minimum.dim() and self.minimum.shape != low.shape:
            raise CalibrationError(
                f"{self._tensor} has {len(low)} channels on axis {self.axis}, but had {len(self.minimum)} before. "
                f"Set the layer to per-tensor quantization or to float."
            )

    def widen(self, low: Tensor, high: Tensor) -> None:
        """Widen `minimum` and `maximum` to include `low` and `high`, float32, 0-d or (C,)."""
        low, high = low.to(self.minimum.device), high.to(self.minimum.device)
        self.minimum, self.maximum = torch.minimum(self.minimum, low), torch.maximum(self.maximum, high)
