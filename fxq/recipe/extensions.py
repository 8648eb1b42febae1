"""Ops, kernels and backends of the user, which a recipe names by import path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fxq.backends import by_name as backends
from fxq.backends.table.own_kernels import makes_kernels
from fxq.common.source import import_path, imported
from fxq.common.trees import leaves
from fxq.errors import BackendError, RecipeError, warn
from fxq.ops import OPS


def import_extensions(paths: Iterable[str]) -> None:
    """Import the modules of ops and kernels, which registers them.

    Raises:
        RecipeError: a path cannot be imported, or is neither an op nor a kernel.
    """
    for path in paths:
        value = imported(path)
        if OPS.of_target(value) is None and not makes_kernels(value):
            raise RecipeError(
                f"{path!r} is neither an op nor a kernel: decorate the function with fxq.extend.register_op or "
                "fxq.extend.register_kernel."
            )


def backend_path(backend: Any) -> str:
    """Name of a backend in a recipe: the name itself, or the import path of a class.

    Raises:
        RecipeError: `backend` is an instance, or a class that cannot be imported.
    """
    if isinstance(backend, backends.Backend):
        raise RecipeError(f"a recipe takes the class of a backend, {type(backend).__name__}, not an instance.")
    return import_path(backend, "the backend") if isinstance(backend, type) else str(backend)


def check_backend(name: str) -> None:
    """Raise `RecipeError` if there is no backend of that name."""
    try:
        if ":" in name:
            backends.backend_type(name)
        else:
            backends.check_name(name)
    except BackendError as error:
        raise RecipeError(str(error)) from None


def warn_of_main(data: dict[str, Any]) -> dict[str, Any]:
    """Return the plain data of a recipe; warn if it names functions or classes of `__main__`.

    Another program has another `__main__`, and cannot import them.
    """
    paths = {leaf for leaf in leaves(data) if isinstance(leaf, str) and leaf.startswith("__main__:")}
    if paths:
        warn(
            f"the recipe names {', '.join(sorted(paths))}: only the script or notebook that defines them can load it. "
            "Move them to a module, and import them from there."
        )
    return data
