"""Folder of fxq's caches: measured prices and compiled loops."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

VARIABLE = "FXQ_CACHE"


def chosen_folder() -> Path | None:
    """Folder named by the environment variable `FXQ_CACHE`, or None if it is not set."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser().absolute() if named else None


def cache_folder() -> Path:
    """Folder of measured prices: `FXQ_CACHE` if set, else `fxq` in the user's cache directory."""
    return chosen_folder() or user_cache_path("fxq")
