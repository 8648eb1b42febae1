"""Backends by name. A backend's module is imported when it is asked for."""

from __future__ import annotations

import importlib

from fxq.backends import cpu
from fxq.backends.base import Backend, Support, Trap
from fxq.backends.kernel import Kernel, known_kernels
from fxq.errors import BackendError, unknown, warn, warn_once

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
    if name == "auto":
        for candidate in auto_order():
            if unavailable(candidate, device) is not None:
                continue
            if candidate == "reference":
                warn(
                    f"fxq has no int8 kernels for a model on {device} of this machine. It is quantized for the "
                    'reference backend: exact, and slower than float. backend="reference" says so without a warning.'
                )
            return get_backend(candidate, device)
    reason = unavailable(name, device)
    if reason is not None:
        raise BackendError(reason)
    backend = _backend_type(name)()
    drawback = backend.drawback()
    if drawback is not None:
        warn_once(drawback)
    return backend


def unavailable(name: str, device: str = "cpu") -> str | None:
    """Why the backend of that name cannot run here, and what to do; None if it can.

    Args:
        name: "auto", or a backend's name.
        device: type of the device that the model is on.

    Raises:
        BackendError: unknown name (nearest names given).
    """
    if name == "auto":
        return None  # reference runs anywhere
    backend = _backend_type(name)()
    if backend.devices and device not in backend.devices:
        return (
            f"backend {name!r} runs on {', '.join(backend.devices)}, the model is on {device}; "
            f'move it with model.to({backend.devices[0]!r}), or use backend="reference".'
        )
    return backend.available()


def kernel_named(name: str) -> type[Kernel]:
    """The class of the kernels of that name, such as "x86.conv"; `from_config` of it makes one from plain data.

    Raises:
        BackendError: unknown name (nearest names given).

    Example:
        >>> kernel_named("cpu.mean").options
        ('x', 'out', 'dim', 'keepdim', 'total')
    """
    if name not in known_kernels():
        for backend in _BACKENDS:  # their kernels are registered when they are imported
            _backend_type(backend)
    found = known_kernels().get(name)
    if found is None:
        raise BackendError(unknown("kernel", name, known_kernels()))
    return found


def devices_of(name: str) -> tuple[str, ...]:
    """Types of the devices that a backend runs on; empty: any."""
    return _backend_type(name).devices


def _backend_type(name: str) -> type[Backend]:
    if name not in _BACKENDS:
        raise BackendError(unknown("backend", name, NAMES))
    module, _, cls = _BACKENDS[name].partition(":")
    found: type[Backend] = getattr(importlib.import_module(module), cls)
    return found


__all__ = [
    "NAMES", "Backend", "Support", "Trap", "auto_order", "devices_of", "get_backend", "kernel_named", "unavailable",
]  # fmt: skip
