"""The loops of a program: a network, or a part of one, as a list of steps that one call runs.

A step is a row of whole numbers: its code, then its fields, in the order in which its loop reads them. Memory is
(base, offset): one of the addresses that the call is given, and bytes from there. The first address is 0, for what lies
where it lies; the second is the memory of values; the third that of a step while it runs (see `SCRATCH`): an
array of Numba's own would be freed once only its address is used. Then come inputs and outputs.

Images are (N, H, W, C) in memory, whatever PyTorch calls their axes; anything else is an image of one row.
"""

from __future__ import annotations

from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code.attention_loops import BOOL_MASK as BOOL_MASK
from fxq.backends.loops.code.attention_loops import CAUSAL as CAUSAL
from fxq.backends.loops.code.attention_loops import FLOAT_MASK as FLOAT_MASK
from fxq.backends.loops.code.attention_loops import NO_MASK as NO_MASK
from fxq.backends.loops.code.attention_loops import attention
from fxq.backends.loops.code.attention_loops import attention_scratch as attention_scratch
from fxq.backends.loops.code.compiler import compiled
from fxq.backends.loops.code.image_loops import CHUNK as CHUNK
from fxq.backends.loops.code.image_loops import move, norm, pointwise, pool, quantize
from fxq.backends.loops.code.layer_loops import ADDED as ADDED
from fxq.backends.loops.code.layer_loops import BENT as BENT
from fxq.backends.loops.code.layer_loops import BY_SUMS as BY_SUMS
from fxq.backends.loops.code.layer_loops import FUSED as FUSED
from fxq.backends.loops.code.layer_loops import ROUNDED as ROUNDED
from fxq.backends.loops.code.layer_loops import depthwise, linear, product
from fxq.backends.loops.code.machine_code import GROUP as GROUP
from fxq.backends.loops.code.machine_code import HAS_VNNI as HAS_VNNI
from fxq.backends.loops.code.machine_code import WIDE as WIDE
from fxq.backends.loops.code.memory_loops import NAMES as NAMES
from fxq.backends.loops.code.memory_loops import NOTHING as NOTHING

LARGE = 1 << 17
"""Bytes of an input that a product reads again for the next columns, from the second cache."""
SCRATCH = 8 * CHUNK
"""Bytes of memory of a step while it runs, besides that for its channels; attention needs other memory."""
WIDTH = 32
"""Numbers of a step, at most."""
QUANTIZE, PRODUCT, DEPTHWISE, POINTWISE, POOL, LINEAR, NORM, MOVE, ATTENTION = range(9)
"""The codes of steps."""


@compiled("i64* i i64*")
def run(steps, count, bases):
    """Run steps, int64 (count, WIDTH), on memory at these addresses."""
    steps = carray(steps, (count, WIDTH))
    for k in range(count):
        step = steps[k]
        code = step[0]
        if code == PRODUCT:
            product(step, bases)
        elif code == DEPTHWISE:
            depthwise(step, bases)
        elif code == POINTWISE:
            pointwise(step, bases)
        elif code == QUANTIZE:
            quantize(step, bases)
        elif code == POOL:
            pool(step, bases)
        elif code == NORM:
            norm(step, bases)
        elif code == MOVE:
            move(step, bases)
        elif code == ATTENTION:
            attention(step, bases)
        else:
            linear(step, bases)
