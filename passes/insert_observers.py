"""insert-observers: put observers on the edges that will be integers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxq.graph.info import Edge, info
from fxq.graph.query import states_of
from fxq.graph.unit import wanted_forms
from fxq.quant.observers import observer_for
from fxq.quant.spec import TensorSpec
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter

FOLDER = "fxq_observers"


@dataclass(frozen=True)
class InsertObservers(Pass):
    """Insert an observer after every value and weight that will be integers, unless it is only moved as a whole.

    Before: conv2d(x, w, b)    After: conv2d(histogram(x), minmax(w), b)
    Also: observes the first and the returned states of recurrent layers with a calibrated state.
    Keeps: the output, exactly: an observer returns its input. Observers of weights are paused during calibration, which
    does not change weights; choose-grids runs them once.
    """

    name: ClassVar[str] = "insert-observers"
    needs: ClassVar[Stage] = Stage.FUSED
    gives: ClassVar[Stage] = Stage.OBSERVED

    def run(self, rewriter: Rewriter) -> None:
        """Insert one observer per observed edge. Several observers of an activation form a chain."""
        nodes = rewriter.nodes()
        wanted = {node: wanted_forms(rewriter.gm, node) for node in nodes}
        states: dict[fx.Node, dict[TensorSpec, None]] = {}
        for node in nodes:
            plan = info(node).plan
            if plan is not None and plan.state is not None and plan.state.range == "calibrated":
                for state in states_of(node):
                    states.setdefault(state, {})[plan.state] = None
        for value in nodes:
            last_observer, readers = value, list(value.users)
            for spec in states.get(value, {}) if value.op != "get_attr" else ():
                last_observer = _observe(rewriter, value, last_observer, Edge(spec, 0, True), readers)
            for edge in info(value).edges:
                if edge.observed:
                    own_readers = {reader for reader in readers if wanted[reader].get(value) == edge.form}
                    observer = _observe(rewriter, value, last_observer, edge, own_readers)
                    last_observer = observer if value.op != "get_attr" else value


def _observe(rewriter: Rewriter, value: fx.Node, seen: fx.Node, edge: Edge, readers: Collection[fx.Node]) -> fx.Node:
    """Insert an observer of `value` after `seen`, and return its node.

    Args:
        rewriter: rewriter of the graph.
        value: the value or weight to observe.
        seen: the value itself, or its previous observer.
        edge: the edge to observe.
        readers: nodes that want this edge.
    """
    about, is_weight = info(value), value.op == "get_attr"
    place = f'layer "{about.path}"' if about.path else "the input" if value.op == "placeholder" else "the model"
    name = f"%{value.name} ({place}{', ' + about.source if about.source else ''})"
    module = observer_for(edge.spec, edge.axis, f"the weight {value.target}" if is_weight else name, edge.constants)
    module.paused = is_weight
    target = rewriter.module(module, value.name, FOLDER)
    observer = rewriter.node("call_module", target, (seen,), after=seen, name=f"{value.name}_observer")
    rewriter.describe(observer, shape=about.shape, dtype=about.dtype, path=about.path, source=about.source)
    takes_all = seen is value and not is_weight
    rewriter.reroute(seen, observer, only=lambda user: user is not observer and (takes_all or user in readers))
    return observer
