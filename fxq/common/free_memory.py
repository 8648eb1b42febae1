"""Memory that this process may still allocate."""

from __future__ import annotations

import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def free_bytes(groups: Path = _GROUPS) -> int | None:
    """Bytes of memory that are free: the smaller of the machine's and what the cgroup allows; None if unknown.

    Memory that the system uses for files does not count as free, although it could be freed.

    Args:
        groups: mount point of the cgroup file system (Linux).
    """
    limits = [count for count in (_of_machine(), _of_group(groups)) if count is not None]
    return min(limits, default=None)


def _of_machine() -> int | None:
    """Free bytes of the machine; None where the system does not tell."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows, macOS
        return None


def _of_group(groups: Path) -> int | None:
    """Bytes up to the limit of the cgroup at the mount point, as in a container (v2 or v1); None if it has no limit."""
    old = groups / "memory"
    for most, used in (
        (groups / "memory.max", groups / "memory.current"),
        (old / "memory.limit_in_bytes", old / "memory.usage_in_bytes"),
    ):
        try:
            return max(int(most.read_text()) - int(used.read_text()), 0)
        except (OSError, ValueError):  # "max" is no limit
            continue
    return None
