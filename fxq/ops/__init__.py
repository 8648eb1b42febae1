"""The op table: one row per op, by subject.

A row is a plain function. It is the op's canonical form: tensor arguments positional, options keyword-only, and its
body is what the op means. The decorator lists every other spelling of the op (module types, functions, method names,
aten overloads) and says how the op takes part in quantization. Passes, patterns and backends name ops, never spellings.

To add an op: add a row to the file of its subject, and a case to the `tests/cases_*.py` of its subject. What passes
need to know of it are fields of the row (`OpTraits`, `Op`). Ops of 1, 2 and 3 dimensions are a family: one row, in a
function of the number of axes (see `convolution.py`).
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
]
