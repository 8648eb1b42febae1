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
        times = interleaved(calls, lambda: None, shortest=True)
    best: str | None = None
    for name, seconds in times.items():
        if best is None or MIN_SPEEDUP * seconds < times[best]:
            best = name
    return int(best or 0)
