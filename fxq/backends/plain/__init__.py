"""Kernels on plain uint8 tensors that every backend can use."""
