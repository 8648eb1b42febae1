"""How many CPUs this process may use, and whether other programs use them."""

from __future__ import annotations

import os
import time
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_CONTENDED, _SPELL = 1.25, 0.02
"""How much longer than its CPU time a loop takes that other programs hold up, and the seconds for which it runs."""


def usable_cpus(groups: Path = _GROUPS) -> float:
    """CPUs that this process may use: those that it is bound to, or the quota of its control group, e.g. 1.5.

    Args:
        groups: where the system shows control groups (Linux); a container sees its own there.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = _quota(groups)
    return min(count, quota) if quota is not None else count


def _quota(groups: Path) -> float | None:
    """CPUs that a control group of version 2 or 1 is limited to; None: it has no limit."""
    try:
        if (groups / "cpu.max").exists():
            most, period = (groups / "cpu.max").read_text().split()
        else:
            folder = groups / "cpu"
            most, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if most in ("max", "-1") else int(most) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def is_contended() -> bool:
    """Whether other programs, or a quota, keep this thread from its CPU: a loop takes longer than its CPU time."""
    wall, own = time.perf_counter(), time.thread_time()
    while time.thread_time() - own < _SPELL:
        pass
    return time.perf_counter() - wall > _CONTENDED * (time.thread_time() - own)
