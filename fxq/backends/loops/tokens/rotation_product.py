"""Product that rotates rows in a token program: a few rows of floats with a Hadamard matrix in integers."""

from __future__ import annotations

from functools import lru_cache

import torch

from fxq.backends.loops.code.compiler import loops
from fxq.backends.plain.few_rows import FewRowsProduct, refused
from fxq.backends.plain.stored_weight import StoredWeight
from fxq.quant.rotation import hadamard


def rotation_product(size: int) -> FewRowsProduct | None:
    """Product of rows of `size` values, float32, with the Hadamard matrix; None if the loop does not support it."""
    few_rows_loops, stored = loops("few_rows_loops"), _hadamard_weight(size)
    return None if few_rows_loops is None or refused(stored) else FewRowsProduct(few_rows_loops, stored, None)


@lru_cache(maxsize=8)
def _hadamard_weight(size: int) -> StoredWeight:
    """Hadamard matrix as 1 and -1 in int8, with one scale, which is exact up to the rounding of the scale."""
    scale = torch.tensor(size**-0.5, dtype=torch.float32, device="cpu")
    return StoredWeight(hadamard(size).sign().to(torch.int8), scale)
