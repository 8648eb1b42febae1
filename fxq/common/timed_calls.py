"""How long calls take: on which clock, and in turns."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

SECONDS, MOST = 0.7, 30
"""Seconds of all rounds together, and how many rounds at most. A call that takes longer is timed once, after one to
warm up."""
LEAST, LONGEST = 3, 4.0
"""How many rounds at least where the least time is asked for, unless they take longer than so many seconds: the first
calls of large models are slower."""
TURN = 0.04
"""Seconds that a call is repeated in its turn, where the least time is asked for. Threads of the call before it, which
wait for more to do, hold the first calls of a turn up; the later ones show its own time. Of many calls, turns are
shorter: each call gets four."""


def clock(every_thread: bool = False) -> Callable[[], float]:
    """What to time calls with: the time that the CPU gave to this thread, where that is the only one that computes.

    Other programs do not count then, however busy the machine is. Several threads wait for each other: that takes time
    that no CPU sees. Nor does Windows count CPU time finely enough.

    Args:
        every_thread: count those of this process, for calls that may compute in a thread of their own.
    """
    if not counts_cpu_time():
        return time.perf_counter
    return time.process_time if every_thread else time.thread_time


@contextmanager
def threads_set_to(count: int) -> Iterator[None]:
    """Context with `count` PyTorch threads. On one thread, CPU time measures a call regardless of other programs."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def counts_cpu_time() -> bool:
    """Whether `clock` measures CPU time, which excludes other programs."""
    return os.name == "posix" and torch.get_num_threads() == 1


def interleaved(
    calls: Mapping[str, Callable[[], object]], wait: Callable[[], None], least: bool = False
) -> dict[str, float]:
    """Median microseconds of each call. They take turns, so that a busy machine slows all of them alike.

    In an order drawn anew: a call that always follows the same other one finds the caches as that one leaves them.

    Args:
        calls: by name.
        wait: what waits for the end of a call.
        least: take the shortest time of each instead, to which other programs have added nothing; on one thread, of
            the time that the CPU gave. In its turn a call is repeated, for `TURN` or less.
    """
    now = clock(every_thread=True) if least else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in calls}
    names, order = list(calls), random.Random(0)
    turn = min(TURN, SECONDS / (4 * max(len(calls), 1))) if least else 0.0
    for _ in rounds(LEAST if least else 1):
        order.shuffle(names)
        for name in names:
            end = time.perf_counter() + turn
            while True:
                with timed(times[name], wait, now):
                    calls[name]()
                if time.perf_counter() >= end:
                    break
    return {name: 1e6 * min(found) if least else median(found) for name, found in times.items()}


def rounds(least: int = 1) -> Iterator[int]:
    """Goes on for `SECONDS` or `MOST` rounds; for so many at least, unless they take longer than `LONGEST`."""
    start = time.perf_counter()
    for i in range(1, MOST + 1):
        yield i - 1
        spent = time.perf_counter() - start
        if spent >= SECONDS and (i >= least or spent >= LONGEST):
            return


@contextmanager
def timed(times: list[float], wait: Callable[[], None], now: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    """Add the seconds that what is inside takes, with the wait for its end."""
    start = now()
    yield
    wait()
    times.append(now() - start)


def median(times: Sequence[float]) -> float:
    """In microseconds; the first call, which packs weights, counts only where it is the only one."""
    return 1e6 * statistics.median(times[1:] or times)
