"""Errors and warnings of fxq. Every message says what is wrong, where, why, and what to do."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable
from functools import cache


class FxqError(Exception):
    """Base of every error that fxq raises on purpose.

    Attributes:
        is_on_all_ranks: whether all processes that work together raise it, so that none waits for this one.
    """

    is_on_all_ranks = False


class InputError(FxqError):
    """The model, the data or an argument cannot be used."""


class StateError(FxqError):
    """A state that a quantized model returned, such as a cache, was written to, and cannot be passed in again."""


class TraceError(FxqError):
    """`torch.fx` cannot trace the model."""


class RecipeError(FxqError):
    """A recipe is malformed, or names something that does not exist."""


class PatternError(FxqError):
    """A fusion pattern or rewrite rule is malformed."""


class PassError(FxqError):
    """A pass broke the graph, or cannot run at this stage."""


class CalibrationError(FxqError):
    """Calibration data, or the activations that the model computes from it, cannot be used."""


class BackendError(FxqError):
    """A backend cannot run on this machine, or failed to lower a unit."""


class RenderError(FxqError):
    """A picture could not be drawn, or a file could not be written."""


class FileError(FxqError):
    """A file cannot be loaded: it is damaged, is not a model, or needs a newer fxq or a module that is missing."""


class ExportError(FxqError):
    """The model cannot be exported to another runtime, or computes other outputs there."""


class NoAttributeError(FxqError, AttributeError):
    """A quantized model lacks an attribute of the float model. An `AttributeError`, so that `hasattr` returns False."""


class FxqWarning(UserWarning):
    """Warning of fxq: the result is usable, but not what was asked for, or not verified."""


def nearest(name: str, candidates: Iterable[str], max_count: int = 3) -> list[str]:
    """Return the names among `candidates` that are spelled most like `name`, best first.

    Example:
        >>> nearest("histgram", ["minmax", "histogram"])
        ['histogram']
    """
    return difflib.get_close_matches(name, list(candidates), n=max_count, cutoff=0.5)


def unknown(kind: str, name: object, valid_names: Iterable[str]) -> str:
    """Return the message for a name that does not exist: the nearest names, then all valid names.

    Example:
        >>> unknown("observer", "histgram", ["minmax", "histogram"])
        "unknown observer 'histgram'; did you mean 'histogram'? Known: histogram, minmax."
    """
    names = sorted(valid_names)
    close = nearest(str(name), names)
    hint = f"; did you mean {' or '.join(repr(c) for c in close)}?" if close else "."
    return f"unknown {kind} {str(name)!r}{hint} Known: {', '.join(names) or 'none'}."


def words_of(error: BaseException) -> str:
    """Return the message of an exception without the text that `fx.Interpreter` appends to it."""
    return str(error).partition("\n\nWhile executing")[0]


_INTERNAL_PACKAGES = frozenset({"fxq", "torch", "contextlib", "copy", "pickle"})
"""Packages whose stack frames a warning skips to find the user's line."""


def warn(message: str) -> None:
    """Issue an `FxqWarning` that points at the user's line: the first frame outside `_INTERNAL_PACKAGES`."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INTERNAL_PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, FxqWarning, stacklevel=level)


@cache
def warn_once(message: str) -> None:
    """Issue a warning once per process, for facts that do not change while it runs."""
    warn(message)
