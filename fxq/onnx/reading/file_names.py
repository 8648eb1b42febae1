"""Names of ONNX files as names of Python and of modules."""

from __future__ import annotations

import keyword
import re

from torch import nn


def identifier(name: str) -> str:
    """Name of the file as a Python identifier."""
    text = re.sub(r"\W+", "_", name).strip("_")
    return f"{text}_1" if text == "self" else text


def attribute_name(part: str) -> str:
    """Part of a name of the file as the name of an attribute."""
    return re.sub(r"\W+", "_", part) or "_"


def free_name(owner: nn.Module, name: str) -> str:
    """Return the name, with a number appended if the module has an attribute of this name."""
    count, free = 0, name
    while hasattr(owner, free) or keyword.iskeyword(free) or free == "self":
        count += 1
        free = f"{name}_{count}"
    return free
