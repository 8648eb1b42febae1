"""Backends whose kernels are rows of a table, by the op that a kernel starts with."""
