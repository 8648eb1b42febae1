"""Out-of-place forms of in-place calls."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._ops import OpOverload

from fxq.graph.info import info

RESHAPING = frozenset({"squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_"})
"""Methods that change the shape of a tensor object, but neither its values nor other views."""
RESIZING = frozenset({"resize_", "resize_as_", "set_", "as_strided_", "sparse_resize_"})
"""Methods that change the storage or size of a tensor object, which have no out-of-place form."""
_OPERATORS = {"iand": "and_", "ior": "or_"}
_RANDOM = frozenset(
    {"bernoulli_", "dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_", "rrelu_"}
)
"""Random methods whose out-of-place form draws other numbers or none."""


class Call(NamedTuple):
    """Op, target and arguments of a `torch.fx` node."""

    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def name_in_place(node: fx.Node) -> str:
    """Name of the method or function that a node calls, without namespace and overload."""
    target = node.target
    if isinstance(target, OpOverload):
        return str(target.overloadpacket.__name__)
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def written_by(node: fx.Node) -> fx.Node | None:
    """Argument that an in-place call of torch writes its result to; None for other calls."""
    name, first = name_in_place(node), node.args[0] if node.args else node.kwargs.get("input")
    if "out" in node.kwargs:
        first = node.kwargs["out"]
    elif isinstance(node.target, OpOverload):
        written = [
            value
            for argument, value in zip(node.target._schema.arguments, node.args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        first = written[0] if len(written) == 1 else None
    elif node.op == "call_module" or not (
        node.kwargs.get("inplace") is True
        or getattr(node.target, "__module__", None) == operator.iadd.__module__
        or (name.endswith("_") and not name.startswith("_"))
    ):
        first = None
    return first if isinstance(first, fx.Node) else None


def fills_several(node: fx.Node) -> bool:
    """Whether a call fills several tensors, as `torch.sort(x, out=(v, i))`."""
    return isinstance(node.kwargs.get("out"), (tuple, list))


def out_of_place(node: fx.Node) -> Call | None:
    """Out-of-place call that computes the new value of the argument `written_by(node)`, or None if torch has none.

    Its result may have another dtype than the argument. None for assignments (`operator.setitem`, `copy_`), which
    `fxq/rewriting/assignments.py` rewrites.
    """
    name, kwargs = name_in_place(node), dict(node.kwargs)
    if name in _RANDOM:
        return None
    if name in ("zero_", "fill_"):
        return _filled(node, 0 if name == "zero_" else node.args[1] if len(node.args) > 1 else kwargs["value"])
    if "out" in kwargs and not isinstance(node.target, OpOverload):
        del kwargs["out"]
        return Call(node.op, node.target, node.args, kwargs)
    if kwargs.pop("inplace", False):
        return Call(node.op, node.target, node.args, kwargs)
    plain = name[:-1]
    target: Any = None
    if node.op == "call_method":
        target = plain if hasattr(Tensor, plain) else None
    elif isinstance(node.target, OpOverload):
        packet = getattr(torch.ops.aten, plain, None) if node.target.namespace == "aten" else None
        target = getattr(packet, node.target._overloadname, None)
    elif getattr(node.target, "__module__", None) == operator.iadd.__module__:
        target = getattr(operator, _OPERATORS.get(name, name[1:]), None)
    elif name.endswith("_"):
        target = next((getattr(home, plain) for home in (torch, F) if callable(getattr(home, plain, None))), None)
    return Call(node.op, target, node.args, kwargs) if target is not None else None


def _filled(node: fx.Node, value: Any) -> Call:
    """Out-of-place form of `x.fill_(value)`."""
    x = written_by(node)
    if isinstance(value, fx.Node) and info(value).is_tensor:
        return Call("call_method", "expand_as", (value, x), {})
    return Call("call_function", torch.full_like, (x, value), {})


def dtype_of_call(call: Call) -> torch.dtype | None:
    """Result dtype of a call, computed on tensors of one element; None if that fails."""
    for device in ("cpu", "meta"):  # not on the meta device first: its kernels import sympy, which is slow
        result = _result_on(device, call)
        if isinstance(result, Tensor):
            return result.dtype
    return None


def _result_on(device: str, call: Call) -> Any:
    """Result of a call on tensors of a device: on the CPU of one element, on the meta device of the call's shapes."""

    def stand_in(value: fx.Node) -> Any:
        about = info(value)
        shape = about.shape or ()
        size = [1] * len(shape) if device == "cpu" else shape
        return torch.zeros(size, dtype=about.dtype, device=device) if about.is_tensor else 1

    args: Any = fx.node.map_arg(call.args, stand_in)
    kwargs: Any = fx.node.map_arg(call.kwargs, stand_in)
    try:
        if call.kind == "call_method":
            return getattr(args[0], call.target)(*args[1:], **kwargs)
        return call.target(*args, **kwargs)
    except Exception:  # no kernel, or one that needs other sizes; any type of error
        return None
