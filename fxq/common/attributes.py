"""Attributes of the float model that a quantized model has, too: copies of plain data."""

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

MAX_ATTRIBUTE_BYTES = 1 << 20
"""Largest size of an attribute that is copied, pickled."""
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, staticmethod, classmethod)
_NOT_DATA = (nn.Module, Tensor, torch.UntypedStorage, torch.TypedStorage, np.ndarray, *_CODE)


@dataclass(frozen=True)
class FloatAttributes:
    """Attributes of a float model, without those that every module has.

    Attributes:
        values: copies of attributes that are plain data, by name: numbers, strings, containers, config objects.
        left: reasons why other attributes are not copied, by name.
    """

    values: dict[str, Any] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> FloatAttributes:
        """Copy the attributes of a float model."""
        attributes = cls()
        for name, value in _attributes(model):
            if name in attributes.values or name in attributes.left:
                continue
            reason = _not_data_reason(value)
            if not reason:
                try:
                    attributes.values[name] = _copied(value)
                except Exception as error:  # objects inside may raise anything
                    reason = f"it cannot be copied ({type(error).__name__}: {error})"
            if reason:
                attributes.left[name] = reason
        return attributes

    def get(self, kind: str, name: str) -> Any:
        """Return the copy of an attribute.

        Args:
            kind: class name of the quantized model, for the message.
            name: name of the attribute.

        Raises:
            NoAttributeError: the attribute was not copied, or the float model did not have it.
        """
        if name in self.values:
            return self.values[name]
        reason = f": the float model has it, but {self.left[name]}" if name in self.left else _ABSENT
        raise NoAttributeError(f"{kind} has no attribute {name!r}{reason}.")


_ABSENT = ", and the float model had none that could be copied"


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of public attributes, those of the model before those of its class."""
    common = {*dir(nn.Module), *vars(nn.Module())}
    tables: list[Mapping[str, Any]] = [vars(model), model._modules, model._parameters, model._buffers]
    tables += [vars(cls) for cls in type(model).__mro__ if not issubclass(nn.Module, cls)]
    for table in tables:
        yield from ((name, value) for name, value in table.items() if name not in common and not name.startswith("_"))


def _not_data_reason(value: Any) -> str:
    """Reason why a value is not plain data, with a remedy; empty if it may be."""
    if isinstance(value, (nn.Module, Tensor)):
        return (
            "its modules and tensors have become part of the graph: see qmodel.graph and qmodel.qparams(), or use the "
            "float model"
        )
    if isinstance(value, _CODE):
        return (
            "its methods would run the float model. Call the method of the float model, or write a module with that "
            "method that calls the quantized model"
        )
    if isinstance(value, type) or hasattr(type(value), "__get__"):
        return "it is a class or a property. Use the float model"
    return "it is code. Use the float model" if callable(value) else ""


class _Pickler(pickle.Pickler):
    """Pickler that raises an error for modules, tensors, arrays and functions."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _NOT_DATA):
            raise pickle.PicklingError(f"there is a {type(obj).__name__} inside")
        return NotImplemented


class _Limited(io.BytesIO):
    """Stream that raises an error above `MAX_ATTRIBUTE_BYTES`, so that a large data set is not copied to its end."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MAX_ATTRIBUTE_BYTES:
            raise pickle.PicklingError(f"it has more than {MAX_ATTRIBUTE_BYTES >> 20} MiB")
        return super().write(data)


def _copied(value: Any) -> Any:
    stream = _Limited()
    _Pickler(stream).dump(value)
    return pickle.loads(stream.getvalue())
