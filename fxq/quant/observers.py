"""Observers: modules on the edges of a graph that find the range of a tensor during calibration.

An observer returns its input as it came. All it knows is in a few buffers whose size does not grow with the data, and
two observers can be merged, so parts of a calibration set can be seen by different processes.

Source: Krishnamoorthi 2018, section 2.5 (min-max and moving average); Migacz 2017 (clipping on a histogram).
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fxq.errors import CalibrationError, InputError, RecipeError, unknown
from fxq.quant import histogram
from fxq.quant.qparams import QParams, choose_qparams
from fxq.quant.spec import TensorSpec


class Observer(nn.Module, ABC):
    """Base of the observers: checks what comes in and leaves to a subclass what to remember of it.

    A subclass says how to take in a batch (`_observe`), how to take in another observer (`_absorb`; `_unite`
    where that is something else for another tensor), and if it clips, which part of the range to keep (`_clipped`).
    Buffers:

        minimum: smallest value seen, float32, 0-d or (C,); +inf before any data.
        maximum: largest value seen, same shape; -inf before any data.
        met: bool (constants,), which of the constants were seen.

    Args:
        spec: the grid that the range is for.
        axis: the channel axis for one range per channel, or None for one per tensor.
        name: what errors call the tensor, such as "the input of layer1.conv2".
        constants: numbers that are no data where they occur, such as what a mask fills in: elements equal to one of
            them are left out. Per tensor only.

    Example:
        >>> observer = MinMax(TensorSpec(), name="the input of conv1")
        >>> _ = observer(torch.tensor([-1.0, 1.55]))
        >>> observer.qparams().z
        100
    """

    per_channel: ClassVar[bool] = True
    """Whether this observer can be made with an axis."""

    minimum: Tensor
    maximum: Tensor
    met: Tensor

    def __init__(
        self, spec: TensorSpec, axis: int | None = None, name: str = "", constants: Sequence[float] = ()
    ) -> None:
        super().__init__()
        self.spec, self.axis, self.name, self.paused, self._met_empty = spec, axis, name, False, False
        self.constants = tuple(constants)
        if axis is not None and not self.per_channel:
            raise RecipeError(
                f"{self._tensor}: the {spec.observer!r} observer has one range per tensor, but the recipe asks for one "
                f"per channel. Set observer='minmax', or per_channel=False."
            )
        self.register_buffer("minimum", torch.tensor(math.inf))
        self.register_buffer("maximum", torch.tensor(-math.inf))
        self.register_buffer("met", torch.zeros(len(self.constants), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        """Take in `x` (float16, bfloat16, float32 or float64, any shape) and return it unchanged.

        Empty tensors and tensors on the meta device have no values and are passed over; so is everything while
        `paused` is true.

        Raises:
            CalibrationError: `x` is not floating point, holds NaN or Inf, or its channels differ from those before.
        """
        if not x.is_floating_point():
            raise CalibrationError(
                f"{self._tensor} is {x.dtype}; only floating point tensors can be quantized. "
                f"Set the layer to float in the recipe."
            )
        if x.numel() and not x.is_meta and not self.paused:
            with torch.no_grad():
                data = self._data_of(x.detach()) if self.constants else x.detach()
                if data.numel():
                    self._observe(data)
        self._met_empty = self._met_empty or x.numel() == 0
        return x

    def on(self, spec: TensorSpec) -> Observer:
        """The same for the grid of another spec: what was seen does not depend on it. Shares the buffers."""
        other = copy.copy(self)
        other.spec = spec
        return other

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
            self._absorb(other)

    def join(self, other: Observer) -> None:
        """Make this observer stand for its tensor and for that of `other`, which share a grid. `other` stays as it is.

        Where `merge` averages, this takes the union: the mean of the ranges of two tensors would fit neither.

        Raises:
            InputError, CalibrationError: as for `merge`.
        """
        self._check_same_kind(other)
        self._meet(other)
        if other.seen:
            self._unite(other)

    def _data_of(self, x: Tensor) -> Tensor:
        """The elements of `x` that are none of the constants; notes which of those there were."""
        low, high = torch.aminmax(flat(x))
        for i, value in enumerate(self.constants):
            if low <= value <= high:
                found = x == value
                self.met = self.met | (torch.arange(len(self.constants), device=self.met.device) == i) & found.any()
                x = x[~found]
        return x

    def _meet(self, other: Observer) -> None:
        """Take over which constants another observer has seen, and that it leaves them out."""
        met = dict.fromkeys([*self.constants, *other.constants], False)
        for observer in (self, other):
            for value, seen in zip(observer.constants, observer.met.tolist(), strict=True):
                met[value] = met[value] or seen
        self.constants = tuple(met)
        self.met = torch.tensor(list(met.values()), dtype=torch.bool, device=self.met.device)

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
        low, high = self._clipped(*self.range())
        low, high = low.clamp(max=min(besides, default=math.inf)), high.clamp(min=max(besides, default=-math.inf))
        return choose_qparams(low, high, self.spec, self.axis)

    def range(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest value: float32, 0-d (per tensor) or (C,) (per channel), on the CPU.

        Where there was nothing but constants it is 0 to 0.

        Raises:
            CalibrationError: no data was seen.
        """
        if not self.seen and self.met_constants:
            return torch.zeros(()), torch.zeros(())
        if not self.seen:
            why = ": what reached it was empty, as are batches of size 0" if self._met_empty else ""
            raise CalibrationError(
                f"{self._tensor} has seen no data{why}. Calibrate with inputs that reach this layer, or set it to "
                "float."
            )
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
        return self.name or "an unnamed tensor"

    @abstractmethod
    def _observe(self, x: Tensor) -> None:
        """Take in a batch."""

    @abstractmethod
    def _absorb(self, other: Observer) -> None:
        """Take in what another observer of the same tensor has seen."""

    def _unite(self, other: Observer) -> None:
        self._absorb(other)

    def _clipped(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return low, high

    def _batch_range(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest value of `x`, float32, 0-d or (C,), on the device of the buffers; all finite."""
        if self.axis is None:
            low, high = torch.aminmax(flat(x))
        else:
            if not -x.dim() <= self.axis < x.dim():
                raise CalibrationError(f"{self._tensor} has shape {tuple(x.shape)}, so there is no axis {self.axis}.")
            low, high = torch.aminmax(x.movedim(self.axis, 0).flatten(1) if x.dim() > 1 else x[:, None], dim=1)
        low, high = low.to(self.minimum.device, torch.float32), high.to(self.minimum.device, torch.float32)
        least, most = float(low.min()), float(high.max())  # NaN propagates through all of these
        if not (math.isfinite(least) and math.isfinite(most)):
            raise CalibrationError(
                f"{self._tensor} holds NaN or Inf, or values beyond float32 (min {least}, max {most}). Look for them "
                f"in the calibration data, or run the float model on it to find the first layer that makes them; "
                f"leave out that data, or set that layer to float."
            )
        self._check_channels(low)
        return low, high

    def _check_channels(self, low: Tensor) -> None:
        if self.minimum.dim() and self.minimum.shape != low.shape:
            raise CalibrationError(
                f"{self._tensor} has {len(low)} channels on axis {self.axis}, but had {len(self.minimum)} before. "
                f"Set the layer to per-tensor quantization or to float."
            )

    def _widen(self, low: Tensor, high: Tensor) -> None:
        self.minimum, self.maximum = torch.minimum(self.minimum, low), torch.maximum(self.maximum, high)


class MinMax(Observer):
    """The smallest and largest value ever seen. Exact, but one outlier stretches the grid.

    Source: Krishnamoorthi 2018, section 2.5.
    """

    def _observe(self, x: Tensor) -> None:
        self._widen(*self._batch_range(x))

    def _absorb(self, other: Observer) -> None:
        self._check_channels(other.minimum)
        self._widen(other.minimum.to(self.minimum.device), other.maximum.to(self.minimum.device))


class MovingAverage(Observer):
    """Exponential moving average of the batches' smallest and largest values; the first batch starts it.

    The only observer that depends on how the data is batched and ordered. `merge` takes the mean weighted by the
    number of batches, `join` the union. Buffer: `batches`, int64, 0-d.

    Source: Jacob et al. 2018, section 3.1; Krishnamoorthi 2018, section 2.5.
    """

    constant: ClassVar[float] = 0.01
    """Weight of a new batch."""

    batches: Tensor

    def __init__(
        self, spec: TensorSpec, axis: int | None = None, name: str = "", constants: Sequence[float] = ()
    ) -> None:
        super().__init__(spec, axis, name, constants)
        self.register_buffer("batches", torch.tensor(0))

    def _observe(self, x: Tensor) -> None:
        self._average(*self._batch_range(x), weight=self.constant if self.seen else 1.0)
        self.batches = self.batches + 1

    def _absorb(self, other: Observer) -> None:
        other = cast("MovingAverage", other)  # merge has checked it
        self._check_channels(other.minimum)
        total = self.batches + other.batches.to(self.batches.device)
        device = self.minimum.device
        self._average(other.minimum.to(device), other.maximum.to(device), weight=float(other.batches / total))
        self.batches = total

    def _unite(self, other: Observer) -> None:
        other = cast("MovingAverage", other)
        self._check_channels(other.minimum)
        self._widen(other.minimum.to(self.minimum.device), other.maximum.to(self.minimum.device))
        self.batches = torch.maximum(self.batches, other.batches.to(self.batches.device))

    def _average(self, low: Tensor, high: Tensor, weight: float) -> None:
        if weight == 1.0:
            self.minimum, self.maximum = low, high
        else:
            self.minimum, self.maximum = self.minimum.lerp(low, weight), self.maximum.lerp(high, weight)


class Histogram(Observer):
    """The range whose grid has the smallest squared error over all values seen, found on a histogram.

    Every value is counted, in bins that double in width when the range outgrows them. The result is the same bit for
    bit however the data was batched, ordered or spread over observers that were merged. Buffers:

        counts: int64, see `fxq/quant/histogram.py`.
        exponent: int64, 0-d; the bins are 2**exponent wide.

    Source: `fxq.quant.histogram.clip_range`.
    """

    per_channel = False

    counts: Tensor
    exponent: Tensor

    def __init__(
        self, spec: TensorSpec, axis: int | None = None, name: str = "", constants: Sequence[float] = ()
    ) -> None:
        super().__init__(spec, axis, name, constants)
        self.register_buffer("counts", histogram.empty_counts())
        self.register_buffer("exponent", torch.tensor(histogram.MIN_EXPONENT))

    def _observe(self, x: Tensor) -> None:
        values = flat(x).float()
        self._widen(*self._batch_range(values))
        bound = max(-float(self.minimum), float(self.maximum))
        self._coarsen_to(histogram.exponent_for(bound))
        # Not in place: a buffer made under torch.inference_mode could not be written outside of it.
        self.counts = self.counts + histogram.count(values, int(self.exponent)).to(self.counts.device)

    def _absorb(self, other: Observer) -> None:
        other = cast("Histogram", other)  # merge has checked it
        self._widen(other.minimum.to(self.minimum.device), other.maximum.to(self.minimum.device))
        self._coarsen_to(int(other.exponent))
        counts = histogram.coarsen(other.counts, int(self.exponent) - int(other.exponent))
        self.counts = self.counts + counts.to(self.counts.device)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.counts = self.counts.clone()  # what is loaded is written into it
        super()._load_from_state_dict(*args, **kwargs)

    def gap(self) -> tuple[float, float]:
        """The widest stretch between two values that holds none."""
        return histogram.widest_gap(self.counts.cpu(), int(self.exponent))

    def _coarsen_to(self, exponent: int) -> None:
        if exponent > int(self.exponent):
            self.counts = histogram.coarsen(self.counts, exponent - int(self.exponent))
            self.exponent = torch.full_like(self.exponent, exponent)

    def _clipped(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        ends = histogram.clip_range(self.counts.cpu(), int(self.exponent), float(low), float(high), self.spec)
        return torch.tensor(ends[0]), torch.tensor(ends[1])


class Percentile(Histogram):
    """The range that leaves out the largest 0.01 % of the values, and also the smallest if there are negative ones.

    Where so few values differ from zero that nothing would be left, the range is that of all values.

    Source: Migacz 2017 and Wu et al. 2020 (arXiv 2004.09602), section 3.4 (calibration).
    """

    percent: ClassVar[float] = 99.99
    """Share of the values below the clipping point at the upper end, and above that at the lower end."""

    def _clipped(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        def at(percent: float) -> Tensor:
            return torch.tensor(histogram.percentile(counts, int(self.exponent), float(low), float(high), percent))

        counts = self.counts.cpu()
        clipped_low = at(100 - self.percent) if low < 0 else low
        clipped_high = at(self.percent) if high > 0 else high
        return (clipped_low, clipped_high) if clipped_low < 0 or clipped_high > 0 else (low, high)


OBSERVERS: dict[str, type[Observer]] = {
    "minmax": MinMax,
    "moving_average": MovingAverage,
    "histogram": Histogram,
    "percentile": Percentile,
}


def make_observer(
    spec: TensorSpec, axis: int | None = None, name: str = "", constants: Sequence[float] = ()
) -> Observer:
    """The observer that `spec` asks for.

    Args:
        spec: the grid; `spec.observer` names the observer.
        axis: the channel axis for one range per channel, or None.
        name: what errors call the tensor.
        constants: numbers that it leaves out.

    Raises:
        RecipeError: there is no such observer, or it has no range per channel.
    """
    if spec.observer not in OBSERVERS:
        raise RecipeError(unknown("observer", spec.observer, OBSERVERS))
    return OBSERVERS[spec.observer](spec, axis, name, constants)


def flat(x: Tensor) -> Tensor:
    """The elements of `x` in one dimension, in the order of memory: without a copy if `x` is dense in any layout.

    `torch.aminmax` is four times as fast on this as on a channels-last tensor as it stands.
    """
    if x.is_contiguous():
        return x.view(-1)
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return x.permute(order).reshape(-1)
