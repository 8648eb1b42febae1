"""What the value of a call depends on, from what its arguments depend on."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fxq.tracing.proxies import FILLS, RANDOM, Origin, found_in

_SIZES = """size dim ndimension numel nelement stride storage_offset get_device is_contiguous is_floating_point
    is_complex sym_size sym_numel sym_stride type is_same_size element_size is_tensor"""
_ATTRIBUTES = "shape ndim device is_cuda is_cpu is_meta requires_grad is_leaf names nbytes layout dtype"
_FRESH = "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty"
_ABOUT_SIZES, _READS = frozenset(f"{_SIZES} {_FRESH}".split()), frozenset(_ATTRIBUTES.split())


def origin_of(kind: str, target: Any, args: Any, kwargs: Any) -> Origin:
    """What the value of a call depends on.

    Args:
        kind: the node's op.
        target: what it calls.
        args: its arguments, with traced values.
        kwargs: the same by name.
    """
    name = function_name(target)
    if kind == "call_module" or name in RANDOM or name in FILLS:
        return Origin.DATA
    inputs = list(found_in((args, kwargs)))
    if name in _ABOUT_SIZES or (target is getattr and args[1] in _READS):
        return max((_sizes_of(v) for v in inputs), default=Origin.CONSTANT)
    return max((v._origin for v in inputs), default=Origin.CONSTANT)


def _sizes_of(value: Any) -> Origin:
    """What the sizes of a traced value depend on."""
    return min(value._origin, Origin.SIZES) if isinstance(value._value, Tensor) else value._origin


def function_name(target: Any) -> str:
    """The name of what a node calls, without its overload; empty where it has none."""
    packet = getattr(target, "overloadpacket", target)
    return packet if isinstance(packet, str) else str(getattr(packet, "__name__", ""))
