"""Decorators that compile functions of addresses and numbers with Numba, and access to the compiled modules."""

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
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from fxq.backends.loops.code import amx_probe
from fxq.backends.loops.code.code_cache import compile_cached
from fxq.backends.loops.code.cpu_kinds import VARIABLE, cpu_kind
from fxq.common.cache_folder import chosen_folder
from fxq.errors import BackendError, FxqError
from fxq.quant.stored_grids import PLAIN_TENSORS

MODULES = (
    "row_loops", "step_loops", "recurrent_loops", "program_loops", "few_rows_loops", "many_rows_loops", "panel_loops",
    "split_float_loops", "token_loops", "pool_loops", "rounding_loops",
)  # fmt: skip
"""Modules of this folder that hold the compiled functions."""
log = logging.getLogger("fxq")
_MAX_LOOP_THREADS = 4
"""Threads above which PyTorch's ops are as fast as a loop, which runs on one thread."""
_MAX_CALL_BOUND_ELEMENTS = 2**17
"""Elements up to which a loop is faster with any number of threads, since PyTorch's ops take longer to call."""
_OPTIONS: Mapping[str, Any] = {"error_model": "numpy", "fastmath": {"contract"}}
"""Options that compile as C does: divisions are not checked, and a product and a sum may be rounded once."""
_NUMBERS: Mapping[str, tuple[str, Any]] = {"f": ("float32", ctypes.c_float), "i": ("int64", ctypes.c_int64)}
_MEMORY = {"f*": "float32", "u8*": "uint8", "i8*": "int8", "i16*": "int16", "i32*": "int32", "i64*": "int64"}


@cache
def _loaded(name: str) -> ModuleType | str:
    """Module of this folder, or the reason why it cannot be loaded.

    Numba fails in many ways, and without it fxq is only slower: any exception counts as a reason, except a kind of CPU
    that cannot be played.
    """
    try:
        return import_module(f"fxq.backends.loops.code.{name}")
    except FxqError:
        raise
    except Exception as error:
        log.info("Numba compiles nothing: %s", error)
        return str(error)


def loops(name: str) -> ModuleType | None:
    """Return a module of this folder whose functions are compiled; None where Numba is missing or does not work."""
    module = _loaded(name)
    return None if isinstance(module, str) else module


def missing(name: str) -> str:
    """Reason why a module of this folder cannot be loaded; empty if it can."""
    module = _loaded(name)
    return module if isinstance(module, str) else ""


def installed() -> str:
    """Version of Numba, or "none"."""
    return version("numba") if find_spec("numba") is not None else "none"


def description() -> str:
    """Text for `fxq doctor`: what compiles loops, or why PyTorch's ops replace them."""
    module = _loaded("row_loops")
    if isinstance(module, str):
        return f"none: dynamic and recurrent layers are slower (pip install fxq[jit]; {module})"
    kind = cpu_kind()
    about = f"compiled by Numba {installed()} for {kind.name}"
    if kind.is_played:
        return f"{about} by order of {VARIABLE}{', which it emulates slowly' if kind.has_amx else ''}"
    refusal = amx_probe.refusal() if amx_probe.has_amx() else ""
    return f"{about} (without AMX: {refusal})" if refusal else about


def loops_for(name: str, elements: int, *read: Tensor | None) -> ModuleType | None:
    """Return a module of loops, or None where PyTorch's ops are as fast or the tensors cannot be read by address.

    Args:
        name: Name of the module.
        elements: Number of elements that the loop computes on one thread; 0 if it runs on all threads.
        read: Tensors whose addresses the loop gets. A dispatch mode of PyTorch would not see these reads.
    """
    if elements > _MAX_CALL_BOUND_ELEMENTS and torch.get_num_threads() > _MAX_LOOP_THREADS:
        return None
    return loops(name) if has_memory(*read) else None


def has_memory(*read: Tensor | None) -> bool:
    """Whether the values of all tensors can be read by address, and no dispatch mode watches PyTorch's ops."""
    return not _len_torch_dispatch_stack() and all(x is None or _is_plain(x) for x in read)


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor has CPU memory that holds its values: it is not fake, sparse or lazily negated."""
    is_dense = type(x) in PLAIN_TENSORS and x.is_cpu and x.layout is torch.strided
    return is_dense and not x.is_neg() and not x._is_zerotensor()


@cache
def _source_hash() -> str:
    """Hash of all sources that are compiled, and of the kind of CPU."""
    digest, quant = hashlib.sha256(repr(cpu_kind()).encode()), Path(__file__).parents[3] / "quant"
    read = (quant / f"{name}.py" for name in ("dynamic_grid", "packing", "least_error"))
    for path in (*sorted(Path(__file__).parent.glob("*.py")), *read):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _claim_name(function: Callable[..., object], name: str) -> None:
    """Give a function a qualified name. Of a closure, it must be the only one in its module, else `ValueError`.

    Numba names machine code by module, qualified name, argument types and a counter of the process. Cached machine code
    has the counter of the process that compiled it: of two closures with one name, one could run as the other.
    """
    function.__qualname__ = name
    key = (function.__module__, name)
    if key in _names and getattr(function, "__closure__", None):
        raise ValueError(f"two closures of {key[0]} would be compiled as {name}: give each a name of its own")
    _names.add(key)


_names: set[tuple[str, str]] = set()
"""Module and qualified name of each function that Numba compiles."""


def _numba() -> Any:
    """The package numba, told which kind of CPU to compile for. Raises `ImportError` where it is not installed."""
    import numba

    cpu_kind()
    return numba


def helper(function: Callable[..., object], name: str = "") -> Callable[..., object]:
    """Decorate a function that `compiled` functions may call. Raises `ImportError` where Numba is not installed.

    Args:
        function: Function to compile.
        name: Qualified name. Default: the function's own. A factory of closures must give each its own name.
    """
    numba = _numba()
    _claim_name(function, name or function.__qualname__)
    dispatcher: Callable[..., object] = numba.njit(**_OPTIONS)(function)
    return dispatcher


def inlined(function: Callable[..., object]) -> Callable[..., object]:
    """Decorate a helper that becomes part of its caller's code, since it is called for each tile or pixel."""
    numba = _numba()
    _claim_name(function, function.__qualname__)
    dispatcher: Callable[..., object] = numba.njit(forceinline=True, **_OPTIONS)(function)
    return dispatcher


def compiled(types: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a function that is called with addresses (`Tensor.data_ptr()`) and numbers, and compile it.

    The machine code is cached on disk. Nothing is checked: neither the memory at an address nor divisions by zero. A
    call releases the GIL.

    Args:
        types: Types of the arguments: "f*" is an address of float32, "u8*", "i8*", "i16*", "i32*" and "i64*" are
            addresses of integers; "f" is a float, "i" an integer.

    Raises:
        ImportError: Numba is not installed.
    """
    import numba

    numba_types, names = numba.types, types.split()
    argument_types = [
        numba_types.CPointer(getattr(numba_types, _MEMORY[name]))
        if name in _MEMORY
        else getattr(numba_types, _NUMBERS[name][0])
        for name in names
    ]
    c_types: list[Any] = [ctypes.c_void_p if name in _MEMORY else _NUMBERS[name][1] for name in names]

    def compile_(function: Callable[..., None]) -> Callable[..., None]:
        # Numba caches machine code under this name, and checks only the function's own file for changes.
        _claim_name(function, f"{function.__name__}_{_source_hash()}")
        loop, is_cached = compile_cached(numba.types.void(*argument_types), function, _OPTIONS)
        if not is_cached:
            _warn_not_cached()
        address: Any = loop.address
        call: Callable[..., None] = ctypes.CFUNCTYPE(None, *c_types)(address)
        call.keeps = loop  # type: ignore[attr-defined]  # the code is freed with it
        return call

    return compile_


@cache
def _warn_not_cached() -> None:
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
    reason = next(filter(None, map(missing, MODULES)), "")
    if reason:
        raise BackendError(f"no loops are compiled: {reason} (pip install fxq[jit]).")
    if _warn_not_cached.cache_info().currsize:
        raise BackendError(
            "the loops are compiled but cannot be cached: set FXQ_CACHE to a writable folder, here and where they are "
            "used."
        )
    return f"compiled by Numba {installed()}, cached in {_cache_place()}"


def _cache_place() -> str:
    """Folder of the cached loops, for a message."""
    chosen = chosen_folder()
    return str(chosen / "numba") if chosen is not None else "Numba's cache (NUMBA_CACHE_DIR, or beside the package)"
