"""What one process has seen of the calibration data, as plain data and tensors: to be stored, sent and merged.

Where several processes saw a share each, the merged whole is what one process would have that saw all of it, in turns:
the first batch of each share, then the second of each, and so on: batch k of share r of n stands for batch k * n + r.
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
from fxq.pipeline.context import Context
from fxq.pipeline.samples import has_enough, record, wanted
from fxq.quant.observer_base import Observer
from fxq.quant.observer_state import kind_of, merge_states, state_of, take_over, with_state

T = TypeVar("T")


def observers_of(gm: fx.GraphModule) -> dict[str, Observer]:
    """The observers that look at calibration data, by the names of their modules."""
    return {name: m for name, m in gm.named_modules() if isinstance(m, Observer) and not m.paused}


def fingerprint(gm: fx.GraphModule, context: Context) -> dict[str, str]:
    """What two graphs have in common if one can take over what the other has seen, by what it is about.

    Not all of the recipe counts: what it says of passes behind calibration may differ, as where `fxq.convert` is given
    another recipe.
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


def difference(one: Sequence[Mapping[str, str]], other: Sequence[Mapping[str, str]]) -> str | None:
    """What differs between two models, by the fingerprints of their graphs; None where nothing does."""
    if len(one) != len(other):
        return f"there are graphs for {len(one)} backends, not for {len(other)}"
    pairs = list(zip(one, other, strict=True))
    return next((why for about, why in _DIFFERENT.items() if any(a[about] != b[about] for a, b in pairs)), None)


_DIFFERENT = {
    "graph": "the model computes something else, or the recipe changes its graph before calibration",
    "weights": "the model has other weights",
    "observers": "the recipe looks at other values, or in another way",
    "samples": "passes of the recipe ask for another number of calibration samples",
}
"""What it means that fingerprints differ in one of their parts."""


def seen_by(gm: fx.GraphModule, context: Context) -> dict[str, Any]:
    """What the observers of a graph have seen, and the samples that are kept."""
    return {
        "observers": {name: state_of(observer) for name, observer in observers_of(gm).items()},
        "samples": samples_as_data(context.samples),
    }


def samples_as_data(samples: Sequence[Batch]) -> list[Any]:
    """Batches as data; `batches_from` is the inverse."""
    return [(tuple(batch.args), dict(batch.kwargs)) for batch in samples]


def batches_from(data: Sequence[Any]) -> list[Batch]:
    """Inverse of `samples_as_data`."""
    return [Batch(args, kwargs) for args, kwargs in data]


def restore(gm: fx.GraphModule, context: Context, seen: dict[str, Any]) -> None:
    """Let a graph have seen what is given, and nothing else."""
    for name, observer in observers_of(gm).items():
        if name in seen["observers"]:
            take_over(observer, with_state(observer, seen["observers"][name]))
        else:
            gm.delete_submodule(name)  # it was removed, see `ObserverSet`
    context.samples[:] = batches_from(seen["samples"])


def sizes_of(seen: dict[str, Any]) -> list[int | None]:
    """How many samples each of the kept batches has."""
    return [samples_in(batch) for batch in batches_from(seen["samples"])]


def part_of(
    seen: dict[str, Any], sizes: Sequence[Sequence[int | None]], share: int, context: Context, few: bool = False
) -> dict[str, Any]:
    """The same, with only those of the samples that are kept of all shares.

    Args:
        seen: what was seen of one share.
        sizes: what `sizes_of` says of all of them.
        share: which one it is.
        context: of the graph.
        few: whether no more data is shown than passes read samples of, as where nothing is calibrated.
    """
    turns = list(in_turns([[number] * len(found) for number, found in enumerate(sizes)]))
    scratch = replace(context, samples=[])
    keep_in_turns(scratch, [[Batch(() if n is None else (torch.empty(n, 0),)) for n in found] for found in sizes], few)
    mine = [samples_in(stub) for number, stub in zip(turns, scratch.samples, strict=False) if number == share]
    batches = zip(batches_from(seen["samples"]), mine, strict=False)
    return {**seen, "samples": samples_as_data([first_of(batch, count or 0) for batch, count in batches])}


def merge_parts(gm: fx.GraphModule, context: Context, parts: Iterable[dict[str, Any]], few: bool = False) -> None:
    """Let a graph have seen what several processes have seen together, and nothing else.

    Args:
        gm: the graph.
        context: of the graph.
        parts: what `part_of` gives for each share, in order.
        few: as for `part_of`.

    Raises:
        InputError, CalibrationError: as for `merge_states`.
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
    """Keep the samples that one process would that saw the batches of all shares in turns."""
    for batch in in_turns(shares):
        if not (few and has_enough(context)):
            record(context, batch)


def in_turns(shares: Sequence[Sequence[T]]) -> Iterator[T]:
    """The first of each, the second of each, and so on; those that are at their end are passed over.

    Example:
        >>> list(in_turns(["adf", "be", "c"]))
        ['a', 'b', 'c', 'd', 'e', 'f']
    """
    for turn in zip_longest(*[[(one,) for one in share] for share in shares]):
        yield from (one for held in turn if held is not None for one in held)
