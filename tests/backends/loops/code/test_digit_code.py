"""Rows of floats as digits of 8 bits: the largest values, and which rows have digits."""

import pytest
import torch

from fxq.backends.loops.code.compiler import loops
from fxq.backends.plain.few_rows import FewRowsProduct
from fxq.backends.plain.stored_weight import StoredWeight
from fxq.quant.packing import Packing

LOOPS = loops("few_rows_loops")
needs_digits = pytest.mark.skipif(LOOPS is None or not LOOPS.HAS_DIGITS, reason="needs Numba, and AVX512 with VNNI")
LARGEST = 127 * (256**2 + 256 + 1) / 2**23
"""Largest value below 1 whose highest digit is below 128."""


def product_with(values, bits, per):
    """Product with a weight of these unsigned integers, with a scale of 1 for each block of `per` values."""
    packing = Packing(tuple(values.shape[1:]), bits, False)
    scale = torch.ones(len(values), values.shape[1] // per)
    return FewRowsProduct(LOOPS, StoredWeight(packing.pack(values), scale, None, 1, per, packing=packing), None)


@needs_digits
@pytest.mark.parametrize("value", [LARGEST, -LARGEST, 1.0, -1.0, 0.5 - 2.0**-20])
@pytest.mark.parametrize("per", [64, 192, 320, 960])
@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_the_largest_sums_fit_int32(bits, per, value):
    values = torch.full((5, 960), 2**bits - 1, dtype=torch.uint8)
    result = product_with(values, bits, per)(torch.full((1, 960), value))
    torch.testing.assert_close(result, torch.full((1, 5), 960 * value * (2**bits - 1)), rtol=1e-6, atol=0)


@needs_digits
def test_digits_drop_what_is_below_their_last_bit_and_other_rows_keep_it():
    """The first row has digits; the second is the sum in float, since its largest value is too large for them."""
    values = torch.ones(3, 960, dtype=torch.uint8)
    values[:, :480] = 0
    weight = product_with(values, 4, 64)
    x = torch.zeros(1, 960)
    x[:, :480], x[:, -1] = 1.0, 2.0**-40
    assert (weight(x) == 0).all()
    x[:, 1:480] = 0
    assert (weight(x) == 2.0**-40).all()
