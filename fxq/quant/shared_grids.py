"""SharedGridGroups: values that can share a grid, as ops hand them on, and the range that the grid has to cover."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fxq.quant.observer_base import Observer
from fxq.quant.qparams import QParams

MAX_SPAN_RATIO = 4.0
"""A grid this many times as wide as the values on it leaves them two bits less: then they get one of their own."""

MAX_CONSTANT_RATIO = 2.0
"""How many times as wide a grid may become for the sake of constants: one bit. A layer in float costs more."""


@dataclass(eq=False)
class SharedGridGroup:
    """Values on one grid, as far as the graph has been gone through.

    Attributes:
        low, high: the range of the data, zero included.
        smallest_span: the smallest span of those values that an op computes with: ops that only move values do not count.
        observers: what has seen the values.
        covered: strands whose values are brought to this grid, too.
        constants: what masks, pads and fills bring in and the grid is to hold as well.
    """

    low: float = 0.0
    high: float = 0.0
    smallest_span: float = math.inf
    observers: list[Observer] = field(default_factory=list)
    covered: list[SharedGridGroup] = field(default_factory=list)
    constants: set[float] = field(default_factory=set)
    _into: SharedGridGroup | None = None

    @property
    def span(self) -> float:
        """How wide the range is."""
        return self.high - self.low

    def root(self) -> SharedGridGroup:
        """The strand that this one has become a part of."""
        grid_group = self
        while grid_group._into is not None:
            if grid_group._into._into is not None:
                grid_group._into = grid_group._into._into
            grid_group = grid_group._into
        return grid_group

    def cover(self, other: SharedGridGroup) -> None:
        """Let the grid hold what another strand's does, while that keeps a grid of its own."""
        self._widen(other)
        self.covered += [other, *other.covered]

    def join(self, other: SharedGridGroup) -> SharedGridGroup:
        """Make one of two strands; the one that both have become."""
        if self is other:
            return self
        large, small = (self, other) if len(self.observers) >= len(other.observers) else (other, self)
        large._widen(small)
        large.observers += small.observers
        large.covered += small.covered
        large.smallest_span = min(large.smallest_span, small.smallest_span)
        small._into = large
        return large

    def _widen(self, other: SharedGridGroup) -> None:
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.constants |= other.constants

    def note_span(self, span: float) -> None:
        """Note that an op computes with values of this span."""
        if span > 0:
            self.smallest_span = min(self.smallest_span, span)

    def can_hold(self, constant: float) -> bool:
        """Whether the grid can hold a constant without becoming much coarser; any where there is no other data."""
        wider = max(self.high, constant) - min(self.low, constant)
        return math.isfinite(constant) and (self.span == 0 or wider <= MAX_CONSTANT_RATIO * self.span)

    def qparams(self, reduce_range: bool = False) -> QParams:
        """The grid, when all of the graph has been gone through; `reduce_range`: with a bit less than 8."""
        shared_grids = dict.fromkeys([self, *(other.root() for other in self.covered)])
        together = joined_observer([grid_group.seen for grid_group in shared_grids if grid_group.observers])
        if reduce_range:
            together = together.on(together.spec.reduced_range)
        return together.qparams(sorted(self.constants))

    @cached_property
    def seen(self) -> Observer:
        """What all of its observers have seen; asked for when all of the graph has been gone through."""
        return joined_observer(self.observers)


def joined_observer(observers: Sequence[Observer]) -> Observer:
    """An observer that stands for the tensors of all of them, which stay as they are."""
    first, *others = observers
    if others:
        first = copy.deepcopy(first)
        for other in others:
            first.join(other)
    return first


def group_around(shared_grids: Iterable[SharedGridGroup]) -> SharedGridGroup:
    """A new strand as wide as all of these, which has seen nothing itself."""
    made = SharedGridGroup()
    for grid_group in shared_grids:
        made._widen(grid_group)
    return made


def group_of(observer: Observer) -> SharedGridGroup:
    """A strand for what an observer has seen.

    Raises:
        CalibrationError: it has seen no data.
    """
    low, high = observer.range()
    return SharedGridGroup(min(float(low), 0.0), max(float(high), 0.0), observers=[observer])
