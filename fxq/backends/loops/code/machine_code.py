"""Decorator for functions whose machine code is written out with llvmlite, and the kind of CPU that they are for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fxq.backends.loops.code.cpu_kinds import cpu_kind

KIND = cpu_kind()
"""Kind of CPU that code is written for. Its features are read when code is emitted."""
GROUP = 4
"""Products that are added to a sum at once. Weights are stored in groups of so many input channels."""
TILE_PIXELS, WIDE_CHANNELS, WIDE_PIXELS = KIND.tile_pixels, KIND.wide_channels, KIND.wide_pixels
"""Sizes of tiles, see `CpuKind`."""


def on_addresses(code: Callable[..., None]) -> Any:
    """Decorate `code(builder, *arguments)`, which emits LLVM instructions, as a Numba function.

    Its arguments are int64, or named tuples of int64, which `code` gets as tuples of LLVM values with these names.
    `code` is also the attribute `emit` of the result.
    """
    _, *parameters = inspect.signature(code).parameters.values()

    def typed(*kinds: Any) -> tuple[Any, Any]:
        classes = [getattr(kind, "instance_class", None) for kind in kinds]
        signature = types.void(
            *[types.int64 if cls is None else kind for kind, cls in zip(kinds, classes, strict=True)]
        )

        def body(context: Any, b: Any, _signature: Any, args: Any) -> Any:
            pairs = zip(args, classes, strict=True)
            code(b, *[value if cls is None else cls(*cgutils.unpack_tuple(b, value)) for value, cls in pairs])
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
