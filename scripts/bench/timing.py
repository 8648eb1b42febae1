"""Timing of calls for benchmarks: in turns, in one process, so that a busy machine slows all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, fx, nn

from fxq.common.timed_calls import rounds, threads_set_to, times_in_turns

WARM_UP = 3
MIN_ROUNDS = 5
__all__ = ["float_against_int8", "interleaved", "no_gc", "threads_set_to"]


@contextmanager
def no_gc() -> Iterator[None]:
    """Collect garbage now and not inside: a collection costs time in proportion to all that lives in the process."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    seconds: float = 3.0,
    statistic: Callable[[list[float]], float] = statistics.median,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median time of each call in seconds. Every round runs each call once, in an order drawn anew.

    In a fixed or turning order a call always follows the same other one, and finds the caches as that one leaves them:
    a small model after the float one is slower than after a model that shares its code.

    Args:
        calls: what to time, by name.
        seconds: how long to go on, warm-up left out; at least `MIN_ROUNDS` rounds.
        statistic: what is given of a call's times instead of the median: `min` where other programs run.
        clock: what is read before and after a call: `time.thread_time` leaves out what other programs take of a call
            that runs on this thread alone.
    """
    with torch.no_grad():
        for _ in range(WARM_UP):
            for call in calls.values():
                call()
        with no_gc():
            times = times_in_turns(calls, rounds(MIN_ROUNDS, seconds), clock)
    return {name: statistic(times[name]) for name in calls}


def float_against_int8(
    model: nn.Module, quantized: fx.GraphModule, inputs: Tensor, seconds: float = 3.0
) -> tuple[float, float]:
    """Median seconds of the float model and of the quantized one, on one thread, in turns.

    The float model is taken at its best in eager mode: its weights, and the inputs of both, are channels-last. The
    model's weights are put into that memory format in place.
    """
    if inputs.dim() == 4:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = inputs.to(memory_format=torch.channels_last)
    with threads_set_to(1):
        medians = interleaved({"float": lambda: model(inputs), "int8": lambda: quantized(inputs)}, seconds)
    return medians["float"], medians["int8"]
