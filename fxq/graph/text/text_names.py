"""Allow-list of the functions and methods, besides ops of the table, that the text of a graph may call."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping
from keyword import iskeyword
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import get_overridable_functions

from fxq.graph.guards import check_fixed, check_same, check_sizes, make_output, own_copy
from fxq.graph.updates import updated, updated_view
from fxq.ops import OPS

_GRAPH_FUNCTIONS = (
    *(check_fixed, check_same, check_sizes, make_output, own_copy, updated, updated_view),
    *(getattr, len, bool, int, float, PackedSequence),
)
_OPERATOR = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "neg", "pos", "abs", "invert", "index"),
    *("and_", "or_", "xor", "not_", "lshift", "rshift", "eq", "ne", "lt", "le", "gt", "ge", "getitem", "contains"),
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "setitem"),
)
_MATH = ("ceil", "floor", "sqrt", "log", "log2", "exp", "prod", "trunc", "pow")
_CREATION = (
    *("full", "zeros", "ones", "empty", "eye", "arange", "linspace", "logspace", "scalar_tensor", "tensor"),
    *("as_tensor", "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("normal", "tril_indices", "triu_indices", "_assert", "_pack_padded_sequence", "_pad_packed_sequence"),
)
_MORE_METHODS = (
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "stride", "unflatten"),
    *("keys", "values", "items"),
)
_NOT_METHODS = ("apply_", "map_", "map2_", "register_hook", "register_post_accumulate_grad_hook", "module_load", "set_")
_CALLS_ITS_ARGUMENT = torch.nn.functional.triplet_margin_with_distance_loss
_LIBRARIES = {
    "torch.ops.torchvision": ("nms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d"),
    "torchvision.ops.roi_align": ("roi_align",),
    "torchvision.ops.poolers": ("_filter_input", "_setup_scales", "_multiscale_roi_align"),
}
"""Functions of other libraries by module: computations on tensors, which exist once the library is imported."""
MAKES_A_MAPPER = "torchvision.ops.poolers._setup_scales"
CALLS_A_MAPPER = "torchvision.ops.poolers._multiscale_roi_align"
"""Function that calls one of its arguments. A text may only give it a result of `MAKES_A_MAPPER`."""
_ATEN = ("sym_size", "sym_numel", "sym_stride", "to_copy", "unsafe_view", "unsafe_split", "safe_softmax")


_LISTED = get_overridable_functions()  # at import, since tracing replaces some methods of tensors
_TENSOR_FUNCTIONS = {function for home in _LISTED.values() for function in home} - {_CALLS_ITS_ARGUMENT}
METHODS = frozenset(
    {name for f in _LISTED[torch.Tensor] if not (name := str(getattr(f, "__name__", "_"))).startswith("_")}
    - {*_NOT_METHODS}
    | {*_MORE_METHODS}
)
"""Names of the methods, mostly of tensors."""


def _functions() -> dict[str, Callable[..., Any]]:
    functions: dict[str, Any] = {f.__name__: f for f in _GRAPH_FUNCTIONS}
    functions |= {f"operator.{name}": getattr(operator, name) for name in _OPERATOR}
    functions |= {f"math.{name}": getattr(math, name) for name in _MATH}
    functions |= {f"torch.{name}": getattr(torch, name) for name in _CREATION}
    for home in (torch, torch.nn.functional, torch.linalg, torch.fft, torch.special):
        public = {name: value for name, value in vars(home).items() if callable(value) and not name.startswith("_")}
        functions |= {f"{home.__name__}.{name}": value for name, value in public.items() if value in _TENSOR_FUNCTIONS}
    return functions


FUNCTIONS: Mapping[str, Callable[..., Any]] = _functions()
"""The functions by name: the tensor functions that torch lists, and plain arithmetic."""
_NAMES = {function: name for name, function in reversed(list(FUNCTIONS.items()))}


def name_of(function: Any) -> str | None:
    """Name of a function in a text, or None if a text may not call it."""
    if function in _NAMES:
        return _NAMES[function]
    is_op = isinstance(function, (OpOverload, OpOverloadPacket))
    own_name = ".".join(str(getattr(function, part, "")) for part in ("__module__", "__name__"))
    name = f"torch.ops.{function}" if is_op else own_name
    return name if function_of(name) is function else None


def function_of(name: str) -> Callable[..., Any] | None:
    """The function of a name, or None: also an overload of an aten operator, or a function of an imported library."""
    path = name.split(".")
    if path[:3] == ["torch", "ops", "aten"] and len(path) == 5:
        plain = path[3].strip("_")
        is_allowed = plain in _ATEN or f"torch.{plain}" in FUNCTIONS or plain in METHODS
        packet = getattr(torch.ops.aten, path[3], None) if is_allowed else None
        return getattr(packet, path[4]) if packet is not None and path[4] in packet.overloads() else None
    if not _library_of(name):
        return FUNCTIONS.get(name)
    module = sys.modules.get(".".join(path[:-1])) if path[0] != "torch" else getattr(torch.ops, path[2])
    return getattr(module, path[-1], None)


def missing_library(name: str) -> str:
    """Library to import before a text can call a function of it; empty for all other names."""
    return _library_of(name) if function_of(name) is None else ""


def _library_of(name: str) -> str:
    """Library of an allowed function; empty for all other names."""
    module, _, function = name.rpartition(".")
    return module.removeprefix("torch.ops.").partition(".")[0] if function in _LIBRARIES.get(module, ()) else ""


def is_taken(name: str) -> bool:
    """Whether a unit cannot have this name: not an identifier, or the name of an op, a function or a reserved word."""
    return not name.isidentifier() or iskeyword(name) or name in _WORDS or name in OPS or name in FUNCTIONS


_WORDS = ("input", "tensor", "modules", "observer", "leaf", "slice", "torch", "operator", "math", "inf", "nan", "Plan")
