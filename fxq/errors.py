"""Errors of fxq: one hierarchy under `FxqError`, every message says what, where, why and what to do."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable
from functools import cache


class FxqError(Exception):
    """Base of every error that fxq raises on purpose."""


class InputError(FxqError):
    """The model, the data or an argument cannot be used as given."""


class TraceError(FxqError):
    """`torch.fx` cannot trace the model."""


class RecipeError(FxqError):
    """A recipe is malformed, or names something that does not exist."""


class PatternError(FxqError):
    """A fusion pattern or rewrite rule is malformed."""


class PassError(FxqError):
    """A pass broke the graph, or cannot run at this stage."""


class CalibrationError(FxqError):
    """Calibration data or the activations it causes are unusable."""


class BackendError(FxqError):
    """A backend cannot run on this machine, or failed to lower a unit."""


class RenderError(FxqError):
    """A picture could not be drawn, or a file could not be written."""


class FileError(FxqError):
    """A file holds no model that can be loaded: it is damaged, newer, of something else, or needs what is not here."""


class ExportError(FxqError):
    """The model cannot be written for another runtime, or does not compute the same there."""


class NoAttributeError(FxqError, AttributeError):
    """A quantized model does not have what the float model has. `hasattr` and `getattr` with a default take it so."""


class FxqWarning(UserWarning):
    """Something worth knowing that did not stop fxq."""


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The names in `known` that look most like `name`, best first.

    Example:
        >>> nearest("histgram", ["minmax", "histogram"])
        ['histogram']
    """
    return difflib.get_close_matches(name, list(known), n=most, cutoff=0.5)


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """The message for a name that is not in a registry: the nearest names, then all of them.

    Example:
        >>> unknown("observer", "histgram", ["minmax", "histogram"])
        "unknown observer 'histgram'; did you mean 'histogram'? Known: histogram, minmax."
    """
    names = sorted(known)
    close = nearest(str(name), names)
    hint = f"; did you mean {' or '.join(repr(c) for c in close)}?" if close else "."
    return f"unknown {kind} {str(name)!r}{hint} Known: {', '.join(names) or 'none'}."


def words_of(error: Exception) -> str:
    """The message of an exception, without what `torch.fx` appends to those that cross an `fx.Interpreter`."""
    return str(error).partition("\n\nWhile executing")[0]


_BETWEEN = frozenset({"fxq", "torch", "contextlib", "copy", "pickle"})
"""What calls fxq, or is called by it, on the way from the user's line."""


def warn(message: str) -> None:
    """Issue an `FxqWarning` that points at the user's line: the first frame outside of fxq, torch and what they use."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, FxqWarning, stacklevel=level)


@cache
def warn_once(message: str) -> None:
    """The same, once in a process: for what does not change while it runs."""
    warn(message)
