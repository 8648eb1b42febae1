"""`SharedGridGroup`: values that share one grid, since ops only move values between them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fxq.quant.observer_base import Observer
from fxq.quant.qparams import QParams

MAX_SPAN_RATIO = 4.0
"""Values whose span is this many times smaller than that of the group would lose two bits: they get an own grid."""

MAX_CONSTANT_RATIO = 2.0
"""Largest growth of a grid to hold constants. It costs one bit, which is less than a layer in float costs."""


@dataclass(eq=False)
class SharedGridGroup:
    """Group of values that share one grid. It grows while the pass walks the graph.

    Attributes:
        low, high: range of the values, zero included.
        smallest_span: smallest span of the values that an op computes with; ops that only move values do not count.
        observers: observers of the values.
        covered: groups with grids of their own, whose values are also requantized to this grid.
        constants: numbers of masks, pads and fills that the grid must hold.
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
        """Width of the range."""
        return self.high - self.low

    def root(self) -> SharedGridGroup:
        """Group that this group was merged into, or itself."""
        group = self
        while group._into is not None:
            if group._into._into is not None:
                group._into = group._into._into
            group = group._into
        return group

    def cover(self, other: SharedGridGroup) -> None:
        """Make the grid cover the range of another group, which keeps its own grid."""
        self._widen(other)
        self.covered += [other, *other.covered]

    def join(self, other: SharedGridGroup) -> SharedGridGroup:
        """Merge two groups, and return the merged one."""
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
        """Record the span of values that an op computes with."""
        if span > 0:
            self.smallest_span = min(self.smallest_span, span)

    def can_hold(self, constant: float) -> bool:
        """Whether the grid can include a constant without becoming too coarse; always true without other data."""
        span = max(self.high, constant) - min(self.low, constant)
        return math.isfinite(constant) and (self.span == 0 or span <= MAX_CONSTANT_RATIO * self.span)

    def qparams(self, reduce_range: bool = False) -> QParams:
        """Return the grid; call it after the walk. `reduce_range`: with at most 7 bits."""
        groups = dict.fromkeys([self, *(group.root() for group in self.covered)])
        observer = joined_observer([group.observer for group in groups if group.observers])
        if reduce_range:
            observer = observer.on(observer.spec.reduced_range)
        return observer.qparams(sorted(self.constants))

    @cached_property
    def observer(self) -> Observer:
        """Observer with the data of all observers of the group; read it after the walk."""
        return joined_observer(self.observers)


def joined_observer(observers: Sequence[Observer]) -> Observer:
    """Return an observer with the data of all these observers, which stay unchanged."""
    first, *others = observers
    if others:
        first = copy.deepcopy(first)
        for observer in others:
            first.join(observer)
    return first


def group_around(groups: Iterable[SharedGridGroup]) -> SharedGridGroup:
    """Return a new group with the ranges and constants of these groups, and no observers."""
    union = SharedGridGroup()
    for group in groups:
        union._widen(group)
    return union


def group_of(observer: Observer) -> SharedGridGroup:
    """Return a new group for the values of one observer.

    Raises:
        CalibrationError: the observer has seen no data.
    """
    low, high = observer.checked_range()
    return SharedGridGroup(min(float(low), 0.0), max(float(high), 0.0), observers=[observer])
