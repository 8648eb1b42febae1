"""Timing of calls: the clock, and interleaved rounds."""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

SECONDS, SHORTEST_SECONDS, MAX_ROUNDS = 0.7, 0.35, 30
"""Seconds and number after which no further round starts; shortest times need fewer rounds than medians. A slower call
has one round, which follows a warm-up call."""
MIN_ROUNDS, MAX_SECONDS = 3, 4.0
"""Smallest number of rounds for shortest times, since first calls of large models are slower, and the seconds after
which there may be fewer."""
TURN_SECONDS = 0.04
"""Seconds for which a call is repeated in its turn, for shortest times: waiting threads of the previous call slow down
the first repetitions. With many calls, turns are shorter, so that each call gets four."""


def clock(every_thread: bool = False) -> Callable[[], float]:
    """Return the clock to time calls with: CPU time if PyTorch uses one thread, else wall time.

    CPU time excludes other programs, on a machine however busy. It also excludes the time that several threads wait for
    each other, and is too coarse on Windows: wall time is used there.

    Args:
        every_thread: whether to count all threads of this process, for calls that compute in a thread of their own.
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
    calls: Mapping[str, Callable[[], object]], wait: Callable[[], None], shortest: bool = False
) -> dict[str, float]:
    """Return the median microseconds of each call. The calls take turns, so that a busy machine slows all of them.

    The order of each round is random, since a call depends on the caches that the previous call leaves.

    Args:
        calls: by name.
        wait: waits for the end of a call, for example for a device.
        shortest: return the shortest time of each call instead, which other programs slow down least; on one thread, in
            CPU time. In its turn, a call is then repeated for up to `TURN_SECONDS`.
    """
    turn = turn_seconds(len(calls)) if shortest else 0.0
    now = clock(every_thread=True) if shortest else time.perf_counter
    times = times_in_turns(calls, rounds(MIN_ROUNDS if shortest else 1), now, wait, turn)
    return {name: 1e6 * min(seconds) if shortest else median(seconds) for name, seconds in times.items()}


def turn_seconds(calls: int) -> float:
    """Seconds for which a short call is repeated in its turn, so that a few rounds of so many calls are quick."""
    return min(TURN_SECONDS, SHORTEST_SECONDS / (4 * max(calls, 1)))


def times_in_turns(
    calls: Mapping[str, Callable[[], object]],
    rounds: Iterable[object],
    now: Callable[[], float] = time.perf_counter,
    wait: Callable[[], None] = lambda: None,
    turn_seconds: float = 0.0,
) -> dict[str, list[float]]:
    """Return all times of each call, in seconds. Each round runs the calls once, in random order.

    Args:
        calls: by name.
        rounds: iterable with one item for each round.
        now: clock, in seconds.
        wait: waits for the end of a call.
        turn_seconds: seconds for which a call is repeated in its turn.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    names, order = list(calls), random.Random(0)
    for _ in rounds:
        order.shuffle(names)
        for name in names:
            end = time.perf_counter() + turn_seconds
            while True:
                with timed(times[name], wait, now):
                    calls[name]()
                if time.perf_counter() >= end:
                    break
    return times


def rounds(min_rounds: int = 1, seconds: float | None = None) -> Iterator[int]:
    """Yield the index of each round.

    Args:
        min_rounds: minimum number of rounds.
        seconds: seconds after which no further round starts. None: `SECONDS`, or `SHORTEST_SECONDS` with several
            rounds at least; then there are at most `MAX_ROUNDS`, and less than `min_rounds` after `MAX_SECONDS`.
    """
    start = time.perf_counter()
    max_seconds = MAX_SECONDS if seconds is None else math.inf
    counts = range(1, MAX_ROUNDS + 1) if seconds is None else itertools.count(1)
    if seconds is None:
        seconds = SECONDS if min_rounds == 1 else SHORTEST_SECONDS
    for i in counts:
        yield i - 1
        spent = time.perf_counter() - start
        if spent >= seconds and (i >= min_rounds or spent >= max_seconds):
            return


@contextmanager
def timed(times: list[float], wait: Callable[[], None], now: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    """Context that appends the seconds of its body, including the wait for its end, to `times`."""
    start = now()
    yield
    wait()
    times.append(now() - start)


def median(times: Sequence[float]) -> float:
    """Return the median of times, in seconds, as microseconds. The first call, which packs weights, is left out."""
    return 1e6 * statistics.median(times[1:] or times)
