"""Latency of a quantized model and its float model, and of the nodes of the quantized model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from fxq.backends.region_kernel import engine_layers
from fxq.common.data import Batch, as_batch, check_batch, device_of
from fxq.common.isolation import copied, seeded, untouched, without_autocast
from fxq.common.metrics import tensors
from fxq.common.timed_calls import interleaved, median, rounds, timed
from fxq.common.train_mode import first_in_train_mode
from fxq.errors import InputError, words_of
from fxq.graph.run import Runner
from fxq.graph.view import view
from fxq.ledger.float_record import RecordedInput
from fxq.ledger.quantized import Quantized
from fxq.report.profile import Profile, TimedLayer


@dataclass(frozen=True)
class Latency:
    """Median latencies of repeated calls on one batch.

    Attributes:
        float_us, int8_us: microseconds of a call of each model, called alternately; None if it was not timed.
        why: reason why a model was not timed; empty if both were.
        profile: times of the nodes of the quantized model, see `profile_of`.
    """

    float_us: float | None = None
    int8_us: float | None = None
    why: str = ""
    profile: Profile = field(default_factory=lambda: Profile(()))


def batch_for(model: Quantized, example_inputs: Any) -> Batch:
    """Return the batch to time a model on: `example_inputs`, or if that is None, the result of `recorded_inputs`.

    Raises:
        InputError: the model does not take these inputs, or none can be generated.
    """
    if example_inputs is None:
        return recorded_inputs(model.record.inputs, device_of(model))
    batch = as_batch(example_inputs, model, "example_inputs")
    check_batch(batch, model, "example_inputs")
    return batch


def recorded_inputs(inputs: Sequence[RecordedInput], device: str) -> Batch:
    """Generate inputs of the shapes and dtypes of a model's example: normal noise for floats, zeros for other dtypes.

    Containers and plain values are those of the example.

    Raises:
        InputError: an input is an object of another class.
    """
    named = [
        (recorded.name, _generated(recorded, repr(recorded.name or i), device)) for i, recorded in enumerate(inputs)
    ]
    return Batch(tuple(value for name, value in named if not name), {name: value for name, value in named if name})


def _generated(recorded: RecordedInput, place: str, device: str) -> Any:
    if recorded.kind == "plain":
        return recorded.value
    if recorded.kind == "dict":
        return {part.name: _generated(part, f"{place}[{part.name!r}]", device) for part in recorded.parts}
    if recorded.kind in ("tuple", "list"):
        parts = [_generated(part, f"{place}[{i}]", device) for i, part in enumerate(recorded.parts)]
        return tuple(parts) if recorded.kind == "tuple" else parts
    if recorded.shape is None or recorded.dtype is None:
        raise InputError(f"input {place} is not a tensor, so it cannot be generated; pass example_inputs=.")
    make = torch.randn if recorded.dtype.is_floating_point else torch.zeros
    return make(recorded.shape, dtype=recorded.dtype, device=device)


def profile_of(model: fx.GraphModule, batch: Batch) -> Profile:
    """Time each node of a model, and each layer inside regions that an engine runs.

    Times of nodes are medians of a few runs; those of layers are the minimum of what the engine reports. Nodes are
    called one by one, so their kernels check inputs, which takes a few microseconds more than in a binding
    (`fxq/runtime/binding.py`).

    Raises:
        InputError: the model does not run on the batch.
    """
    with torch.no_grad(), without_autocast(), seeded(), untouched(model):
        _call(model, batch, "the model")
        layers_by_node = {node.name: layers for node, layers in engine_layers(model, batch).items()}
        times = _node_times(model, batch, _waiter(model))
    rows: list[TimedLayer] = []
    for node in (node for node in view(model) if node.name in times):
        rows += [
            TimedLayer(node.name, " + ".join(layer.nodes), *layer[1:]) for layer in layers_by_node.get(node.name, ())
        ] or [TimedLayer(node.name, "", node.label, node.dtype, node.kind, times[node.name])]
    count = torch.get_num_threads()
    return Profile(tuple(rows), f"{str(batch)[1:-1]}, {count} {'thread' if count == 1 else 'threads'}")


def time_models(model: fx.GraphModule, real: nn.Module | None, batch: Batch) -> Latency:
    """Time the quantized model, the float model if it still exists, and every node of the quantized model.

    Args:
        model: the quantized model.
        real: the float model; None if it was deleted.
        batch: inputs of both.

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
        medians = interleaved(calls, _waiter(model))
    return Latency(medians.get("float"), medians["int8"], why, profile_of(model, batch))


def _call(model: nn.Module, batch: Batch, which: str) -> Callable[[], object]:
    """Return a call of a model on a batch, after calling it once. Raises `InputError` if that fails."""
    inputs = copied(batch)  # a model may change its inputs in place
    call = partial(model, *inputs.args, **inputs.kwargs)
    try:
        call()
    except Exception as error:  # leaf modules may raise anything
        raise InputError(f"{which} does not run on {batch}: {type(error).__name__}: {words_of(error)}") from error
    return call


def _waiter(model: fx.GraphModule) -> Callable[[], None]:
    """Return a function that waits until the accelerator has finished; it does nothing on a CPU."""
    return torch.accelerator.synchronize if device_of(model) != "cpu" else lambda: None


def _node_times(model: fx.GraphModule, batch: Batch, wait: Callable[[], None]) -> dict[str, float]:
    """Median microseconds of each node that computes something."""
    times: dict[str, list[float]] = {n.name: [] for n in model.graph.nodes if n.op.startswith("call")}
    for _ in rounds():
        runner = Runner(model, copied(batch))
        for node in model.graph.nodes:
            with timed(times.get(node.name, []), wait):
                runner.step(node)
    return {name: median(node_times) for name, node_times in times.items()}


def _not_timed(real: nn.Module | None, batch: Batch) -> str:
    """Reason why the float model cannot be timed on a batch; empty if it can."""
    if real is None:
        return "the float model was deleted: the quantized model only has a weak reference to it"
    if first_in_train_mode(real) is not None:
        return "the float model is in train mode"
    where = {t.device.type for t in tensors((batch.args, batch.kwargs))}
    if where and device_of(real) not in where:
        return f"the float model is on {device_of(real)} and the inputs are on {', '.join(sorted(where))}"
    return ""
