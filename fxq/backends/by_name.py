"""Backends by name. The module of a backend is imported on first use."""

from __future__ import annotations

from inspect import isabstract

from fxq.backends import cpu
from fxq.backends.base import Backend, FaultyKernel, Support
from fxq.backends.installed import InstalledBackend, installed_backends
from fxq.backends.kernel import Kernel, known_kernels
from fxq.common.source import import_name
from fxq.errors import BackendError, RecipeError, unknown, warn, warn_once, words_of

_BACKENDS = {
    "reference": "fxq.backends.reference:Reference",
    "tensorrt": "fxq.backends.tensorrt:Tensorrt",
    "x86": "fxq.backends.x86.x86:X86",
    "fbgemm": "fxq.backends.packed.fbgemm:Fbgemm",
    "qnnpack": "fxq.backends.packed.qnnpack:Qnnpack",
    "jit": "fxq.backends.loops.jit_engine:Jit",
    "openvino": "fxq.backends.engines.openvino:Openvino",
    "onnxruntime": "fxq.backends.engines.onnxruntime:Onnxruntime",
}
FASTEST = "fastest"
"""Name with which a recipe asks to try all backends and keep the fastest (`fxq/workflow/fastest.py`)."""
NAMES = ("auto", FASTEST, *_BACKENDS)
"""Names that a recipe may use, besides import paths and the names of other packages' backends."""
_USER_BACKENDS: dict[str, str] = {}
"""Import paths of the user's own backends that have been used, by name."""


def auto_order() -> tuple[str, ...]:
    """Backends that "auto" tries, best first.

    On x86-64, x86 needs nothing but PyTorch, compiles nothing, and can emit float; fbgemm is for builds of PyTorch
    without oneDNN. qnnpack is made for ARM; on x86-64 it is slower than float. The others may be faster on x86-64, see
    `fastest_order`, but "auto" has them for builds of PyTorch without int8 kernels and for other devices: compiled
    loops (jit), engines, backends of other packages, and last reference, which runs nothing on integers.
    """
    torch_kernels = ("x86", "fbgemm") if cpu.is_x86() else ("qnnpack",)
    return (*torch_kernels, "jit", "openvino", "onnxruntime", *_usable_names(), "reference")


def auto_skips(name: str, device: str = "cpu") -> str | None:
    """Why "auto" does not select a backend: it is unavailable, or has no kernels; None if it can be selected."""
    reason = unavailable(name, device)
    if reason is None and name not in _BACKENDS and not backend_type(name).has_kernels:
        return "it has no kernels that are faster than float."
    return reason


def _usable_names() -> tuple[str, ...]:
    """Names of the backends of other packages, except refused ones."""
    return tuple(backend.name for backend in installed() if not backend.refused)


def builtin_names() -> tuple[str, ...]:
    """Names of the backends that are part of fxq."""
    return tuple(_BACKENDS)


def names_with_kernels() -> tuple[str, ...]:
    """Names of the backends of fxq that have kernels, for this machine or others."""
    return tuple(name for name in _BACKENDS if backend_type(name).has_kernels)


def installed() -> tuple[InstalledBackend, ...]:
    """Backends that other packages add through entry points. None of them is imported."""
    return installed_backends(NAMES)


def check_name(name: str) -> None:
    """Raise `BackendError` if no backend or several backends have this name. Imports none of them."""
    of_packages = [] if name in NAMES else installed()
    matching = [backend for backend in of_packages if backend.name == name]
    if name not in NAMES and not matching:
        raise BackendError(unknown("backend", name, (*NAMES, *(b.name for b in of_packages if not b.refused))))
    if matching and matching[0].refused:
        backend = matching[0]
        raise BackendError(f"backend {name!r} of {backend.distribution}: {backend.refused}. Uninstall one of them.")


def fastest_order() -> tuple[str, ...]:
    """Backends that "fastest" tries: all that may be faster than float on this kind of CPU, also of other packages."""
    left_out = ("qnnpack",) if cpu.is_x86() else ("x86", "fbgemm")
    return (*(name for name in names_with_kernels() if name not in left_out), *_usable_names())


def get_backend(name: str, device: str = "cpu") -> Backend:
    """Return the backend of a name. "auto" and "fastest" give the first of `auto_order()` that runs here.

    Args:
        name: "auto", "fastest", a backend's name, or the import path of a class of the user's own.
        device: type of the device that the model is on.

    Raises:
        BackendError: the name is unknown (the message suggests the nearest), or the backend cannot run on this machine
            or device.
    """
    if name in ("auto", FASTEST):
        for candidate in auto_order():
            if auto_skips(candidate, device) is not None:
                continue
            if candidate == "reference":
                warn(
                    f"fxq has no int8 kernels for models on {device} on this machine. The model is quantized for the "
                    'reference backend, which is exact, but slower than float. Set backend="reference" to avoid this '
                    "warning, or add kernels for CPUs by pip install 'fxq[jit]'."
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
    """Why the backend of a name cannot run here, and the remedy; None if it can.

    Args:
        name: "auto", "fastest", a backend's name, or the import path of a class of the user's own.
        device: type of the device that the model is on.

    Raises:
        BackendError: the name is unknown; the message suggests the nearest.
    """
    if name in ("auto", FASTEST):
        return None  # reference runs anywhere
    try:
        backend = backend_type(name)()
        reason = backend.available()
    except Exception as error:  # whatever the code of another package raises: other backends may still run
        package = next((entry for entry in installed() if entry.name == name), None)
        if package is None:
            raise
        return str(error) if isinstance(error, BackendError) else f"{package.where} fails: {words_of(error)}"
    if backend.devices and device not in backend.devices:
        return (
            f"backend {name!r} runs on {', '.join(backend.devices)}, the model is on {device}; "
            f'move it with model.to({backend.devices[0]!r}), or use backend="reference".'
        )
    return reason


def kernel_named(name: str) -> type[Kernel]:
    """Return the class of the kernels of a name, such as "x86.conv". Its `from_config` makes a kernel from plain data.

    Raises:
        BackendError: the name is unknown; the message suggests the nearest.

    Example:
        >>> kernel_named("cpu.mean").options
        ('x', 'out', 'dim', 'keepdim', 'total')
    """
    for backend in _BACKENDS:  # importing a backend registers its kernels
        if name in known_kernels():
            break
        backend_type(backend)
    kernel_type = known_kernels().get(name)
    if kernel_type is None:
        raise BackendError(unknown("kernel", name, known_kernels()))
    return kernel_type


def devices_of(name: str) -> tuple[str, ...]:
    """Device types that a backend runs on; empty: any."""
    return backend_type(name).devices


def backend_type(name: str) -> type[Backend]:
    """Return the class of a backend by its name, or by its import path if it is the user's own.

    Raises:
        BackendError: the name is unknown (the message suggests the nearest) or taken by another backend, the path
            names no backend class, or the package of the backend cannot be imported.
    """
    if name not in _BACKENDS and ":" not in name:
        check_name(name)
        return _of_package(next(backend for backend in installed() if backend.name == name))
    try:
        backend: type[Backend] = import_name(_BACKENDS.get(name, name), Backend)
    except RecipeError as error:
        raise BackendError(f"backend {name!r}: {error}") from None
    if ":" not in name:
        return backend
    if isabstract(backend) or not isinstance(getattr(backend, "name", None), str):
        raise BackendError(f"backend {name!r} has no name, or lacks methods of fxq.extend.Backend.")
    of_packages = {b.name: f"that of {b.distribution}" for b in installed() if b.path != name}
    owner = "fxq's" if backend.name in NAMES else of_packages.get(backend.name)
    owner = owner or _USER_BACKENDS.setdefault(backend.name, name)
    if owner != name:
        raise BackendError(f"backend {name!r} is called {backend.name!r}, as {owner} is; choose another name.")
    return backend


def _of_package(backend: InstalledBackend) -> type[Backend]:
    try:
        backend_class: type[Backend] = import_name(backend.path, Backend)
    except Exception as error:  # whatever the code of another package raises
        raise BackendError(f"{backend.where} cannot be imported: {words_of(error)}") from error
    name = getattr(backend_class, "name", None)
    if isabstract(backend_class) or name != backend.name:
        raise BackendError(
            f"{backend.where}: its class {backend.path} is called {name!r}, or lacks methods of fxq.extend.Backend."
        )
    return backend_class


def recipe_name(backend: Backend) -> str:
    """Name of a backend in a recipe: its own name, or its import path if it is the user's own."""
    return _USER_BACKENDS.get(backend.name, backend.name)


__all__ = [
    "NAMES", "Backend", "FaultyKernel", "Support", "auto_order", "auto_skips", "backend_type", "builtin_names",
    "check_name", "devices_of", "fastest_order", "get_backend", "installed", "kernel_named", "names_with_kernels",
    "recipe_name", "unavailable",
]  # fmt: skip
