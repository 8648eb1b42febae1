"""Backends by name. A backend's module is imported when it is asked for."""

from __future__ import annotations

import importlib

from fxq.backends import cpu
from fxq.backends.base import Backend, Support, Trap
from fxq.errors import BackendError, unknown, warn

_BACKENDS = {
    "reference": "fxq.backends.reference:Reference",
    "x86": "fxq.backends.x86.x86:X86",
    "fbgemm": "fxq.backends.packed.fbgemm:Fbgemm",
    "qnnpack": "fxq.backends.packed.qnnpack:Qnnpack",
}
NAMES = ("auto", *_BACKENDS)
"""What a recipe may ask for."""


def auto_order() -> tuple[str, ...]:
    """The backends that "auto" tries, best first.

    On x86-64, x86 is the fastest and emits float; fbgemm does where PyTorch is built without oneDNN. qnnpack is made
    for ARM: it runs on x86, too, but slower than float.
    """
    return ("x86", "fbgemm", "reference") if cpu.is_x86() else ("qnnpack", "reference")


def get_backend(name: str, device: str = "cpu") -> Backend:
    """The backend of that name; "auto" is the first of `auto_order()` that this machine runs.

    Args:
        name: "auto", or a backend's name.
        device: type of the device that the model is on.

    Raises:
        BackendError: unknown name (nearest names given), or it cannot run on this machine or device.
    """
    backend: Backend
    if name == "auto":
        for candidate in auto_order():
            try:
                backend = get_backend(candidate, device)
            except BackendError:
                continue
            if candidate == "reference":
                warn(
                    f"fxq has no int8 kernels for a model on {device} of this machine. It is quantized for the "
                    'reference backend: exact, and slower than float. backend="reference" says so without a warning.'
                )
            return backend
    backend = _backend_type(name)()
    if backend.devices and device not in backend.devices:
        raise BackendError(
            f"backend {name!r} runs on {', '.join(backend.devices)}, the model is on {device}; "
            f'move it with model.to({backend.devices[0]!r}), or use backend="reference".'
        )
    backend.check_machine()
    return backend


def devices_of(name: str) -> tuple[str, ...]:
    """Types of the devices that a backend runs on; empty: any."""
    return _backend_type(name).devices


def _backend_type(name: str) -> type[Backend]:
    if name not in _BACKENDS:
        raise BackendError(unknown("backend", name, NAMES))
    module, _, cls = _BACKENDS[name].partition(":")
    found: type[Backend] = getattr(importlib.import_module(module), cls)
    return found


__all__ = ["NAMES", "Backend", "Support", "Trap", "auto_order", "devices_of", "get_backend"]
