"""The processes of a `torch.distributed` group: what each of them knows goes to all, and no error leaves one waiting.

Only tensors of bytes and numbers are sent; what is in them is plain data (`fxq/common/stored_data.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fxq import errors
from fxq.common.stored_data import pack, unpack
from fxq.errors import CalibrationError, FxqError, InputError, words_of

log = logging.getLogger("fxq")
T = TypeVar("T")

AUTO = "auto"
"""The group that a function takes if none is given: the default one, where there is one of several processes."""

_PATIENCE = 30.0
"""Seconds behind which a process says that it waits for others."""


@dataclass(frozen=True)
class Ranks:
    """The processes that do something together, of which this is one.

    Attributes:
        rank: the number of this one.
        size: how many there are.
        group: the process group; None where this one is alone.
        device: of the tensors that the group sends.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    device: str = "cpu"

    @classmethod
    def of(cls, group: Any = AUTO) -> Ranks:
        """The processes of a group.

        Args:
            group: a `torch.distributed.ProcessGroup`; None: this process alone; "auto": the default group, where
                `torch.distributed` is initialized, else this process alone.

        Raises:
            InputError: it is something else, or this process does not belong to it.
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

    def together(self, make: Callable[[], T]) -> T:
        """What `make` returns here; where it fails on one rank, all raise.

        Raises:
            FxqError: what `make` raises, with the number of the rank before it.
        """
        made: list[T] = []

        def kept() -> None:
            made.append(make())

        for _ in self.exchanged(kept):
            pass
        return made[0]

    def exchanged(self, make: Callable[[], Any], device: str = "cpu") -> Iterator[Any]:
        """What `make` returns on each rank, in their order. Every rank has to take all of them.

        Of several ranks one at a time is in memory. What a rank made itself comes back as the others get it.

        Args:
            make: returns plain data and tensors.
            device: where the tensors are to be.

        Raises:
            FxqError: on every rank, what `make` raises on one of them, with the number of the rank before it; a
                `CalibrationError` where that is no `FxqError`.
        """
        if self.size == 1:
            yield make()
            return
        raised: Exception | None = None
        try:
            mine = pack(make())
        except Exception as error:  # whatever the user's data and model raise
            raised, mine = error, pack((_kind_of(error), _words(error)))
        lengths = self._gathered(torch.tensor([len(mine), raised is not None], device=self.device))
        for rank, (length, failed) in enumerate(lengths):
            if failed:
                kind, words = unpack(self._sent(rank, mine, length))
                raise getattr(errors, kind)(f"rank {rank}: {words}") from raised
        for rank, (length, _) in enumerate(lengths):
            yield unpack(self._sent(rank, mine, length), device)

    def _gathered(self, numbers: Tensor) -> list[list[int]]:
        found = [torch.empty_like(numbers) for _ in range(self.size)]
        with self._saying_that_it_waits():
            dist.all_gather(found, numbers, group=self.group)
        return [one.tolist() for one in found]

    def _sent(self, rank: int, mine: bytes, length: int) -> bytes:
        """The bytes that a rank sends to all; `mine` where that is this one."""
        own = rank == self.rank
        data = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if own else torch.empty(length, dtype=torch.uint8)
        data = data.to(self.device)
        dist.broadcast(data, group=self.group, group_src=rank)
        return data.cpu().numpy().tobytes()

    @contextmanager
    def _saying_that_it_waits(self) -> Iterator[None]:
        text = (
            "fxq: rank %d has waited for %g seconds for others of the %d in its process group, each of which has to "
            "make the same call. Where this process is to work alone, say group=None."
        )
        timer = threading.Timer(_PATIENCE, log.warning, (text, self.rank, _PATIENCE, self.size))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _kind_of(error: Exception) -> str:
    """The name of the class in `fxq.errors` that says what went wrong on another rank."""
    if not isinstance(error, FxqError):
        return CalibrationError.__name__
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)


def _words(error: Exception) -> str:
    return words_of(error) if isinstance(error, FxqError) else f"{type(error).__name__}: {words_of(error)}"
