"""Which values of a graph are of the same kind (shape, strides, dtype; or number) for all inputs of the same kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator

from fxq.common.metrics import tensors
from fxq.common.writes import LightDispatchMode
from fxq.graph.query import ARITHMETIC, op_of, reads_only_metadata

_NAMESPACES = frozenset({"aten", "prims", "fxq", "onednn", "quantized", "mkldnn"})
"""Operators whose tags tell whether a size follows from values; others are not relied on."""
_FROM_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_UNTAGGED = frozenset({"aten::_pack_padded_sequence", "aten::_pad_packed_sequence"})
_READS_UNSEEN = frozenset({"tensor_split", "tolist", "numpy"})
"""Functions that look at values without calling an operator."""
_TORCH = frozenset({"torch", "torch.functional", "torch.nn.functional", "torch._tensor"})
_MASKS = frozenset({torch.bool, torch.uint8})


class Reads(LightDispatchMode):
    """Notes whether anything that is called inside looks at values to decide on a size or a number.

    Attributes:
        values: whether something did.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.values = self.values or _reads_values(func, args)
        return func(*args, **(kwargs or {}))


def _reads_values(func: Any, args: tuple[Any, ...]) -> bool:
    if func is torch.ops.aten.index.Tensor:  # tagged, but only a mask decides how many values there are
        return any(i is not None and i.dtype in _MASKS for i in args[1])
    return func.namespace not in _NAMESPACES or func.name() in _UNTAGGED or not _FROM_VALUES.isdisjoint(func.tags)


def run(node: fx.Node, called: Callable[..., Any], args: Any, kwargs: Any, sure: bool) -> tuple[Any, bool]:
    """Run what a node calls, whose inputs are of fixed kinds.

    Args:
        node: a call of a function, method or module.
        called: the function, method or module, or what stands for it.
        sure: it is a kernel or a unit.
        args: the values of its positional arguments; of a method, without the object.
        kwargs: those of its keyword arguments.

    Returns:
        Its value, and whether that is of a fixed kind as well. It is for kernels, units and the ops of the table,
        unless an option of theirs is a tensor, and for what else torch and Python's arithmetic give without a look at
        values. Of modules and a user's own functions nobody knows.
    """
    if sure or (op_of(node) is not None and not holds_tensor(kwargs)):
        return called(*args, **kwargs), True
    if not _is_known(node, called):
        return called(*args, **kwargs), False
    with Reads() as reads:
        value = called(*args, **kwargs)
    owner = getattr(called, "__self__", None) if node.op == "call_method" else None
    plain = getattr(called, "__module__", "") in ARITHMETIC or not holds_tensor((owner, args, kwargs))
    return value, not reads.values and (plain or reads_only_metadata(node) or _all_tensors(value))


def _is_known(node: fx.Node, called: Any) -> bool:
    """Whether a node calls a function of torch's or Python's own that does nothing out of sight.

    A module may hold others, which hooks or the user change later; an operator of higher order calls what it is given.
    """
    if node.op == "call_module" or isinstance(called, HigherOrderOperator):
        return False
    if getattr(called, "__name__", "") in _READS_UNSEEN:
        return False
    where = getattr(called, "__module__", None) or ""
    known = where in ARITHMETIC or where in _TORCH or where.startswith(("torch._C", "torch._ops."))
    return known or node.op == "call_method" or reads_only_metadata(node)


def holds_tensor(values: Any) -> bool:
    """Whether there is a tensor among arguments."""
    return next(tensors(values), None) is not None


def _all_tensors(value: Any) -> bool:
    """Whether a value is a tensor with strides, or some of them. How many values other tensors hold, no tag tells."""
    if isinstance(value, (tuple, list)):
        return all(map(_all_tensors, value))
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
