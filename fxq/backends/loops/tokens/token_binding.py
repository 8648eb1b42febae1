"""Binding of graphs with states that grow: to programs whose results were compared with those of the graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import fx

from fxq.backends.loops.tokens.program_check import MIN_AGREEMENT_DB, BestAgreement, ProgramCheck
from fxq.backends.loops.tokens.token_binder import RecordedKind, TokenBinder, value_kind
from fxq.common.data import Batch
from fxq.common.metrics import tensors
from fxq.errors import warn
from fxq.graph.run import Runner
from fxq.runtime.binding import Binder, BoundForward
from fxq.runtime.generated_code import function_of
from fxq.runtime.growing import GrowingKinds, OtherInputsError

MAX_CALLS = 4
"""Number of calls that are compared before a program that rounds inputs of layers is taken for wrong."""


def growing_kinds() -> GrowingKinds:
    """Return an empty cache of bindings for one graph with states that grow."""
    return GrowingKinds(_record, _ComparedBindings())


def _record(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    recorder = _Recorder(gm, Batch(args, dict(kwargs)))
    return recorder.run(), recorder.kinds


class _ComparedBindings:
    """Binding of a graph to a function whose programs agree with the graph.

    First the programs end at attentions, and each is run on the graph's own values. Then the attentions become part of
    programs. If these disagree, the function with the first ones is used.
    """

    def __init__(self) -> None:
        self._agreements: dict[tuple[frozenset[str], bool], BestAgreement] = defaultdict(BestAgreement)

    def __call__(
        self,
        gm: fx.GraphModule,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        open_inputs: set[str],
        earlier: Mapping[fx.Node, RecordedKind],
    ) -> tuple[Any, BoundForward | None]:
        """Run the graph and return its outputs, and the function; None if another call has to decide about it."""
        batch = Batch(args, dict(kwargs))
        binder = TokenBinder(gm, batch, frozenset(open_inputs), earlier)
        value, bound = binder.bound()
        chosen = self._chosen(binder, bound, batch, value) if binder.uses_loops else bound
        if chosen is not None:
            self._agreements.clear()
        return value, chosen

    def _chosen(self, binder: TokenBinder, bound: BoundForward, batch: Batch, value: Any) -> BoundForward | None:
        """Function whose programs agree with the graph; None if another call has to decide. See `_compare`."""
        try:
            difference, may_pass = self._compare(binder, bound, batch, value)
        except OtherInputsError:  # gradients, for example
            return Binder(binder.gm, batch, binder.open_inputs).bound()[1]
        if difference:
            if may_pass:
                return None
            _warn(difference)
            return Binder(binder.gm, batch, binder.open_inputs).bound()[1]
        try:
            joined = binder.joined()
            if joined is None:
                return bound
            difference, may_pass = self._compare(binder, joined, batch, value)
        except OtherInputsError:
            return bound
        if difference and not binder.rounds:
            _warn(difference)
        return joined if not difference else None if may_pass else bound

    def _compare(self, binder: TokenBinder, bound: BoundForward, batch: Batch, value: Any) -> tuple[str, bool]:
        """Run a bound function and compare its outputs, and the results of its programs, with those of the graph.

        Args:
            binder: binder that has just written the function.
            bound: the function.
            batch: inputs of the call that the graph was run with.
            value: outputs of the graph.

        Returns:
            Text about a result that has not agreed in any call, empty if there is none; and whether it still may.
        """
        checked = function_of(bound.source, "forward", {**binder.constants, **binder.checks})
        results, outputs = checked(*batch.args, **batch.kwargs), list(tensors(value))
        whole = ProgramCheck(lambda: list(tensors(results)), ["an output"] * len(outputs), outputs, MIN_AGREEMENT_DB)
        whole()
        agreement = self._agreements[binder.open_inputs, binder.joins]
        difference = agreement.difference([*binder.checks.values(), whole])
        return difference, binder.rounds and agreement.calls < MAX_CALLS


def _warn(difference: str) -> None:
    warn(
        f"the compiled programs for single tokens differ from the graph of this model: {difference}. They are "
        "not used, so tokens take longer. Please report the model."
    )


class _Recorder(Runner):
    """Runner that records the kinds of the values of a graph.

    Attributes:
        kinds: kind of the value of each node.
    """

    def __init__(self, gm: fx.GraphModule, batch: Batch) -> None:
        super().__init__(gm, batch)
        self.kinds = {node: value_kind(value) for node, value in self.values.items()}

    def compute(self, node: fx.Node) -> Any:
        value = super().compute(node)
        self.kinds[node] = value_kind(value)
        return value
