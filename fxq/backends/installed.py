"""Backends that other packages add by being installed, through the entry-point group `fxq.backends`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points

GROUP = "fxq.backends"


@dataclass(frozen=True)
class InstalledBackend:
    """Entry point of another package.

    Attributes:
        name: the backend's name.
        path: import path of its class, `package.module:Class`.
        distribution: name and version of the package that has it.
        refused: the reason why it cannot be asked for by its name; empty if it can.
    """

    name: str
    path: str
    distribution: str
    refused: str = ""


def installed_backends(taken: Collection[str]) -> tuple[InstalledBackend, ...]:
    """Backends of installed packages, by name. Imports none of them.

    Args:
        taken: names that no package may use: one of these, and one that two packages use, is refused.
    """
    points_found = _read(tuple(sys.path))
    uses = Counter(name for name, _, _ in points_found)
    backends = []
    for name, path, distribution in points_found:
        others = ["fxq"] if name in taken else [d for n, _, d in points_found if n == name and d != distribution]
        clash = name in taken or uses[name] > 1
        why = f"the name {name!r} is also that of a backend of {', '.join(others) or distribution}"
        backends.append(InstalledBackend(name, path, distribution, why if clash else ""))
    return tuple(backends)


@lru_cache(maxsize=4)
def _read(path: tuple[str, ...]) -> tuple[tuple[str, str, str], ...]:
    """Name, import path and distribution of each entry point of the packages on `sys.path`."""
    points = entry_points(group=GROUP)
    return tuple(
        sorted({(p.name, p.value, f"{p.dist.name} {p.dist.version}" if p.dist is not None else "?") for p in points})
    )
