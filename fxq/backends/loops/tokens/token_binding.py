"""Binding of graphs with states that grow: to programs whose results were compared with those of the graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from fxq.backends.loops.tokens.program_check import MIN_AGREEMENT_DB, ProgramCheck
from fxq.backends.loops.tokens.token_binder import RecordedKind, TokenBinder, value_kind
from fxq.common.data import Batch
from fxq.common.metrics import tensors
from fxq.errors import warn
from fxq.graph.run import Runner
from fxq.runtime.binding import Binder, BoundForward
from fxq.runtime.generated_code import function_of
from fxq.runtime.growing import GrowingKinds, OtherInputsError


def growing_kinds() -> GrowingKinds:
    """Return an empty cache of bindings for one graph with states that grow."""
    return GrowingKinds(_record, _bind)


def _record(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    recorder = _Recorder(gm, Batch(args, dict(kwargs)))
    return recorder.run(), recorder.kinds


def _bind(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    open_inputs: set[str],
    earlier: Mapping[fx.Node, RecordedKind],
) -> tuple[Any, BoundForward]:
    batch, names = Batch(args, dict(kwargs)), frozenset(open_inputs)
    binder = TokenBinder(gm, batch, names, earlier)
    value, bound = binder.bound()
    if not binder.uses_loops:
        return value, bound
    try:
        difference = _difference(binder, bound, batch, value)
    except OtherInputsError:  # gradients, for example
        return Binder(gm, batch, names).bound()
    if difference:
        _warn(difference)
        return Binder(gm, batch, names).bound()
    try:
        joined = binder.joined()
        difference = "" if joined is None else _difference(binder, joined, batch, value)
    except OtherInputsError:
        return value, bound
    if joined is None or difference:
        if not binder.rounds and difference:
            _warn(difference)
        return value, bound
    return value, joined


def _warn(difference: str) -> None:
    warn(
        f"the compiled programs for single tokens differ from the graph of this model: {difference}. They are "
        "not used, so tokens take longer. Please report the model."
    )


def _difference(binder: TokenBinder, bound: BoundForward, batch: Batch, value: Any) -> str:
    """Run a bound function and compare its outputs, and the results of its programs, with those of the graph.

    Args:
        binder: binder that has just written the function.
        bound: the function.
        batch: inputs of the call that the graph was run with.
        value: outputs of the graph.

    Returns:
        Text about a difference; empty if there is none.
    """
    checked = function_of(bound.source, "forward", {**binder.constants, **binder.checks})
    results, outputs = checked(*batch.args, **batch.kwargs), list(tensors(value))
    whole = ProgramCheck(lambda: list(tensors(results)), ["an output"] * len(outputs), outputs, MIN_AGREEMENT_DB)
    whole()
    return next((check.difference for check in (*binder.checks.values(), whole) if check.difference), "")


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
