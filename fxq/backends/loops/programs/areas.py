"""Where the values of a program lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

ABSOLUTE, ARENA, SCRATCH, GIVEN = range(4)
"""Bases of addresses: memory that lies where it lies, that of values, that of a step while it runs, and from there on
inputs, then outputs."""
LANES = 16
"""So many channels are written at once: each pixel has room for a multiple of them."""
SLACK = 64
"""Bytes behind a value that may be read, and count for nothing."""


class ByteGrid(NamedTuple):
    """What integers stand for: (q - zero) * scale, from `qmin` to `qmax`."""

    scale: float
    zero: int
    qmin: int = 0
    qmax: int = 255


@dataclass(eq=False)
class Area:
    """Memory of a value: images (N, H, W, C) with a border, C floats or bytes to a pixel and room behind them.

    Attributes:
        shape: (N, H, W, C), without the border.
        is_float: whether it is float32, and not uint8; None: not decided yet.
        room: how many elements there are from a pixel to the next; 0: as many as can be written at once.
        base: from where `offset` counts.
        zero: the byte of the border; None: nobody reads it.
        border: rows above, pixels on the left, rows below and pixels on the right.
        first: the step that writes it.
        last: the last step that reads it.
        offset: where it begins, in bytes.
        whole: of what it is a part, which is joined of several; None: of nothing.
        channel: where its channels begin there.
    """

    shape: tuple[int, int, int, int]
    is_float: bool | None = None
    room: int = 0
    base: int = ARENA
    zero: int | None = None
    border: tuple[int, int, int, int] = (0, 0, 0, 0)
    first: int = 0
    last: int = 0
    offset: int = 0
    whole: Area | None = None
    channel: int = 0

    @property
    def wide(self) -> int:
        """Elements from a pixel to the next."""
        if self.whole is not None:
            return self.whole.wide
        return self.room or -(-self.shape[3] // LANES) * LANES

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return 4 if self.is_float else 1

    @property
    def pitch(self) -> int:
        """Elements from a row to the next."""
        if self.whole is not None:
            return self.whole.pitch
        return (self.shape[2] + self.border[1] + self.border[3]) * self.wide

    @property
    def sample(self) -> int:
        """Elements from an image to the next."""
        if self.whole is not None:
            return self.whole.sample
        return (self.shape[1] + self.border[0] + self.border[2]) * self.pitch

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.shape[0] * self.sample * self.size

    def place(self, row: int, column: int) -> int:
        """Elements from its begin to a pixel of the first image; the border has rows and columns below 0."""
        if self.whole is not None:
            return self.whole.place(row, column) + self.channel
        return (row + self.border[0]) * self.pitch + (column + self.border[1]) * self.wide

    @property
    def start(self) -> list[int]:
        """Base and offset of where it begins, with its border."""
        return [self.root.base, self.root.offset]

    @property
    def origin(self) -> list[int]:
        """Base and offset of the first pixel."""
        return [self.root.base, self.root.offset + self.place(0, 0) * self.size]

    @property
    def strides(self) -> list[int]:
        """Bytes to the next image, row and pixel."""
        return [step * self.size for step in (self.sample, self.pitch, self.wide)]

    @property
    def root(self) -> Area:
        """The memory that it is in: its own, or that of what it is a part of."""
        return self if self.whole is None else self.whole.root

    def become_part(self, whole: Area, channel: int) -> None:
        """Lie among the channels of another area, which has its border from now on."""
        whole.widen(self.border, self.zero)
        self.whole, self.channel = whole, channel

    def widen(self, border: Iterable[int], zero: int | None = None) -> bool:
        """Have a border as wide as this at least, of this byte; whether that can be: not if it is of another one."""
        if self.whole is not None:
            return self.whole.widen(border, zero)
        if not any(border):
            return True
        if None not in (self.zero, zero) and self.zero != zero:
            return False
        first, second, third, fourth = map(max, self.border, border)
        self.border = first, second, third, fourth
        self.zero = self.zero if zero is None else zero
        return True


@dataclass
class Arena:
    """The memory of a program.

    Attributes:
        nbytes: how much it is.
        filled: (offset, bytes, value) of what holds borders, which nobody writes.
    """

    nbytes: int = 0
    filled: list[tuple[int, int, int]] = field(default_factory=list)


def laid_out(areas: Iterable[Area]) -> Arena:
    """Give the areas of a program their places. Two that are not in use at once may share one, unless borders differ.

    Args:
        areas: in the order in which they are written. Those that are part of others count as these.
    """
    arena, used = Arena(), list[tuple[Area, tuple[object, ...] | None]]()
    free: dict[tuple[object, ...] | None, list[tuple[int, int]]] = {}
    for area in dict.fromkeys(area.root for area in areas):
        for old in [entry for entry in used if entry[0].last < area.first]:
            used.remove(old)
            free.setdefault(old[1], []).append((_room(old[0]), old[0].offset))
        bordered = any(area.border)
        kind = (area.shape, area.border, area.wide, area.zero) if bordered else None
        room, places = _room(area), free.get(kind, [])
        fit = min((place for place in places if place[0] >= room), default=None)
        if fit is None:
            area.offset = arena.nbytes
            arena.nbytes += room
            if bordered:
                arena.filled.append((area.offset, room, area.zero or 0))
        else:
            places.remove(fit)
            area.offset = fit[1]
            if fit[0] > room:
                places.append((fit[0] - room, fit[1] + room))
        used.append((area, kind))
    return arena


def _room(area: Area) -> int:
    return -(-(area.nbytes + SLACK) // 64) * 64
