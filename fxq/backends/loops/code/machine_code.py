"""Functions for Numba whose machine code is written out, and what the CPU can do that it is made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from numba import types
from numba.core import config
from numba.extending import intrinsic


def _features() -> str:
    """What the CPU can do that code is made for, as LLVM writes it."""
    name, features = (getattr(config, setting, None) for setting in ("CPU_NAME", "CPU_FEATURES"))
    if features is not None:
        return str(features)
    return "" if name else str(llvmlite.binding.get_host_cpu_features().flatten())  # of another CPU nothing is known


HAS_AVX512 = "+avx512f" in _features()
"""Whether vectors have 512 bits."""
HAS_VNNI = "+avx512vnni" in _features()
"""Whether one instruction adds four products to each of 16 sums."""
GROUP = 4 if HAS_VNNI else 2
"""How many products are added at once: so many channels of a weight lie beside each other."""
PIXELS = 12 if HAS_VNNI else 4
"""Of how many pixels a large tile is: 16 sums of each stay in registers. Small ones are of 4, or of one."""
WIDE = 64
"""How many channels a depthwise convolution computes at once where there is VNNI."""


def on_addresses(code: Callable[..., None]) -> Any:
    """A function for Numba, of addresses and counts, int64, whose machine code is `code(builder, *them)`."""
    names = code.__code__.co_varnames[1 : code.__code__.co_argcount]

    def body(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        code(b, *args)
        return context.get_dummy_value()

    signature = types.void(*[types.int64] * len(names))
    # Numba asks how many arguments there are, so that they have to stand there.
    made: dict[str, Any] = {"signature": signature, "body": body}
    exec(f"def typed(_typing, {', '.join(names)}):\n    return signature, body", made)
    made["typed"].__doc__ = code.__doc__
    return intrinsic(made["typed"])
