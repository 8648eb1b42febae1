"""Machine code of loops in Numba's cache, in a folder that may be read-only."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from fxq.common.cache_folder import chosen_folder

log = logging.getLogger("fxq")


def compile_cached(signature: Any, function: Callable[..., None], options: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return the C callback of a function: from Numba's cache, or compiled and cached where a folder is writable.

    Only these functions use the folder of `FXQ_CACHE`, and read a cache in a read-only folder, which Numba ignores.

    Args:
        signature: Numba signature of the function.
        function: Function to compile. Its qualified name is the key in the cache.
        options: Options of the compiler.

    Returns:
        The `CFunc`, and whether it is in the cache.
    """
    from numba.core.ccallback import CFunc
    from numba.core.sigutils import normalize_signature

    def compiled(writes: bool | None) -> Any:
        loop: Any = CFunc(function, normalize_signature(signature), locals={}, options=dict(options))
        if writes is not None:
            loop._cache = _cache(function, writes)
        loop.compile()
        return loop

    try:
        return compiled(writes=True), True
    except Exception as error:  # no writable folder, or a damaged file; an error of the code is raised again below
        log.debug("the cache of compiled loops cannot be written: %s", error)
    try:
        loop = compiled(writes=False)
    except Exception:
        loop = compiled(writes=None)
    return loop, bool(loop.cache_hits)


def _cache(function: Callable[..., None], writes: bool) -> Any:
    """Numba's cache of one function. With `writes`, in the first writable folder; `RuntimeError` if there is none.

    Numba's own classes are not changed: other threads may be compiling functions of the user.
    """
    from numba.core import caching

    numba: Any = caching
    default_locator, *other_locators = numba.CacheImpl._locator_classes
    folder = chosen_folder()  # instead of the folder of NUMBA_CACHE_DIR, which the first locator finds

    def find(self: Any, py_func: Any, py_file: str) -> None:
        other_locators[0].__init__(self, py_func, py_file)
        self._cache_path = os.path.join(str(folder), "numba", self.get_suitable_cache_subpath(py_file))

    folder_locator = type("FolderLocator", (other_locators[0],), {"__init__": find})
    locators = [folder_locator if folder is not None else default_locator, *other_locators]
    if not writes:
        locators = [
            type(locator.__name__, (locator,), {"ensure_cache_path": lambda self: None}) for locator in locators
        ]

    class Impl(numba.CompileResultCacheImpl):
        _locator_classes = locators

    class Cache(numba.FunctionCache):
        _impl_class = Impl

        def save_overload(self, sig: Any, data: Any) -> None:
            if writes:
                super().save_overload(sig, data)

    return Cache(function)
