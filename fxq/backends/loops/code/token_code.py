"""Machine code for attention of a few queries to a cache: products of a query with all keys, where they are stored."""

from __future__ import annotations

from numba.core import cgutils

from fxq.backends.loops.code import vectors
from fxq.backends.loops.code.machine_code import on_addresses
from fxq.backends.loops.code.vectors import FLOATS, INT64, LANES, load, number, splat, store


@on_addresses
def key_products(b, query, keys, key_stride, count, blocks, out):
    """Write the products of a query with `count` keys, float32 (blocks, 16) each, `key_stride` bytes apart."""
    with cgutils.for_range(b, count, intp=INT64) as key:
        line, total = b.add(keys, b.mul(key.index, key_stride)), cgutils.alloca_once(b, FLOATS)
        b.store(splat(b, 0.0), total)
        with cgutils.for_range(b, blocks, intp=INT64) as block:
            offset = b.mul(block.index, number(4 * LANES))
            x, y = (load(b, b.add(start, offset), FLOATS) for start in (query, line))
            b.store(vectors.multiply_add(b, x, y, b.load(total)), total)
        store(b, vectors.reduced(b, b.load(total), b.fadd), b.add(out, b.mul(key.index, number(4))))
