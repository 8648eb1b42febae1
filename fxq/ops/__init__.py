"""The op table: one row per op, in files by subject.

A row is a plain function, the canonical form of the op: tensor arguments are positional, options keyword-only, and the
body defines the op. The decorator lists all other spellings of the op (module types, functions, method names, aten
overloads) and its traits. Passes, patterns and backends refer to ops by name, never by spelling.

To add an op: add a row to the file of its subject, and a case to the `tests/cases_*.py` of its subject. Passes read the
fields of the row (`OpTraits`, `Op`). Ops of 1, 2 and 3 dimensions are a family: a function of the number of axes
registers their rows (see `convolution.py`).
"""

from fxq.ops import (
    activations,
    arithmetic,
    conversions,
    convolution,
    functions,
    layers,
    pointwise,
    pooling,
    recurrent,
    reduction,
    resampling,
    selection,
    shapes,
    states,
)
from fxq.ops.convolution import conv_padding
from fxq.ops.registry import OPS

__all__ = [
    "OPS",
    "activations",
    "arithmetic",
    "conv_padding",
    "conversions",
    "convolution",
    "functions",
    "layers",
    "pointwise",
    "pooling",
    "recurrent",
    "reduction",
    "resampling",
    "selection",
    "shapes",
    "states",
]
