"""Decorator for functions whose machine code is written out with llvmlite, and the kind of CPU that they are for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fxq.backends.loops.code.cpu_kinds import cpu_kind

KIND = cpu_kind()
"""Kind of CPU that code is written for. Its features are read when code is emitted."""
GROUP = 4
"""Products that are added to a sum at once. Weights are stored in groups of so many input channels."""
X_BYTES = KIND.x_bytes
"""Bytes of an integer of a pixel in tiles of layers, see `CpuKind`."""
TILE_PIXELS, WIDE_CHANNELS = KIND.tile_pixels, KIND.wide_channels
"""Sizes of tiles, see `CpuKind`."""


def on_addresses(code: Callable[..., None], is_called: bool = False) -> Any:
    """Decorate `code(builder, *arguments)`, which emits LLVM instructions, as a Numba function.

    Its arguments are int64, or named tuples of int64, which `code` gets as tuples of LLVM values with these names.
    `code` is also the attribute `emit` of the result.

    Args:
        code: The function.
        is_called: Whether its instructions are a function of their own, which gets all registers, and not part of the
            caller's code.
    """
    _, *parameters = inspect.signature(code).parameters.values()

    def typed(*kinds: Any) -> tuple[Any, Any]:
        classes = [getattr(kind, "instance_class", None) for kind in kinds]
        signature = types.void(
            *[types.int64 if cls is None else kind for kind, cls in zip(kinds, classes, strict=True)]
        )

        def body(context: Any, b: Any, _signature: Any, args: Any) -> Any:
            groups = [
                [value] if cls is None else cgutils.unpack_tuple(b, value)
                for value, cls in zip(args, classes, strict=True)
            ]
            values = [value for group in groups for value in group]
            if is_called:
                function = _function(b, len(values))
                b.call(function, values)
                b, values = ir.IRBuilder(function.append_basic_block()), list(function.args)
            left = iter(values)
            taken = [[next(left) for _ in group] for group in groups]
            code(b, *[group[0] if cls is None else cls(*group) for group, cls in zip(taken, classes, strict=True)])
            if is_called:
                b.ret_void()
            return context.get_dummy_value()

        return signature, body

    typing = inspect.Parameter("_typing", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call = inspect.Signature([typing, *parameters])

    def declared(*args: Any, **named: Any) -> tuple[Any, Any]:
        return typed(*call.bind(*args, **named).args[1:])

    declared.__signature__ = call  # type: ignore[attr-defined]  # Numba reads the arguments from it
    declared.__doc__ = code.__doc__
    function: Any = intrinsic(declared)
    function.emit = code
    return function


def choose(b: Any, value: Any, cases: Sequence[int], code: Callable[[int], None]) -> None:
    """Emit `code(case)` for each case. When it runs, an int64 chooses the case; other numbers choose the last one."""
    blocks = [b.append_basic_block(f"case{case}") for case in cases]
    end = b.append_basic_block("end")
    switch = b.switch(value, blocks[-1])
    for case, block in zip(cases[:-1], blocks, strict=False):
        switch.add_case(ir.Constant(ir.IntType(64), case), block)
    for case, block in zip(cases, blocks, strict=True):
        b.position_at_end(block)
        code(case)
        b.branch(end)
    b.position_at_end(end)


def _function(b: Any, count: int) -> Any:
    """New function of some int64 in the module of a builder, which LLVM does not make part of its callers."""
    name = b.module.get_unique_name("tile")
    function = ir.Function(b.module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * count), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("noimplicitfloat")  # LLVM's vectorizers leave it alone: it has vectors already
    return function
