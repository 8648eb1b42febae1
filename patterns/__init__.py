"""Fusion patterns. Importing this package registers them."""

from fxq.patterns.fusions import conv, elementwise, excite, linear, norm

__all__ = ["conv", "elementwise", "excite", "linear", "norm"]
