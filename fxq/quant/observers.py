"""The kinds of observers, and the observer that a spec asks for by name, with its options.

Source: Krishnamoorthi 2018, section 2.5 (min-max and moving average); Migacz 2017 (clipping on a histogram).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from fxq.common.source import import_name
from fxq.errors import RecipeError, unknown
from fxq.quant import histogram
from fxq.quant.entropy import entropy_range
from fxq.quant.least_error import least_range, rows_of
from fxq.quant.observer_base import Observer
from fxq.quant.spec import TensorSpec
from fxq.quant.tensor_range import flat


class MinMax(Observer):
    """The smallest and largest value ever seen. Exact, but one outlier stretches the grid.

    Source: Krishnamoorthi 2018, section 2.5.
    """

    def observe(self, x: Tensor) -> None:
        self.widen(*self.batch_range(x))

    def absorb(self, other: Observer) -> None:
        self.check_channels(other.minimum)
        self.widen(other.minimum, other.maximum)


class MovingAverage(Observer):
    """Exponential moving average of the batches' smallest and largest values; the first batch starts it.

    The only observer that depends on how the data is batched and ordered. `merge` takes the mean weighted by the
    number of batches, `join` the union. Buffer: `batches`, int64, 0-d.

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
        other = cast("MovingAverage", other)  # merge has checked it
        self.check_channels(other.minimum)
        total = self.batches + other.batches.to(self.batches.device)
        device = self.minimum.device
        self._average(other.minimum.to(device), other.maximum.to(device), weight=float(other.batches / total))
        self.batches = total

    def unite(self, other: Observer) -> None:
        other = cast("MovingAverage", other)
        self.check_channels(other.minimum)
        self.widen(other.minimum, other.maximum)
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

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("counts", histogram.empty_counts())
        self.register_buffer("exponent", torch.tensor(histogram.MIN_EXPONENT))

    def observe(self, x: Tensor) -> None:
        values = flat(x).float()
        self.widen(*self.batch_range(values))
        bound = max(-float(self.minimum), float(self.maximum))
        self._coarsen_to(histogram.exponent_for(bound))
        # Not in place: a buffer made under torch.inference_mode could not be written outside of it.
        self.counts = self.counts + histogram.count(values, int(self.exponent)).to(self.counts.device)

    def _looks_as(self, other: Observer) -> bool:
        """Options say what is made of the counts; the smallest and the largest value are known as well."""
        return type(other).observe in (type(self).observe, MinMax.observe)

    def absorb(self, other: Observer) -> None:
        other = cast("Histogram", other)  # merge has checked it
        self.widen(other.minimum, other.maximum)
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

    def clipped(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        ends = histogram.clip_range(self.counts.cpu(), int(self.exponent), float(low), float(high), self.spec)
        return torch.tensor(ends[0]), torch.tensor(ends[1])


class Percentile(Histogram):
    """The range that leaves out the largest values, by default 0.01 %, and also the smallest if some are negative.

    Where so few values differ from zero that nothing would be left, the range is that of all values.

    Source: Migacz 2017 and Wu et al. 2020 (arXiv 2004.09602), section 3.4 (calibration).
    """

    options: ClassVar[Mapping[str, tuple[float, float]]] = {"percent": (50.0, 100.0)}
    percent: float = 99.99
    """Share of the values below the clipping point at the upper end, and above that at the lower end."""

    def clipped(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        def at(percent: float) -> Tensor:
            return torch.tensor(histogram.percentile(counts, int(self.exponent), float(low), float(high), percent))

        counts = self.counts.cpu()
        clipped_low = at(100 - self.percent) if low < 0 else low
        clipped_high = at(self.percent) if high > 0 else high
        return (clipped_low, clipped_high) if clipped_low < 0 or clipped_high > 0 else (low, high)


class Entropy(Histogram):
    """The range in which integers tell most of how the values are distributed: the least Kullback-Leibler divergence.

    It clips more than `Histogram` does: every value counts the same, however far from the others it is.

    Source: `fxq.quant.entropy.entropy_range`.
    """

    def clipped(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        ends = entropy_range(self.counts.cpu(), int(self.exponent), float(low), float(high), self.spec)
        return torch.tensor(ends[0]), torch.tensor(ends[1])


class LeastError(Observer):
    """The range whose grid has the smallest error over all values seen, for each channel or block: meant for weights.

    What `Histogram` finds for a whole tensor, found on the values themselves. They are kept, so that it takes as much
    memory as what it sees; calibration data may be any amount, and recipes refuse it there. The result is the same
    however the data was batched or merged. Buffer: `values`, float32, the shape of `minimum` and one axis more, sorted
    along that one.

    Source: `fxq.quant.least_error.least_range`.
    """

    keeps_data = True
    options: ClassVar[Mapping[str, tuple[float, float]]] = {"power": (1.0, 8.0)}
    power: float = 2.0
    """What magnitudes of errors are raised to before they are summed up."""

    values: Tensor

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("values", torch.empty(0))

    def observe(self, x: Tensor) -> None:
        self.widen(*self.batch_range(x))
        self._keep(rows_of(x, self.axis, self.block).to(self.minimum.device, torch.float32))

    def absorb(self, other: Observer) -> None:
        other = cast("LeastError", other)  # merge has checked it
        self.check_channels(other.minimum)
        self.widen(other.minimum, other.maximum)
        self._keep(other.values.to(self.minimum.device))

    def _keep(self, values: Tensor) -> None:
        self.values = (torch.cat([self.values, values], -1) if self.values.numel() else values).sort(-1).values

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in ("minimum", "maximum", "values"):  # what is loaded is written into them, and has other shapes
            setattr(self, name, torch.empty_like(state_dict[prefix + name]))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def clipped(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return least_range(self.values.cpu(), low, high, self.spec, self.power)


OBSERVERS: dict[str, type[Observer]] = {
    "minmax": MinMax,
    "moving_average": MovingAverage,
    "histogram": Histogram,
    "percentile": Percentile,
    "entropy": Entropy,
    "mse": LeastError,
}


def observer_named(text: str) -> tuple[type[Observer], dict[str, float]]:
    """The class and the options that the text of a spec names.

    Args:
        text: a name of `OBSERVERS`, or the import path of a class of your own (`package.module:Class`); behind a colon,
            its options.

    Raises:
        RecipeError: there is no such observer, or it has no such option or value; the nearest names are given.

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
    made = import_name(f"{name}:{path}", Observer)
    return made, made.options_from(rest)


def observer_for(
    spec: TensorSpec, axis: int | None = None, name: str = "", constants: Sequence[float] = ()
) -> Observer:
    """The observer that `spec` asks for.

    Args:
        spec: the grid; `spec.observer` names the observer and its options.
        axis: the channel axis for one range per channel, or None.
        name: what errors call the tensor.
        constants: numbers that it leaves out.

    Raises:
        RecipeError: there is no such observer, or it has no range per channel.
    """
    made, options = observer_named(spec.observer)
    return made(spec, axis, name, constants, **options)
