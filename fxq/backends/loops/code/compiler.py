"""Functions of addresses and numbers, compiled to machine code by Numba."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack

from fxq.backends.loops.code.code_cache import compile_cached
from fxq.common.cache_folder import chosen_folder
from fxq.errors import BackendError

MODULES = ("row_loops", "step_loops", "program_loops")
"""Modules of this folder that hold the compiled functions."""
log = logging.getLogger("fxq")
_THREADS = 4
"""With more threads, PyTorch's ops are as fast as a loop, which runs on one."""
_SMALL = 2**17
"""Up to so many elements the loop is faster with any number of threads: PyTorch's ops take longer to call."""
_OPTIONS: Mapping[str, Any] = {"error_model": "numpy", "fastmath": {"contract"}}
"""As in C: nothing is asked before a division, and a product and a sum may be rounded at once."""
_NUMBERS: Mapping[str, tuple[str, Any]] = {"f": ("float32", ctypes.c_float), "i": ("int64", ctypes.c_int64)}
_MEMORY = {"f*": "float32", "u8*": "uint8", "i8*": "int8", "i16*": "int16", "i32*": "int32", "i64*": "int64"}


@cache
def _loaded(name: str) -> ModuleType | str:
    """A module of this folder, or why there is none: Numba fails in many ways, and without it fxq is only slower."""
    try:
        return import_module(f"fxq.backends.loops.code.{name}")
    except Exception as error:
        log.info("Numba compiles nothing: %s", error)
        return str(error)


def loops(name: str) -> ModuleType | None:
    """A module of this folder whose functions are compiled; None where Numba is missing or does not work."""
    found = _loaded(name)
    return None if isinstance(found, str) else found


def missing(name: str) -> str:
    """Why there is no such module; empty where there is one."""
    found = _loaded(name)
    return found if isinstance(found, str) else ""


def installed() -> str:
    """The version of Numba that is installed; "none"."""
    return version("numba") if find_spec("numba") is not None else "none"


def description() -> str:
    """What compiles loops, or why PyTorch's ops stand in for them."""
    found = _loaded("row_loops")
    if isinstance(found, str):
        return f"none: dynamic and recurrent layers are slower (pip install fxq[jit]; {found})"
    return f"compiled by Numba {installed()}"


def loops_for(name: str, elements: int, *read: Tensor | None) -> ModuleType | None:
    """As `loops`, where one thread is quick enough, and the memory of tensors is what they say.

    Args:
        name: of the module.
        elements: how many it is about.
        read: tensors whose addresses are to be given to a loop, which nobody who watches PyTorch's ops sees.
    """
    if elements > _SMALL and torch.get_num_threads() > _THREADS:
        return None
    return loops(name) if has_memory(*read) else None


def has_memory(*read: Tensor | None) -> bool:
    """Whether the memory of tensors holds their values, and nobody watches PyTorch's ops."""
    return not _len_torch_dispatch_stack() and all(x is None or _is_plain(x) for x in read)


def _is_plain(x: Tensor) -> bool:
    """Whether it has memory on the CPU that holds its values: no fake, sparse, or lazily negated tensor."""
    is_dense = type(x) in (Tensor, nn.Parameter) and x.is_cpu and x.layout is torch.strided
    return is_dense and not x.is_neg() and not x._is_zerotensor()


@cache
def _sources() -> str:
    """A hash of all that is compiled."""
    found, package = hashlib.sha256(), Path(__file__).parents[3]
    for path in (*sorted(Path(__file__).parent.glob("*.py")), package / "quant" / "dynamic_grid.py"):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


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
        types: those of the arguments: "f*" is an address of float32, "u8*", "i8*", "i16*", "i32*" and "i64*" are of
            integers; "f" is a float, "i" an integer.

    Raises:
        ImportError: Numba is not installed.
    """
    import numba

    of, names = numba.types, types.split()
    argument_types = [
        of.CPointer(getattr(of, _MEMORY[name])) if name in _MEMORY else getattr(of, _NUMBERS[name][0]) for name in names
    ]
    taken: list[Any] = [ctypes.c_void_p if name in _MEMORY else _NUMBERS[name][1] for name in names]

    def compile_(function: Callable[..., None]) -> Callable[..., None]:
        # Numba keeps machine code under this name, and looks at the file of the function alone for what has changed.
        function.__qualname__ = f"{function.__name__}_{_sources()}"
        loop, is_cached = compile_cached(numba.types.void(*argument_types), function, _OPTIONS)
        if not is_cached:
            _say_not_kept()
        address: Any = loop.address
        call: Callable[..., None] = ctypes.CFUNCTYPE(None, *taken)(address)
        call.keeps = loop  # type: ignore[attr-defined]  # the code goes with it
        return call

    return compile_


@cache
def _say_not_kept() -> None:
    """Warn once per process that compiled loops cannot be cached."""
    log.warning(
        "fxq compiles its loops in this process, which takes seconds of CPU time, and cannot cache them: neither the "
        "package's folder nor the user's cache is writable. Run `fxq doctor --compile` when building the image, or set "
        "FXQ_CACHE to a writable folder."
    )


def compile_loops() -> str:
    """Compile all loops into the cache for later processes, and return a message that says where it is.

    Raises:
        BackendError: Numba is missing or does not work, or no cache folder is writable.
    """
    wrong = next(filter(None, map(missing, MODULES)), "")
    if wrong:
        raise BackendError(f"no loops are compiled: {wrong} (pip install fxq[jit]).")
    if _say_not_kept.cache_info().currsize:
        raise BackendError(
            "the loops are compiled but cannot be cached: set FXQ_CACHE to a writable folder, here and where they are "
            "used."
        )
    return f"compiled by Numba {installed()}, cached in {_kept_in()}"


def _kept_in() -> str:
    chosen = chosen_folder()
    return str(chosen / "numba") if chosen is not None else "Numba's cache (NUMBA_CACHE_DIR, or beside the package)"
