"""Observers, and the functions that make the observer of a spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy
import torch
from torch import Tensor

from fxq.common.source import import_name
from fxq.errors import CalibrationError, RecipeError, unknown
from fxq.quant import histogram
from fxq.quant.entropy import entropy_range
from fxq.quant.least_error import MAX_QUICK_VALUES, QUICK_ZOOMS, ZOOMS, least_range, rows_of
from fxq.quant.observer_base import Observer
from fxq.quant.spec import TensorSpec
from fxq.quant.tensor_range import flat


class MinMax(Observer):
    """Range from the smallest to the largest value seen. One outlier makes the whole grid coarser.

    Source: Krishnamoorthi 2018, section 2.5.
    """

    def observe(self, x: Tensor) -> None:
        self.widen(*self.batch_range(x))

    def absorb(self, other: Observer) -> None:
        self.check_channels(other.minimum)
        self.widen(other.minimum, other.maximum)


class MovingAverage(Observer):
    """Exponential moving average of the smallest and the largest value of each batch.

    The only observer whose result depends on the size and order of batches. `merge` takes the mean weighted by the
    number of batches, `join` the union. Buffer: `batches`, int64, 0-d, the number of batches.

    Source: Jacob et al. 2018, section 3.1; Krishnamoorthi 2018, section 2.5.
    """

    options: ClassVar[Mapping[str, tuple[float, float]]] = {"momentum": (0.0, 1.0)}
    momentum: float = 0.01
    """Weight of a new batch."""

    batches: Tensor

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("batches", torch.tensor(0))

    def observe(self, x: Tensor) -> None:
        self._average(*self.batch_range(x), weight=self.momentum if self.seen else 1.0)
        self.batches = self.batches + 1

    def absorb(self, other: Observer) -> None:
        operand = cast("MovingAverage", other)  # `merge` has checked the class
        self.check_channels(operand.minimum)
        total = self.batches + operand.batches.to(self.batches.device)
        device = self.minimum.device
        self._average(operand.minimum.to(device), operand.maximum.to(device), weight=float(operand.batches / total))
        self.batches = total

    def unite(self, other: Observer) -> None:
        operand = cast("MovingAverage", other)
        self.check_channels(operand.minimum)
        self.widen(operand.minimum, operand.maximum)
        self.batches = torch.maximum(self.batches, operand.batches.to(self.batches.device))

    def _average(self, low: Tensor, high: Tensor, weight: float) -> None:
        if weight == 1.0:
            self.minimum, self.maximum = low, high
        else:
            self.minimum, self.maximum = self.minimum.lerp(low, weight), self.maximum.lerp(high, weight)


class Histogram(Observer):
    """Range whose grid has the smallest squared error over all values seen, computed from a histogram.

    Every value is counted. When the range outgrows the bins, they double in width, exactly: the result is the same, bit
    for bit, for any batches, order or merging of observers. Buffers:

        counts: int64 (SLOTS,), see `fxq/quant/histogram.py`.
        exponent: int64, 0-d; the width of a bin is 2**exponent.
        zeros: int64, 0-d; the number of values that are exactly zero.

    Source: `fxq.quant.histogram.clip_range`.
    """

    per_channel = False

    counts: Tensor
    exponent: Tensor
    zeros: Tensor

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("counts", histogram.empty_counts())
        self.register_buffer("exponent", torch.tensor(histogram.MIN_EXPONENT))
        self.register_buffer("zeros", torch.tensor(0))

    def observe(self, x: Tensor) -> None:
        values = flat(x).float()
        self.widen(*self.batch_range(values))
        bound = max(-float(self.minimum), float(self.maximum))
        self._coarsen_to(histogram.exponent_for(bound))
        # Not in place: a buffer created under torch.inference_mode cannot be written outside of it.
        self.counts = self.counts + histogram.count(values, int(self.exponent)).to(self.counts.device)
        self.zeros = self.zeros + histogram.zeros_in(values)

    def _records_as(self, other: Observer) -> bool:
        """Whether `other` records a histogram too, with any options, or only the smallest and the largest value."""
        return type(other).observe in (type(self).observe, MinMax.observe)

    def absorb(self, other: Observer) -> None:
        operand = cast("Histogram", other)  # `merge` has checked the class
        self.widen(operand.minimum, operand.maximum)
        self._coarsen_to(int(operand.exponent))
        counts = histogram.coarsen(operand.counts, int(self.exponent) - int(operand.exponent))
        self.counts = self.counts + counts.to(self.counts.device)
        self.zeros = self.zeros + operand.zeros.to(self.zeros.device)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.counts = self.counts.clone()  # loading writes in place, which `empty_counts` does not allow
        super()._load_from_state_dict(*args, **kwargs)

    def share_up_to(self, bound: float) -> float | None:
        total, zeros = int(self.counts.sum()), int(self.zeros)
        if not total or any(0 < abs(constant) <= bound for constant in self.met_constants):
            return None
        small = histogram.count_up_to(self.counts.cpu(), int(self.exponent), bound) - zeros
        return small / (total - zeros) if total > zeros else 0.0

    def gap(self) -> tuple[float, float]:
        """Return the widest interval between two values seen that has no value in it, to a bin."""
        return histogram.widest_gap(self.counts.cpu(), int(self.exponent))

    def _coarsen_to(self, exponent: int) -> None:
        if exponent > int(self.exponent):
            self.counts = histogram.coarsen(self.counts, exponent - int(self.exponent))
            self.exponent = torch.full_like(self.exponent, exponent)

    def _check_counted(self, low: Tensor, high: Tensor) -> None:
        """Raise `CalibrationError` for a range of the user's that is wider than the values whose histogram clips it."""
        smallest, largest = min(float(self.minimum), 0.0), max(float(self.maximum), 0.0)
        if low < smallest or high > largest:
            raise CalibrationError(
                f"{self._tensor}: range() of the observer {type(self).__qualname__!r} returned {float(low):g} to "
                f"{float(high):g}, wider than the values that it has counted, {smallest:g} to {largest:g}. clipped() "
                "chooses a range within these: override clipped(), and return the wider range there."
            )

    def clipped(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        self._check_counted(low, high)
        ends = histogram.clip_range(self.counts.cpu(), int(self.exponent), float(low), float(high), self.spec)
        return torch.tensor(ends[0]), torch.tensor(ends[1])


class Percentile(Histogram):
    """Range that clips the largest values, by default 0.01 %, and the smallest ones if some are negative.

    If almost all values are zero, so that the clipped range would be empty, it is the range of all values.

    Source: Migacz 2017 and Wu et al. 2020 (arXiv 2004.09602), section 3.4 (calibration).
    """

    options: ClassVar[Mapping[str, tuple[float, float]]] = {"percent": (50.0, 100.0)}
    percent: float = 99.99
    """Percentage of the values below the upper clipping point, and above the lower one."""

    def clipped(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        def at(percent: float) -> Tensor:
            return torch.tensor(histogram.percentile(counts, int(self.exponent), float(low), float(high), percent))

        counts = self.counts.cpu()
        clipped_low = at(100 - self.percent) if low < 0 else low
        clipped_high = at(self.percent) if high > 0 else high
        return (clipped_low, clipped_high) if clipped_low < 0 or clipped_high > 0 else (low, high)


class Entropy(Histogram):
    """Range whose integers have the smallest Kullback-Leibler divergence from the distribution of the values.

    It clips more than `Histogram`, since an outlier counts like any other value, however large its error is.

    Source: `fxq.quant.entropy.entropy_range`.
    """

    def clipped(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        self._check_counted(low, high)
        ends = entropy_range(self.counts.cpu(), int(self.exponent), float(low), float(high), self.spec)
        return torch.tensor(ends[0]), torch.tensor(ends[1])


class LeastError(Observer):
    """Range whose grid has the smallest error over all values seen, per tensor, channel or block; for weights.

    It stores all values, so that recipes refuse it for calibration data; use `Histogram` there. The result is the same
    for any batches, order or merging of observers. Buffer: `values`, float32, the shape of `minimum` and one axis more,
    sorted along that axis.

    Source: `fxq.quant.least_error.least_range`.
    """

    keeps_data = True
    options: ClassVar[Mapping[str, tuple[float, float]]] = {"power": (1.0, 8.0), "emphasis": (0.0, 100.0)}
    power: float = 2.0
    """Exponent of the error: the sum of abs(error) ** power is minimized."""
    emphasis: float = 0.0
    """How much more the errors of large values count, see `fxq.quant.least_error.least_range`."""
    search: Callable[..., tuple[Tensor, Tensor]] = staticmethod(least_range)
    """Function with the arguments and results of `least_range`; a backend may have a faster one."""

    values: Tensor

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("values", torch.empty(0))

    def observe(self, x: Tensor) -> None:
        self.widen(*self.batch_range(x))
        self._store(rows_of(x, self.axis, self.block).to(self.minimum.device, torch.float32))

    def absorb(self, other: Observer) -> None:
        operand = cast("LeastError", other)  # `merge` has checked the class
        self.check_channels(operand.minimum)
        self.widen(operand.minimum, operand.maximum)
        self._store(operand.values.to(self.minimum.device))

    def _store(self, values: Tensor) -> None:
        values = torch.cat([self.values, values], -1) if self.values.numel() else values
        # NumPy sorts rows of some tens of values many times as fast as PyTorch
        self.values = torch.from_numpy(numpy.sort(values.numpy(), -1)) if values.is_cpu else values.sort(-1).values

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in ("minimum", "maximum", "values"):  # loading writes in place; the shapes differ
            setattr(self, name, torch.empty_like(state_dict[prefix + name]))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def clipped(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        zooms = QUICK_ZOOMS if self.values.shape[-1] <= MAX_QUICK_VALUES else ZOOMS
        return self.search(self.values.cpu(), low, high, self.spec, self.power, zooms=zooms, emphasis=self.emphasis)


OBSERVERS: dict[str, type[Observer]] = {
    "minmax": MinMax,
    "moving_average": MovingAverage,
    "histogram": Histogram,
    "percentile": Percentile,
    "entropy": Entropy,
    "mse": LeastError,
}


def observer_named(text: str) -> tuple[type[Observer], dict[str, float]]:
    """Return the class and the options of an observer from its name in a spec.

    Args:
        text: a name of `OBSERVERS`, or the import path of your own class (`package.module:Class`); options follow after
            a colon.

    Raises:
        RecipeError: an unknown observer or option (the message has the nearest names), or a value out of its bounds.

    Example:
        >>> observer_named("percentile:99.9")[1], observer_named("fxq.quant.observers:Percentile:percent=95")[1]
        ({'percent': 99.9}, {'percent': 95.0})
    """
    name, _, rest = text.partition(":")
    if name in OBSERVERS:
        return OBSERVERS[name], OBSERVERS[name].options_from(rest)
    path, _, rest = rest.partition(":")
    if not path.replace(".", "").isidentifier():
        raise RecipeError(unknown("observer", name, OBSERVERS))
    observer_type = import_name(f"{name}:{path}", Observer)
    return observer_type, observer_type.options_from(rest)


def observer_for(
    spec: TensorSpec, axis: int | None = None, name: str = "", constants: Sequence[float] = ()
) -> Observer:
    """Make the observer of a spec.

    Args:
        spec: the spec; `spec.observer` names the observer and its options.
        axis: the channel axis for one range per channel, the axis that is cut into blocks, or None.
        name: name of the tensor in errors.
        constants: fill constants, which are left out of the range.

    Raises:
        RecipeError: an unknown observer, or an `axis` for one that has one range per tensor.
    """
    observer_type, options = observer_named(spec.observer)
    return observer_type(spec, axis, name, constants, **options)
