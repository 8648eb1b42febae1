"""Dependence of a call's value on the graph's inputs, from the dependence of its arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fxq.tracing.proxies import FILLS, RANDOM, Dependence, traced_values

_SIZES = """size dim ndimension numel nelement stride storage_offset get_device is_contiguous is_floating_point
    is_complex sym_size sym_numel sym_stride type is_same_size element_size is_tensor"""
_ATTRIBUTES = "shape ndim device is_cuda is_cpu is_meta requires_grad is_leaf names nbytes layout dtype"
_FRESH = "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty"
_ABOUT_SIZES, _READS = frozenset(f"{_SIZES} {_FRESH}".split()), frozenset(_ATTRIBUTES.split())


def dependence_of(kind: str, target: Any, args: Any, kwargs: Any) -> Dependence:
    """Inputs that the value of a call depends on.

    Args:
        kind: op of the node, such as "call_function".
        target: target of the node.
        args: positional arguments, with traced values in them.
        kwargs: arguments by name.
    """
    name = function_name(target)
    if kind == "call_module" or name in RANDOM or name in FILLS:
        return Dependence.DATA
    inputs = list(traced_values((args, kwargs)))
    if name in _ABOUT_SIZES or (target is getattr and args[1] in _READS):
        return max((_sizes_of(v) for v in inputs), default=Dependence.CONSTANT)
    return max((v._dependence for v in inputs), default=Dependence.CONSTANT)


def _sizes_of(value: Any) -> Dependence:
    """Inputs that the sizes of a traced value depend on."""
    return min(value._dependence, Dependence.SIZES) if isinstance(value._value, Tensor) else value._dependence


def function_name(target: Any) -> str:
    """Name of the function that a node calls, without its overload; empty if it has none."""
    packet = getattr(target, "overloadpacket", target)
    return packet if isinstance(packet, str) else str(getattr(packet, "__name__", ""))
