"""The one place where fxq runs source text, which it has written itself.

`fxq/runtime/binding.py` writes a graph as one function of straight calls. Networks of small layers are dominated by
Python overhead, and a list of closures would add a call, a loop step and a lookup of each argument to every node. Of
values, the text holds only what `repr` writes of None, bool, int and str; all others are constants, which it names.
"""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable
from typing import Any

_NUMBERS = itertools.count()


def function_of(source: str, name: str, constants: dict[str, Any]) -> Callable[..., Any]:
    """Compile code that fxq has written, and return the function of this name. Tracebacks show its lines.

    Args:
        source: the code.
        name: name of a function that it defines.
        constants: objects by the names with which the code refers to them; becomes the function's globals.
    """
    place = f"<a graph bound by fxq, {next(_NUMBERS)}>"
    exec(compile(source, place, "exec"), constants)
    function: Callable[..., Any] = constants.pop(name)
    linecache.cache[place] = len(source), None, source.splitlines(keepends=True), place
    weakref.finalize(function, linecache.cache.pop, place, None)
    return function
