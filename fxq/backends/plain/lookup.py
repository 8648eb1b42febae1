"""`Lookup`: elementwise functions of one uint8 tensor, as lookup tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from fxq.backends.kernel import Kernel, activation_refused, refuse
from fxq.backends.plain.converters import chunks, line
from fxq.errors import BackendError
from fxq.quant.qparams import QParams, dequantize, quantize

_MIN_INDEX_SELECT_ELEMENTS = 8192
"""Number of elements below which one `take` is fastest, since the overhead of calls dominates."""
_MIN_PAIR_ELEMENTS = 32768
"""Number of elements from which a table over pairs of bytes is faster than one over bytes."""


class Lookup(Kernel):
    """Lookup table of any elementwise function: exactly `quantize(function(dequantize(x)))`.

    In large tensors two bytes are looked up at once.

    Args:
        table: results for the integers 0 to 255, (256,), or (C, 256) if each channel (axis 1) has its own function.
            uint8, or float32 if `out` is None.
        function: name of the function, for display.
        x: grid of the input.
        out: grid of the output; None for float32.
    """

    name: ClassVar[str] = "cpu.table"
    options: ClassVar[tuple[str, ...]] = ("function", "x", "out")
    table: Tensor

    def __init__(self, table: Tensor, function: str, x: QParams, out: QParams | None) -> None:
        super().__init__()
        refuse(self.name, activation_refused("the input", x), activation_refused("the output", out))
        expected = torch.float32 if out is None else torch.uint8
        if table.dtype != expected or table.dim() not in (1, 2) or table.shape[-1] != 256:
            raise BackendError(
                f"{self.name}: a table must be {expected} (256,) or (C, 256); it is {table.dtype} {tuple(table.shape)}."
            )
        self.register_buffer("table", table.detach())
        self.function, self.x, self.out = function, x, out

    @classmethod
    def of(
        cls, function: Callable[[Tensor], Tensor], name: str, x: QParams, out: QParams | None, channels: int = 0
    ) -> Lookup:
        """Return the lookup table of a float function.

        Args:
            function: float32 (256,) -> float32 (256,); with `channels`, (256, C) -> (256, C).
            name: name of the function.
            x: grid of the input.
            out: grid of the output; None for float32.
            channels: C if each channel has its own function, else 0.

        Raises:
            BackendError: the function changes the shape, or gives NaN for an integer of the grid.
        """
        refuse(cls.name, activation_refused("the input", x), activation_refused("the output", out))
        integers = torch.arange(256, dtype=torch.uint8, device="cpu")
        real = dequantize(integers.unsqueeze(1).expand(256, channels) if channels else integers, x)
        with torch.no_grad():
            y = function(real).to(torch.float32)
        if y.shape != real.shape:
            raise BackendError(f"{cls.name}: {name} turns {tuple(real.shape)} into {tuple(y.shape)}.")
        if out is not None and bool(y[x.qmin : x.qmax + 1].isnan().any()):
            raise BackendError(f"{cls.name}: {name} gives NaN for some inputs, which integers cannot represent.")
        y = y if out is None else quantize(y.nan_to_num(), out)
        return cls(y.t().contiguous() if channels > 1 else y.reshape(256), name, x, out)

    def forward(self, x: Tensor) -> Tensor:
        """uint8, any shape -> `out`'s grid or float32, the same shape; per channel (N, C, ...)."""
        if self.table.dim() == 2:
            return self._per_channel(x)
        if x.numel() < _MIN_INDEX_SELECT_ELEMENTS and x.is_contiguous():
            return self.table.take(x.to(torch.int64))
        x, flat = line(x)
        size = x.numel()
        if size < _MIN_PAIR_ELEMENTS:
            return self.table.index_select(0, flat.to(torch.int32)).as_strided(x.shape, x.stride())
        y = self.table.new_empty(size)
        pairs = size // 2 * 2
        if self.out is None or x.storage_offset() % 2:  # a view of pairs must start at an even byte
            _look_up(self.table, flat, y)
        else:
            _look_up(self._cached("pairs", self._pairs), flat[:pairs].view(torch.uint16), y[:pairs].view(torch.int16))
            _look_up(self.table, flat[pairs:], y[pairs:])
        return y.as_strided(x.shape, x.stride())

    def _pairs(self) -> Tensor:
        """Return the table over pairs of bytes, int16 (65536,): 256 tables, one for each second byte."""
        first, second = self.table.expand(256, 256), self.table.unsqueeze(1).expand(256, 256)
        return torch.stack([first, second], dim=-1).contiguous().view(torch.int16).view(-1)

    def _per_channel(self, x: Tensor) -> Tensor:
        channels = len(self.table)
        if x.dim() < 2 or x.shape[1] != channels:
            raise BackendError(f"{self.name}: the input is {tuple(x.shape)}, the table has {channels} channels.")
        rows = x.movedim(1, -1).contiguous()
        source, y = rows.view(-1, channels), self.table.new_empty(rows.numel())
        start = self._cached("start", lambda: torch.arange(channels, dtype=torch.int32, device="cpu").mul_(256))
        table = self.table.view(-1)
        for step in chunks(rows.numel(), channels):
            part = source[step.start // channels : step.stop // channels]
            index = part.to(torch.int32).add_(start).view(-1)
            torch.index_select(table, 0, index, out=y[step])
        y = y.view(rows.shape).movedim(-1, 1)
        return y if x.dim() == 4 else y.contiguous()


def _look_up(table: Tensor, index: Tensor, out: Tensor) -> None:
    """Write table[index] to `out` in chunks, so that the int32 copy of the index stays in the cache."""
    for step in chunks(len(index)):
        torch.index_select(table, 0, index[step].to(torch.int32), out=out[step])
