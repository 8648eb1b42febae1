"""Measured costs: how long kernels and float ops take on this machine, kept in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path

from fxq.backends.cpu import cpu_name

log = logging.getLogger("fxq")

Call = Callable[[], Any]
AGREE, NEAR, LONGEST = 3, 1.25, 0.15
"""Runs that must agree with the quickest one, how much slower they may be, and the seconds after which to give up."""


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
    with torch.inference_mode():
        call()
        call()
        times: list[float] = []
        began = time.perf_counter()
        while sum(t <= NEAR * min(times) for t in times) < AGREE and time.perf_counter() - began < LONGEST:
            other.bitwise_not_()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return min(times)


class Costs:
    """Seconds by what was measured. Something unknown is measured when it is asked for.

    Attributes:
        path: the file that holds them between sessions; None: they are not kept.
        known: the seconds, by a text that says all that the time depends on.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.known: dict[str, float] = _read(path) if path is not None else {}
        self._new: dict[str, float] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.known

    def seconds(self, key: str, prepare: Callable[[], Call], cold: bool = False) -> float:
        """The seconds of what `key` names; `prepare` returns the call to time where they are not known yet."""
        if key not in self.known:
            self.known[key] = self._new[key] = measure(prepare(), cold)
        return self.known[key]

    def of_size(self, key: str, elements: int, prepare: Callable[[int], Call]) -> float:
        """The seconds of a conversion: measured at powers of four, in between on the line through two of them.

        Measured with cold caches. The two forms of an op find the caches alike; a conversion is a call more, and inside
        a network pays for its own code and buffers: 35 to 57 µs for a small tensor instead of 8 (AVX512-VNNI server).
        """
        exponent = max(math.log(max(elements, 1), 4), 2.0)
        below = math.floor(exponent)
        sizes = 4**below, 4 ** (below + 1)
        low, high = (self.seconds(f"{key} {n}", lambda n=n: prepare(n), cold=True) for n in sizes)  # type: ignore[misc]
        return low + (max(elements, 16) - sizes[0]) / (sizes[1] - sizes[0]) * (high - low)

    def save(self) -> None:
        """Write what was measured, beside what others have written meanwhile. Where that fails, nothing is kept."""
        if self.path is None or not self._new:
            return
        data = {"machine": machine(), "seconds": {**_read(self.path), **self._new}}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self.path.parent, suffix=".json", delete=False, encoding="utf-8"
            ) as file:
                json.dump(data, file, indent=1)
            os.replace(file.name, self.path)
        except OSError as error:
            log.info("measured costs are not kept: %s", error)
        self._new.clear()


def machine() -> dict[str, str]:
    """What costs depend on: when any of it changes, everything is measured again."""
    return {
        "cpu": cpu_name(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "fxq": version("fxq"),
    }


def machine_costs() -> Costs:
    """The costs of this machine, as far as they have been measured."""
    about = hashlib.sha256(json.dumps(machine(), sort_keys=True).encode()).hexdigest()
    return Costs(user_cache_path("fxq") / f"costs-{about[:12]}.json")


def _read(path: Path) -> dict[str, float]:
    """The seconds in a file; none where it is not there or not readable."""
    try:
        seconds = json.loads(path.read_text(encoding="utf-8"))["seconds"]
        return {str(k): float(v) for k, v in seconds.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("the measured costs in %s are not readable (%s); they are measured again.", path, error)
        return {}
