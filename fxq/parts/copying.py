"""Copies of float models whose attributes Python cannot copy, such as an imported module or a lock."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fxq.common.isolation import computed_tensors
from fxq.errors import InputError, words_of


def copy_of(model: nn.Module, memo: Mapping[int, Any]) -> Any:
    """Return a deep copy of a model. Attributes that Python cannot copy are shared with the model.

    Args:
        model: the model.
        memo: values that replace objects in the copy, by the id of the object.

    Raises:
        InputError: such an attribute is an iterator, whose state both models would change.
    """
    memo = {**computed_tensors(model), **memo}
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:  # attributes may raise anything
        return copy.deepcopy(model, {**_not_copiable(model, memo), **memo})


def _not_copiable(model: nn.Module, memo: Mapping[int, Any]) -> dict[int, Any]:
    own: list[Any] = [*model.modules(), *model.parameters(), *model.buffers()]
    own_memo, shared = {**{id(item): item for item in own}, **memo}, dict[int, Any]()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_modules", "_parameters", "_buffers"):
                continue
            try:
                copy.deepcopy(value, dict(own_memo))
            except Exception as error:
                if isinstance(value, Iterator):
                    raise InputError(
                        f"attribute {name!r} of {path or 'the model'} is a {type(value).__name__}, which cannot be "
                        f"copied for the quantized model: {words_of(error)}. Create it in forward."
                    ) from error
                shared[id(value)] = value
    return shared
