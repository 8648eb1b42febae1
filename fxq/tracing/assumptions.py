"""Plain values that a forward reads from traced ones (a branch, a number, a rank), and the checks that guard them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx

from fxq.common.metrics import tensors
from fxq.errors import TraceError
from fxq.graph.guards import HOW, check_fixed, check_same, structure
from fxq.tracing.failure import Untraceable, user_frame, user_line, user_text
from fxq.tracing.forward_arguments import Argument
from fxq.tracing.proxies import Dependence, TracedValue

Create = Callable[..., fx.Node]


class Assumptions:
    """Plain values that the structure of a graph depends on. The graph checks them when it runs.

    Attributes:
        create: function that makes a node of the graph.
        trace_code: code object that runs the trace. Only frames that it called are searched for the user's line.
        owner: name in messages, if no line of the user's code is found.
        forced: outcome of branches on sizes by line, used in place of the example's.
        free: lines whose branches on sizes do not change the graph, so that it does not check them.
        squeezes: whether a `squeeze` was traced, so that ranks depend on sizes.
        refusals: errors raised for values that a graph cannot hold. The forward may have caught them.
        answers: for each value that was branched on, the first line that did, and the outcome.
        branches: for each line that branches on sizes, the largest number of branches in one run of its function.
    """

    def __init__(
        self, create: Create, trace_code: CodeType, owner: str, forced: Mapping[str, bool], free: Collection[str]
    ) -> None:
        self.create, self.trace_code, self.owner = create, trace_code, owner
        self.forced, self.free = forced, free
        self.squeezes = False
        self.branches: dict[str, int] = {}
        self.answers: dict[fx.Node, tuple[str, bool]] = {}
        self._runs: Counter[tuple[str, int]] = Counter()
        self._frames: list[FrameType | None] = []  # holds references, so that ids stay unique
        self.refusals: list[Untraceable] = []
        self._dtypes = self._ranks = self._devices = False
        self._guarded: set[tuple[fx.Node, str]] = set()
        self._in_call: list[tuple[FrameType, int, fx.Node, tuple[fx.Node, str]]] = []
        self._checked: dict[str, tuple[fx.Node, Any]] = {}
        self._inputs: dict[str, tuple[fx.Node, Any]] = {}

    def refuse(self, why: str, node: fx.Node) -> Untraceable:
        """Return the error for a value that a graph cannot hold, and record it in `refusals`."""
        self.refusals.append(Untraceable(why, node))
        return self.refusals[-1]

    def plain_value(
        self, value: TracedValue, how: str, allow_data: bool = False, frame: FrameType | None = None
    ) -> Any:
        """Return the plain value that a traced value has on the example. The graph checks that it is the same later.

        Args:
            value: the traced value.
            how: conversion to a plain value, a key of `HOW`.
            allow_data: whether the value may depend on data.
            frame: frame that asks, if that may be torch, which only inspects its arguments (see `forget`).

        Raises:
            Untraceable: the value depends on the data in a tensor.
        """
        if value._dependence is Dependence.DATA and not allow_data and how not in ("len", "keys"):
            raise self.refuse(f"{_DESCRIPTIONS.get(how, f'{how}() of')} a value that depends on the data", value.node)
        result, key = HOW[how](value._value), (value.node, how)
        if value._dependence is Dependence.CONSTANT:
            return result
        place = user_line(self.trace_code) or self.owner
        if how == "bool":
            self._note_branch(place)
            place, result = self.answers.setdefault(value.node, (place, self.forced.get(place, result)))
        if key not in self._guarded and not (how == "bool" and place in self.free):
            self._guarded.add(key)
            line = user_text(self.trace_code) or "its forward"
            options = {"how": how, "place": place, "text": line}
            check = self.create("call_function", check_same, (value.node, result), options)
            if frame is not None:
                self._in_call.append((frame, frame.f_lasti, check, key))
        return result

    def _note_branch(self, place: str) -> None:
        """Count a branch on sizes, for each run of a function: blocks of one class run the same line many times."""
        frame = user_frame(self.trace_code)
        self._frames.append(frame)
        self._runs[place, id(frame)] += 1
        self.branches[place] = max(self.branches.get(place, 0), self._runs[place, id(frame)])
        if place in self.forced and self.branches[place] > 1:
            raise TraceError(f"{place}: a loop that would not end")

    def forget(self, frame: FrameType | None = None) -> None:
        """Drop the checks that the current call in `frame` added: torch only inspected its arguments."""
        for asked, at, check, key in self._in_call:
            if asked is frame and at == frame.f_lasti:
                check.graph.erase_node(check)
                self._guarded.remove(key)
        self._in_call.clear()

    def reads_dtype(self, value: TracedValue) -> None:
        """Have the graph check the dtypes of its inputs, since its structure depends on them."""
        self._dtypes = self._dtypes or value._dependence is not Dependence.CONSTANT

    def reads_device(self, value: TracedValue) -> None:
        """Have the graph check the device types of its inputs, since its structure depends on them."""
        self._devices = self._devices or value._dependence is not Dependence.CONSTANT

    def rank(self, value: TracedValue) -> Any:
        """Number of axes of a tensor, or number of sizes, as a plain int.

        It follows from the ranks of the inputs, which the graph then checks. After a `squeeze` it depends on sizes too:
        then the rank of a tensor is a traced value, and the number of sizes is checked.
        """
        example = value._value
        if self.squeezes:
            return (
                self.plain_value(value, "len")
                if isinstance(example, torch.Size)
                else value.tracer.create_proxy("call_method", "dim", (value,), {})
            )
        self.reads_rank(value)
        return example.dim() if isinstance(example, Tensor) else len(example)

    def reads_rank(self, value: TracedValue) -> None:
        """Have the graph check the ranks of its inputs, since its structure depends on them."""
        self._ranks = self._ranks or value._dependence is not Dependence.CONSTANT

    def add_input(self, entry: Argument, node: fx.Node) -> None:
        """Record an input of the graph, and the value or structure that it must have, if that is checked."""
        name = entry.name.lstrip("*")
        self._inputs[name] = node, entry.value
        if entry.checked:
            self._checked[name] = node, _any_length(node, entry.value if entry.fixed else structure(entry.value))

    def add_checks(self, graph: fx.Graph) -> None:
        """Insert a check of the inputs at the start of the graph, for those that its structure depends on."""
        self.forget()  # frames keep the local variables of the forward alive
        self._frames.clear()
        checked = dict(self._checked)
        for name, (node, value) in self._inputs.items() if self._dtypes or self._ranks or self._devices else ():
            if next(tensors(value), None) is not None:
                checked[name] = node, _any_length(node, structure(value, self._dtypes, self._ranks, self._devices))
        if checked:
            first = next(n for n in graph.nodes if n.op != "placeholder")
            nodes = {name: node for name, (node, _) in checked.items()}
            expected = {name: wanted for name, (_, wanted) in checked.items()}
            with graph.inserting_before(first):
                self.create("call_function", check_fixed, (nodes, expected), {})


def _any_length(node: fx.Node, wanted: Any) -> Any:
    """Expected structure of an input. That of `*args` may be a tuple or a list."""
    return ["any", *wanted[1:]] if str(node.target).startswith("*") else wanted


_DESCRIPTIONS = {"bool": "a branch on", "len": "the length of"}
