"""State of a calibration as plain data and tensors, which can be stored, sent to other processes and merged.

The merged state of several processes is the state of one process that saw all of their data in turns: the first batch
of each share, then the second of each, and so on. Batch k of share r of n shares is batch k * n + r of the whole.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import fx

from fxq.common.checksums import checksum
from fxq.common.data import Batch, first_of, samples_in
from fxq.common.metrics import tensors
from fxq.pipeline.context import Context
from fxq.pipeline.samples import has_enough, record, wanted
from fxq.quant.observer_base import Observer
from fxq.quant.observer_state import kind_of, merge_states, state_of, take_over, with_state

T = TypeVar("T")


def observers_of(gm: fx.GraphModule) -> dict[str, Observer]:
    """Observers that see calibration data, by the names of their modules."""
    return {name: m for name, m in gm.named_modules() if isinstance(m, Observer) and not m.paused}


def fingerprint(gm: fx.GraphModule, context: Context) -> dict[str, str]:
    """Fingerprint of an observed graph, by aspect. Graphs with equal fingerprints can take each other's state.

    Passes after calibration do not count, since `fxq.convert` may take another recipe.
    """
    observers = observers_of(gm)
    inside = tuple(f"{name}." for name, module in gm.named_modules() if isinstance(module, Observer))
    tensors = [t for t in (*gm.named_parameters(), *gm.named_buffers()) if not t[0].startswith(inside)]
    graphs = [module for _, module in gm.named_modules() if isinstance(module, fx.GraphModule)]
    lines = [node.format_node() or "" for graph in graphs for node in graph.graph.nodes]
    return {
        "graph": _hash(re.sub(r" at 0x[0-9a-f]+", "", line) for line in lines),
        "weights": _hash(f"{name} {tensor.shape} {checksum(tensor)}" for name, tensor in tensors),
        "observers": _hash(f"{name} {kind_of(observer)}" for name, observer in observers.items()),
        "samples": f"{wanted(context.recipe)}{'' if context.divisible else ', whole batches'}",
    }


def _hash(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def difference(prints: Sequence[Mapping[str, str]], other: Sequence[Mapping[str, str]]) -> str | None:
    """Description of the first difference between two models, by the fingerprints of their graphs; None if equal."""
    if len(prints) != len(other):
        return f"there are graphs for {len(prints)} backends, not for {len(other)}"
    pairs = list(zip(prints, other, strict=True))
    return next((why for about, why in _DIFFERENT.items() if any(a[about] != b[about] for a, b in pairs)), None)


_DIFFERENT = {
    "graph": "the model computes something else, or the recipe changes its graph before calibration",
    "weights": "the model has other weights",
    "observers": "the recipe observes other values, or with other observers",
    "samples": "passes of the recipe ask for another number of calibration samples",
}
"""Description of a difference in each aspect of a fingerprint."""


def seen_by(gm: fx.GraphModule, context: Context) -> dict[str, Any]:
    """State of a graph: that of its observers, and the recorded samples."""
    return {
        "observers": {name: state_of(observer) for name, observer in observers_of(gm).items()},
        "samples": samples_as_data(context.samples),
    }


def summary(gm: fx.GraphModule, context: Context) -> str:
    """Hash of a calibrated graph, its weights, what its observers saw, and the recorded samples."""
    marks = [str(checksum(tensor)) for tensor in tensors(seen_by(gm, context))]
    return _hash([*fingerprint(gm, context).values(), *marks])[:16]


def samples_as_data(samples: Sequence[Batch]) -> list[Any]:
    """Batches as plain data; `batches_from` is the inverse."""
    return [(tuple(batch.args), dict(batch.kwargs)) for batch in samples]


def batches_from(data: Sequence[Any]) -> list[Batch]:
    """Batches from plain data, the inverse of `samples_as_data`."""
    return [Batch(args, kwargs) for args, kwargs in data]


def restore(gm: fx.GraphModule, context: Context, seen: dict[str, Any]) -> None:
    """Set the state of a graph to that of `seen_by`."""
    for name, observer in observers_of(gm).items():
        if name in seen["observers"]:
            take_over(observer, with_state(observer, seen["observers"][name]))
        else:
            gm.delete_submodule(name)  # it was removed, see `ObserverSet`
    context.samples[:] = batches_from(seen["samples"])


def sizes_of(seen: dict[str, Any]) -> list[int | None]:
    """Number of samples in each recorded batch; None if it is not known."""
    return [samples_in(batch) for batch in batches_from(seen["samples"])]


def part_of(
    seen: dict[str, Any], sizes: Sequence[Sequence[int | None]], share: int, context: Context, few: bool = False
) -> dict[str, Any]:
    """State of one share, with only the samples that remain when all shares are merged.

    Args:
        seen: state of the share, of `seen_by`.
        sizes: `sizes_of` of all shares.
        share: number of this share.
        context: context of the graph.
        few: whether the data ends once there are enough samples, as if nothing is calibrated.
    """
    turns = list(in_turns([[number] * len(counts) for number, counts in enumerate(sizes)]))
    scratch = replace(context, samples=[])
    stubs = [[Batch(() if n is None else (torch.empty(n, 0),)) for n in counts] for counts in sizes]
    keep_in_turns(scratch, stubs, few)
    remaining = [samples_in(stub) for number, stub in zip(turns, scratch.samples, strict=False) if number == share]
    batches = zip(batches_from(seen["samples"]), remaining, strict=False)
    return {**seen, "samples": samples_as_data([first_of(batch, count or 0) for batch, count in batches])}


def merge_parts(gm: fx.GraphModule, context: Context, parts: Iterable[dict[str, Any]], few: bool = False) -> None:
    """Set the state of a graph to the merged states of several processes.

    Args:
        gm: the graph.
        context: context of the graph.
        parts: `part_of` of each share, in order.
        few: as for `part_of`.

    Raises:
        InputError: see `merge_states`.
        CalibrationError: see `merge_states`.
    """
    shares: list[list[Batch]] = []

    def states() -> Iterator[dict[str, Any]]:
        for part in parts:
            shares.append(batches_from(part["samples"]))
            yield part["observers"]

    observers = observers_of(gm)
    for name in set(observers) - merge_states(observers, states()):
        gm.delete_submodule(name)
    context.samples.clear()
    keep_in_turns(context, shares, few)


def keep_in_turns(context: Context, shares: Sequence[Sequence[Batch]], few: bool) -> None:
    """Record the samples that one process would record that saw the batches of all shares in turns."""
    for batch in in_turns(shares):
        if not (few and has_enough(context)):
            record(context, batch)


def in_turns(shares: Sequence[Sequence[T]]) -> Iterator[T]:
    """Yield the first item of each share, then the second of each, and so on. Shares that have ended are skipped.

    Example:
        >>> list(in_turns(["adf", "be", "c"]))
        ['a', 'b', 'c', 'd', 'e', 'f']
    """
    for turn in zip_longest(*[[(item,) for item in share] for share in shares]):
        yield from (item for wrapped in turn if wrapped is not None for item in wrapped)
