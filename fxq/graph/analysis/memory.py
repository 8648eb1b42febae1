"""Aliasing and in-place writes of traced values, observed in one run of the model, not inferred from op names."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from fxq.common.metrics import tensors
from fxq.common.trees import leaves, mapped
from fxq.graph.query import tensor_meta

View = tuple[Any, ...]


KEEP_STATE_REMEDY = (
    "a graph keeps no state between calls. Keep the module as a float leaf (recipe.leaf), or return the new value."
)
"""Remedy for modules that change their own tensors or keep other state between calls."""


class MemoryWatch:
    """Numbers the storages ("blocks") that one run uses.

    Holds weak references, which keep the address of a storage from being reused, but not its memory.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._views: dict[fx.Node, View] = {}
        self._objects: dict[fx.Node, ref[Tensor]] = {}
        self._indices: dict[fx.Node, int] = {}
        self.parts: dict[fx.Node, list[Any]] = {}

    def memory(self, value: Any) -> tuple[int, ...]:
        """Blocks of the tensors inside a value."""
        blocks = (_block(t) for t in tensors(value))
        return tuple(dict.fromkeys(self._numbers.setdefault(b, len(self._numbers)) for b in blocks if b is not None))

    def versions(self, values: Any) -> list[tuple[Tensor, int]]:
        """Tensors inside arguments, each with its version counter."""
        return [(t, t._version) for t in tensors(values) if not t.is_inference()]

    def changed(self, before: list[tuple[Tensor, int]]) -> tuple[int, ...]:
        """Blocks of the tensors whose version counter changed since `before`."""
        return self.memory([t for t, version in before if t._version != version])

    def see(self, node: fx.Node, value: Any) -> None:
        """Record the block, offset and layout of the value of a node."""
        block = _block(value) if isinstance(value, Tensor) else None
        if isinstance(value, int):
            self._indices[node] = value
        if isinstance(value, (tuple, list)):
            self.parts[node] = [tensor_meta(part) for part in value]
        if block is not None:
            self._objects[node] = ref(value)  # one for all nodes with this tensor
            part = value.storage_offset(), tuple(value.shape), value.stride(), value.dtype
            self._views[node] = (self._numbers.setdefault(block, len(self._numbers)), *part)

    def spot(self, node: fx.Node) -> View | None:
        """Block, offset, shape, strides and dtype of a value; None if it is not a tensor with memory."""
        return self._views.get(node)

    def new_block(self) -> int:
        """Number of a new block, which no value of the run uses."""
        return self._numbers.setdefault(object(), len(self._numbers))

    def same(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether two values are the same view of the same block, so that they are interchangeable."""
        return a in self._views and self._views[a] == self._views.get(b)

    def same_object(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether the values of two nodes are one Python object, so that reshaping one in place reshapes the other."""
        return a in self._objects and self._objects[a] is self._objects.get(b)

    def replaced(self, node: fx.Node, by: fx.Node) -> None:
        """Note that the tensor object of `node` is now the value of the node `by`."""
        if node in self._objects:
            self._objects[by] = self._objects[node]

    def overlaps(self, node: fx.Node) -> bool:
        """Whether elements of a value may share memory, as those of `expand` and of an `unfold` by short steps do."""
        if node not in self._views:
            return False
        _, _, shape, strides, _ = self._views[node]
        reach = 0
        for stride, size in sorted(zip(strides, shape, strict=True)):
            if size > 1 and stride <= reach and 0 not in shape:
                return True
            reach += (size - 1) * stride
        return False

    def overwrites(self, written: fx.Node, place: Any, read: fx.Node) -> bool:
        """Whether an elementwise write may change elements of a value before it has read them.

        Elements are written in the order of memory, so the write is safe if no element is read from a position
        before the one that it is written to.

        Args:
            written: the value that is changed.
            place: index of the part that is changed; `...` for all of it.
            read: a value in the same block.
        """
        if written not in self._views or read not in self._views:
            return False
        views = [self._views[written], self._views[read]]
        place = mapped(place, lambda leaf: self._indices.get(leaf, leaf) if isinstance(leaf, fx.Node) else leaf)
        if any(isinstance(index, (fx.Node, Tensor)) for index in leaves(place)):
            return True  # such an index may name any element
        if views[0][-1].itemsize != views[1][-1].itemsize:
            return True  # offsets count elements of different sizes
        reach = 1 + max(map(_last, views))
        target, source = (torch.arange(reach).as_strided(view[2], view[3], view[1]) for view in views)
        target = target[place]
        if not torch.isin(target.flatten(), source.flatten()).any():
            return False
        try:
            return bool((target > source).any())
        except RuntimeError:  # shapes that do not broadcast: no elementwise op
            return True


def _last(view: View) -> int:
    """Offset of the last element of a view."""
    _, offset, shape, strides, _ = view
    return int(offset) + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _block(tensor: Tensor) -> StorageWeakRef | None:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # e.g. sparse tensors
        return None
