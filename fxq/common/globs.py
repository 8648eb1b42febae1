"""Globs for module paths, where `*` stops at a dot, and for other text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache


def path_matches(path: str, glob: str) -> bool:
    """Whether a module path matches a glob: `*` and `?` stop at a dot, `**` crosses dots.

    `[abc]` and `[!abc]` match one character, as in globs of file names. `**.` may be empty: `**.dense` matches `dense`.

    Example:
        >>> path_matches("layer.0.dense", "layer.*.dense"), path_matches("layer.0.output.dense", "layer.*.dense")
        (True, False)
        >>> path_matches("layer.0.output.dense", "layer.**.dense")
        True
    """
    return _pattern(glob).fullmatch(path) is not None


def text_matches(text: str, glob: str) -> bool:
    """Whether a text other than a path matches a glob: `*` matches any characters."""
    return fnmatchcase(text, glob)


def crossing(glob: str, paths: Iterable[str]) -> str | None:
    """Return the glob with `**` instead of `*` if it then matches any of the paths, else None."""
    wider = re.sub(r"(?<!\*)\*(?!\*)", "**", glob)
    return wider if wider != glob and any(path_matches(path, wider) for path in paths) else None


@lru_cache(maxsize=1024)
def _pattern(glob: str) -> re.Pattern[str]:
    return re.compile("".join(map(_translated, _TOKENS.findall(glob))), re.DOTALL)


_TOKENS = re.compile(r"\*\*\.|\*+|\?|\[!?\]?[^\]]*\]|.", re.DOTALL)
_MEANS = {"**.": r"(?:.*\.)?", "*": r"[^.]*", "?": r"[^.]"}


def _translated(token: str) -> str:
    if token.startswith("[") and len(token) > 1:
        inside = re.sub(r"([\\\[&~|^])", r"\\\1", token[1:-1])
        return f"[^{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"
    return _MEANS.get(token) or (".*" if token.startswith("**") else re.escape(token))
