"""The sum of products of two rows of small integers, as code that every vector unit has an instruction for.

LLVM's vectors of Python loops are half as wide as they could be, since sums have 32 bits. Here the code is written out:
integers of 16 bits are multiplied, and products added in pairs, which is one instruction of x86 (`pmaddwd`), exactly.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fxq.backends.loops.code import MULTIPLE

LANES = 16
"""How many products an instruction computes. `MULTIPLE // LANES` of them do not wait for each other."""


@intrinsic
def dot(_typing: Any, _left: Any, _right: Any, _count: Any) -> Any:
    """The sum of the products of int16 and int8, int32, by the addresses of both and their count.

    The count is a multiple of `MULTIPLE`.
    """
    return types.int32(types.int64, types.int64, types.int64), _code


def _code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    left, right, count = args
    int8, int16, int32, int64 = map(ir.IntType, (8, 16, 32, 64))
    products, pairs = ir.VectorType(int32, LANES), ir.VectorType(int32, LANES // 2)
    even, odd = (ir.Constant(pairs, list(range(first, LANES, 2))) for first in (0, 1))
    nothing = ir.Constant(products, ir.Undefined)
    sums = [cgutils.alloca_once_value(builder, ir.Constant(pairs, None)) for _ in range(MULTIPLE // LANES)]

    def loaded(address: Any, integer: Any, first: Any) -> Any:
        place = builder.add(address, builder.mul(first, ir.Constant(int64, integer.width // 8)))
        vector = ir.VectorType(integer, LANES)
        found = builder.load(builder.inttoptr(place, vector.as_pointer()))
        found.align = 1
        return builder.sext(found, products)

    rounds = builder.sdiv(count, ir.Constant(int64, MULTIPLE))
    with cgutils.for_range(builder, rounds, intp=int64) as loop:
        for k, total in enumerate(sums):
            first = builder.add(builder.mul(loop.index, ir.Constant(int64, MULTIPLE)), ir.Constant(int64, k * LANES))
            made = builder.mul(loaded(left, int16, first), loaded(right, int8, first))
            both = [builder.shuffle_vector(made, nothing, which) for which in (even, odd)]
            builder.store(builder.add(builder.load(total), builder.add(*both)), total)
    whole = builder.load(sums[0])
    for total in sums[1:]:
        whole = builder.add(whole, builder.load(total))
    kind, name = ir.FunctionType(int32, [pairs]), f"llvm.vector.reduce.add.v{LANES // 2}i32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [whole])
