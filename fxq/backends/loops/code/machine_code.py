"""Decorator for functions whose machine code is written out with llvmlite, and the CPU features that they use."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import llvmlite.binding
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic


def _features() -> str:
    """CPU features that Numba compiles for, as LLVM writes them."""
    name, features = (getattr(config, setting, None) for setting in ("CPU_NAME", "CPU_FEATURES"))
    if features is not None:
        return str(features)
    return (
        "" if name else str(llvmlite.binding.get_host_cpu_features().flatten())
    )  # features of another CPU are unknown


HAS_AVX512 = "+avx512f" in _features()
"""Whether vectors have 512 bits."""
HAS_VNNI = "+avx512vnni" in _features()
"""Whether one instruction adds four products to each of 16 sums."""
GROUP = 4 if HAS_VNNI else 2
"""Products that one instruction adds to a sum. Weights are stored in groups of so many input channels."""
TILE_PIXELS = 12 if HAS_VNNI else 4
"""Pixels of a large tile: 16 sums of each stay in registers. Small tiles have 4 pixels, or one."""
WIDE_CHANNELS = 64
"""Channels that a depthwise convolution computes at once where there is VNNI."""


def on_addresses(code: Callable[..., None]) -> Any:
    """Decorate `code(builder, *arguments)`, which emits LLVM instructions, as a Numba function.

    Its arguments are int64, or named tuples of int64, which `code` gets as tuples of LLVM values with these names.
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
    return intrinsic(declared)
