"""The attributes of the float model that a quantized model has, too: copies of plain data; and why it lacks others."""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fxq.errors import NoAttributeError

MOST = 1 << 20
"""Bytes of an attribute that is copied."""
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, staticmethod, classmethod)
_NOT_DATA = (nn.Module, Tensor, torch.UntypedStorage, torch.TypedStorage, np.ndarray, *_CODE)


@dataclass(frozen=True)
class FloatAttributes:
    """Attributes of a float model.

    Attributes:
        values: copies of those that are plain data, by name: numbers, strings, containers, config objects.
        left: why each of the others is not handed on.
    """

    values: dict[str, Any] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> FloatAttributes:
        """What a float model has besides what every module has."""
        handed = cls()
        for name, value in _attributes(model):
            if name in handed.values or name in handed.left:
                continue
            why = _why_not(value)
            if not why:
                try:
                    handed.values[name] = _copied(value)
                except Exception as error:  # whatever the objects inside raise
                    why = f"it cannot be copied ({type(error).__name__}: {error})"
            if why:
                handed.left[name] = why
        return handed

    def get(self, kind: str, name: str) -> Any:
        """The value of that name.

        Args:
            kind: of the model that is asked, for the message.
            name: of the attribute.

        Raises:
            NoAttributeError: it was not handed on, or the float model did not have it.
        """
        if name in self.values:
            return self.values[name]
        why = f": the float model has it, but {self.left[name]}" if name in self.left else _NOWHERE
        raise NoAttributeError(f"{kind} has no attribute {name!r}{why}.")


_NOWHERE = ", and the float model had none that could be handed on"


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Public names with what stands behind them, the model's own before those of its class."""
    common = {*dir(nn.Module), *vars(nn.Module())}
    tables: list[Mapping[str, Any]] = [vars(model), model._modules, model._parameters, model._buffers]
    tables += [vars(cls) for cls in type(model).__mro__ if not issubclass(nn.Module, cls)]
    for table in tables:
        yield from ((name, value) for name, value in table.items() if name not in common and not name.startswith("_"))


def _why_not(value: Any) -> str:
    """Why a value is no data; empty where it may be."""
    if isinstance(value, (nn.Module, Tensor)):
        return (
            "its modules and tensors have become part of the graph: see qmodel.graph and qmodel.qparams(), or ask the "
            "float model"
        )
    if isinstance(value, _CODE):
        return (
            "its methods would run the float model. Call the float model's, or write them around the quantized one: a "
            "module whose method calls it"
        )
    if isinstance(value, type) or hasattr(type(value), "__get__"):
        return "what its code computes is its own. Ask the float model"
    return "it is code. Ask the float model" if callable(value) else ""


class _Pickler(pickle.Pickler):
    """Writes data only."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _NOT_DATA):
            raise pickle.PicklingError(f"there is a {type(obj).__name__} inside")
        return NotImplemented


class _Limited(io.BytesIO):
    """Takes as much as an attribute may have: a data set that a model holds is not read to its end."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MOST:
            raise pickle.PicklingError(f"it has more than {MOST >> 20} MiB")
        return super().write(data)


def _copied(value: Any) -> Any:
    stream = _Limited()
    _Pickler(stream).dump(value)
    return pickle.loads(stream.getvalue())
