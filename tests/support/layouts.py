"""Memory layouts of tensors."""

from collections.abc import Callable

import torch
from torch import Tensor

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "strided": lambda x: x[:, ::2, 1:],
    "reversed": lambda x: x.permute(3, 2, 1, 0),
    "expanded": lambda x: x[:, :1].expand(-1, 7, -1, -1),
    "scalar": lambda x: x[0, 0, 0, 0],
    "size one": lambda x: x[:1, :1].as_strided((1, 1, 4, 5), (99, 77, 5, 1)),
}
"""Functions that give a contiguous tensor of shape (2, 6, 4, 5) another layout, by name."""
