"""Nested plain data with tensors as bytes of a safetensors file, which runs no code when it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fxq.errors import InputError

_KEY = "fxq"
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def pack(value: Any) -> bytes:
    """Return a value as the bytes of a safetensors file; `unpack` is the inverse.

    Args:
        value: tensors, numbers, strings, dtypes, None, and tuples, lists, dicts and slices of such values. Tensors
            become dense and lose their gradients.

    Raises:
        InputError: a value inside has another type.

    Example:
        >>> unpack(pack({"x": (torch.ones(2), None), 3: [slice(0, 2), torch.int8]}))
        {'x': (tensor([1., 1.]), None), 3: [slice(0, 2, None), torch.int8]}
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_to_json(value, tensors))
    return bytes(save(tensors, {_KEY: text}))


def unpack(data: bytes, device: str = "cpu") -> Any:
    """Inverse of `pack`, with the tensors on a device.

    Raises:
        InputError: the bytes are not from `pack`, or incomplete.
    """
    try:
        tensors = {name: tensor.to(device) for name, tensor in load(data).items()}
        length = int.from_bytes(data[:8], "little")  # a safetensors file begins with the length of its header, JSON
        return _from_json(json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_KEY]), tensors)
    except Exception as error:  # parsers of foreign bytes may raise anything
        raise InputError(f"{len(data)} bytes are not data of fxq, or incomplete: {error}.") from error


def _to_json(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return lists and scalars as JSON has them, and other values as a dict with their type as its only key."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        # A copy: safetensors refuses tensors that share memory.
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_to_json(part, tensors) for part in value]
    if type(value) is tuple:
        return {"tuple": _to_json(list(value), tensors)}
    if type(value) is dict:
        return {"dict": [[_to_json(key, tensors), _to_json(part, tensors)] for key, part in value.items()]}
    if type(value) is slice:
        return {"slice": _to_json([value.start, value.stop, value.step], tensors)}
    if type(value) is torch.dtype:
        return {"dtype": str(value)}
    raise InputError(
        f"a {type(value).__name__} cannot be stored as data. Use tensors, numbers, strings, dtypes, None, and tuples, "
        "lists, dicts and slices of these."
    )


def _from_json(data: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(data, list):
        return [_from_json(part, tensors) for part in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dtype":
        return _DTYPES[content]
    return _CONTAINERS[kind](_from_json(content, tensors))


_CONTAINERS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "dict": dict, "slice": lambda parts: slice(*parts)}
