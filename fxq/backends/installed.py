"""Backends of other installed packages, found through the entry-point group `fxq.backends`."""

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
    """Backend that the entry point of another package names.

    Attributes:
        name: the backend's name.
        path: import path of its class, `package.module:Class`.
        distribution: name and version of the package.
        refused: reason why the name cannot be used, because another backend has it; empty if it can.
    """

    name: str
    path: str
    distribution: str
    refused: str = ""

    @property
    def where(self) -> str:
        """Name and package, as messages give them."""
        return f"backend {self.name!r} of the package {self.distribution}"


def installed_backends(taken: Collection[str]) -> tuple[InstalledBackend, ...]:
    """Backends of installed packages, sorted by name. Imports none of them.

    Args:
        taken: names that packages may not use. A backend with one of them, or with a name that two packages use, is
            listed as refused.
    """
    points = _read_entry_points(tuple(sys.path))
    uses = Counter(name for name, _, _ in points)
    backends = []
    for name, path, distribution in points:
        owners = ["fxq"] if name in taken else [d for n, _, d in points if n == name and d != distribution]
        clashes = name in taken or uses[name] > 1
        reason = f"the name {name!r} is taken by a backend of {', '.join(owners) or distribution}"
        backends.append(InstalledBackend(name, path, distribution, reason if clashes else ""))
    return tuple(backends)


@lru_cache(maxsize=4)
def _read_entry_points(path: tuple[str, ...]) -> tuple[tuple[str, str, str], ...]:
    """Name, import path and distribution of each entry point of the packages on `sys.path`, the key of the cache."""
    points = entry_points(group=GROUP)
    return tuple(
        sorted({(p.name, p.value, f"{p.dist.name} {p.dist.version}" if p.dist is not None else "?") for p in points})
    )
