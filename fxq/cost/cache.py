"""Measured prices of kernels and float ops on this machine, stored in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fxq.backends import cpu
from fxq.backends.loops.code import compiler
from fxq.backends.loops.code.cpu_kinds import VARIABLE
from fxq.common.cache_folder import cache_folder
from fxq.common.files import write_file
from fxq.common.timed_calls import clock, counts_cpu_time
from fxq.errors import RenderError

log = logging.getLogger("fxq")

Call = Callable[[], Any]
Prepare = Callable[[], Call]
AGREEING_RUNS, MAX_RUN_RATIO, MAX_MEASURE_SECONDS = 3, 1.25, 0.15
"""A call is timed until this many runs are within this ratio of the fastest run, or until these seconds have passed."""
MIN_ROUNDS, MAX_ROUNDS, MAX_ROUND_RATIO = 3, 10, 1.1
"""Number of rounds per price, and the ratio to the fastest round within which a second one must be."""
MIN_ROUND_INTERVAL, MAX_EXTRA_SECONDS = 0.2, 2.5
"""Minimum seconds between the starts of two rounds, and maximum seconds for all rounds after the first. Other programs
on a core or its hyperthread slow integer kernels down for tenths of a second at a time."""
MAX_CACHED_BYTES = 1 << 28
"""Bytes of tensors in calls that are cached for the next round, since creating a call takes longer than timing it."""
MIN_CONVERSION_ELEMENTS = 4**6
"""Elements of a conversion below which the call itself dominates its time."""
EVICTION_BYTES = 1 << 24
"""Bytes that are written to evict the caches of a core: more than their size."""


def measure(call: Call, cold: bool = False) -> float:
    """Return the seconds that a call takes on an idle machine: the minimum over runs, once several runs agree.

    Other programs only add to times. Runs are repeated until `AGREEING_RUNS` of them took at most `MAX_RUN_RATIO` times
    the fastest, or `MAX_MEASURE_SECONDS` have passed. The first two runs, in which kernels pack weights, do not count;
    after a slow first run, the second one does.

    Args:
        call: the call to time.
        cold: whether to evict the CPU caches before every run.
    """
    eviction_buffer = torch.zeros(EVICTION_BYTES if cold else 0, dtype=torch.uint8)
    now = clock()
    with torch.inference_mode():
        began = now()
        call()
        if now() - began < MAX_MEASURE_SECONDS / AGREEING_RUNS:
            call()
        times: list[float] = []
        began = now()
        while (
            sum(t <= MAX_RUN_RATIO * min(times) for t in times) < AGREEING_RUNS and now() - began < MAX_MEASURE_SECONDS
        ):
            eviction_buffer.bitwise_not_()
            start = now()
            call()
            times.append(now() - start)
    return min(times)


class Costs:
    """Measured prices in seconds, by key. Prices that are not known yet are measured on request.

    A price is the minimum over several rounds. Rounds of different prices are interleaved, so that a short disturbance
    does not affect all rounds of the same price (see `settle`).

    Attributes:
        has_table: whether estimates of the price table are used as well (`fxq/cost/price_table.py`).
        path: file that stores them between sessions; None: they are not stored.
        rounds: seconds of each round, by a key that contains everything that the time depends on.
    """

    has_table: ClassVar[bool] = True

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.rounds: dict[str, list[float]] = read_rounds(path) if path is not None else {}
        self._new: set[str] = set()
        self._asked: dict[str, tuple[Prepare, bool]] = {}
        self._calls: dict[str, Call] = {}
        self._seconds_left, self._round, self._bytes_left = MAX_EXTRA_SECONDS, -math.inf, MAX_CACHED_BYTES

    def __contains__(self, key: str) -> bool:
        return key in self.rounds

    def seconds(self, key: str, prepare: Prepare, cold: bool = False) -> float:
        """Return the price of `key` in seconds, measured now if it is not known.

        Args:
            key: everything that the time depends on.
            prepare: creates the call to time; not called if the price is known.
            cold: whether to evict the CPU caches before every run.
        """
        self._asked[key] = prepare, cold
        if key not in self.rounds:
            self._measure(key)
        return min(self.rounds[key])

    def is_sound(self, key: str) -> bool:
        """Whether the measured rounds of a price agree, so that it may override the price table."""
        return _rounds_agree(self.rounds.get(key, []))

    def settle(self, keys: Iterable[str] | None = None) -> None:
        """Measure further rounds of prices with few rounds, or whose rounds do not agree.

        Prices with cold caches vary more, and get the maximum number of rounds.

        Args:
            keys: the prices; None: all that were requested.
        """
        asked = [key for key in (self._asked if keys is None else keys) if key in self._asked and key in self.rounds]
        while self._run_round(key for key in asked if self._asked[key][1] or not _rounds_agree(self.rounds[key])):
            pass
        noisy = sum(not _rounds_agree(self.rounds[key]) for key in asked)
        if noisy:
            log.info("%d of %d prices differ from round to round: the machine is busy.", noisy, len(asked))

    def _run_round(self, keys: Iterable[str]) -> bool:
        """Measure one more round of the prices among `keys` that may change; return whether there were any."""
        changeable = [key for key in keys if self._may_change(key)]
        if not changeable or self._seconds_left <= 0:
            return False
        began = time.monotonic()
        time.sleep(max(0.0, self._round + MIN_ROUND_INTERVAL - began))
        self._round = time.monotonic()
        for key in changeable:
            if time.monotonic() - began > self._seconds_left:
                break
            self._measure(key)
        self._seconds_left -= time.monotonic() - began
        return True

    def _may_change(self, key: str) -> bool:
        """Whether a price can be measured here and has rounds left.

        Prices whose rounds agreed in an earlier session do not change, so that a network is quantized reproducibly.
        """
        rounds = self.rounds.get(key, [])
        return key in self._asked and 0 < len(rounds) < MAX_ROUNDS and (key in self._new or not _rounds_agree(rounds))

    def _measure(self, key: str) -> None:
        prepare, cold = self._asked[key]
        call = self._calls.get(key) or prepare()
        size = _bytes(call)
        if key not in self._calls and size <= self._bytes_left:
            self._calls[key] = call
            self._bytes_left -= size
        self.rounds.setdefault(key, []).append(measure(call, cold))
        self._new.add(key)

    def release(self, keys: Iterable[str]) -> None:
        """Free the tensors of the calls of these prices. A further round would prepare its call again."""
        for key in keys:
            self._bytes_left += _bytes(self._calls.pop(key, None))

    def of_size(self, key: str, elements: int, prepare: Callable[[int], Call]) -> float:
        """Return the seconds of a conversion, interpolated linearly between measurements at powers of four.

        They are measured with cold caches: a conversion is an additional call in a network, which must load its code
        and buffers.

        Args:
            key: everything that the time depends on, except the size.
            elements: number of elements.
            prepare: creates the call to time, for a number of elements.
        """
        elements = max(elements, MIN_CONVERSION_ELEMENTS)
        below = (elements.bit_length() - 1) // 2
        sizes = 4**below, 4 ** (below + 1)
        low, high = (self.seconds(f"{key} {n}", lambda n=n: prepare(n), cold=True) for n in sizes)  # type: ignore[misc]
        return low + (elements - sizes[0]) / (sizes[1] - sizes[0]) * (high - low)

    def save(self) -> None:
        """Add the new prices to the file. If it cannot be written, log that.

        Wall-clock prices whose rounds disagree are not stored, since other programs disturbed them.
        """
        if self.path is None or not self._new:
            return
        sound = {key: self.rounds[key] for key in self._new if counts_cpu_time() or self.is_sound(key)}
        try:
            write_rounds(self.path, {**read_rounds(self.path), **sound})
        except RenderError as error:
            log.info("measured prices are not stored: %s", error)
        self._new.clear()


def _bytes(call: Call | None) -> int:
    """Bytes of the tensors among the arguments of a `functools.partial`; 0 for other callables."""
    arguments = tree_leaves((getattr(call, "args", ()), getattr(call, "keywords", {})))
    return sum(value.numel() * value.element_size() for value in arguments if isinstance(value, Tensor))


def _rounds_agree(rounds: list[float]) -> bool:
    """Whether there are enough rounds, and a second one is near the fastest."""
    return len(rounds) >= MIN_ROUNDS and sum(seconds <= MAX_ROUND_RATIO * min(rounds) for seconds in rounds) > 1


def machine() -> dict[str, str]:
    """Facts that prices depend on: if any of them changes, all prices are measured again.

    The number of threads is part of the keys instead, since it may change within a session.
    """
    return {
        **cpu.machine(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "fxq": version("fxq"),
        "loops": _loops(),
        "kernels": kernels_code(),
    }


def _loops() -> str:
    """Text of what decides the machine code of loops, besides the CPU. Numba is not imported, which takes long."""
    settings = (f"{name}={os.environ[name]}" for name in _LOOP_SETTINGS if name in os.environ)
    return " ".join((compiler.installed(), *settings))


_LOOP_SETTINGS = (VARIABLE, "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_DISABLE_JIT")
_MEASURED = (
    "backends", "ops", "graph/bindable.py", "graph/region.py", "runtime/binding.py", "cost/cache.py", "cost/probe.py",
)  # fmt: skip
"""Files and folders of the package whose code is measured, or measures: kernels, float ops, and how they are called.
Regions decide which kernel an op gets."""


@cache
def kernels_code() -> str:
    """Hash of the measured code, so that edited kernels are measured again."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for name in _MEASURED:
        place = package / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else (place,):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def machine_path() -> Path:
    """File of this machine's prices, in the folder `FXQ_CACHE` or the user's cache directory."""
    digest = hashlib.sha256(json.dumps(machine(), sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"costs-{digest[:12]}.json"


def machine_costs() -> Costs:
    """Return the prices of this machine that have been measured so far."""
    return Costs(machine_path())


def write_rounds(path: Path, rounds: dict[str, list[float]]) -> None:
    """Write a file of prices measured on this machine. Raises `RenderError` if it cannot be written."""
    write_file(path, json.dumps({"machine": machine(), "rounds": rounds}, indent=1).encode())


def parse_file(text: str) -> tuple[dict[str, str], dict[str, list[float]]]:
    """Return the machine and the rounds in the text of a file of prices. Raises `ValueError` for other text."""
    try:
        data = json.loads(text)
        facts = {str(key): str(value) for key, value in data["machine"].items()}
        rounds = {str(key): [float(seconds) for seconds in times] for key, times in data["rounds"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if not all(rounds.values()):
        raise ValueError("it was written by something else")
    return facts, rounds


def read_rounds(path: Path) -> dict[str, list[float]]:
    """Return the rounds in a file; an empty dict if it is missing or cannot be read."""
    try:
        return parse_file(path.read_text(encoding="utf-8"))[1]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("the measured prices in %s cannot be read (%s); they are measured again.", path, error)
        return {}
