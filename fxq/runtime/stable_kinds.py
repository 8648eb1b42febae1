"""Check whether the kind of a value (shape, strides and dtype; or the number) follows from the kinds of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator

from fxq.common.metrics import tensors
from fxq.common.writes import LightDispatchMode
from fxq.graph.bindable import Bindable
from fxq.graph.query import ARITHMETIC, op_of, reads_only_metadata, submodule

_NAMESPACES = frozenset({"aten", "prims", "fxq", "onednn", "quantized", "mkldnn"})
"""Namespaces of operators whose tags say reliably whether a size depends on values."""
_FROM_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_UNTAGGED = frozenset({"aten::_pack_padded_sequence", "aten::_pad_packed_sequence"})
_READS_UNSEEN = frozenset({"tensor_split", "tolist", "numpy"})
"""Functions that read values without calling an operator."""
_TORCH = frozenset({"torch", "torch.functional", "torch.nn.functional", "torch._tensor"})
_MASKS = frozenset({torch.bool, torch.uint8})


class ValueReads(LightDispatchMode):
    """Mode that notices operators whose result sizes or numbers depend on values.

    Attributes:
        happened: whether such an operator was called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.happened = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.happened = self.happened or _reads_values(func, args)
        return func(*args, **(kwargs or {}))


def _reads_values(func: Any, args: tuple[Any, ...]) -> bool:
    if func is torch.ops.aten.index.Tensor:  # tagged, but only with a mask the size depends on values
        return any(i is not None and i.dtype in _MASKS for i in args[1])
    return func.namespace not in _NAMESPACES or func.name() in _UNTAGGED or not _FROM_VALUES.isdisjoint(func.tags)


def run(node: fx.Node, called: Callable[..., Any], args: Any, kwargs: Any, sure: bool) -> tuple[Any, bool]:
    """Run a node whose inputs are of fixed kinds, and tell whether its value is of a fixed kind as well.

    The kind is fixed for kernels, units, and ops of the table without tensors among their options, and for functions of
    torch and Python's arithmetic that read no values. For modules and the user's functions it is unknown: not fixed.

    Args:
        node: call of a function, method or module.
        called: the function, method or module, or its bound form.
        args: values of the positional arguments; for a method, without the object.
        kwargs: values of the keyword arguments.
        sure: whether `called` is a kernel or a unit.

    Returns:
        The value, and whether its kind is fixed.
    """
    op = op_of(node)
    if sure or (op is not None and not holds_tensor(kwargs)):
        return called(*args, **kwargs), op is None or not op.traits.grows
    if not _is_library_function(node, called):
        return called(*args, **kwargs), False
    with ValueReads() as reads:
        value = called(*args, **kwargs)
    owner = getattr(called, "__self__", None) if node.op == "call_method" else None
    plain = getattr(called, "__module__", "") in ARITHMETIC or not holds_tensor((owner, args, kwargs))
    return value, not reads.happened and (plain or reads_only_metadata(node) or _all_tensors(value))


def _is_library_function(node: fx.Node, called: Any) -> bool:
    """Whether a node calls a function of torch or Python that does nothing hidden.

    Modules are excluded, since hooks or the user may change them later, and higher-order operators, since they call
    functions that are passed to them.
    """
    if node.op == "call_module" or isinstance(called, HigherOrderOperator):
        return False
    if getattr(called, "__name__", "") in _READS_UNSEEN:
        return False
    where = getattr(called, "__module__", None) or ""
    is_library = where in ARITHMETIC or where in _TORCH or where.startswith(("torch._C", "torch._ops."))
    return is_library or node.op == "call_method" or reads_only_metadata(node)


def may_have_side_effects(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node runs code of the user: a module that is kept as it is, a hook, or a function."""
    module = submodule(gm, node)
    if isinstance(module, Bindable):
        return not module.is_unmodified()
    is_fxq = (getattr(node.target, "__module__", None) or "").startswith("fxq.")
    is_call = node.op in ("call_module", "call_function", "call_method")
    return is_call and not is_fxq and op_of(node) is None and not _is_library_function(node, node.target)


def holds_tensor(values: Any) -> bool:
    """Whether arguments contain a tensor."""
    return next(tensors(values), None) is not None


def _all_tensors(value: Any) -> bool:
    """Whether a value consists of strided tensors. Tags do not say how many values tensors of other layouts hold."""
    if isinstance(value, (tuple, list)):
        return all(map(_all_tensors, value))
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
