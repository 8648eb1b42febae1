"""Detection of in-place writes into tensors, with copies of the values before."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxq.common.metrics import tensors


class LightDispatchMode(TorchDispatchMode):
    """Dispatch mode that does not import `torch._dynamo`.

    PyTorch disables the compiler inside of dispatch modes, and for that imports it, which takes as long as all of
    PyTorch. Where it is not imported, there is nothing to disable.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        without_compiler = cls.__torch_dispatch__
        plain = getattr(without_compiler, "__wrapped__", without_compiler)

        def dispatch(self: TorchDispatchMode, *args: Any, **kwargs: Any) -> Any:
            return (without_compiler if "torch._dynamo" in sys.modules else plain)(self, *args, **kwargs)

        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]


class WriteWatch(LightDispatchMode):
    """Dispatch mode that copies a watched tensor before the first op that writes into its storage.

    It also sees writes through views and through `.data`, which leave the tensor's version counter unchanged.

    Attributes:
        copies: tensors that were written to, each with a copy of its values before.
    """

    supports_higher_order_operators = True

    def __init__(self, watched: Iterable[Tensor]) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []
        self._waiting: dict[int, list[Tensor]] = {}
        for tensor in watched:
            if tensor.layout is torch.strided and not tensor.is_meta:
                self._waiting.setdefault(_address(tensor), []).append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for at, name in _written(func):
            value = args[at] if at < len(args) else kwargs.get(name)
            for tensor in tensors(value):
                for own in self._waiting.pop(_address(tensor), ()):
                    self.copies.append((own, own.detach().clone()))
        return func(*args, **kwargs)

    @property
    def written(self) -> list[Tensor]:
        """Tensors that were written to."""
        return [tensor for tensor, _ in self.copies]

    def put_back(self) -> None:
        """Restore the values of all tensors that were written to."""
        with torch.no_grad():
            for tensor, value in self.copies:
                tensor.copy_(value)


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a sparse tensor has none
        return 0


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that a PyTorch op mutates."""
    schema = getattr(func, "_schema", None)  # higher-order operators have no schema
    arguments = schema.arguments if schema is not None and schema.is_mutable else ()
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
