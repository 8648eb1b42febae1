"""Instructions of an ARM CPU as the operating system reports them, of which LLVM does not list all."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Any

_CAPABILITIES = (("neon", 16, 1), ("dotprod", 16, 20), ("i8mm", 26, 13))
"""LLVM feature; the entry of the auxiliary vector in which Linux reports it, AT_HWCAP or AT_HWCAP2; and its bit."""
_SETTINGS = (("neon", "AdvSIMD"), ("dotprod", "FEAT_DotProd"), ("i8mm", "FEAT_I8MM"))
"""LLVM feature, and the setting `hw.optional.arm` in which macOS reports it."""


@cache
def features() -> tuple[str, ...]:
    """LLVM features of this CPU, of those that kinds of ARM need; empty on other CPUs and systems."""
    if platform.machine().lower() not in ("aarch64", "arm64"):
        return ()
    try:
        library: Any = ctypes.CDLL(None)
        if platform.system() == "Linux":
            return _of_linux(library)
        return _of_macos(library) if platform.system() == "Darwin" else ()
    except (AttributeError, OSError, TypeError):  # a C library without the function; Windows has no common library
        return ()


def _of_linux(library: Any) -> tuple[str, ...]:
    read: Any = library.getauxval
    read.restype, read.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return tuple(name for name, entry, bit in _CAPABILITIES if read(entry) >> bit & 1)


def _of_macos(library: Any) -> tuple[str, ...]:
    def is_set(setting: str) -> bool:
        value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        name = f"hw.optional.arm.{setting}".encode()
        failed = library.sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
        return not failed and value.value == 1

    return tuple(name for name, setting in _SETTINGS if is_set(setting))
