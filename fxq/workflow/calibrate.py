"""Calibration: data is shown to observers, by one process or by several with a share each, with or without a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from fxq.calibration.calibration_state import (
    batches_from,
    difference,
    fingerprint,
    merge_parts,
    part_of,
    restore,
    samples_as_data,
    seen_by,
    sizes_of,
)
from fxq.calibration.checkpoint import Checkpoint, read_checkpoint
from fxq.calibration.ranks import Ranks
from fxq.common.data import Batch, naming_batch
from fxq.common.files import as_path
from fxq.common.isolation import untouched, without_autocast
from fxq.common.progress import progress_bar
from fxq.errors import InputError
from fxq.pipeline.samples import has_enough
from fxq.workflow.observed_model import ObservedModel
from fxq.workflow.training_model import TrainingModel

EVERY = 60.0
"""Seconds between two writes of a checkpoint."""

Sizes = Sequence[int | None]


@dataclass(frozen=True)
class Calibration:
    """How data is shown to the observers of a model.

    Attributes:
        observed: the model; with `backend="fastest"` the first of several.
        ranks: the processes that calibrate together, each with a share of the data.
        path: a file to write what was seen to, and to go on from; None: none.
        every: seconds between two writes of it.
        progress: show a progress bar; None: when stderr is a terminal, the first rank alone.
        few: show no more data than passes read samples of, for where nothing is calibrated.
    """

    observed: ObservedModel
    ranks: Ranks
    path: str | os.PathLike[str] | None = None
    every: float = EVERY
    progress: bool | None = None
    few: bool = False

    def run(self, data: Iterator[Batch], length: int | None) -> None:
        """Show the share of the data that this process has, and take in what the others have seen of theirs.

        Args:
            data: the batches.
            length: how many there are; None: not known.

        Raises:
            InputError: the model has seen data before; the ranks have other models or recipes, or no data at all; the
                checkpoint is of something else.
            FxqError: what goes wrong on any of the ranks.
        """
        if self.ranks.size == 1 and self.path is None:
            self._show(data, length, None)
            return
        prints = _prints(self.observed)
        file = self.ranks.together(lambda: self._begin(prints, length))
        first, *others = self.ranks.exchanged(lambda: prints)
        for rank, other in enumerate(others, 1):
            why = difference(first, other)
            if why is not None:
                raise InputError(f"rank {rank} calibrates another model or recipe than rank 0: {why}.")
        try:
            self.ranks.together(lambda: self._show(data, length, file))
            if self.ranks.size > 1:
                self._merge_ranks()
        finally:
            if file is not None:
                self.observed.stored_in = file.path, self.observed.batches_seen

    def _begin(self, prints: Sequence[Mapping[str, str]], length: int | None) -> Checkpoint | None:
        """Go on from the file where there is one."""
        observed, graphs = self.observed, graphs_of(self.observed)
        if self.path is None:
            _check_new(observed)
            return None

        def seen() -> list[dict[str, Any]]:
            return [seen_by(one, one.manager.context) for one in graphs]

        file = Checkpoint(self.path, self.every, prints, self.ranks, seen)
        if not file.path.exists() or observed.stored_in != (file.path, observed.batches_seen):
            _check_new(observed)
        found = file.load(_device(observed), length)
        if found is None:
            file.write()  # what cannot be written fails now, not in an hour
            return file
        for one, its in zip(graphs, found, strict=True):
            restore(one, one.manager.context, its)
            one.batches_seen = len(file.checksums)
        return file

    def _show(self, data: Iterator[Batch], length: int | None, file: Checkpoint | None) -> None:
        own, done, count = self.observed.manager.context.model, file is not None and file.complete, 0
        shown = self.progress if self.ranks.rank == 0 else bool(self.progress)
        bar, context = progress_bar("calibrating", length, shown), self.observed.manager.context
        floats = context.floats.filled_by(self.observed, context)
        with untouched(own), torch.no_grad(), without_autocast(), floats, bar as advance:
            for i, batch in enumerate(islice(data, 1) if done else data):
                if file is None or not file.covers(i, batch):
                    if self.few and has_enough(context):
                        break
                    with naming_batch(i, batch):
                        # its own __call__ prints what goes wrong
                        nn.Module.__call__(self.observed, *batch.args, **batch.kwargs)
                    if file is not None:
                        file.add(batch)
                count = i + 1
                advance()
        if file is not None and not done:
            file.finish(count)

    def _merge_ranks(self) -> None:
        graphs, rank = graphs_of(self.observed), self.ranks.rank
        own, device = [seen_by(one, one.manager.context) for one in graphs], _device(self.observed)

        def parts(i: int, sizes: Sequence[Sizes]) -> Iterator[dict[str, Any]]:
            context = graphs[i].manager.context
            return self.ranks.exchanged(lambda: part_of(own[i], sizes, rank, context, self.few), device)

        seen = list(self.ranks.exchanged(lambda: (self.observed.batches_seen, [sizes_of(one) for one in own])))
        _merge(self.observed, seen, parts, self.few)


def first_of_all(first: list[Batch], ranks: Ranks, model: nn.Module) -> list[Batch]:
    """The first batch of the first rank that has one; none where no rank has.

    Args:
        first: that of this rank, if there is one.
        ranks: the processes that have a share of the data each.
        model: the float model.
    """
    has = list(ranks.exchanged(lambda: bool(first)))
    sender = has.index(True) if any(has) else 0
    sent = ranks.exchanged(lambda: samples_as_data(first) if ranks.rank == sender else [], _home(model))
    return [batch for found in sent for batch in batches_from(found)]


def merge_calibrations(observed: ObservedModel, checkpoints: Sequence[str | os.PathLike[str]]) -> ObservedModel:
    """Let a prepared model have seen what calibrations on several machines have seen together; the same model.

    Each was `fxq.calibrate(prepared, share, checkpoint=path)`, with the same float model and recipe, and has ended. The
    result is that of one calibration on all of the data, as for `fxq.calibrate` on several ranks.

    Args:
        observed: what `fxq.prepare` returned, which has seen no data.
        checkpoints: the files, in the order of the shares.

    Raises:
        InputError: no file is given, one is given twice, is damaged, has not ended, or is of another model or recipe;
            `observed` has seen data.

    Example:
        >>> import tempfile
        >>> model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.rand(6, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     paths = [f"{folder}/{i}.safetensors" for i in range(2)]
        ...     for i in range(2):  # on two machines
        ...         _ = fxq.calibrate(fxq.prepare(model, "static", example_inputs=x), [x[i::2]], checkpoint=paths[i])
        ...     observed = fxq.merge_calibrations(fxq.prepare(model, "static", example_inputs=x), paths)
        >>> observed.batches_seen
        2
    """
    observed = as_observed(observed)
    _check_new(observed)
    if isinstance(checkpoints, (str, os.PathLike)) or not isinstance(checkpoints, Iterable):
        raise InputError(f"checkpoints is {checkpoints!r}; give a list of the paths of files.")
    paths = [as_path(path) for path in checkpoints]
    twice = [path for i, path in enumerate(paths) if path.resolve() in [other.resolve() for other in paths[:i]]]
    if twice or not paths:
        raise InputError(f"{twice[0]} is there twice." if twice else "checkpoints is empty: give at least one file.")
    graphs, prints, device = graphs_of(observed), _prints(observed), _device(observed)
    seen: list[tuple[int, list[Sizes]]] = []
    for path in paths:
        found = read_checkpoint(path, prints, device)
        if not found["complete"]:
            raise InputError(
                f"{path} is of a calibration that has not ended: {len(found['checksums'])} batches were seen. Go on "
                "with it: fxq.calibrate with the same data and checkpoint."
            )
        seen.append((len(found["checksums"]), [sizes_of(one) for one in found["models"]]))

    def parts(i: int, sizes: Sequence[Sizes]) -> Iterator[dict[str, Any]]:
        for share, path in enumerate(paths):
            whole = read_checkpoint(path, prints, device)["models"][i]
            yield part_of(whole, sizes, share, graphs[i].manager.context)

    _merge(observed, seen, parts)
    return observed


def _merge(
    observed: ObservedModel,
    seen: Sequence[tuple[int, Sequence[Sizes]]],
    parts: Callable[[int, Sequence[Sizes]], Iterable[dict[str, Any]]],
    few: bool = False,
) -> None:
    """Let a model have seen what several processes have seen together, and nothing else.

    Args:
        observed: the model.
        seen: how many batches each has seen, and for each graph how many samples its kept batches have.
        parts: for the number of a graph, and these sizes, the part of each process, see `part_of`.
        few: as for `Calibration`.
    """
    total = sum(count for count, _ in seen)
    if not total:
        raise InputError("data is empty, also that of the other processes: it takes at least one batch.")
    for i, one in enumerate(graphs_of(observed)):
        merge_parts(one, one.manager.context, parts(i, [sizes[i] for _, sizes in seen]), few)
        one.batches_seen = total


def as_observed(observed: Any) -> ObservedModel:
    """A model with observers as it is. Raises `InputError` for what `fxq.prepare` has not returned, or to train."""
    if isinstance(observed, ObservedModel):
        return observed
    if isinstance(observed, TrainingModel):
        raise InputError("this model finds ranges while it is trained: call it in train mode, and fxq.convert it.")
    raise InputError(f"this takes the model that fxq.prepare returned, not a {type(observed).__name__}.")


def _check_new(observed: ObservedModel) -> None:
    if observed.batches_seen:
        raise InputError(
            f"the model has seen {observed.batches_seen} batches already. With checkpoints, or on several ranks, a "
            "calibration begins with a model that has seen none: prepare it anew, and give all data in one call."
        )


def graphs_of(observed: ObservedModel) -> list[ObservedModel]:
    """Those that see the data: with `backend="fastest"` one for each kind of backend."""
    return [one for one in (observed, *(observed.others or ())) if one.same_as is None]


def _prints(observed: ObservedModel) -> list[dict[str, str]]:
    return [fingerprint(one, one.manager.context) for one in graphs_of(observed)]


def _device(observed: ObservedModel) -> str:
    return _home(observed.manager.context.model)


def _home(model: nn.Module) -> str:
    """The device that a model is on, with its number."""
    return next((str(t.device) for t in (*model.parameters(), *model.buffers())), "cpu")
