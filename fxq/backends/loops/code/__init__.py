"""Loops over memory, written in Python and compiled by Numba where it is installed (`fxq[jit]`).

One loop computes the dynamic range of each row and quantizes the row. PyTorch needs ten ops for this, each of which
writes a tensor. Without Numba, PyTorch's ops compute the same numbers.
"""
