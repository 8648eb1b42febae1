"""fxq: a quantization compiler for PyTorch, as a pipeline of graph-rewriting passes on `torch.fx`.

The public names (`fxq/public.py`) are imported on first use, so that `fxq --help` does not import PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxq import extend as extend
    from fxq.public import *  # noqa: F403  # for type checkers and editors

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Public name, or submodule of the package. Imports `fxq.public` on first use."""
    if name == "extend":
        return import_module("fxq.extend")
    if not name.startswith("__") or name == "__all__":
        public = import_module("fxq.public")
        globals().update({"__all__": public.__all__, **{symbol: getattr(public, symbol) for symbol in public.__all__}})
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names; submodules are private and left out."""
    public: list[str] = import_module("fxq.public").__all__
    return [*public, "__version__", "__doc__", "__file__", "__name__", "__path__"]
