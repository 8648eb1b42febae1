"""Globs: over module paths, where a dot is a border, and over any other text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache


def path_matches(path: str, glob: str) -> bool:
    """Whether a module path is one that the glob means: `*` and `?` stop at a dot, `**` crosses dots.

    `[abc]` and `[!abc]` are one character, as in file names. `**.` may stand for nothing: `**.dense` is `dense`, too.

    Example:
        >>> path_matches("layer.0.dense", "layer.*.dense"), path_matches("layer.0.output.dense", "layer.*.dense")
        (True, False)
        >>> path_matches("layer.0.output.dense", "layer.**.dense")
        True
    """
    return _pattern(glob).fullmatch(path) is not None


def text_matches(text: str, glob: str) -> bool:
    """The same of a text that is no path: `*` stands for anything."""
    return fnmatchcase(text, glob)


def crossing(glob: str, paths: Iterable[str]) -> str | None:
    """The glob with `**` in the place of `*`, where that means some of these paths; else None."""
    wide = re.sub(r"(?<!\*)\*(?!\*)", "**", glob)
    return wide if wide != glob and any(path_matches(path, wide) for path in paths) else None


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
