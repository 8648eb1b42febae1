"""Product that rotates rows in a token program: a few rows of floats with a Hadamard matrix in integers."""

from __future__ import annotations

from functools import lru_cache

import torch

from fxq.backends.loops.code.compiler import loops
from fxq.backends.plain.few_rows import FewRowsProduct, refused
from fxq.backends.plain.stored_weight import StoredWeight
from fxq.quant.rotation import hadamard


@lru_cache(maxsize=8)
def rotation_product(size: int) -> FewRowsProduct | None:
    """Product of rows of `size` values, float32, with the Hadamard matrix; None if the loop does not support it.

    The matrix is stored as 1 and -1 in int8, with one scale, which is exact up to the rounding of the scale.
    """
    few_rows_loops, scale = loops("few_rows_loops"), torch.tensor(size**-0.5, dtype=torch.float32, device="cpu")
    stored = StoredWeight(hadamard(size).sign().to(torch.int8), scale)
    return None if few_rows_loops is None or refused(stored) else FewRowsProduct(few_rows_loops, stored, None)
