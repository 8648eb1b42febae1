"""Backends by name. A backend's module is imported when it is asked for."""

from __future__ import annotations

import importlib

from fxq.backends.base import Backend, Support
from fxq.errors import BackendError, unknown

_BACKENDS = {"reference": "fxq.backends.reference:Reference", "x86": "fxq.backends.x86:X86"}
_AUTO = ("x86", "reference")


def get_backend(name: str) -> Backend:
    """The backend of that name; "auto" is the first of x86 and reference that this machine runs.

    Raises:
        BackendError: unknown name (nearest names given), or this machine cannot run it.
    """
    if name == "auto":
        for candidate in _AUTO:
            try:
                return get_backend(candidate)
            except BackendError:
                continue
    if name not in _BACKENDS:
        raise BackendError(unknown("backend", name, ["auto", *_BACKENDS]))
    module, _, cls = _BACKENDS[name].partition(":")
    backend: Backend = getattr(importlib.import_module(module), cls)()
    backend.check_machine()
    return backend


__all__ = ["Backend", "Support", "get_backend"]
