"""Place and reason of a failed trace: the line of the user's code, the value it depends on, the remedies."""

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
    """Error for an operation in a forward that a graph cannot hold.

    Attributes:
        node: the traced value that the operation depends on, if any.
        remedy: what the user can do; empty for the usual remedies.
    """

    def __init__(self, why: str, node: fx.Node | None = None, remedy: str = "") -> None:
        super().__init__(why)
        self.node, self.remedy = node, remedy


class StatefulForwardError(Untraceable):
    """Error for a forward that keeps a state between calls, which a copy of the model has for itself."""


@dataclass(frozen=True)
class TraceFailure:
    """Place and reason of a failed trace.

    Attributes:
        place: `file:line`, or the model's type if the line is not known.
        path: path of the module whose forward contains the line; empty for the model itself.
        why: what happened there, with the value that it depends on.
        remedy: what the user can do; empty for the usual remedies.
    """

    place: str
    path: str
    why: str
    remedy: str = ""

    def error(self) -> str:
        """Message of the error, with the remedies."""
        layer = f' in layer "{self.path}"' if self.path else ""
        leaf = f'"{self.path}")' if self.path else '"path.of.module") for a submodule that contains this code'
        if self.remedy:
            return f"cannot trace {self.place}{layer}: {self.why} {self.remedy}"
        return (
            f"cannot trace {self.place}{layer}: {self.why} "
            "A graph cannot branch or loop on data. Remedies: rewrite the code without it (torch.where, a fixed "
            f"number of iterations), or keep the module as a float leaf: recipe.leaf({leaf}."
        )

    def note(self) -> str:
        """Reason in the ledger for a module that stays a float leaf."""
        return f"cannot be traced: {self.place}: {self.why}".rstrip(".")


def locate_failure(model: nn.Module, error: Exception) -> TraceFailure:
    """Find the line of the user's code that raised an error of a trace, and the values that were traced there."""
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
    remedy = ""
    if isinstance(error, Untraceable):
        depends, remedy = _described_value(error.node) if error.node is not None else "", error.remedy
    else:
        values = [f"{name} (%{v.node.name})" for name, v in local.items() if isinstance(v, fx.Proxy)]
        depends = f" Values traced there: {', '.join(values)}." if values else ""
    reason = str(error).strip().partition(". ")[0].rstrip(".")
    for words, why, known_remedy in _KNOWN_ERRORS:
        if words in str(error):
            name = str(error).partition("'")[2].partition("'")[0]
            reason, remedy = why.format(name=name), known_remedy.format(name=name)
    return TraceFailure(place or type(model).__name__, path, f"{reason or type(error).__name__}.{depends}", remedy)


_KNOWN_ERRORS = (
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
        "an autograd.Function is called (torch.utils.checkpoint with use_reentrant=True calls one), and tracing cannot "
        "look inside",
        "Pass use_reentrant=False, or call the function directly in eval mode; or keep the module as a "
        'float leaf: recipe.leaf("path.of.module").',
    ),
)
"""Errors of Python and torch for traced values: part of the message, the cause, and the remedy."""


def _described_value(node: fx.Node) -> str:
    """Sentence that names the value that a branch or loop depends on, and the call that computes it."""
    inputs = ", ".join(f"%{n.name}" for n in node.all_input_nodes)
    source = f", {info(node).source}" if info(node).source else ""
    computed = f" = {called_name(node)}({inputs}){source}" if node.op != "placeholder" else ", an input of the model"
    return f" It depends on the value %{node.name}{computed}."


def user_frame(trace_code: CodeType) -> Any:
    """Innermost frame outside torch and fxq among those that `trace_code` called; None if there is none.

    A plain `Sequential` has no line of its own. Frames outside the trace belong to the caller, not to the model.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and _is_library(frame):
        frame = frame.f_back if frame.f_code is not trace_code else None
    return frame


def user_line(trace_code: CodeType) -> str:
    """`file:line` of the frame that `user_frame` finds; empty if there is none."""
    frame = user_frame(trace_code)
    return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""


def user_text(trace_code: CodeType) -> str:
    """Text of the line that `user_line` names; empty if there is no file."""
    frame = user_frame(trace_code)
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() if frame is not None else ""
