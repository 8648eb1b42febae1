"""Number of CPUs that this process may use, and whether it has to share them."""

from __future__ import annotations

import os
import time
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_MAX_WALL_RATIO, _PROBE_SECONDS = 1.25, 0.02
"""Wall time over CPU time of the probing loop above which the CPU counts as contended; CPU seconds of the loop."""


def usable_cpus(groups: Path = _GROUPS) -> float:
    """Number of CPUs that this process may use: the smaller of its affinity and its cgroup quota (may be 1.5).

    Args:
        groups: mount point of the cgroup file system (Linux).
    """
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = _quota(groups)
    return min(count, quota) if quota is not None else count


def _quota(groups: Path) -> float | None:
    """CPU quota of a cgroup (v2 or v1), or None if it has no limit."""
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
    """Whether other programs or a quota preempt this thread, so that wall time exceeds CPU time."""
    wall, own = time.perf_counter(), time.thread_time()
    while time.thread_time() - own < _PROBE_SECONDS:
        pass
    return time.perf_counter() - wall > _MAX_WALL_RATIO * (time.thread_time() - own)
