"""Memory of the values of a program: shapes, strides, borders, and the layout of all values in one arena."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

ABSOLUTE, ARENA, SCRATCH, EXTERNAL = range(4)
"""Numbers of base addresses: 0, for offsets that are addresses; the memory of values; the scratch memory of the running
step; from `EXTERNAL` on the inputs, then the outputs."""
LANES = 16
"""Channels that are written at once: each pixel has room for a multiple of them."""
SLACK_BYTES = 64
"""Bytes after a value that may be read without effect on any result."""


@dataclass(eq=False)
class Area:
    """Memory of a value: images (N, H, W, C) with a border, and room after the channels of each pixel.

    Attributes:
        shape: (N, H, W, C), without the border.
        is_float: True for float32, False for uint8, None if it is not decided yet.
        room: Elements from a pixel to the next; 0 for C rounded up to `LANES`.
        base: Number of the base address that `offset` counts from.
        zero: Byte of the border; None if no step reads the border.
        border: Rows above, columns on the left, rows below, columns on the right.
        first_step: Index of the step that writes it.
        last_step: Index of the last step that reads it.
        offset: Bytes from the base address.
        parent: Area that has this one among its channels, or inside of its border; None if it has memory of its own.
        parent_channel: Channel of the parent that this area begins at.
        frame: Pixels of the parent's border that belong to this area, in the order of `border`.
    """

    shape: tuple[int, int, int, int]
    is_float: bool | None = None
    room: int = 0
    base: int = ARENA
    zero: int | None = None
    border: tuple[int, int, int, int] = (0, 0, 0, 0)
    first_step: int = 0
    last_step: int = 0
    offset: int = 0
    parent: Area | None = None
    parent_channel: int = 0
    frame: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def pixel_stride(self) -> int:
        """Elements from a pixel to the next."""
        if self.parent is not None:
            return self.parent.pixel_stride
        return self.room or -(-self.shape[3] // LANES) * LANES

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return 4 if self.is_float else 1

    @property
    def row_stride(self) -> int:
        """Elements from a row to the next."""
        if self.parent is not None:
            return self.parent.row_stride
        return (self.shape[2] + self.border[1] + self.border[3]) * self.pixel_stride

    @property
    def sample_stride(self) -> int:
        """Elements from an image to the next."""
        if self.parent is not None:
            return self.parent.sample_stride
        return (self.shape[1] + self.border[0] + self.border[2]) * self.row_stride

    @property
    def nbytes(self) -> int:
        """Bytes of all images, with borders."""
        return self.shape[0] * self.sample_stride * self.size

    def place(self, row: int, column: int) -> int:
        """Elements from the begin of the area to a pixel of the first image.

        Rows and columns of the border have negative indices, or indices beyond the shape.
        """
        if self.parent is not None:
            return self.parent.place(row - self.frame[0], column - self.frame[1]) + self.parent_channel
        return (row + self.border[0]) * self.row_stride + (column + self.border[1]) * self.pixel_stride

    @property
    def start(self) -> list[int]:
        """Base and offset of the begin of the area, with its border."""
        return [self.root.base, self.root.offset]

    @property
    def origin(self) -> list[int]:
        """Base and offset of the first pixel."""
        return [self.root.base, self.root.offset + self.place(0, 0) * self.size]

    @property
    def byte_strides(self) -> list[int]:
        """Bytes to the next image, row and pixel."""
        return [step * self.size for step in (self.sample_stride, self.row_stride, self.pixel_stride)]

    @property
    def root(self) -> Area:
        """Area that owns the memory: this one, or the root of its parent."""
        return self if self.parent is None else self.parent.root

    def become_part(self, parent: Area, parent_channel: int) -> None:
        """Move the area into channels of another one, which takes over its border."""
        parent.widen(self.border, self.zero)
        self.parent, self.parent_channel = parent, parent_channel

    def framed(self, frame: tuple[int, int, int, int], byte: int) -> Area | None:
        """Return an area that also has a frame of this one's border; None if the border has another byte already.

        Args:
            frame: Rows above, columns on the left, rows below, columns on the right.
            byte: Byte of the frame, and of the border around it.
        """
        if not self.widen(frame, byte):
            return None
        n, h, w, c = self.shape
        shape = n, h + frame[0] + frame[2], w + frame[1] + frame[3], c
        return Area(shape, self.is_float, parent=self, frame=frame)

    def widen(self, border: Iterable[int], zero: int | None = None) -> bool:
        """Make the border at least as wide as `border`, with the byte `zero`.

        Returns:
            False, and no change, if the border has another byte already.
        """
        if self.parent is not None:
            wider = [own + framed if own else 0 for own, framed in zip(border, self.frame, strict=True)]
            return self.parent.widen(wider, zero)
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
    """Memory of all values of a program.

    Attributes:
        nbytes: Size in bytes.
        filled: (offset, bytes, value) of areas with borders, which are filled once: no step writes borders.
    """

    nbytes: int = 0
    filled: list[tuple[int, int, int]] = field(default_factory=list)


def lay_out(areas: Iterable[Area]) -> Arena:
    """Set the offsets of areas in one arena. Areas that are not in use at once may share memory.

    Areas with borders share memory only if shape, type, border and byte of the border are equal.

    Args:
        areas: Areas in the order in which they are written. An area with a parent counts as its root.
    """
    arena, used = Arena(), list[tuple[Area, tuple[object, ...] | None]]()
    free: dict[tuple[object, ...] | None, list[tuple[int, int]]] = {}
    for area in dict.fromkeys(area.root for area in areas):
        for old in [entry for entry in used if entry[0].last_step < area.first_step]:
            used.remove(old)
            free.setdefault(old[1], []).append((_room(old[0]), old[0].offset))
        bordered = any(area.border)
        border_kind = (area.shape, area.border, area.pixel_stride, area.zero, area.is_float) if bordered else None
        room, slots = _room(area), free.get(border_kind, [])
        slot = min((free_slot for free_slot in slots if free_slot[0] >= room), default=None)
        if slot is None:
            area.offset = arena.nbytes
            arena.nbytes += room
            if bordered:
                arena.filled.append((area.offset, room, area.zero or 0))
        else:
            slots.remove(slot)
            area.offset = slot[1]
            if slot[0] > room:
                slots.append((slot[0] - room, slot[1] + room))
        used.append((area, border_kind))
    return arena


def _room(area: Area) -> int:
    """Bytes of an area with its slack, a multiple of 64."""
    return -(-(area.nbytes + SLACK_BYTES) // 64) * 64
