"""Where fxq keeps what it need not do again in the next process: prices, and machine code of its loops."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

VARIABLE = "FXQ_CACHE"


def chosen_folder() -> Path | None:
    """The folder that the environment variable `FXQ_CACHE` names; None where it is not set."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser().absolute() if named else None


def cache_folder() -> Path:
    """The folder of measured prices: that of `FXQ_CACHE`, else fxq's folder in the user's cache directory."""
    return chosen_folder() or user_cache_path("fxq")
