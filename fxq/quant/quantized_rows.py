"""Tensor that is stored as integers with one scale per row: a state, such as a key-value cache, between calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fxq.common.trees import leaves, mapped
from fxq.errors import InputError

_ABOUT = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad")),
        *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested")),
        *(Tensor.dim, Tensor.size, Tensor.numel, torch.numel, Tensor.is_floating_point, torch.is_floating_point),
        *(Tensor.is_complex, torch.is_complex, Tensor.__len__, Tensor.is_contiguous, Tensor.stride),
    ]
)
"""Functions that read no values."""
_MOVES = frozenset(
    [
        *(Tensor.__getitem__, Tensor.index_select, torch.index_select, Tensor.narrow, torch.narrow, Tensor.select),
        *(Tensor.repeat_interleave, torch.repeat_interleave, torch.cat, Tensor.split, torch.split, Tensor.chunk),
        *(torch.chunk, Tensor.clone, torch.clone, Tensor.detach, Tensor.contiguous, Tensor.to, Tensor.cpu, Tensor.cuda),
    ]
)
"""Functions that, on integers and scales, do what they do to the tensor, unless they move parts of rows."""


class QuantizedRows(Tensor):
    """Float tensor (..., N) that is stored as integers, with one scale for each row of N values.

    A model with an integer cache returns it, and takes it or a float tensor in the next call. Functions that select,
    reorder or join whole rows return `QuantizedRows`. All others compute with the float values, and return floats.

    Args:
        integers: int8[..., N].
        scale: float32[..., 1], the value of one step in each row.

    Raises:
        InputError: a function would change it in place.

    Example:
        >>> cache = QuantizedRows(torch.tensor([[100, -50], [1, 2]], dtype=torch.int8), torch.tensor([[0.5], [2.0]]))
        >>> cache[1:].integers, cache.sum(-1)
        (tensor([[1, 2]], dtype=torch.int8), tensor([25.,  6.]))
    """

    integers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, integers: Tensor, scale: Tensor) -> QuantizedRows:
        """Make a tensor with the shape of `integers`."""
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        result: QuantizedRows = make(cls, integers.shape, dtype=scale.dtype, device=integers.device)
        result.__dict__.update(integers=integers, scale=scale)
        return result

    def dequantize(self) -> Tensor:
        """The float values: float32[..., N]."""
        return self.integers.to(self.scale.dtype).mul_(self.scale)

    @property
    def nbytes(self) -> int:
        """Bytes of the integers and scales."""
        return self.integers.nbytes + self.scale.nbytes

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"QuantizedRows({tuple(self.shape)}, integers={self.integers.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedRows:
        return QuantizedRows(copy.deepcopy(self.integers, memo), copy.deepcopy(self.scale, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return QuantizedRows, (self.integers, self.scale)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function on integers and scales if it moves whole rows; else on the float values."""
        kwargs = kwargs or {}
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if any(isinstance(value, QuantizedRows) for value in _written(func, args, kwargs)):
            name = getattr(func, "__name__", str(func))
            raise InputError(f"{name} would change a tensor that is stored as integers: change x.dequantize() instead.")
        result = _moved(func, args, kwargs) if func in _MOVES else None
        return func(*_in_float(args), **_in_float(kwargs)) if result is None else result

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator that was called below PyTorch's functions, on the float values."""
        return func(*_in_float(args), **_in_float(kwargs or {}))


def _in_float(values: Any) -> Any:
    return mapped(values, lambda leaf: leaf.dequantize() if isinstance(leaf, QuantizedRows) else leaf)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Arguments that a function writes to."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")
    yield from leaves((args[:1] if in_place else (), kwargs.get("out")))


def _moved(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Result of a function that moves rows; None if it changes rows, or if one of its tensors is not in integers."""
    given = args[0] if isinstance(args[0], (tuple, list)) else args[:1]
    if not all(isinstance(x, QuantizedRows) for x in given):
        return None
    integers, scales = (
        mapped(args, lambda leaf, part=part: getattr(leaf, part) if isinstance(leaf, QuantizedRows) else leaf)
        for part in ("integers", "scale")
    )
    try:
        results = func(*integers, **kwargs), func(*scales, **kwargs)
    except (IndexError, RuntimeError):  # it goes along rows, of which scales have one value
        return None
    pairs = list(zip(*(r if isinstance(r, (tuple, list)) else [r] for r in results), strict=False))
    rows, dtypes = given[0].shape[-1:], (given[0].integers.dtype, given[0].scale.dtype)
    for values, scale in pairs:
        if values.shape != scale.shape[:-1] + rows or scale.shape[-1] != 1 or (values.dtype, scale.dtype) != dtypes:
            return None
    joined = tuple(QuantizedRows(*pair) for pair in pairs)
    return joined if isinstance(results[0], (tuple, list)) else joined[0]
