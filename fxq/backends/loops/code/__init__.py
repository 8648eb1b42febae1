"""Loops over memory in Python that Numba compiles, where it is installed (`fxq[jit]`).

PyTorch needs ten calls to measure a grid for each row and round to it, and fills memory in each; one loop does it all.
Without Numba the same numbers come from PyTorch's ops.
"""

MULTIPLE = 32
"""Rows of integers that are multiplied have a multiple of so many; see `dot_product.py`."""
