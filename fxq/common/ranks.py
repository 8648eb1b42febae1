"""Exchange of data between the processes of a `torch.distributed` group. An error of one process is raised in all.

Only tensors are sent: those of sums, and bytes that hold plain data (`fxq/common/stored_data.py`).
"""

from __future__ import annotations

import logging
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import fxq.errors as errors
from fxq.common.stored_data import pack, unpack
from fxq.errors import CalibrationError, FxqError, InputError, words_of

log = logging.getLogger("fxq")
T = TypeVar("T")

AUTO = "auto"
"""Default `group` of functions: the default group of `torch.distributed` if it is initialized, else this process."""

_WARN_AFTER_SECONDS = 30.0
"""Time after which a process warns that it waits for others."""


@dataclass(frozen=True)
class Ranks:
    """Processes that work together, as seen by one of them.

    Attributes:
        rank: number of this process.
        size: number of processes.
        group: process group; None if this process is alone.
        device: device of the tensors that the group sends.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    device: str = "cpu"

    @classmethod
    def of(cls, group: Any = AUTO) -> Ranks:
        """Processes of a group.

        Args:
            group: a `torch.distributed.ProcessGroup`; None: this process alone; "auto": the default group if
                `torch.distributed` is initialized, else this process alone.

        Raises:
            InputError: the group is something else, or this process does not belong to it.
        """
        running = dist.is_available() and dist.is_initialized()
        if group is None or (group == AUTO and not running):
            return cls()
        group = dist.group.WORLD if group == AUTO else group
        if not running or not isinstance(group, dist.ProcessGroup):
            raise InputError(
                f"group is {group!r}, and must be a torch.distributed.ProcessGroup that this process belongs to, None "
                f"for this process alone, or {AUTO!r}."
            )
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        return cls(dist.get_rank(group), dist.get_world_size(group), group, device)

    def slice_of(self, count: int) -> slice:
        """Part of `count` neighbouring items that is this rank's; it may be empty.

        Example:
            >>> [Ranks(rank, 3).slice_of(8) for rank in range(3)]
            [slice(0, 2, None), slice(2, 5, None), slice(5, 8, None)]
        """
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def together(self, make: Callable[[], T]) -> T:
        """Return the result of `make` on this rank. If it fails on one rank, all ranks raise.

        `make` may exchange data itself. Then an error of one rank is raised in the others at their next exchange.

        Raises:
            FxqError: the error of `make`, with the number of the rank in its message.
        """
        results: list[T] = []

        def store_result() -> None:
            results.append(make())

        for _ in self.exchanged(store_result):
            pass
        return results[0]

    def exchanged(self, make: Callable[[], Any], device: str = "cpu", about: str = "") -> Iterator[Any]:
        """Yield the result of `make` of each rank, in order of the ranks. Every rank must iterate over all of them.

        Only one result is in memory at a time. A rank gets its own result in the form that the others get.

        Args:
            make: function that returns plain data and tensors.
            device: device of the tensors in the results.
            about: what the results are of, which must be equal on all ranks.

        Raises:
            InputError: `about` differs between ranks. All ranks raise this error.
            FxqError: `make` failed on a rank. All ranks raise this error, with the number of the rank in its message;
                a `CalibrationError` if it is no `FxqError`.
        """
        if self.size == 1:
            yield make()
            return
        raised: Exception | None = None
        handled = sys.exc_info()[1]  # the caller may be in an `except`
        try:
            own_bytes = pack(make())
        except Exception as error:  # the user's data and model raise errors of any type
            if _is_on_all_ranks(error, handled):
                raise
            raised, own_bytes = error, pack((_kind_of(error), _words(error)))
        header = [len(own_bytes), raised is not None, zlib.crc32(about.encode())]
        headers = self._gathered(torch.tensor(header, device=self.device))
        for rank, (length, failed, _) in enumerate(headers):
            if failed:
                kind, message = unpack(self._sent(rank, own_bytes, length))
                raise _on_all_ranks(getattr(errors, kind)(f"rank {rank}: {message}")) from raised
        if len({checksum for *_, checksum in headers}) > 1:
            raise _on_all_ranks(InputError(_APART.format(rank=self.rank, about=about or "the end of this call")))
        for rank, (length, *_) in enumerate(headers):
            yield unpack(self._sent(rank, own_bytes, length), device)

    def from_first(self, make: Callable[[], Any], device: str, about: str) -> Any:
        """Return the result of `make` of the first rank, for what could differ by rounding between the ranks.

        The arguments are those of `exchanged`.
        """
        first, *_ = self.exchanged(lambda: make() if self.rank == 0 else None, device, about)
        return first

    def summed(self, tensors: Mapping[str, Tensor], device: str, about: str) -> dict[str, Tensor]:
        """Sums over the ranks of tensors by name, bit for bit equal on all ranks.

        Args:
            tensors: tensors of this rank, which may be changed in place. Ranks that lack one add zeros.
            device: device of the sums.
            about: what the tensors are of, as for `exchanged`.
        """
        if self.size == 1:
            return dict(tensors)
        kinds: dict[str, tuple[Sequence[int], torch.dtype]] = {}
        for of_rank in self.exchanged(lambda: {k: (list(v.shape), v.dtype) for k, v in tensors.items()}, about=about):
            kinds.update(of_rank)
        sums = {}
        for name, (shape, dtype) in sorted(kinds.items()):
            own = tensors[name] if name in tensors else torch.zeros(shape, dtype=dtype)
            own = own.to(self.device).contiguous()
            dist.all_reduce(own, group=self.group)
            sums[name] = own.to(device)
        return sums

    def _gathered(self, numbers: Tensor) -> list[list[int]]:
        """Numbers, 1-d, of each rank."""
        gathered = [torch.empty_like(numbers) for _ in range(self.size)]
        with self._warning_if_it_waits():
            dist.all_gather(gathered, numbers, group=self.group)
        return [row.tolist() for row in gathered]

    def _sent(self, rank: int, own_bytes: bytes, length: int) -> bytes:
        """Bytes that `rank` sends to all, of this length. If it is this rank, it sends `own_bytes`."""
        own = rank == self.rank
        dtype = torch.uint8
        data = torch.frombuffer(bytearray(own_bytes), dtype=dtype) if own else torch.empty(length, dtype=dtype)
        data = data.to(self.device)
        dist.broadcast(data, group=self.group, group_src=rank)
        return data.cpu().numpy().tobytes()

    @contextmanager
    def _warning_if_it_waits(self) -> Iterator[None]:
        text = (
            "fxq: rank %d has waited %g seconds for the other processes of its group of %d, which all must make the "
            "same call. If this process should work alone, pass group=None."
        )
        seconds = _WARN_AFTER_SECONDS
        timer = threading.Timer(seconds, log.warning, (text, self.rank, seconds, self.size))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


_APART = (
    "ranks do different things: rank {rank} is at {about}, and another one is not. Use equal models, recipes and "
    'calls. With optimize="speed", measured times may choose other layers: use optimize="coverage". With group=None, '
    "each process works alone."
)


def _on_all_ranks(error: FxqError) -> FxqError:
    """Mark an error that all ranks raise at once."""
    error.is_on_all_ranks = True
    return error


def _is_on_all_ranks(error: BaseException | None, handled: BaseException | None) -> bool:
    """Whether an error, or one that it is raised from, is marked by `_on_all_ranks`; not if only `handled` is."""
    while error is not None and error is not handled:
        if isinstance(error, FxqError) and error.is_on_all_ranks:
            return True
        error = error.__cause__ or error.__context__
    return False


def _kind_of(error: Exception) -> str:
    """Name of the class in `fxq.errors` that other ranks raise for an error."""
    if not isinstance(error, FxqError):
        return CalibrationError.__name__
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)


def _words(error: Exception) -> str:
    return words_of(error) if isinstance(error, FxqError) else f"{type(error).__name__}: {words_of(error)}"
