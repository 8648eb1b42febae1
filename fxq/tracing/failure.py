"""Where a trace failed and why: the line of the user's code, the value it depends on, the ways out."""

from __future__ import annotations

import linecache
import sys
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import fx, nn

from fxq.common.source import short_path
from fxq.graph.info import info
from fxq.graph.query import called_name


def _is_library(frame: Any) -> bool:
    """Whether a frame runs torch's code, this package's, or generated code."""
    owner = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return owner in ("torch", "fxq") or frame.f_code.co_filename.startswith("<")


class Untraceable(Exception):
    """A forward asks for something that no graph can hold.

    Attributes:
        node: the value that it asks, if it is one that was traced.
        way: what to do about it, where that is not what it always is.
    """

    def __init__(self, why: str, node: fx.Node | None = None, way: str = "") -> None:
        super().__init__(why)
        self.node, self.way = node, way


@dataclass(frozen=True)
class Blame:
    """Why a model cannot be traced.

    Attributes:
        place: `file:line`, or the model's type where that is not known.
        path: path of the module whose forward it is in; empty for the model itself.
        why: what happened there, with the value that it depends on.
        way: what to do about it; empty for what there always is to do.
    """

    place: str
    path: str
    why: str
    way: str = ""

    def error(self) -> str:
        """The message for the error, with the ways out."""
        layer = f' in layer "{self.path}"' if self.path else ""
        leaf = f'"{self.path}")' if self.path else '"path.of.module") for a module that holds it'
        if self.way:
            return f"cannot trace {self.place}{layer}: {self.why} {self.way}"
        return (
            f"cannot trace {self.place}{layer}: {self.why} "
            "A graph has no branches or loops over data. Two ways out: write it without (torch.where, a fixed "
            f"number of iterations), or keep the module as a float leaf: recipe.leaf({leaf}."
        )

    def note(self) -> str:
        """What the ledger says of the module, which stays a float leaf."""
        return f"cannot be traced: {self.place}: {self.why}".rstrip(".")


def blame(model: nn.Module, error: Exception) -> Blame:
    """Where in the user's code an error of a trace was raised, and what was traced there."""
    frame = error.__traceback__
    place, local, module = "", {}, None
    while frame is not None:
        code = frame.tb_frame.f_code
        if not _is_library(frame.tb_frame):
            place = f"{short_path(code.co_filename)}:{frame.tb_lineno}"
            local = frame.tb_frame.f_locals
            owner = local.get(code.co_varnames[0]) if code.co_argcount else None
            module = owner if isinstance(owner, nn.Module) else module
        frame = frame.tb_next
    path = next((name for name, m in model.named_modules() if m is module), "") if module is not None else ""
    way = ""
    if isinstance(error, Untraceable):
        depends, way = _made(error.node) if error.node is not None else "", error.way
    else:
        values = [f"{name} (%{v.node.name})" for name, v in local.items() if isinstance(v, fx.Proxy)]
        depends = f" Values traced there: {', '.join(values)}." if values else ""
    reason = str(error).strip().partition(". ")[0].rstrip(".")
    for words, why, instead in _KNOWN:
        if words in str(error):
            name = str(error).partition("'")[2].partition("'")[0]
            reason, way = why.format(name=name), instead.format(name=name)
    return Blame(place or type(model).__name__, path, f"{reason or type(error).__name__}.{depends}", way)


_KNOWN = (
    (
        "for 'torch._C.TensorBase' objects doesn't apply",
        "a method of torch.Tensor is called as a function, torch.Tensor.{name}(x), which takes no traced value",
        "Write it as a method, x.{name}(...), or as torch.{name}(x, ...).",
    ),
    (
        "but instead found type 'TracedValue'",
        "a TorchScript function is called, which takes no traced value",
        "Call the Python function that it was scripted from, or keep the module as a float leaf: "
        'recipe.leaf("path.of.module").',
    ),
    (
        "unwrap_if_dead()",
        "an autograd.Function is called, as torch.utils.checkpoint with use_reentrant=True does, which tracing cannot "
        "see into",
        "Pass use_reentrant=False, or call the function directly in eval mode; or keep the module as a "
        'float leaf: recipe.leaf("path.of.module").',
    ),
)
"""Errors of Python and torch for traced values: part of the message, the cause, and what to do."""


def _made(node: fx.Node) -> str:
    """The value that a branch or loop depends on."""
    inputs = ", ".join(f"%{n.name}" for n in node.all_input_nodes)
    source = f", {info(node).source}" if info(node).source else ""
    made = f" = {called_name(node)}({inputs}){source}" if node.op != "placeholder" else ", an input of the model"
    return f" It depends on the value %{node.name}{made}."


def user_frame(within: CodeType) -> Any:
    """The innermost frame outside torch and fxq among those that `within` has called; None where it called no other.

    A plain `Sequential` has no line of its own, and that of whoever traces it is not the model's.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and _is_library(frame):
        frame = frame.f_back if frame.f_code is not within else None
    return frame


def user_line(within: CodeType) -> str:
    """`file:line` of that frame; empty where there is none."""
    frame = user_frame(within)
    return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""


def user_text(within: CodeType) -> str:
    """The line of code that `user_line` names; empty where there is no file."""
    frame = user_frame(within)
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() if frame is not None else ""
