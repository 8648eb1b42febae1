"""Dot product of two rows of small integers, as code that every vector unit has an instruction for.

LLVM vectorizes Python loops with half of the lanes, since sums have 32 bits. Here the code is written out: integers of
16 bits are multiplied and the products are added in pairs, which is one exact instruction of x86 (`pmaddwd`).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fxq.backends.loops.code import MULTIPLE

LANES = 16
"""Products that one instruction computes. `MULTIPLE // LANES` instructions do not depend on each other."""


@intrinsic
def dot(_typing: Any, _left: Any, _right: Any, _count: Any) -> Any:
    """Dot product, int32, of int16 values with int8 values.

    Arguments are the addresses of both and their count, a multiple of `MULTIPLE`.
    """
    return types.int32(types.int64, types.int64, types.int64), _code


def _code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    left, right, count = args
    int8, int16, int32, int64 = map(ir.IntType, (8, 16, 32, 64))
    products, pairs = ir.VectorType(int32, LANES), ir.VectorType(int32, LANES // 2)
    even, odd = (ir.Constant(pairs, list(range(first, LANES, 2))) for first in (0, 1))
    undefined = ir.Constant(products, ir.Undefined)
    sums = [cgutils.alloca_once_value(builder, ir.Constant(pairs, None)) for _ in range(MULTIPLE // LANES)]

    def load_lanes(address: Any, integer: Any, first: Any) -> Any:
        start = builder.add(address, builder.mul(first, ir.Constant(int64, integer.width // 8)))
        vector = ir.VectorType(integer, LANES)
        values = builder.load(builder.inttoptr(start, vector.as_pointer()))
        values.align = 1
        return builder.sext(values, products)

    rounds = builder.sdiv(count, ir.Constant(int64, MULTIPLE))
    with cgutils.for_range(builder, rounds, intp=int64) as loop:
        for k, total in enumerate(sums):
            first = builder.add(builder.mul(loop.index, ir.Constant(int64, MULTIPLE)), ir.Constant(int64, k * LANES))
            product = builder.mul(load_lanes(left, int16, first), load_lanes(right, int8, first))
            even_and_odd = [builder.shuffle_vector(product, undefined, lanes) for lanes in (even, odd)]
            builder.store(builder.add(builder.load(total), builder.add(*even_and_odd)), total)
    result = builder.load(sums[0])
    for total in sums[1:]:
        result = builder.add(result, builder.load(total))
    function_type, name = ir.FunctionType(int32, [pairs]), f"llvm.vector.reduce.add.v{LANES // 2}i32"
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), [result])
