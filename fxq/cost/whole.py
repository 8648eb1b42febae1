"""Timing of whole graphs, for backends that fuse ops so that prices of single ops do not add up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from fxq.backends.lower_graph import Change, lowered_copy
from fxq.common.isolation import copied
from fxq.common.timed_calls import interleaved
from fxq.pipeline.context import Context

log = logging.getLogger("fxq")
MIN_SPEEDUP = 1.15
"""Speedup required of a later change over the best earlier one."""


def quickest(gm: fx.GraphModule, context: Context, changes: Sequence[Change]) -> int:
    """Return the index of the change with which a qdq graph runs fastest, lowered, on the example.

    Compares minimum times, since other programs only add to them. A later change must be faster by `MIN_SPEEDUP` than
    the best one before it, so that noise does not decide. Changes that fail to run are skipped; if all fail, the index
    is 0.

    Args:
        gm: module of the qdq graph.
        context: holds the example and the backend.
        changes: the changes to compare.
    """
    best: int | None = None
    times = _times(gm, context, changes)
    for i, seconds in times.items():
        if best is None or MIN_SPEEDUP * seconds < times[best]:
            best = i
    return best or 0


def time_ratio(gm: fx.GraphModule, context: Context, change: Change) -> float:
    """Return the time of a qdq graph with a change relative to the unchanged one, both lowered. See `quickest`.

    Raises:
        KeyError: one of them fails to run.
    """
    times = _times(gm, context, [lambda rewriter, copies: None, change])
    return times[1] / times[0]


def _times(gm: fx.GraphModule, context: Context, changes: Sequence[Change]) -> dict[int, float]:
    """Least seconds of a call on the example with each of the changes, by index, for those that run."""
    calls: dict[str, Callable[[], object]] = {}
    example = copied(context.example)  # a model may change its inputs in place
    args, kwargs = example.args, example.kwargs
    with torch.no_grad():
        for i, change in enumerate(changes):
            try:
                lowered = lowered_copy(gm, gm.graph, replace(context, units={}, regions={}), change)
                lowered(*args, **kwargs)
            except Exception as error:  # engines may raise anything; verify-lowering reports the error
                log.debug("a choice of ops cannot be timed: %s: %s", type(error).__name__, error)
                continue
            calls[str(i)] = lambda lowered=lowered: lowered(*args, **kwargs)  # type: ignore[misc]
        return {int(i): seconds for i, seconds in interleaved(calls, lambda: None, shortest=True).items()}
