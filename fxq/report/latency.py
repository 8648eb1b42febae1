"""How long a quantized model takes beside the float one, and which of its nodes the time goes to."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxq.backends.region_kernel import layers_run
from fxq.common.data import Batch, as_batch, check_batch, device_of
from fxq.common.isolation import copied, seeded, untouched, without_autocast
from fxq.common.metrics import tensors
from fxq.common.train_mode import first_in_train_mode
from fxq.cost.cache import clock
from fxq.errors import InputError, words_of
from fxq.graph.run import Runner
from fxq.graph.view import view
from fxq.ledger.float_record import RecordedInput
from fxq.ledger.quantized import Quantized
from fxq.report.profile import Profile, Timed

SECONDS, MOST = 0.7, 30
"""How long calls are repeated, and how often at most; one that takes longer is timed once, after one to warm up."""


@dataclass(frozen=True)
class Latency:
    """Medians of repeated calls on one batch.

    Attributes:
        float_us, int8_us: microseconds of a call of either model, in turns; None where it was not timed.
        why: why not; empty where nothing is missing.
        profile: what of the quantized model takes how long, see `profile_of`.
    """

    float_us: float | None = None
    int8_us: float | None = None
    why: str = ""
    profile: Profile = field(default_factory=lambda: Profile(()))


def batch_for(model: Quantized, example_inputs: Any) -> Batch:
    """What to time a model on: `example_inputs`, or where it is None, what `recorded_inputs` makes.

    Raises:
        InputError: they are not what the model takes, or none can be made up.
    """
    if example_inputs is None:
        return recorded_inputs(model.record.inputs, device_of(model))
    batch = as_batch(example_inputs, model, "example_inputs")
    check_batch(batch, model, "example_inputs")
    return batch


def recorded_inputs(inputs: Sequence[RecordedInput], device: str) -> Batch:
    """Inputs of the shapes and dtypes of a model's example: normal noise, and zeros for integers and flags.

    Args:
        inputs: those of the example, as `Record.inputs` has them.
        device: where to make them.

    Raises:
        InputError: one of them was no plain tensor.
    """
    made: dict[str | int, Tensor] = {}
    for i, one in enumerate(inputs):
        if one.shape is None or one.dtype is None:
            raise InputError(
                f"input {one.name or i!r} is no plain tensor, so none can be made up; give example_inputs=."
            )
        make = torch.randn if one.dtype.is_floating_point else torch.zeros
        made[one.name or i] = make(one.shape, dtype=one.dtype, device=device)
    named = {name: value for name, value in made.items() if isinstance(name, str)}
    return Batch(tuple(made.values())[: len(made) - len(named)], named)


def profile_of(model: fx.GraphModule, batch: Batch) -> Profile:
    """Microseconds of each node of a model, run one by one, and where it is an engine's region, of each layer in it.

    The medians of a few runs; of a layer, what the engine says, the least of a few. Kernels look at their inputs each
    time, which those that the model's calls are bound to do not: a few microseconds of each.

    Args:
        model: the quantized model.
        batch: what to run it on.

    Raises:
        InputError: it does not run on the batch.
    """
    with torch.no_grad(), without_autocast(), seeded(), untouched(model):
        _call(model, batch, "the model")
        found = {node.name: layers for node, layers in layers_run(model, batch).items()}
        times = _nodes(model, batch, _waiting(model))
    rows: list[Timed] = []
    for node in (node for node in view(model) if node.name in times):
        rows += [Timed(node.name, " + ".join(layer.nodes), *layer[1:]) for layer in found.get(node.name, ())] or [
            Timed(node.name, "", node.label, node.dtype, node.kind, times[node.name])
        ]
    count = torch.get_num_threads()
    return Profile(tuple(rows), f"{str(batch)[1:-1]}, {count} {'thread' if count == 1 else 'threads'}")


def time_models(model: fx.GraphModule, real: nn.Module | None, batch: Batch) -> Latency:
    """Time the quantized model, the float one where there is one, and every node of the first.

    Args:
        model: the quantized model.
        real: the float model that it came from; None: it is gone.
        batch: what to run them on.

    Raises:
        InputError: the quantized model does not run on the batch.
    """
    why = _not_timed(real, batch)
    with torch.no_grad(), without_autocast(), seeded(), ExitStack() as kept:
        calls: dict[str, Callable[[], object]] = {}
        for name, module in {"int8": model, **({"float": real} if real is not None and not why else {})}.items():
            kept.enter_context(untouched(module))
            try:
                calls[name] = _call(module, batch, "the float model" if name == "float" else "the model")
            except InputError as error:
                if name == "int8":
                    raise
                why = str(error)
        medians = interleaved(calls, _waiting(model))
    return Latency(medians.get("float"), medians["int8"], why, profile_of(model, batch))


def _call(model: nn.Module, batch: Batch, which: str) -> Callable[[], object]:
    """A call of a model, which has been made once. Raises `InputError` where it fails."""
    given = copied(batch)  # a model may change its inputs in place
    call = partial(model, *given.args, **given.kwargs)
    try:
        call()
    except Exception as error:  # whatever a module that was kept as it is raises
        raise InputError(f"{which} does not run on {batch}: {type(error).__name__}: {words_of(error)}") from error
    return call


def _waiting(model: fx.GraphModule) -> Callable[[], None]:
    """Waits until all is done; a CPU has done by then what it was given."""
    return torch.accelerator.synchronize if device_of(model) != "cpu" else lambda: None


def interleaved(
    calls: Mapping[str, Callable[[], object]], wait: Callable[[], None], least: bool = False
) -> dict[str, float]:
    """Median microseconds of each call. They take turns, so that a busy machine slows all of them alike.

    In an order drawn anew: a call that always follows the same other one finds the caches as that one leaves them.

    Args:
        calls: by name.
        wait: what waits for the end of a call.
        least: take the shortest time of each instead, to which other programs have added nothing; on one thread, of
            the time that the CPU gave.
    """
    now = clock(every_thread=True) if least else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in calls}
    names, order = list(calls), random.Random(0)
    for _ in _rounds():
        order.shuffle(names)
        for name in names:
            with _timed(times[name], wait, now):
                calls[name]()
    return {name: 1e6 * min(found) if least else _median(found) for name, found in times.items()}


def _nodes(model: fx.GraphModule, batch: Batch, wait: Callable[[], None]) -> dict[str, float]:
    """Median microseconds of each node that computes something."""
    times: dict[str, list[float]] = {n.name: [] for n in model.graph.nodes if n.op.startswith("call")}
    for _ in _rounds():
        runner = Runner(model, copied(batch))
        for node in model.graph.nodes:
            with _timed(times.get(node.name, []), wait):
                runner.step(node)
    return {name: _median(found) for name, found in times.items()}


def _rounds() -> Iterator[int]:
    """Goes on for `SECONDS` or `MOST` rounds; one at least."""
    end = time.perf_counter() + SECONDS
    for i in range(MOST):
        yield i
        if time.perf_counter() >= end:
            return


@contextmanager
def _timed(
    times: list[float], wait: Callable[[], None], now: Callable[[], float] = time.perf_counter
) -> Iterator[None]:
    start = now()
    yield
    wait()
    times.append(now() - start)


def _median(times: Sequence[float]) -> float:
    """In microseconds; the first call, which packs weights, counts only where it is the only one."""
    return 1e6 * statistics.median(times[1:] or times)


def _not_timed(real: nn.Module | None, batch: Batch) -> str:
    """Why the float model cannot be timed on a batch; empty when it can."""
    if real is None:
        return "the float model is gone: the quantized model holds no more than a weak reference to it"
    if first_in_train_mode(real) is not None:
        return "the float model is in train mode"
    where = {t.device.type for t in tensors((batch.args, batch.kwargs))}
    if where and device_of(real) not in where:
        return f"the float model is on {device_of(real)} and the inputs are on {', '.join(sorted(where))}"
    return ""
