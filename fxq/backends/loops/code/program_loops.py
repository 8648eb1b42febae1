"""Loop of a program: runs a list of steps, which compute a network or a part of it, in one call.

A step is a row of integers: its code, then its fields, in the order in which its loop reads them. A place in memory is
(base, offset): the number of a base address, and bytes from there. Base 0 is the address 0, for offsets that are
addresses. Base 1 is the memory of values. Base 2 is the scratch memory of the running step (see `SCRATCH_BYTES`);
arrays that Numba allocates would be freed while only their addresses are in use. Inputs and outputs are next.

Images are (N, H, W, C) in memory, whatever the order of PyTorch's axes. Other tensors are images of one row.
"""

from __future__ import annotations

from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code.amx_code import BLOCKS_AT_ONCE as BLOCKS_AT_ONCE
from fxq.backends.loops.code.amx_code import ROW_BYTES as ROW_BYTES
from fxq.backends.loops.code.amx_code import TILE_ROWS as TILE_ROWS
from fxq.backends.loops.code.amx_loops import amx_product
from fxq.backends.loops.code.amx_loops import amx_scratch as amx_scratch
from fxq.backends.loops.code.amx_loops import pixel_bytes as pixel_bytes
from fxq.backends.loops.code.attention_loops import BOOL_MASK as BOOL_MASK
from fxq.backends.loops.code.attention_loops import CAUSAL as CAUSAL
from fxq.backends.loops.code.attention_loops import FLOAT_MASK as FLOAT_MASK
from fxq.backends.loops.code.attention_loops import NO_MASK as NO_MASK
from fxq.backends.loops.code.attention_loops import attention
from fxq.backends.loops.code.attention_loops import attention_scratch as attention_scratch
from fxq.backends.loops.code.compiler import compiled, helper
from fxq.backends.loops.code.depthwise_code import PARTS as PARTS
from fxq.backends.loops.code.depthwise_code import RUNS_AT_ONCE as RUNS_AT_ONCE
from fxq.backends.loops.code.depthwise_loops import WIDE_TILE_PIXELS as WIDE_TILE_PIXELS
from fxq.backends.loops.code.depthwise_loops import depthwise
from fxq.backends.loops.code.image_loops import CHUNK as CHUNK
from fxq.backends.loops.code.image_loops import move, norm, pointwise, pool, quantize
from fxq.backends.loops.code.layer_loops import ADD_RESIDUAL as ADD_RESIDUAL
from fxq.backends.loops.code.layer_loops import APPLY_FUNCTION as APPLY_FUNCTION
from fxq.backends.loops.code.layer_loops import APPLY_PRELU as APPLY_PRELU
from fxq.backends.loops.code.layer_loops import CONVERTED_AT as CONVERTED_AT
from fxq.backends.loops.code.layer_loops import ROUND as ROUND
from fxq.backends.loops.code.layer_loops import STORE_FLOATS as STORE_FLOATS
from fxq.backends.loops.code.layer_loops import STORE_SUMS as STORE_SUMS
from fxq.backends.loops.code.layer_loops import linear, product
from fxq.backends.loops.code.machine_code import GROUP as GROUP
from fxq.backends.loops.code.machine_code import KIND as KIND
from fxq.backends.loops.code.machine_code import TILE_PIXELS as TILE_PIXELS
from fxq.backends.loops.code.machine_code import WIDE_CHANNELS as WIDE_CHANNELS
from fxq.backends.loops.code.machine_code import X_BYTES as X_BYTES
from fxq.backends.loops.code.memory_loops import FUNCTION_NAMES as FUNCTION_NAMES
from fxq.backends.loops.code.memory_loops import NO_FUNCTION as NO_FUNCTION

MAX_TILE_INPUT_BYTES = 1 << 17
"""Bytes of input that a product reads again for its next columns: they stay in the second-level cache."""
SCRATCH_BYTES = 8 * CHUNK
"""Bytes of scratch memory of a step, besides those for its channels. Attention needs other memory."""
MAX_STEP_FIELDS = 32
"""Integers in the row of a step. Unused ones are 0."""
QUANTIZE, PRODUCT, DEPTHWISE, POINTWISE, POOL, LINEAR, NORM, MOVE, ATTENTION, AMX_PRODUCT = range(10)
"""Codes of steps."""
_HAS_AMX = KIND.has_amx


@helper
def _layer(code, step, bases):
    """Run a step of a layer."""
    if code == PRODUCT:
        product(step, bases)
    elif code == DEPTHWISE:
        depthwise(step, bases)
    elif code == LINEAR:
        linear(step, bases)
    elif _HAS_AMX:  # otherwise Numba does not compile it
        amx_product(step, bases)


@compiled("i64* i i64*")
def run(steps, count, bases):
    """Run steps, int64 (count, MAX_STEP_FIELDS), on the base addresses `bases`."""
    steps = carray(steps, (count, MAX_STEP_FIELDS))
    for k in range(count):
        step = steps[k]
        code = step[0]
        if code == POINTWISE:
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
            _layer(code, step, bases)
