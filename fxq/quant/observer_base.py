"""What an observer is: a module on an edge of a graph that finds the range of a tensor during calibration.

An observer returns its input as it came. All it knows is in a few buffers whose size does not grow with the data, and
two observers can be merged, so parts of a calibration set can be seen by different processes.
The kinds are in `fxq/quant/observers.py`.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from fxq.errors import CalibrationError, InputError, RecipeError, unknown
from fxq.quant.qparams import QParams, choose_qparams
from fxq.quant.spec import TensorSpec
from fxq.quant.tensor_range import range_of


class Observer(nn.Module, ABC):
    """Base of the observers: checks what comes in and leaves to a subclass what to remember of it.

    A subclass says how to take in a batch (`observe`), how to take in another observer (`absorb`; `unite`
    where that is something else for another tensor), and if it clips, which part of the range to keep (`clipped`).
    A class of your own is named in a spec by its import path: `TensorSpec(observer="my_package.ranges:MyObserver")`.
    What it remembers besides stands in buffers of its own. What it can do stands in attributes of the class.

    Attributes:
        options: the least and the largest value of each option, by name. An option is a number, and an attribute of
            the class that holds the default. A spec gives options in its text, in this order or by name:
            "percentile:99.9", or "percentile:percent=99.9"; several with commas between them.
        per_channel: whether this observer can be made with an axis.
        keeps_data: whether it keeps all that it sees, which is too much where that is calibration data.

    Buffers:

        minimum: smallest value seen, float32, 0-d, (C,), or for blocks as `QParams.scale`; +inf before any data.
        maximum: largest value seen, same shape; -inf before any data.
        met: bool (constants,), which of the constants were seen.

    Args:
        spec: the grid that the range is for.
        axis: the channel axis for one range per channel, the axis that is cut where the spec asks for blocks, or None
            for one per tensor.
        name: what errors call the tensor, such as "the input of layer1.conv2".
        constants: numbers that are no data where they occur, such as what a mask fills in: elements equal to one of
            them are left out. Per tensor only.
        **options: values for the options of the class.

    Raises:
        RecipeError: an axis where the class has none, an unknown option, or a value out of its bounds.

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
                f"{self._tensor}: the {spec.observer!r} observer has one range per tensor, not one per channel as is "
                "asked for. Set observer='minmax' or 'mse', or per='tensor'."
            )
        self.register_buffer("minimum", torch.tensor(math.inf))
        self.register_buffer("maximum", torch.tensor(-math.inf))
        self.register_buffer("met", torch.zeros(len(self.constants), dtype=torch.bool))

    @classmethod
    def options_from(cls, text: str) -> dict[str, float]:
        """The options in the part of a spec's text that is behind the observer's name.

        Raises:
            RecipeError: an unknown option (the nearest names are given), or a value out of its bounds.
        """
        found: dict[str, float] = {}
        names = list(cls.options)
        for position, part in enumerate(text.split(",") if text else ()):
            key, named, value = part.strip().rpartition("=")
            if not named and position < len(names):
                key = names[position]
            found[key] = cls.check_option(key or value, value)
        return found

    @classmethod
    def check_option(cls, key: str, value: float | str) -> float:
        """The value of an option as a number. Raises `RecipeError` as `options_from` does."""
        if key not in cls.options:
            raise RecipeError(unknown(f"option of the observer {cls.__name__}", key, cls.options))
        least, most = cls.options[key]
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise RecipeError(f"observer {cls.__name__}: {key} is {value!r}; it must be from {least:g} to {most:g}.")
        return number

    def forward(self, x: Tensor) -> Tensor:
        """Take in `x` (float16, bfloat16, float32 or float64, any shape) and return it unchanged.

        Empty tensors and tensors on the meta device have no values and are passed over; so is everything while
        `paused` is true.

        Raises:
            CalibrationError: `x` is not floating point, holds NaN or Inf, or its channels differ from those before.
            InputError: `x` is no tensor.
        """
        if not isinstance(x, Tensor):
            raise InputError(f"{self._tensor} is {x!r} ({type(x).__name__}); an observer takes a tensor.")
        if not x.is_floating_point():
            raise CalibrationError(
                f"{self._tensor} is {x.dtype}; only floating point tensors can be quantized. "
                f"{'Set the layer to float in the recipe.' if self.name else 'Give it x.float().'}"
            )
        if x.numel() and not x.is_meta and not self.paused:
            with torch.no_grad():
                data = self._data_of(x.detach()) if self.constants else x.detach()
                if data.numel():
                    self.observe(data)
        self.met_empty = self.met_empty or x.numel() == 0
        return x

    def on(self, spec: TensorSpec) -> Observer:
        """The same for the grid of another spec: what was seen does not depend on it. Shares the buffers."""
        other = copy.copy(self)
        other.spec = spec
        return other

    def answer_as(self, other: Observer) -> Observer | None:
        """An observer like `other` that has seen what this one has; None where that does not follow from its buffers.

        The numbers are the same, bit for bit, as if it had been there itself. The two share buffers.

        Args:
            other: for the same tensor, perhaps of another kind, or for the grid of another spec.

        Example:
            >>> seen = fxq.quant.observers.Histogram(TensorSpec())
            >>> _ = seen(torch.arange(1000.0))
            >>> asked = fxq.quant.observers.Percentile(TensorSpec(), percent=99.0)
            >>> seen.answer_as(asked).qparams().s < seen.qparams().s, asked.seen
            (True, False)
        """
        alike = (self.axis, self.constants) == (other.axis, other.constants) and self._looks_as(other)
        if not alike or not set(self._buffers).issuperset(other._buffers):
            return None
        made = copy.copy(other)
        made._buffers = {name: self._buffers[name] for name in other._buffers}
        made.met_empty, made.block = self.met_empty, self.block
        return made

    def _looks_as(self, other: Observer) -> bool:
        """Whether this observer keeps of a batch what `other` would, and perhaps more."""
        return type(self) is type(other) and all(getattr(self, key) == getattr(other, key) for key in self.options)

    def merge(self, other: Observer) -> None:
        """Make this observer what it would be had it also seen all that `other` saw. `other` stays as it is.

        For two observers of one tensor; for two tensors that share a grid, see `join`.

        Raises:
            InputError: the two differ in class, spec or axis.
            CalibrationError: the two have seen different numbers of channels.
        """
        self._check_same_kind(other)
        self._meet(other)
        if other.seen:
            self.absorb(other)

    def join(self, other: Observer) -> None:
        """Make this observer stand for its tensor and for that of `other`, which share a grid. `other` stays as it is.

        Where `merge` averages, this takes the union: the mean of the ranges of two tensors would fit neither.

        Raises:
            InputError, CalibrationError: as for `merge`.
        """
        self._check_same_kind(other)
        self._meet(other)
        if other.seen:
            self.unite(other)

    def _data_of(self, x: Tensor) -> Tensor:
        """The elements of `x` that are none of the constants; notes which of those there were."""
        low, high = range_of(x)
        for i, value in enumerate(self.constants):
            if low <= value <= high:
                found = x == value
                self.met = self.met | (torch.arange(len(self.constants), device=self.met.device) == i) & found.any()
                x = x[~found]
        return x

    def _meet(self, other: Observer) -> None:
        """Take over which constants another observer has seen, and that it leaves them out, and how blocks are cut."""
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
        """Scale and zero point for what was seen, on the CPU, and for these numbers `besides`.

        Raises:
            CalibrationError: no data was seen.
        """
        low, high = self.clipped(*self.range())
        low, high = low.clamp(max=min(besides, default=math.inf)), high.clamp(min=max(besides, default=-math.inf))
        return choose_qparams(low, high, self.spec, self.axis, self.block)

    def range(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest value: float32, 0-d (per tensor) or (C,) (per channel), on the CPU.

        Where there was nothing but constants it is 0 to 0.

        Raises:
            CalibrationError: no data was seen.
        """
        if not self.seen and self.met_constants:
            return torch.zeros(()), torch.zeros(())
        if not self.seen:
            why = ": what reached it was empty, as are batches of size 0" if self.met_empty else ""
            todo = "Calibrate with inputs that reach this layer, or set it to float."
            if not self.name:  # an observer by itself
                todo = "Call the observer on it first."
            raise CalibrationError(f"{self._tensor} has seen no data{why}. {todo}")
        return self.minimum.float().cpu(), self.maximum.float().cpu()

    @property
    def met_constants(self) -> tuple[float, ...]:
        """The constants that were seen."""
        return tuple(value for value, met in zip(self.constants, self.met.tolist(), strict=True) if met)

    @property
    def seen_only_zeros(self) -> bool:
        """Whether there was data, and all of it zero."""
        return self.seen and not bool(self.minimum.any() or self.maximum.any())

    def gap(self) -> tuple[float, float]:
        """The widest stretch between two values that holds none; (0.0, 0.0) where this observer does not know."""
        return 0.0, 0.0

    def extra_repr(self) -> str:
        return f"{self.spec}" if self.axis is None else f"{self.spec}, axis={self.axis}"

    @property
    def seen(self) -> bool:
        """Whether there was data."""
        return bool((self.minimum <= self.maximum).all())

    @property
    def _tensor(self) -> str:
        return self.name or "the tensor"

    @abstractmethod
    def observe(self, x: Tensor) -> None:
        """Take in a batch."""

    @abstractmethod
    def absorb(self, other: Observer) -> None:
        """Take in what another observer of the same tensor has seen."""

    def unite(self, other: Observer) -> None:
        """Take in what an observer of another tensor has seen, which is to be on the same grid."""
        self.absorb(other)

    def clipped(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The part to keep of the range from `low` to `high`, float32, 0-d or (C,), on the CPU."""
        return low, high

    def batch_range(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest value of `x`, float32, 0-d or (C,), on the device of the buffers; all finite."""
        if self.axis is not None:
            if not -x.dim() <= self.axis < x.dim():
                raise CalibrationError(f"{self._tensor} has shape {tuple(x.shape)}, so there is no axis {self.axis}.")
            if self.spec.block is not None:
                self.block = max(self.spec.block // math.prod(x.shape[2:]), 1)
        low, high = range_of(x, self.axis, self.block)
        low, high = low.to(self.minimum.device, torch.float32), high.to(self.minimum.device, torch.float32)
        least, most = float(low.min()), float(high.max())  # NaN propagates through all of these
        if not (math.isfinite(least) and math.isfinite(most)):
            raise CalibrationError(
                f"{self._tensor} holds NaN or Inf, or values beyond float32 (min {least}, max {most}). Look for them "
                f"in the calibration data, or run the float model on it to find the first layer that makes them; "
                f"leave out that data, or set that layer to float."
            )
        self.check_channels(low)
        return low, high

    def check_channels(self, low: Tensor) -> None:
        """Raise `CalibrationError` when the ends of a range (0-d or (C,)) are of another number of channels."""
        if self.minimum.dim() and self.minimum.shape != low.shape:
            raise CalibrationError(
                f"{self._tensor} has {len(low)} channels on axis {self.axis}, but had {len(self.minimum)} before. "
                f"Set the layer to per-tensor quantization or to float."
            )

    def widen(self, low: Tensor, high: Tensor) -> None:
        """Make `minimum` and `maximum` include `low` and `high`, float32, 0-d or (C,)."""
        low, high = low.to(self.minimum.device), high.to(self.minimum.device)
        self.minimum, self.maximum = torch.minimum(self.minimum, low), torch.maximum(self.maximum, high)
