"""Calibration of a prepared model, in one process or in several with shares of the data, with optional checkpoints."""

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
from fxq.common.data import Batch, naming_batch
from fxq.common.files import as_path
from fxq.common.isolation import untouched, without_autocast
from fxq.common.progress import progress_bar
from fxq.common.ranks import Ranks
from fxq.errors import InputError
from fxq.pipeline.samples import has_enough
from fxq.workflow.observed_model import ObservedModel
from fxq.workflow.training_model import TrainingModel

EVERY = 60.0
"""Default number of seconds between two writes of a checkpoint."""

Sizes = Sequence[int | None]


@dataclass(frozen=True)
class Calibration:
    """Calibration run of a prepared model.

    Attributes:
        observed: the model; with `backend="fastest"` the first of several.
        ranks: processes that calibrate together, each with a share of the data.
        path: path of the checkpoint; None: no checkpoint.
        every: seconds between two writes of the checkpoint.
        progress: whether to show a progress bar. None: on the first rank, if stderr is a terminal.
        few: whether to stop when passes have enough samples, for models without calibrated ranges.
    """

    observed: ObservedModel
    ranks: Ranks
    path: str | os.PathLike[str] | None = None
    every: float = EVERY
    progress: bool | None = None
    few: bool = False

    def run(self, data: Iterator[Batch], length: int | None) -> None:
        """Run the model on this process's share of the data, and merge the statistics of all ranks.

        Args:
            data: batches of this process.
            length: number of batches; None if unknown.

        Raises:
            InputError: the model has seen data before; ranks have different models or recipes, or no data at all; the
                checkpoint belongs to another model, recipe or data.
            FxqError: an error on any of the ranks.
        """
        if self.ranks.size == 1 and self.path is None:
            self._show(data, length, None)
            return
        prints = _prints(self.observed)
        file = self.ranks.together(lambda: self._begin(prints, length))
        _check_equal(prints, self.ranks)
        try:
            self.ranks.together(lambda: self._show(data, length, file))
            if self.ranks.size > 1:
                _merge_ranks(self.observed, self.ranks, self.few)
        finally:
            if file is not None:
                self.observed.stored_in = file.path, self.observed.batches_seen

    def _begin(self, prints: Sequence[Mapping[str, str]], length: int | None) -> Checkpoint | None:
        """Resume from the checkpoint if it exists, and return it; None without a checkpoint."""
        observed, graphs = self.observed, graphs_of(self.observed)
        if self.path is None:
            _check_new(observed)
            return None

        def seen() -> list[dict[str, Any]]:
            return [seen_by(graph, graph.manager.context) for graph in graphs]

        file = Checkpoint(self.path, self.every, prints, self.ranks, seen)
        if not file.path.exists() or observed.stored_in != (file.path, observed.batches_seen):
            _check_new(observed)
        states = file.load(_device(observed), length)
        if states is None:
            file.write()  # so that a path that cannot be written fails before the run
            return file
        for graph, state in zip(graphs, states, strict=True):
            restore(graph, graph.manager.context, state)
            graph.batches_seen = len(file.checksums)
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
                    # per batch, since the code of `data` may use these variables, too
                    with naming_batch(i, batch), untouched(nn.Module(), context.outside):
                        # the __call__ of `fx.GraphModule` would print errors
                        nn.Module.__call__(self.observed, *batch.args, **batch.kwargs)
                    if file is not None:
                        file.add(batch)
                count = i + 1
                advance()
        if file is not None and not done:
            file.finish(count)


def _check_equal(prints: Sequence[Mapping[str, str]], ranks: Ranks) -> None:
    """Raise `InputError` on all ranks if the fingerprints of the graphs of one differ from those of the first."""
    first, *others = ranks.exchanged(lambda: prints)
    for rank, rank_prints in enumerate(others, 1):
        why = difference(first, rank_prints)
        if why is not None:
            raise InputError(f"rank {rank} calibrates another model or recipe than rank 0: {why}.")


def _merge_ranks(observed: ObservedModel, ranks: Ranks, few: bool, may_be_unused: bool = False) -> None:
    """Replace the statistics of a model by the merged ones of all ranks.

    Args:
        observed: the model.
        ranks: the processes.
        few: as in `Calibration`.
        may_be_unused: whether it may have seen no batch on any rank. It then stays as it is.
    """
    graphs = graphs_of(observed)
    own, device = [seen_by(graph, graph.manager.context) for graph in graphs], _device(observed)

    def parts(i: int, sizes: Sequence[Sizes]) -> Iterator[dict[str, Any]]:
        context = graphs[i].manager.context
        return ranks.exchanged(lambda: part_of(own[i], sizes, ranks.rank, context, few), device)

    seen = list(ranks.exchanged(lambda: (observed.batches_seen, [sizes_of(state) for state in own])))
    if may_be_unused and not any(count for count, _ in seen):
        return
    _merge(observed, seen, parts, few)


def calibrate_programs(programs: Sequence[ObservedModel], ranks: Ranks, run: Callable[[], None]) -> None:
    """Calibrate the programs of a model on this process's share of the data, and merge the statistics of all ranks.

    Args:
        programs: observed models of the programs, in the same order on all ranks.
        ranks: the processes.
        run: function that runs the programs on the share.

    Raises:
        InputError: ranks have different programs, models or recipes. All ranks raise this error.
        FxqError: an error on any of the ranks.
    """
    if ranks.size == 1:
        run()
        return
    _check_equal([own for observed in programs for own in _prints(observed)], ranks)
    few = [not observed.calibrated for observed in programs]
    ranks.together(run)
    for observed, reads_few in zip(programs, few, strict=True):
        _merge_ranks(observed, ranks, reads_few, may_be_unused=True)


def first_of_all(first: list[Batch], ranks: Ranks, model: nn.Module) -> list[Batch]:
    """Return the first batch of the first rank that has one, on every rank; an empty list if no rank has a batch.

    Args:
        first: first batch of this rank, if there is one.
        ranks: processes with a share of the data each.
        model: the float model.
    """
    has = list(ranks.exchanged(lambda: bool(first)))
    sender = has.index(True) if any(has) else 0
    sent = ranks.exchanged(lambda: samples_as_data(first) if ranks.rank == sender else [], _home(model))
    return [batch for data in sent for batch in batches_from(data)]


def merge_calibrations(observed: ObservedModel, checkpoints: Sequence[str | os.PathLike[str]]) -> ObservedModel:
    """Load the merged statistics of several calibrations into a prepared model. Returns `observed` itself.

    Each calibration was `fxq.calibrate(prepared, share, checkpoint=path)` with the same float model and recipe,
    possibly on another machine, and ran to its end. The result equals that of one calibration on all shares, as with
    `fxq.calibrate` on several ranks.

    Args:
        observed: result of `fxq.prepare` that has seen no data.
        checkpoints: paths of the checkpoints, in the order of the shares.

    Raises:
        InputError: `checkpoints` is empty, has a path twice, or has a file that is damaged, unfinished, or of another
            model or recipe; or `observed` has seen data.

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
        raise InputError(f"checkpoints is {checkpoints!r}; give a list of paths.")
    paths = [as_path(path) for path in checkpoints]
    repeated = [path for i, path in enumerate(paths) if path.resolve() in [p.resolve() for p in paths[:i]]]
    if repeated or not paths:
        raise InputError(
            f"checkpoints has {repeated[0]} twice." if repeated else "checkpoints is empty: give at least one file."
        )
    graphs, prints, device = graphs_of(observed), _prints(observed), _device(observed)
    seen: list[tuple[int, list[Sizes]]] = []
    for path in paths:
        checkpoint = read_checkpoint(path, prints, device)
        count = len(checkpoint["checksums"])
        if not checkpoint["complete"]:
            raise InputError(
                f"{path} is of a calibration that is not finished: it has seen {count} batches. Resume it: call "
                "fxq.calibrate with the same data and checkpoint."
            )
        seen.append((count, [sizes_of(state) for state in checkpoint["models"]]))

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
    """Replace the statistics of a model by the merged statistics of several processes.

    Args:
        observed: the model.
        seen: for each process, the number of batches it saw, and for each graph the sizes of its recorded batches.
        parts: function of the index of a graph and these sizes that returns the part of each process, see `part_of`.
        few: as in `Calibration`.
    """
    total = sum(count for count, _ in seen)
    if not total:
        raise InputError("data is empty on every process: calibration needs at least one batch.")
    for i, graph in enumerate(graphs_of(observed)):
        merge_parts(graph, graph.manager.context, parts(i, [sizes[i] for _, sizes in seen]), few)
        graph.batches_seen = total


def as_observed(observed: Any) -> ObservedModel:
    """Return `observed` if it is an observed model. Raises `InputError` for anything else."""
    if isinstance(observed, ObservedModel):
        return observed
    if isinstance(observed, TrainingModel):
        raise InputError(
            "a model prepared for training finds its ranges during training: run your training loop, then fxq.convert."
        )
    raise InputError(f"this takes the model that fxq.prepare returned, not a {type(observed).__name__}.")


def _check_new(observed: ObservedModel) -> None:
    if observed.batches_seen:
        raise InputError(
            f"the model has already seen {observed.batches_seen} batches. Calibration with checkpoints or on several "
            "ranks must start with a new model: call fxq.prepare again, and pass all data in one call."
        )


def graphs_of(observed: ObservedModel) -> list[ObservedModel]:
    """Models that run on the calibration data: one, or with `backend="fastest"` one for each distinct graph."""
    return [model for model in (observed, *(observed.others or ())) if model.same_as is None]


def _prints(observed: ObservedModel) -> list[dict[str, str]]:
    return [fingerprint(graph, graph.manager.context) for graph in graphs_of(observed)]


def _device(observed: ObservedModel) -> str:
    return _home(observed.manager.context.model)


def _home(model: nn.Module) -> str:
    """Name of the device that a model is on, such as "cpu" or "cuda:0"."""
    return next((str(t.device) for t in (*model.parameters(), *model.buffers())), "cpu")
