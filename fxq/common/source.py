"""Source locations of functions and classes, and import paths."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any

from fxq.common.parsing import call_parser
from fxq.errors import RecipeError


@lru_cache(maxsize=256)  # to find a class, Python parses its whole file
def source_of(function: Callable[..., Any]) -> str:
    """`folder/file.py:line` of a function or class; the name of a class that has no file (defined in a terminal)."""
    if inspect.isclass(function):
        try:
            return f"{short_path(inspect.getfile(function))}:{call_parser(inspect.getsourcelines, function)[1]}"
        except (OSError, TypeError):
            return name_of(function)
    code = inspect.unwrap(function).__code__
    return f"{short_path(code.co_filename)}:{code.co_firstlineno}"


def short_path(filename: str) -> str:
    """Last two parts of a path, three below `patterns/`: they identify a file without the folders of the machine."""
    parts = filename.replace(os.sep, "/").split("/")
    return "/".join(parts[-3:] if parts[-3:-2] == ["patterns"] else parts[-2:])


def digest_of(value: Any) -> str:
    """Hash of the file of a function or class; of its name if it has no file (defined in a notebook)."""
    try:
        code = Path(inspect.getfile(value)).read_bytes()
    except (OSError, TypeError):
        code = name_of(value).encode()
    return hashlib.sha256(code).hexdigest()[:12]


def import_name(name: str, base: type) -> Any:
    """Import the class `package.module:Class`. Raises `RecipeError` if it is missing or no subclass of `base`."""
    value = imported(name)
    if not (isinstance(value, type) and issubclass(value, base)):
        raise RecipeError(f"{name!r} is not a subclass of {base.__name__}.")
    return value


_MAY_IMPORT: ContextVar[bool] = ContextVar("may_import", default=True)


@contextmanager
def without_imports() -> Iterator[None]:
    """Context in which `imported` finds only modules that are imported already, and those of fxq.

    A file must not decide which code is imported and run.
    """
    token = _MAY_IMPORT.set(False)
    try:
        yield
    finally:
        _MAY_IMPORT.reset(token)


def check_imported(module: str, user: str) -> None:
    """Raise `RecipeError` if a module, which `user` needs, is not imported yet and not part of fxq."""
    if module not in sys.modules and module.partition(".")[0] != "fxq":
        raise RecipeError(
            f"{user} needs the module {module!r}, and loading a file imports no code: `import {module}` first."
        )


def imported(name: str) -> Any:
    """Import the object `package.module:Name`. Raises `RecipeError` if there is none."""
    module, _, qualname = str(name).partition(":")
    find: Callable[[Any, str], Any] = getattr
    if not _MAY_IMPORT.get():
        check_imported(module, repr(name))
        find = inspect.getattr_static  # the `__getattr__` of a module may import other modules
    try:
        value: Any = importlib.import_module(module)
        for part in qualname.split("."):
            value = find(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(f"cannot import {name!r} (written package.module:Name): {error}.") from None
    return value


def import_path(value: Any, description: str) -> str:
    """`package.module:Name` of a class or function that can be imported.

    Args:
        value: the class or function.
        description: its name in the error.

    Raises:
        RecipeError: it is defined inside of a function, so that it cannot be imported.
    """
    if "<locals>" in value.__qualname__:
        raise RecipeError(f"{description} is local to a function, and cannot be imported. Define it in a module.")
    return name_of(value)


def name_of(value: Any) -> str:
    """`package.module:Name` of a class or function, also if it cannot be imported."""
    return f"{value.__module__}:{value.__qualname__}"
