"""Where code of the user's or of fxq is: its file and line, and what an import path names."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from fxq.errors import RecipeError


@lru_cache(maxsize=256)  # to find a class, Python parses its whole file
def source_of(function: Callable[..., Any]) -> str:
    """`folder/file.py:line` of a function or class."""
    if inspect.isclass(function):
        return f"{short_path(inspect.getfile(function))}:{inspect.getsourcelines(function)[1]}"
    code = inspect.unwrap(function).__code__
    return f"{short_path(code.co_filename)}:{code.co_firstlineno}"


def short_path(filename: str) -> str:
    """The last two parts of a path: enough to find a file, nothing about the machine."""
    return "/".join(filename.replace(os.sep, "/").split("/")[-2:])


def import_name(name: str, base: type) -> Any:
    """The class that `package.module:Class` names. Raises `RecipeError` when there is none, or it is no `base`."""
    module, _, qualname = name.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in qualname.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(f"cannot import {name!r} (written package.module:Class): {error}.") from None
    if not (isinstance(value, type) and issubclass(value, base)):
        raise RecipeError(f"{name!r} is not a {base.__name__} class.")
    return value
