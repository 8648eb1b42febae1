"""Parsing of Python code, safe in several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_LOCK = threading.Lock()
_MAX_ATTEMPTS = 20


def call_parser(parse: Callable[..., T], argument: object) -> T:
    """Call a function that parses Python code, such as `ast.parse`, or `inspect.getsourcelines` of a class.

    In CPython up to 3.12, calls in several threads at once can raise `SystemError` ("AST constructor recursion depth
    mismatch"). The lock keeps fxq's own calls apart; a call that another library's disturbs is repeated.
    """
    for _ in range(_MAX_ATTEMPTS - 1):
        try:
            with _LOCK:
                return parse(argument)
        except SystemError:
            continue
    return parse(argument)
