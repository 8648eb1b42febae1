"""How much memory the tensors of a model take."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def nbytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers of a model, the integer weights of kernels included.

    Memory that two of them share counts once. What kernels pack when they run, and can make again, is left out.

    Example:
        >>> nbytes(nn.Linear(10, 10, bias=False))
        400
    """
    tensors: Sequence[Tensor] = [*model.parameters(), *model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
