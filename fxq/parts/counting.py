"""Multiply-accumulates of the ops that a model runs, by the module that runs them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class MacCounter(TorchDispatchMode):
    """Counts multiply-accumulates of matrix products, convolutions, attention and recurrent layers.

    Attributes:
        counts: multiply-accumulates by the path of the innermost running module, the last one of `stack`.
        stack: paths of the running modules, outermost first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.stack = [""]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and count it."""
        result = func(*args, **(kwargs or {}))
        rule = _RULES.get(str(func.overloadpacket).removeprefix("aten.")) if hasattr(func, "overloadpacket") else None
        if rule is not None:
            self.counts[self.stack[-1]] += rule(args, result)
        return result


def _matmul(first: int) -> Callable[[Any, Any], int]:
    return lambda args, result: result.numel() * args[first].shape[-1]


def _convolution(args: Any, result: Tensor) -> int:
    x, weight, transposed = args[0], args[1], len(args) > 6 and bool(args[6])
    return (x if transposed else result).numel() * math.prod(weight.shape[1:])


def _attention(args: Any, result: Any) -> int:
    query, key, value = args[:3]
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return int(pairs * (query.shape[-1] + value.shape[-1]))


def _recurrent(args: Any, result: Any) -> int:
    x, *weights = args[:3]
    return int(math.prod(x.shape[:-1]) * sum(w.numel() for w in weights))


_RULES: dict[str, Callable[[Any, Any], int]] = {
    **dict.fromkeys(("mm", "bmm"), _matmul(0)),
    **dict.fromkeys(("addmm", "baddbmm"), _matmul(1)),
    **dict.fromkeys(("convolution", "_convolution"), _convolution),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
        ),
        _attention,
    ),
    "mkldnn_rnn_layer": _recurrent,
}


@contextmanager
def counting_macs() -> Iterator[MacCounter]:
    """Context that counts multiply-accumulates. In it, PyTorch's fused layers run op by op, so that all are counted."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with MacCounter() as counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
