"""Where code of the user's or of fxq is: its file and line, and what an import path names."""

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

from fxq.errors import RecipeError


@lru_cache(maxsize=256)  # to find a class, Python parses its whole file
def source_of(function: Callable[..., Any]) -> str:
    """`folder/file.py:line` of a function or class; of a class that is in no file, as in a terminal, its name."""
    if inspect.isclass(function):
        try:
            return f"{short_path(inspect.getfile(function))}:{inspect.getsourcelines(function)[1]}"
        except (OSError, TypeError):
            return name_of(function)
    code = inspect.unwrap(function).__code__
    return f"{short_path(code.co_filename)}:{code.co_firstlineno}"


def short_path(filename: str) -> str:
    """The last two parts of a path, which find a file and reveal nothing of the machine; three below `patterns/`."""
    parts = filename.replace(os.sep, "/").split("/")
    return "/".join(parts[-3:] if parts[-3:-2] == ["patterns"] else parts[-2:])


def digest_of(value: Any) -> str:
    """A hash of the file that a function or class is in; of its name where it is in none, as in a notebook."""
    try:
        code = Path(inspect.getfile(value)).read_bytes()
    except (OSError, TypeError):
        code = name_of(value).encode()
    return hashlib.sha256(code).hexdigest()[:12]


def import_name(name: str, base: type) -> Any:
    """The class that `package.module:Class` names. Raises `RecipeError` when it is missing, or no `base`."""
    value = imported(name)
    if not (isinstance(value, type) and issubclass(value, base)):
        raise RecipeError(f"{name!r} names no class of {base.__name__}.")
    return value


_MAY_IMPORT: ContextVar[bool] = ContextVar("may_import", default=True)


@contextmanager
def without_imports() -> Iterator[None]:
    """Inside, `imported` finds what is imported already, and fxq's own: a file is not to say which code runs."""
    token = _MAY_IMPORT.set(False)
    try:
        yield
    finally:
        _MAY_IMPORT.reset(token)


def check_imported(module: str, what: str) -> None:
    """Raise `RecipeError` for a module that nobody has imported, and `what` names."""
    if module not in sys.modules and module.partition(".")[0] != "fxq":
        raise RecipeError(f"{what} needs the module {module!r}, and no file imports code: `import {module}` first.")


def imported(name: str) -> Any:
    """What `package.module:Name` names. Raises `RecipeError` when there is nothing."""
    module, _, qualname = str(name).partition(":")
    find: Callable[[Any, str], Any] = getattr
    if not _MAY_IMPORT.get():
        check_imported(module, repr(name))
        find = inspect.getattr_static  # a module may import others when it is asked for what it has not
    try:
        value: Any = importlib.import_module(module)
        for part in qualname.split("."):
            value = find(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(f"cannot import {name!r} (written package.module:Name): {error}.") from None
    return value


def import_path(value: Any, what: str) -> str:
    """`package.module:Name` of a class or function; `what` it is called in the error.

    Raises:
        RecipeError: it is local to a function, so that no import finds it.
    """
    if "<locals>" in value.__qualname__:
        raise RecipeError(f"{what} is local to a function: a file cannot name it.")
    return name_of(value)


def name_of(value: Any) -> str:
    """`package.module:Name` of a class or function, whether an import finds it or not."""
    return f"{value.__module__}:{value.__qualname__}"
