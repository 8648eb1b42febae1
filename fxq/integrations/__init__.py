"""Support for models of other libraries, imported when such a model is used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import nn

from fxq.errors import FileError


def __getattr__(name: str) -> Any:
    """Import `FxqConfig`, with transformers, when it is asked for."""
    if name == "FxqConfig":
        from fxq.integrations.transformers_files import FxqConfig

        return FxqConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def generator_support(model: nn.Module) -> Any:
    """Module of fxq that quantizes a model which generates, with the calls of its library; None for other models."""
    if "transformers" not in sys.modules:
        return None
    from fxq.integrations import transformers as support

    return support if support.generates(model) else None


def load_folder(folder: Path) -> Any:
    """Load a quantized model from a folder that its `save_pretrained` wrote.

    Raises:
        FileError: the folder has no quantized model, or transformers is not installed.
    """
    if not (folder / "config.json").is_file():
        raise FileError(f"cannot load {str(folder)!r}: it is a folder without a config.json.")
    try:
        from fxq.integrations import transformers_files
    except ImportError as error:
        raise FileError(f"cannot load {str(folder)!r}: it needs transformers: pip install transformers.") from error
    return transformers_files.load_folder(folder)
