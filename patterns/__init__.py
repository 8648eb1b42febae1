"""Fusion patterns by subject. Importing this package registers them."""

from fxq.patterns import conv, elementwise, linear, norm

__all__ = ["conv", "elementwise", "linear", "norm"]
