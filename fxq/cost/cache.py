"""Measured costs: how long kernels and float ops take on this machine, kept in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import logging
import math
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
from fxq.common.cache_folder import cache_folder
from fxq.common.files import write_file
from fxq.common.timed_calls import clock, counts_cpu_time
from fxq.errors import RenderError

log = logging.getLogger("fxq")

Call = Callable[[], Any]
Prepare = Callable[[], Call]
AGREE, NEAR, LONGEST = 3, 1.25, 0.15
"""Runs that must agree with the quickest one, how much slower they may be, and the seconds after which to give up."""
LEAST, MOST, CLOSE = 3, 10, 1.1
"""Rounds at least and at most, and how much slower than the quickest a second one may be."""
APART, PATIENCE = 0.2, 2.5
"""Seconds from the begin of a round to the next, at least, and for all rounds behind the first, at most. What else runs
on a core, or on the other half of it, makes integers up to twice as slow, for tenths of a second at a time."""
KEPT = 1 << 28
"""Bytes of tensors in calls that are kept for the next round: to make a call takes longer than to time it."""
SMALL = 4**6
"""Elements of a conversion below which its time is that of the call."""
EVICTED = 1 << 24
"""Bytes that are written to empty the caches of a core: more than they hold."""


def measure(call: Call, cold: bool = False) -> float:
    """Seconds that a call takes on a quiet machine: those of its quickest run, once others come near it.

    On a busy machine most runs are interrupted; so it goes on until `AGREE` runs took at most `NEAR` times as long as
    the quickest, or `LONGEST` seconds have passed. The first two runs are left out: kernels pack weights in them.

    Args:
        call: what to time.
        cold: empty the caches before every run.
    """
    other = torch.zeros(EVICTED if cold else 0, dtype=torch.uint8)
    now = clock()
    with torch.inference_mode():
        call()
        call()
        times: list[float] = []
        began = now()
        while sum(t <= NEAR * min(times) for t in times) < AGREE and now() - began < LONGEST:
            other.bitwise_not_()
            start = now()
            call()
            times.append(now() - start)
    return min(times)


class Costs:
    """Seconds by what was measured. Something unknown is measured when it is asked for.

    A price is the least of several rounds. Between two rounds of one thing all others have theirs, so that whatever
    keeps the machine busy for a moment does not meet all rounds of the same one (see `settle`).

    Attributes:
        has_table: whether estimates of the price table are used as well (`fxq/cost/price_table.py`).
        path: the file that holds them between sessions; None: they are not kept.
        rounds: what each round measured, in seconds, by a text that says all that the time depends on.
    """

    has_table: ClassVar[bool] = True

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.rounds: dict[str, list[float]] = read_rounds(path) if path is not None else {}
        self._new: set[str] = set()
        self._asked: dict[str, tuple[Prepare, bool]] = {}
        self._calls: dict[str, Call] = {}
        self._patience, self._round, self._room = PATIENCE, -math.inf, KEPT

    def __contains__(self, key: str) -> bool:
        return key in self.rounds

    def seconds(self, key: str, prepare: Prepare, cold: bool = False) -> float:
        """The seconds of what `key` names; `prepare` returns the call to time where they are not known yet."""
        self._asked[key] = prepare, cold
        if key not in self.rounds:
            self._measure(key)
        return min(self.rounds[key])

    def is_sound(self, key: str) -> bool:
        """Whether the measured rounds of a price agree, so that it may override the price table."""
        return _is_sure(self.rounds.get(key, []))

    def settle(self, keys: Iterable[str] | None = None) -> None:
        """Measure again, in rounds, what is not sure yet: few rounds, or no second one near the quickest.

        With cold caches a run is as slow as what happens to be in them makes it; those get all of their rounds.

        Args:
            keys: of these only; None: of all that was asked for.
        """
        asked = [key for key in (self._asked if keys is None else keys) if key in self._asked and key in self.rounds]
        while self._again(key for key in asked if self._asked[key][1] or not _is_sure(self.rounds[key])):
            pass
        noisy = sum(not _is_sure(self.rounds[key]) for key in asked)
        if noisy:
            log.info("%d of %d prices differ from round to round: the machine is busy.", noisy, len(asked))

    def _again(self, keys: Iterable[str]) -> bool:
        """One more round of these, as far as they may change; whether any of them may."""
        found = [key for key in keys if self._may_change(key)]
        if not found or self._patience <= 0:
            return False
        began = time.monotonic()
        time.sleep(max(0.0, self._round + APART - began))
        self._round = time.monotonic()
        for key in found:
            if time.monotonic() - began > self._patience:
                break
            self._measure(key)
        self._patience -= time.monotonic() - began
        return True

    def _may_change(self, key: str) -> bool:
        """Whether something is measured here and had not all of its rounds.

        What an earlier session was sure of stays as it is: the same network is to become the same model again.
        """
        rounds = self.rounds.get(key, [])
        return key in self._asked and 0 < len(rounds) < MOST and (key in self._new or not _is_sure(rounds))

    def _measure(self, key: str) -> None:
        prepare, cold = self._asked[key]
        call = self._calls.get(key) or prepare()
        size = _bytes(call)
        if key not in self._calls and size <= self._room:
            self._calls[key] = call
            self._room -= size
        self.rounds.setdefault(key, []).append(measure(call, cold))
        self._new.add(key)

    def of_size(self, key: str, elements: int, prepare: Callable[[int], Call]) -> float:
        """The seconds of a conversion: measured at powers of four, in between on the line through two of them.

        Measured with cold caches. The two forms of an op find the caches alike; a conversion is a call more, and inside
        a network pays for its own code and buffers: 35 to 57 µs for a small tensor instead of 8 (AVX512-VNNI server).
        """
        elements = max(elements, SMALL)
        below = (elements.bit_length() - 1) // 2
        sizes = 4**below, 4 ** (below + 1)
        low, high = (self.seconds(f"{key} {n}", lambda n=n: prepare(n), cold=True) for n in sizes)  # type: ignore[misc]
        return low + (elements - sizes[0]) / (sizes[1] - sizes[0]) * (high - low)

    def save(self) -> None:
        """Write what was measured, beside what others have written meanwhile. Where that fails, nothing is kept.

        Wall-clock prices whose rounds disagree are not written either, as other programs disturbed them.
        """
        if self.path is None or not self._new:
            return
        sound = {key: self.rounds[key] for key in self._new if counts_cpu_time() or self.is_sound(key)}
        try:
            write_rounds(self.path, {**read_rounds(self.path), **sound})
        except RenderError as error:
            log.info("measured costs are not kept: %s", error)
        self._new.clear()


def _bytes(call: Call) -> int:
    """The size of the tensors that a `functools.partial` holds as arguments; of another call nothing is known: 0."""
    given = tree_leaves((getattr(call, "args", ()), getattr(call, "keywords", {})))
    return sum(value.numel() * value.element_size() for value in given if isinstance(value, Tensor))


def _is_sure(rounds: list[float]) -> bool:
    """Whether there are enough rounds, of which a second one came near the quickest."""
    return len(rounds) >= LEAST and sum(seconds <= CLOSE * min(rounds) for seconds in rounds) > 1


def machine() -> dict[str, str]:
    """What costs depend on: when any of it changes, everything is measured again.

    The number of threads stands in what is measured: it may change within a session.
    """
    return {
        **cpu.machine(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "fxq": version("fxq"),
        "Numba": compiler.installed(),
        "kernels": kernels_code(),
    }


_MEASURED = ("backends", "ops", "graph/bindable.py", "runtime/binding.py", "cost/cache.py", "cost/probe.py")
"""The files of the package that say what is measured, and how: kernels, float ops, and the way they are called."""


@cache
def kernels_code() -> str:
    """A hash of the code that is measured: an edited kernel has other prices."""
    found, package = hashlib.sha256(), Path(__file__).parents[1]
    for name in _MEASURED:
        place = package / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else (place,):
            found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()[:12]


def machine_path() -> Path:
    """File of this machine's costs, in the folder of `FXQ_CACHE` or the user's cache directory."""
    about = hashlib.sha256(json.dumps(machine(), sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"costs-{about[:12]}.json"


def machine_costs() -> Costs:
    """The costs of this machine, as far as they have been measured."""
    return Costs(machine_path())


def write_rounds(path: Path, rounds: dict[str, list[float]]) -> None:
    """Write a file of costs measured on this machine. Raises `RenderError` if it cannot be written."""
    write_file(path, json.dumps({"machine": machine(), "rounds": rounds}, indent=1).encode())


def parse_file(text: str) -> tuple[dict[str, str], dict[str, list[float]]]:
    """The machine and the rounds in the text of a file of costs. Raises `ValueError` where it is no such text."""
    try:
        data = json.loads(text)
        about = {str(key): str(value) for key, value in data["machine"].items()}
        rounds = {str(key): [float(seconds) for seconds in found] for key, found in data["rounds"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if not all(rounds.values()):
        raise ValueError("it was written by something else")
    return about, rounds


def read_rounds(path: Path) -> dict[str, list[float]]:
    """The rounds in a file; none where it is not there or not readable."""
    try:
        return parse_file(path.read_text(encoding="utf-8"))[1]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("the measured costs in %s are not readable (%s); they are measured again.", path, error)
        return {}
