"""Machine code for memory that threads share: atomic loads, stores, additions and exchanges of int64, and waiting."""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fxq.backends.loops.code.vectors import INT64, call_intrinsic, number

_IS_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


def _on_integers(code: Callable[..., Any]) -> Any:
    """Decorator that turns `code(builder, *arguments)`, which returns an int64, into a Numba function of int64."""
    count = len(inspect.signature(code).parameters) - 1

    def typed() -> tuple[Any, Any]:
        def body(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
            return code(b, *args)

        return types.int64(*[types.int64] * count), body

    parameters = list(inspect.signature(code).parameters.values())[1:]
    typing = inspect.Parameter("_typing", inspect.Parameter.POSITIONAL_OR_KEYWORD)

    def declared(*_: Any) -> tuple[Any, Any]:
        return typed()

    declared.__signature__ = inspect.Signature([typing, *parameters])  # type: ignore[attr-defined]  # Numba reads it
    declared.__doc__ = code.__doc__
    return intrinsic(declared)


def _word(b: Any, address: Any) -> Any:
    return b.inttoptr(address, INT64.as_pointer())


@_on_integers
def load_acquire(b, address):
    """Number at an address. Memory that its writer wrote before `store_release` is visible from here on."""
    return b.load_atomic(_word(b, address), "acquire", 8)


@_on_integers
def store_release(b, address, value):
    """Write a number after all earlier reads and writes of this thread."""
    b.store_atomic(value, _word(b, address), "release", 8)
    return value


@_on_integers
def add(b, address, value):
    """Add to a number atomically, in the order of `load_acquire` and `store_release`. Returns the old number."""
    return b.atomic_rmw("add", _word(b, address), value, "acq_rel")


@_on_integers
def exchange(b, address, expected, value):
    """Replace a number atomically if it is `expected`, in the order of `add`. Returns 1 if it was, else 0."""
    pair = b.cmpxchg(_word(b, address), expected, value, "acq_rel", "monotonic")
    return b.zext(b.extract_value(pair, 1), INT64)


@_on_integers
def lowest_bit(b, x):
    """Index of the lowest bit of a number that is not 0."""
    return call_intrinsic(b, "llvm.cttz.i64", INT64, [x, ir.Constant(ir.IntType(1), 1)])


@_on_integers
def pause(b):
    """Tell the CPU that the thread waits in a loop."""
    if _IS_X86:
        call_intrinsic(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
    return number(0)


@_on_integers
def call_step(b, function, steps, count, bases):
    """Call a C function by its address: `void function(int64 steps, int64 count, int64 bases)`."""
    kind = ir.FunctionType(ir.VoidType(), [INT64] * 3)
    b.call(b.inttoptr(function, kind.as_pointer()), [steps, count, bases])
    return number(0)


@_on_integers
def call_plain(b, function):
    """Call a C function without arguments by its address, and ignore its result."""
    kind = ir.FunctionType(ir.IntType(32), [])
    b.call(b.inttoptr(function, kind.as_pointer()), [])
    return number(0)


@_on_integers
def call_number(b, function):
    """Result of a C function by its address: `int32 function()`."""
    kind = ir.FunctionType(ir.IntType(32), [])
    return b.sext(b.call(b.inttoptr(function, kind.as_pointer()), []), INT64)


@_on_integers
def call_team(b, function, member, data, threads):
    """Call `void function(void *member, void *data, uint32 threads, uint32 flags)`, GNU OpenMP's `GOMP_parallel`."""
    word = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [INT64, INT64, word, word])
    b.call(b.inttoptr(function, kind.as_pointer()), [member, data, b.trunc(threads, word), ir.Constant(word, 0)])
    return number(0)
