"""Benchmarks, demos, networks and tools of the checkout. Run one from its root: `python -m scripts.bench.kernels`.

They import each other by their full names (`scripts.networks.resnet`). No release contains them.
"""
