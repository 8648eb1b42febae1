"""A plugin of pytest that takes from PyTorch what it has announced to remove: quantized dtypes, their ops, and engines.

`pytest -p tests.without_quantized` runs the tests as with such a PyTorch, in this process and those that xdist starts.
"""

import torch
import torch.storage

DTYPES = ("quint8", "qint8", "qint32", "quint4x2", "quint2x4")
MAKERS = (
    "quantize_per_tensor",
    "quantize_per_tensor_dynamic",
    "quantize_per_channel",
    "_empty_affine_quantized",
    "_empty_per_channel_affine_quantized",
    "_make_per_tensor_quantized_tensor",
    "_make_per_channel_quantized_tensor",
)


class Removed:
    """A namespace of ops that has none left."""

    def __getattr__(self, name):
        raise AttributeError(f"torch.ops.quantized.{name} is removed")


def pytest_configure():
    """Before any module of fxq, or of the tests, is imported."""
    torch.storage._dtype_to_storage_type_map()  # PyTorch's own table names the dtypes, and is made once
    torch.ops.quantized = Removed()
    for name in (*DTYPES, *MAKERS):
        delattr(torch, name)
