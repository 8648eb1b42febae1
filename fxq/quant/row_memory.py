"""`RowMemory`: memory of states in integers, such as key-value caches, that are appended to in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxq.common.appending import Room
from fxq.quant.packing import Packing
from fxq.quant.quantized_rows import QuantizedRows


class RowMemory:
    """Memory of integers, scales and zero points, (samples, heads, capacity, ...), that successive states share.

    A state has the first entries along axis 2. It is continued without calls of PyTorch for each part.

    Args:
        rooms: memory of the integers, the scales and the zero points.
        packing: how a row of integers is packed into bytes; None: each takes a byte.

    Attributes:
        sizes: samples, heads, and values of a row.
        packing: as above.
        blocks: number of scales of a row.
    """

    def __init__(self, rooms: Sequence[Room], packing: Packing | None = None) -> None:
        self._rooms, self.packing = rooms, packing
        samples, heads, _, depth = rooms[0].memory.shape
        self.sizes = samples, heads, depth if packing is None else packing.count
        self.blocks = rooms[1].memory.shape[3]
        self._places = [(room.memory.data_ptr(), room.memory.stride()[:3]) for room in rooms]

    @classmethod
    def of(cls, parts: Sequence[Tensor], packing: Packing | None = None) -> RowMemory | None:
        """Memory of a state whose parts are results of `extended` along axis 2; its integers may be packed.

        None if they have no such memory, or are not at its start, as of a window that is cut from each state anew.
        """
        if any(part.storage_offset() or not part.is_cpu for part in parts):
            return None
        rooms = [room for part in parts if (room := Room.of(part)) is not None]
        return cls(rooms, packing) if len(rooms) == len(parts) else None

    def claims(self, end: int, count: int) -> bool:
        """Reserve `count` entries after the entry `end`, see `Room.claims`. With gradients enabled, none are."""
        return not torch.is_grad_enabled() and all(room.claims(end, count) for room in self._rooms)

    def parts(self, length: int) -> tuple[Tensor, ...]:
        """Integers, scales and zero points of a state of this length."""
        return tuple(room.memory.narrow(2, 0, length) for room in self._rooms)

    def state(self, length: int) -> QuantizedRows:
        """State of this length."""
        samples, heads, depth = self.sizes
        return QuantizedRows.in_memory(self, (samples, heads, length, depth))

    def numbers(self, length: int) -> list[int]:
        """Address, length, and strides of the first three axes, of each part of a state of this length."""
        return [number for address, strides in self._places for number in (address, length, *strides)]
