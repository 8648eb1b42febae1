"""Backends by name. A backend's module is imported when it is asked for."""

from __future__ import annotations

from inspect import isabstract

from fxq.backends import cpu
from fxq.backends.base import Backend, Support, Trap
from fxq.backends.installed import InstalledBackend, installed_backends
from fxq.backends.kernel import Kernel, known_kernels
from fxq.common.source import import_name
from fxq.errors import BackendError, RecipeError, unknown, warn, warn_once, words_of

_BACKENDS = {
    "reference": "fxq.backends.reference:Reference",
    "x86": "fxq.backends.x86.x86:X86",
    "fbgemm": "fxq.backends.packed.fbgemm:Fbgemm",
    "qnnpack": "fxq.backends.packed.qnnpack:Qnnpack",
    "jit": "fxq.backends.loops.jit_engine:Jit",
    "openvino": "fxq.backends.engines.openvino:Openvino",
    "onnxruntime": "fxq.backends.engines.onnxruntime:Onnxruntime",
}
FASTEST = "fastest"
"""What a recipe asks for that wants all backends tried (`fxq/workflow/fastest.py`)."""
NAMES = ("auto", FASTEST, *_BACKENDS)
"""What a recipe may ask for, besides import paths and backends of other packages."""
_OWN: dict[str, str] = {}
"""Import paths of the user's own backends, by name."""


def auto_order() -> tuple[str, ...]:
    """The backends that "auto" tries, best first.

    On x86-64, x86 is the fastest and emits float; fbgemm does where PyTorch is built without oneDNN. qnnpack is made
    for ARM: it runs on x86, too, but slower than float. The other backends follow, for PyTorch builds without int8
    kernels: compiled loops (jit), engines, and last reference, which runs nothing on integers.
    """
    ours = ("x86", "fbgemm") if cpu.is_x86() else ("qnnpack",)
    return (*ours, "jit", "openvino", "onnxruntime", "reference")


def known() -> tuple[str, ...]:
    """The names of fxq's own backends."""
    return tuple(_BACKENDS)


def installed() -> tuple[InstalledBackend, ...]:
    """The backends that other packages add through their entry points; none of them is imported."""
    return installed_backends(NAMES)


def check_name(name: str) -> None:
    """Raise `BackendError` if no backend has this name, or several have it. Imports none."""
    others = [] if name in NAMES else installed()
    mine = [backend for backend in others if backend.name == name]
    if name not in NAMES and not mine:
        raise BackendError(unknown("backend", name, (*NAMES, *(b.name for b in others if not b.refused))))
    if mine and mine[0].refused:
        raise BackendError(f"backend {name!r} of {mine[0].distribution}: {mine[0].refused}. Uninstall one of them.")


def fastest_order() -> tuple[str, ...]:
    """The backends that "fastest" tries: all that may be faster than float on a machine of this kind."""
    left_out = ("reference", "qnnpack") if cpu.is_x86() else ("reference", "x86", "fbgemm")
    return tuple(name for name in _BACKENDS if name not in left_out)


def get_backend(name: str, device: str = "cpu") -> Backend:
    """The backend of that name; "auto" is the first of `auto_order()` that this machine runs, "fastest" the same.

    Args:
        name: "auto", a backend's name, or the import path of one of the user's own.
        device: type of the device that the model is on.

    Raises:
        BackendError: unknown name (nearest names given), or it cannot run on this machine or device.
    """
    if name in ("auto", FASTEST):
        for candidate in auto_order():
            if unavailable(candidate, device) is not None:
                continue
            if candidate == "reference":
                warn(
                    f"fxq has no int8 kernels for a model on {device} of this machine. It is quantized for the "
                    'reference backend: exact, but slower than float. backend="reference" avoids this warning; '
                    "pip install 'fxq[jit]' adds kernels for CPUs."
                )
            return get_backend(candidate, device)
    reason = unavailable(name, device)
    if reason is not None:
        raise BackendError(reason)
    backend = backend_type(name)()
    drawback = backend.drawback()
    if drawback is not None:
        warn_once(drawback)
    return backend


def unavailable(name: str, device: str = "cpu") -> str | None:
    """Why the backend of that name cannot run here, and what to do; None if it can.

    Args:
        name: "auto", a backend's name, or the import path of one of the user's own.
        device: type of the device that the model is on.

    Raises:
        BackendError: unknown name (nearest names given).
    """
    if name in ("auto", FASTEST):
        return None  # reference runs anywhere
    try:
        kind = backend_type(name)
    except BackendError as error:
        if any(other.name == name for other in installed()):  # another package's fault ends nothing
            return str(error)
        raise
    backend = kind()
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
    for backend in _BACKENDS:  # their kernels are registered when they are imported
        if name in known_kernels():
            break
        backend_type(backend)
    found = known_kernels().get(name)
    if found is None:
        raise BackendError(unknown("kernel", name, known_kernels()))
    return found


def devices_of(name: str) -> tuple[str, ...]:
    """Types of the devices that a backend runs on; empty: any."""
    return backend_type(name).devices


def backend_type(name: str) -> type[Backend]:
    """The class of a backend: of fxq's and of other packages' by its name, of the user's own by its import path.

    Raises:
        BackendError: unknown name (nearest names given), no class of a backend, or one whose name is taken; the package
            that has it cannot be imported.
    """
    if name not in _BACKENDS and ":" not in name:
        check_name(name)
        return _of_package(next(backend for backend in installed() if backend.name == name))
    try:
        found: type[Backend] = import_name(_BACKENDS.get(name, name), Backend)
    except RecipeError as error:
        raise BackendError(f"backend {name!r}: {error}") from None
    if ":" not in name:
        return found
    if isabstract(found) or not isinstance(getattr(found, "name", None), str):
        raise BackendError(f"backend {name!r} has no name, or not the methods of a fxq.extend.Backend.")
    of_packages = {b.name: f"that of {b.distribution}" for b in installed() if b.path != name}
    taken = "fxq's" if found.name in NAMES else of_packages.get(found.name) or _OWN.setdefault(found.name, name)
    if taken != name:
        raise BackendError(f"backend {name!r} is called {found.name!r}, as {taken} is; choose another name.")
    return found


def _of_package(backend: InstalledBackend) -> type[Backend]:
    where = f"backend {backend.name!r} of the package {backend.distribution}"
    try:
        found: type[Backend] = import_name(backend.path, Backend)
    except Exception as error:  # whatever the code of another package raises
        raise BackendError(f"{where} cannot be imported: {words_of(error)}") from error
    if isabstract(found) or getattr(found, "name", None) != backend.name:
        raise BackendError(
            f"{where}: its class {backend.path} is called {getattr(found, 'name', None)!r}, or lacks methods of a "
            "fxq.extend.Backend."
        )
    return found


def written(backend: Backend) -> str:
    """What a recipe calls a backend: its name, of one of the user's own its import path."""
    return _OWN.get(backend.name, backend.name)


__all__ = [
    "NAMES", "Backend", "Support", "Trap", "auto_order", "backend_type", "check_name", "devices_of", "fastest_order",
    "get_backend", "installed", "kernel_named", "known", "unavailable", "written",
]  # fmt: skip
