"""Functions of addresses and numbers, compiled to machine code by Numba."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

log = logging.getLogger("fxq")
_THREADS, _SMALL = 4, 2**17
"""With more threads than this, PyTorch's ops are as fast as one compiled loop on one thread; on fewer elements not."""
_OPTIONS: Mapping[str, Any] = {"error_model": "numpy", "fastmath": {"contract"}}
"""As in C: nothing is asked before a division, and a product and a sum may be rounded at once."""
_NUMBERS: Mapping[str, tuple[str, Any]] = {"f": ("float32", ctypes.c_float), "i": ("int64", ctypes.c_int64)}
_MEMORY = {"f*": "float32", "u8*": "uint8", "i8*": "int8", "i16*": "int16", "i32*": "int32"}


@cache
def _loaded(name: str) -> ModuleType | str:
    """A module of this folder, or why there is none: Numba fails in many ways, and without it fxq is only slower."""
    try:
        return import_module(f"fxq.backends.jit.{name}")
    except Exception as error:
        log.info("Numba compiles nothing: %s", error)
        return str(error)


def loops(name: str) -> ModuleType | None:
    """A module of this folder whose functions are compiled; None where Numba is missing or does not work."""
    found = _loaded(name)
    return None if isinstance(found, str) else found


def installed() -> str:
    """The version of Numba that is installed; "none"."""
    return version("numba") if find_spec("numba") is not None else "none"


def description() -> str:
    """What compiles loops, or why PyTorch's ops stand in for them."""
    found = _loaded("row_loops")
    if isinstance(found, str):
        return f"none: dynamic and recurrent layers are slower (pip install fxq[jit]; {found})"
    return f"compiled by Numba {installed()}"


def loops_for(name: str, elements: int) -> ModuleType | None:
    """As `loops`, where one thread is quick enough with so many elements."""
    return loops(name) if elements <= _SMALL or torch.get_num_threads() <= _THREADS else None


def helper(function: Callable[..., object]) -> Callable[..., object]:
    """What functions that are `compiled` may call, as a decorator. Raises `ImportError`: Numba is not installed."""
    import numba

    made: Callable[..., object] = numba.njit(**_OPTIONS)(function)
    return made


def compiled(types: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compile a function, as a decorator. It is called with addresses (`Tensor.data_ptr()`) and numbers.

    Compiled once and kept on disk. Nothing is checked: not the memory behind an address, nor division by zero. A call
    lets other threads of Python run.

    Args:
        types: those of the arguments: "f*" is an address of float32, "u8*", "i8*", "i16*" and "i32*" of integers; "f"
            is a float, "i" an integer.

    Raises:
        ImportError: Numba is not installed.
    """
    import numba

    of, names = numba.types, types.split()
    given = [
        of.CPointer(getattr(of, _MEMORY[name])) if name in _MEMORY else getattr(of, _NUMBERS[name][0]) for name in names
    ]
    taken: list[Any] = [ctypes.c_void_p if name in _MEMORY else _NUMBERS[name][1] for name in names]

    def compile_(function: Callable[..., None]) -> Callable[..., None]:
        signature = numba.types.void(*given)
        try:
            made = numba.cfunc(signature, cache=True, **_OPTIONS)(function)
        except RuntimeError:  # there is no folder that it may write to
            made = numba.cfunc(signature, **_OPTIONS)(function)
        address: Any = made.address
        call: Callable[..., None] = ctypes.CFUNCTYPE(None, *taken)(address)
        call.keeps = made  # type: ignore[attr-defined]  # the code goes with it
        return call

    return compile_
