"""A plugin of pytest that takes from PyTorch what it has announced to remove: quantized dtypes, their ops, and engines.

`pytest -p tests.support.without_quantized` runs the tests as with such a PyTorch, in this process and those that xdist
starts. Tests whose parameter is one of the engines are left out.
"""

import sys

import pytest
import torch

ENGINES = ("fbgemm", "qnnpack")
NAMES = (
    "quint8", "qint8", "qint32", "quint4x2", "quint2x4", "quantize_per_tensor", "quantize_per_tensor_dynamic",
    "quantize_per_channel", "_empty_affine_quantized", "_empty_per_channel_affine_quantized",
    "_make_per_tensor_quantized_tensor", "_make_per_channel_quantized_tensor",
)  # fmt: skip


class Removed:
    """A namespace of ops that has none left."""

    def __getattr__(self, name):
        raise AttributeError(f"torch.ops.quantized.{name} is removed")


def pytest_configure():
    """Before any module of fxq, or of the tests, is imported."""
    torch.ops.quantized = Removed()
    removed, before = {name: getattr(torch, name) for name in NAMES}, torch.__getattr__

    def of_torch(name):
        """Attribute that was removed; only PyTorch's own modules, which still name it, get it."""
        if name in removed and sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "torch":
            return removed[name]
        return before(name)

    for name in NAMES:
        delattr(torch, name)
    torch.__getattr__ = of_torch


def pytest_collection_modifyitems(items):
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(getattr(value, "backend", value) in ENGINES for value in values if not isinstance(value, torch.Tensor)):
            item.add_marker(pytest.mark.skip(reason="of an engine that is removed"))
