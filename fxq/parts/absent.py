"""Placeholders for weights of the float model that a quantized part no longer has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fxq.errors import InputError

SMALLER_PARTS = "If Python code needs the values, choose smaller parts: recipe.parts(...)."


class AbsentTensor(Tensor):
    """Placeholder with the shape, dtype and device of a weight, but no values: an op that reads it raises.

    Attributes:
        weight_name: name of the weight in the float model.
        advice: end of the error for a read: what to do instead.
        on_read: function that is called with the name and returns the tensor to compute with; None: reads raise.
    """

    weight_name: str
    advice: str
    on_read: Callable[[str], Tensor] | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain

    @staticmethod
    def like(
        tensor: Tensor, name: str, on_read: Callable[[str], Tensor] | None = None, advice: str = SMALLER_PARTS
    ) -> AbsentTensor:
        """Return the placeholder for a weight, which is a parameter if the weight is one."""
        is_parameter = isinstance(tensor, nn.Parameter)
        return _absent(tuple(tensor.shape), tensor.dtype, tensor.device, is_parameter, name, advice, on_read)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an op on the weights that `on_read` returns.

        Raises:
            InputError: an argument is a placeholder without `on_read`.
        """
        if func is torch.ops.aten.detach.default:  # reads no values
            return args[0]
        return func(*tree_map(_value, args), **tree_map(_value, kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AbsentTensor({self.weight_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentTensor:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_parameter = isinstance(self, nn.Parameter)
        return _absent, (tuple(self.shape), self.dtype, self.device, is_parameter, self.weight_name, self.advice)


def _absent(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    is_parameter: bool,
    name: str,
    advice: str,
    on_read: Callable[[str], Tensor] | None = None,
) -> AbsentTensor:
    make: Any = torch.Tensor._make_wrapper_subclass
    absent: AbsentTensor = make(AbsentTensor, shape, dtype=dtype, device=device)
    absent.weight_name, absent.advice, absent.on_read = name, advice, on_read
    if is_parameter:
        vars(absent)["_is_param"] = True  # makes `isinstance(absent, nn.Parameter)` true
    return absent


def _value(leaf: Any) -> Any:
    if not isinstance(leaf, AbsentTensor):
        return leaf
    if leaf.on_read is None:
        raise InputError(
            f"{leaf.weight_name} is read, but it belongs to a part that is quantized, which holds integers instead: "
            f"see q.qparams(). {leaf.advice}"
        )
    return leaf.on_read(leaf.weight_name)
