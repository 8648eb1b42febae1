"""Tensor that is stored as integers with a grid per row or block: a state, such as a key-value cache, between calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxq.common.trees import leaves, mapped
from fxq.errors import InputError
from fxq.quant.packing import Packing
from fxq.quant.rotation import rotated

if TYPE_CHECKING:
    from fxq.quant.row_memory import RowMemory

_ABOUT = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad")),
        *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested")),
        *(Tensor.dim, Tensor.size, Tensor.numel, torch.numel, Tensor.is_floating_point, torch.is_floating_point),
        *(Tensor.is_complex, torch.is_complex, Tensor.__len__, Tensor.is_contiguous, Tensor.stride),
    ]
)
"""Functions that read properties of a tensor, such as its shape, and none of its values."""
_MOVES = frozenset(
    [
        *(Tensor.__getitem__, Tensor.index_select, torch.index_select, Tensor.narrow, torch.narrow, Tensor.select),
        *(Tensor.repeat_interleave, torch.repeat_interleave, torch.cat, Tensor.split, torch.split, Tensor.chunk),
        *(torch.chunk, Tensor.unbind, torch.unbind, Tensor.repeat, Tensor.tile, torch.tile, Tensor.expand),
        *(Tensor.flip, torch.flip, Tensor.roll, torch.roll),
        *(Tensor.clone, torch.clone, Tensor.detach, Tensor.contiguous, Tensor.to, Tensor.cpu, Tensor.cuda),
    ]
)
"""Functions that run on integers, scales and zero points separately, if the call moves whole rows."""
_COPIES = frozenset([Tensor.clone, torch.clone, Tensor.detach, Tensor.contiguous, Tensor.to, Tensor.cpu, Tensor.cuda])
"""Functions of these whose result has the shape of the tensor."""
_PLACE_OF_DIMS = {Tensor.flip: 1, torch.flip: 1, Tensor.roll: 2, torch.roll: 2}
"""Functions whose results have the shape of the tensor, although they may move values along rows, and the position of
their first argument that is an axis."""
_MEMORY = frozenset(
    [Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.storage_offset, Tensor.share_memory_, Tensor.set_]
)
"""Functions that read or change the memory of a tensor."""


class QuantizedRows(Tensor):
    """Float tensor (..., N) that is stored as integers, with a scale and a zero point for each row of N values.

    A row may have several scales and zero points, for blocks of equal size. Integers of few bits may be packed.

    A model with an integer cache returns it, and takes it or a float tensor in the next call. Functions that select,
    reorder or join whole rows return `QuantizedRows`. All others compute with the float values, and return floats.

    Args:
        integers: uint8[..., N], or packed along the last axis.
        scale: float32[..., 1], the value of one step in each row; or one per block of a row.
        zero_point: uint8 in the shape of `scale`, the integer that represents zero in each row or block.
        packing: how a row of integers is packed into bytes; None: each takes a byte.
        is_rotated: whether the integers are those of the rotated rows, see `fxq/quant/rotation.py`.

    Raises:
        InputError: scales and zero points differ in shape, or do not divide a row; or a function would change it in
            place.

    Example:
        >>> integers, zero_point = torch.tensor([[200, 50], [1, 2]]), torch.tensor([[100], [0]])
        >>> cache = QuantizedRows(integers.byte(), torch.tensor([[0.5], [2.0]]), zero_point.byte())
        >>> cache[1:].integers, cache.sum(-1)
        (tensor([[1, 2]], dtype=torch.uint8), tensor([25.,  6.]))
    """

    _sizes: torch.Size
    _parts: tuple[Tensor, Tensor, Tensor] | None
    memory: RowMemory | None
    packing: Packing | None
    blocks: int
    is_rotated: bool

    @staticmethod
    def __new__(
        cls: Any,
        integers: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        packing: Packing | None = None,
        is_rotated: bool = False,
    ) -> QuantizedRows:
        """Make a tensor with the shape of the unpacked integers."""
        sizes = integers.shape if packing is None else torch.Size((*integers.shape[:-1], packing.count))
        if scale.shape != zero_point.shape or sizes[-1] % max(scale.shape[-1], 1):
            raise InputError(
                f"scale has the shape {tuple(scale.shape)} and zero_point {tuple(zero_point.shape)}: both must be "
                f"equal, with one value, or one for each block of equal size, for the {sizes[-1]} values of a row."
            )
        parts = integers, scale, zero_point
        return cls._made(sizes, scale.dtype, integers.device, parts, None, packing, scale.shape[-1], is_rotated)

    @classmethod
    def in_memory(cls, memory: RowMemory, shape: tuple[int, ...]) -> QuantizedRows:
        """Rows of this shape at the start of memory. Their parts are made when they are read first."""
        sizes = torch.Size(shape)
        return cls._made(sizes, torch.float32, "cpu", None, memory, memory.packing, memory.blocks, False)

    @classmethod
    def _made(cls, sizes: torch.Size, dtype: Any, device: Any, parts: Any, memory: Any, *form: Any) -> QuantizedRows:
        make: Any = Tensor._make_wrapper_subclass
        result: QuantizedRows = make(cls, sizes, dtype=dtype, device=device)
        packing, blocks, is_rotated = form
        result.__dict__.update(_parts=parts, memory=memory, _sizes=sizes)
        result.__dict__.update(packing=packing, blocks=blocks, is_rotated=is_rotated)
        return result

    def rotated(self) -> QuantizedRows:
        """Rotation of its rows, with the same integers in the same memory: what they stand for changes."""
        about, form = (self.scale.dtype, self.device) if self.memory is None else (torch.float32, "cpu"), _form(self)
        return self._made(self._sizes, *about, self._parts, self.memory, *form[:2], not self.is_rotated)

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Integers as they are stored, scales and zero points. Those of rows in memory are made when first read."""
        parts = self._parts
        if parts is None:
            memory: Any = self.memory
            parts = self.__dict__["_parts"] = memory.parts(self._sizes[2])
        return parts

    @property
    def integers(self) -> Tensor:
        """Integers, uint8[..., N]; those of the rotated rows if `is_rotated`. If they are packed, this unpacks them."""
        return self.parts[0] if self.packing is None else self.packing.unpack_last(self.parts[0])

    @property
    def scale(self) -> Tensor:
        """Scales, float32[..., blocks of a row]."""
        return self.parts[1]

    @property
    def zero_point(self) -> Tensor:
        """Zero points, uint8[..., blocks of a row]."""
        return self.parts[2]

    def dequantize(self) -> Tensor:
        """Return the float values, float32[..., N]."""
        values = self.integers.to(self.scale.dtype)
        by_block = values.unflatten(-1, (self.blocks, values.shape[-1] // self.blocks))
        values = by_block.sub_(self.zero_point.unsqueeze(-1)).mul_(self.scale.unsqueeze(-1)).flatten(-2)
        return rotated(values) if self.is_rotated else values

    def is_stored_as(self, block: int | None, bits: int) -> bool:
        """Whether its scales are of blocks of this size, or None: of rows, and its stored integers have this width.

        Integers of rotated rows are stored as none.
        """
        stored = 8 if self.packing is None else self.packing.bits
        is_in_blocks = self.blocks == 1 if block is None else self.blocks * block == self._sizes[-1]
        return stored == bits and is_in_blocks and not self.is_rotated

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Sizes of the axes. Without `__torch_function__`, since each call with a state reads it several times."""
        return self._sizes

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the stored integers, scales and zero points."""
        return sum(part.nbytes for part in self.parts)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedRows({tuple(self.shape)}, integers={self.parts[0].dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedRows:
        integers, scale, zero_point = (copy.deepcopy(part, memo) for part in self.parts)
        return QuantizedRows(integers, scale, zero_point, self.packing, self.is_rotated)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return QuantizedRows, (*self.parts, self.packing, self.is_rotated)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function on integers, scales and zero points if it moves whole rows; else on the float values."""
        kwargs = kwargs or {}
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _MEMORY:
            raise InputError(
                f"a tensor that is stored as integers has no memory of floats, which {func.__name__} is for: use one "
                "of x.parts (integers, scales, zero points), or x.dequantize()."
            )
        if func is Tensor.__iter__:
            return iter(Tensor.unbind(*args))
        if any(isinstance(value, QuantizedRows) for value in _written(func, args, kwargs)):
            name = getattr(func, "__name__", str(func))
            raise InputError(f"{name} would change a tensor that is stored as integers: change x.dequantize() instead.")
        result = _moved(func, args, kwargs) if func in _MOVES else None
        return func(*_in_float(args), **_in_float(kwargs)) if result is None else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator that was called below PyTorch's functions, on the float values."""
        return func(*_in_float(args), **_in_float(kwargs or {}))


def _in_float(values: Any) -> Any:
    return mapped(values, lambda leaf: leaf.dequantize() if isinstance(leaf, QuantizedRows) else leaf)


_IN_PLACE_OPERATORS = frozenset(
    f"__{name}__"
    for name in (
        *("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "idiv", "imod", "ipow", "imatmul"),
        *("iand", "ior", "ixor", "ilshift", "irshift"),
    )
)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Arguments that a function writes to."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS or kwargs.get("inplace")
    yield from leaves((_first(args, kwargs) if in_place else (), kwargs.get("out")))


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """First argument of a function, which may be passed by its name."""
    return args[0] if args else next((kwargs[name] for name in ("input", "tensors", "self") if name in kwargs), ())


def _moved(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Result of a function that moves rows; None if it changes rows, or if one of its tensors is not in integers."""
    first = _first(args, kwargs)
    tensors = first if isinstance(first, (tuple, list)) else (first,)
    if not tensors or not all(isinstance(x, QuantizedRows) and _form(x) == _form(tensors[0]) for x in tensors):
        return None
    sizes, dtypes = tensors[0].parts[0].shape[-1], [part.dtype for part in tensors[0].parts]
    packing, blocks, is_rotated = _form(tensors[0])
    if func is Tensor.expand:
        args, kwargs = _without_row_size(tensors[0], args, kwargs)
    try:
        # the result could be of whole bytes, although it is of some values of each row
        if _goes_along_rows(func, args, kwargs) or (packing is not None and not _keeps_size(func, args, kwargs)):
            return None
        results = [func(*_part(args, i), **_part(kwargs, i)) for i in range(3)]
    except (IndexError, RuntimeError):  # it goes along rows, of which scales have one value
        return None
    if func is Tensor.expand:  # entries that share memory could not be appended to
        results = [result.contiguous() for result in results]
    for integers, scale, zero_point in zip(*map(_as_tuple, results), strict=False):
        is_whole = integers.shape[-1:] == (sizes,) and scale.shape[-1:] == (blocks,)
        is_alike = integers.shape[:-1] == scale.shape[:-1] and scale.shape == zero_point.shape
        if not (is_whole and is_alike and [integers.dtype, scale.dtype, zero_point.dtype] == dtypes):
            return None
    of_parts = zip(*map(_as_tuple, results), strict=True)
    joined = tuple(QuantizedRows(integers, scale, zero, packing, is_rotated) for integers, scale, zero in of_parts)
    return joined if isinstance(results[0], (tuple, list)) else joined[0]


def _goes_along_rows(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function that keeps the shape may change the order of the values of a row."""
    if func not in _PLACE_OF_DIMS:
        return False
    last = _first(args, kwargs).dim() - 1
    dims = list(leaves((args[_PLACE_OF_DIMS[func] :], kwargs.get("dims", ()))))
    return not dims or any(dim % (last + 1) == last for dim in dims)


def _keeps_size(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the rows of each result have as many values as those of the tensors.

    The function runs on tensors without memory, unless the shape of its result depends on values of an argument.
    """
    if func in _COPIES:
        return True
    others = [leaf for leaf in leaves((args, kwargs)) if type(leaf) is Tensor]
    counts = "repeat_interleave" in func.__name__ or any(leaf.dtype in (torch.bool, torch.uint8) for leaf in others)
    of_values = counts and bool(others)

    def shaped(leaf: Any) -> Any:
        if isinstance(leaf, QuantizedRows):
            return leaf.zero_point[..., :1].expand(leaf.shape) if of_values else torch.empty(leaf.shape, device="meta")
        is_replaced = type(leaf) is Tensor and not of_values and leaf.dim() > 0  # a number can be an index
        return torch.empty_like(leaf, device="meta") if is_replaced else leaf

    results = func(*mapped(args, shaped), **mapped(kwargs, shaped))
    count = next(leaf.shape[-1] for leaf in leaves((args, kwargs)) if isinstance(leaf, QuantizedRows))
    return all(result.shape[-1:] == (count,) for result in _as_tuple(results))


def _without_row_size(
    rows: QuantizedRows, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Arguments of `expand` with -1 instead of the number of values of a row, which differs from that of its parts."""
    *others, last = leaves((args[1:], kwargs.get("size", ())))
    return (rows, (*others, -1 if last == rows.shape[-1] else last)), {}


def _form(rows: Any) -> tuple[Packing | None, int, bool]:
    """How rows are packed, the number of blocks of a row, and whether the integers are those of rotated rows."""
    return rows.packing, rows.blocks, rows.is_rotated


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _part(values: Any, i: int) -> Any:
    """Arguments with part `i` of each tensor that is stored as integers."""
    return mapped(values, lambda leaf: leaf.parts[i] if isinstance(leaf, QuantizedRows) else leaf)
