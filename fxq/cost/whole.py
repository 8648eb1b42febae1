"""Whole graphs are timed where a backend joins ops, so that prices of single ops do not add up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from fxq.backends.lower_graph import lower_graph
from fxq.common.isolation import copied
from fxq.cost.cache import clock
from fxq.pipeline.context import Context
from fxq.rewriting.rewriter import Rewriter

log = logging.getLogger("fxq")
SECONDS, MOST = 1.0, 20
"""How long whole graphs are timed in turns, and how often at most."""

Change = Callable[[Rewriter, Mapping[fx.Node, fx.Node]], None]
"""Edits a copy of a graph, given what each node of the graph is there."""


def quickest(gm: fx.GraphModule, context: Context, changes: Sequence[Change]) -> int:
    """Which of several changes of a qdq graph makes it the fastest, lowered and run on the example: its number.

    The shortest time of each counts, since other programs only add to it. One that does not run is never the fastest;
    where none runs, it is the first.
    """
    calls: dict[int, Callable[[], object]] = {}
    given = copied(context.example)  # a model may change its inputs in place
    args, kwargs = given.args, given.kwargs
    with torch.no_grad():
        for i, change in enumerate(changes):
            try:
                made = _lowered(gm, context, change)
                made(*args, **kwargs)
            except Exception as error:  # whatever an engine raises; verify-lowering says what is wrong with it
                log.debug("a choice of ops cannot be timed: %s: %s", type(error).__name__, error)
                continue
            calls[i] = lambda made=made: made(*args, **kwargs)  # type: ignore[misc]
        times, now = dict.fromkeys(calls, float("inf")), clock(every_thread=True)
        end = time.perf_counter() + SECONDS
        for _ in range(MOST):
            for i, call in calls.items():
                start = now()
                call()
                times[i] = min(times[i], now() - start)
            if time.perf_counter() > end:
                break
    return min(times, key=times.__getitem__, default=0)


def _lowered(gm: fx.GraphModule, context: Context, change: Change) -> fx.GraphModule:
    copied = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = copied.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    rewriter = Rewriter(fx.GraphModule(gm, copied), replace(context, units={}, regions={}), "trial")
    change(rewriter, copies)
    lower_graph(rewriter)
    rewriter.erase_unused()
    rewriter.gm.recompile()
    return rewriter.gm
