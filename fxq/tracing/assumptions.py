"""What a forward asks of traced values as plain ones (a branch, a number, a rank), and the checks that it stays so."""

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
from fxq.tracing.proxies import Origin, TracedValue

Create = Callable[..., fx.Node]


class Assumptions:
    """The plain values that decided how a graph looks; the graph checks them when it is run.

    Attributes:
        create: makes a node of the graph.
        within: the code that the trace runs in: lines of the user's code are looked for inside.
        owner: what a message names where no line of the user's code asked.
        forced: by line, how its branches on sizes are to go, whatever the example says.
        free: lines whose branches on sizes make no difference to the graph: it does not check them.
        squeezes: whether a `squeeze` was traced, so that ranks depend on sizes.
        refusals: what no graph can hold, as far as a forward asked for it: it may catch the error.
        answers: the values that were branched on, each with the first line that did, and the way that it went.
        branches: the lines that branch on sizes, each with how often it did at most in one run of its function.
    """

    def __init__(
        self, create: Create, within: CodeType, owner: str, forced: Mapping[str, bool], free: Collection[str]
    ) -> None:
        self.create, self.within, self.owner = create, within, owner
        self.forced, self.free = forced, free
        self.squeezes = False
        self.branches: dict[str, int] = {}
        self.answers: dict[fx.Node, tuple[str, bool]] = {}
        self._runs: Counter[tuple[str, int]] = Counter()
        self._frames: list[FrameType | None] = []  # kept, so that no other gets the same id
        self.refusals: list[Untraceable] = []
        self._dtypes = self._ranks = self._devices = False
        self._guarded: set[tuple[fx.Node, str]] = set()
        self._in_call: list[tuple[FrameType, int, fx.Node, tuple[fx.Node, str]]] = []
        self._checked: dict[str, tuple[fx.Node, Any]] = {}
        self._given: dict[str, tuple[fx.Node, Any]] = {}

    def refuse(self, why: str, node: fx.Node) -> Untraceable:
        """The error for what no graph can hold, remembered."""
        self.refusals.append(Untraceable(why, node))
        return self.refusals[-1]

    def fix(self, value: TracedValue, how: str, anyway: bool = False, frame: FrameType | None = None) -> Any:
        """What the example has in the place of a traced value, as a plain one. The graph checks that it stays so.

        Args:
            value: the traced value.
            how: what it is made, a key of `HOW`.
            anyway: whether it may depend on data.
            frame: the one that asked, where a function of torch may have, only to see what it is given.

        Raises:
            Untraceable: it depends on the data in a tensor.
        """
        if value._origin is Origin.DATA and not anyway and how not in ("len", "keys"):
            raise self.refuse(f"{_ASKED.get(how, f'{how}() of')} a value that depends on the data", value.node)
        result, key = HOW[how](value._value), (value.node, how)
        if value._origin is Origin.CONSTANT:
            return result
        place = user_line(self.within) or self.owner
        if how == "bool":
            self._note_branch(place)
            place, result = self.answers.setdefault(value.node, (place, self.forced.get(place, result)))
        if key not in self._guarded and not (how == "bool" and place in self.free):
            self._guarded.add(key)
            line = user_text(self.within) or "its forward"
            options = {"how": how, "place": place, "text": line}
            check = self.create("call_function", check_same, (value.node, result), options)
            if frame is not None:
                self._in_call.append((frame, frame.f_lasti, check, key))
        return result

    def _note_branch(self, place: str) -> None:
        """Count a branch on sizes. The same line may be in many functions that run, as that of a block of layers."""
        frame = user_frame(self.within)
        self._frames.append(frame)
        self._runs[place, id(frame)] += 1
        self.branches[place] = max(self.branches.get(place, 0), self._runs[place, id(frame)])
        if place in self.forced and self.branches[place] > 1:
            raise TraceError(f"{place}: a loop, which would not end")

    def forget(self, frame: FrameType | None = None) -> None:
        """Take back what was asked from the call that a frame is at: torch only looked which arguments it has."""
        for asked, at, check, key in self._in_call:
            if asked is frame and at == frame.f_lasti:
                check.graph.erase_node(check)
                self._guarded.remove(key)
        self._in_call.clear()

    def reads_dtype(self, value: TracedValue) -> None:
        """Have the graph check the dtypes of its inputs, as what it does depends on them."""
        self._dtypes = self._dtypes or value._origin is not Origin.CONSTANT

    def reads_device(self, value: TracedValue) -> None:
        """The same of the types of their devices."""
        self._devices = self._devices or value._origin is not Origin.CONSTANT

    def rank(self, value: TracedValue) -> Any:
        """The number of axes of a tensor, or of sizes, as it is on the example: a plain number, no node that reads it.

        It follows from those of the inputs, which the graph then checks; where a `squeeze` drops what has size 1, from
        sizes too, and it stays a traced value.
        """
        known = value._value
        if self.squeezes:
            return (
                self.fix(value, "len")
                if isinstance(known, torch.Size)
                else value.tracer.create_proxy("call_method", "dim", (value,), {})
            )
        self.reads_rank(value)
        return known.dim() if isinstance(known, Tensor) else len(known)

    def reads_rank(self, value: TracedValue) -> None:
        """Have the graph check how many axes its inputs have, as what it does depends on them."""
        self._ranks = self._ranks or value._origin is not Origin.CONSTANT

    def give(self, entry: Argument, node: fx.Node) -> None:
        """Note an input of the graph, and what it must be where the example decides that."""
        name = entry.name.lstrip("*")
        self._given[name] = node, entry.value
        if entry.checked:
            self._checked[name] = node, _any_length(node, entry.value if entry.fixed else structure(entry.value))

    def add_checks(self, graph: fx.Graph) -> None:
        """Have the graph check first that it is called as the example calls it, where that decided something."""
        self.forget()  # the frames hold whatever the forward had at hand
        self._frames.clear()
        checked = dict(self._checked)
        for name, (node, value) in self._given.items() if self._dtypes or self._ranks or self._devices else ():
            if next(tensors(value), None) is not None:
                checked[name] = node, _any_length(node, structure(value, self._dtypes, self._ranks, self._devices))
        if checked:
            first = next(n for n in graph.nodes if n.op != "placeholder")
            nodes = {name: node for name, (node, _) in checked.items()}
            expected = {name: wanted for name, (_, wanted) in checked.items()}
            with graph.inserting_before(first):
                self.create("call_function", check_fixed, (nodes, expected), {})


def _any_length(node: fx.Node, wanted: Any) -> Any:
    """The structure of an input; that of `*args` is a tuple or a list alike."""
    return ["any", *wanted[1:]] if str(node.target).startswith("*") else wanted


_ASKED = {"bool": "a branch on", "len": "the length of"}
