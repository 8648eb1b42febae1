"""Model with observers in its parts, which `fxq.prepare` returns for a model that traces only in part."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxq.calibration.calibration_state import fingerprint, restore, seen_by
from fxq.calibration.checkpoint import Checkpoint
from fxq.common.code_state import CodeState
from fxq.common.data import Batch, device_of, naming_batch
from fxq.common.isolation import copied, snapshot_of, untouched, without_autocast
from fxq.common.progress import progress_bar
from fxq.common.ranks import Ranks
from fxq.errors import FxqError, InputError, words_of
from fxq.parts.absent import AbsentTensor
from fxq.parts.choose import PartPlan, RecordedCalls, call
from fxq.parts.part import kind_of
from fxq.parts.parts_model import with_parts
from fxq.parts.quantize_parts import MAX_CHECKED_BATCHES, PartsRun
from fxq.pipeline.history import History
from fxq.workflow.calibrate import EVERY
from fxq.workflow.observed_model import ObservedModel

MAX_BATCHES_WITHOUT_RANGES = 64
"""Maximum number of batches that are run, for recipes without calibrated ranges, to find the parts that data calls."""


class ObservedParts(nn.Module):
    """Model with observers in its parts: calibrate it by calling it on data, then `fxq.convert` it.

    Attributes:
        model: copy of the float model that calls the observed graphs of the parts.
        run: the quantization that it belongs to.
        batches_seen: number of calls.
        stored_in: path of the checkpoint of the last calibration, and the number of batches it had seen.

    Args:
        run: the quantization that it belongs to.
    """

    def __init__(self, run: PartsRun) -> None:
        super().__init__()
        self.run = run
        self.batches_seen = 0
        self.stored_in: tuple[Path, int] | None = None
        observed = {plan.path: ObservedCalls(plan, run) for plan in run.choice.parts if not plan.is_late}
        self.model = with_parts(run.model, observed, run.weights)
        for plan in run.choice.parts:
            if plan.is_late:
                LateCalls(plan, run, self.model.get_submodule(plan.path))
        self.eval()

    @property
    def parts(self) -> Mapping[str, ObservedModel]:
        """Observed graphs by the path of the part; further graphs of one part have a number."""
        plans = self.run.choice.parts
        return {name: observed for plan in plans for name, observed in plan.programs.items()}

    @property
    def history(self) -> Mapping[str, History]:
        """Snapshots of the passes so far, for each part."""
        return {name: observed.history for name, observed in self.parts.items()}

    @property
    def calibrated(self) -> str:
        """Name of the first value whose range needs calibration; empty if there is none."""
        return self.run.calibrated

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the float model with observers."""
        self._note(Batch(args, kwargs))
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def _note(self, batch: Batch) -> None:
        checked = self.run.checked
        if len(checked) < MAX_CHECKED_BATCHES:
            checked.append(copied(batch))
        self.batches_seen += 1

    def calibrate(
        self,
        data: Iterator[Batch],
        length: int | None,
        progress: bool | None,
        checkpoint: str | os.PathLike[str] | None = None,
        every: float = EVERY,
        ranks: Ranks | None = None,
    ) -> ObservedParts:
        """Run the whole model on the data, see `fxq.calibrate`. Returns the model itself.

        Args:
            data: the batches; may be empty for recipes without calibrated ranges.
            length: number of batches; None if unknown.
            progress: whether to show a progress bar.
            checkpoint: path of the file from which an interrupted calibration continues.
            every: seconds between two writes of that file.
            ranks: the processes that calibrate together.

        Raises:
            InputError: several processes calibrate together; the checkpoint is of another model, recipe or data, or the
                model keeps a state between calls.
        """
        if ranks is not None and ranks.size > 1:
            raise InputError(
                f"{type(self.model).__name__} is quantized in parts, whose calibration runs in one process: call "
                "fxq.calibrate(observed, all_data, group=None) on one rank."
            )
        run = self.run
        if run.keeps_state and checkpoint is not None:
            raise InputError(
                f"{type(self.model).__name__} keeps a state between calls, which the batches that a checkpoint covers "
                "would not change. Calibrate without a checkpoint."
            )
        few, file = not run.calibrated, self._resumed(checkpoint, every, length) if checkpoint is not None else None
        count, bar = 0, progress_bar("calibrating", length, progress)
        outside = CodeState.of(run.model).bindings
        with untouched(run.model, outside), torch.no_grad(), without_autocast(), bar as advance:
            for i, batch in enumerate(data):
                if few and i >= (MAX_CHECKED_BATCHES if run.all_called else MAX_BATCHES_WITHOUT_RANGES):
                    run.seen = f"the data up to batch {i}"
                    break
                self._note(batch)
                if file is None or not file.covers(i, batch):
                    with naming_batch(i, batch):
                        call(self.model, batch, seed=i)
                    if file is not None:
                        file.add(batch)
                count = i + 1
                advance()
            if any(not observed.batches_seen for observed in run.graphs):
                call(self.model, run.example)
        if file is not None:
            self.stored_in = file.path, count
            file.finish(count)
        return self

    def _resumed(self, path: str | os.PathLike[str], every: float, length: int | None) -> Checkpoint:
        """Open the checkpoint of a calibration. If its file exists, restore the state of the observers from it."""
        run = self.run
        graphs, run.is_fixed, run.seen = run.graphs, True, "the example, whose calls alone a checkpoint stores,"

        def seen() -> list[dict[str, Any]]:
            return [{**seen_by(graph, graph.manager.context), "calls": graph.batches_seen} for graph in graphs]

        prints = [fingerprint(graph, graph.manager.context) for graph in graphs]
        file = Checkpoint(path, every, prints, Ranks.of(None), seen)
        if self.batches_seen and self.stored_in != (file.path, self.batches_seen):
            raise InputError(
                f"the model has already seen {self.batches_seen} batches. Calibration with checkpoints must start with "
                "a new model: call fxq.prepare again, and pass all data in one call."
            )
        self.batches_seen = 0
        states = file.load(device_of(run.model), length)
        if states is None:
            file.write()  # so that a path that cannot be written fails before the run
        for graph, state in zip(graphs, states or (), strict=False):
            restore(graph, graph.manager.context, state)
            graph.batches_seen = state["calls"]
        return file

    def __reduce__(self) -> tuple[Any, ...]:
        raise InputError(
            "an observed model cannot be pickled: it holds the float model and an unfinished pipeline. Save its "
            "calibration (fxq.calibrate with a checkpoint), or pickle the quantized model."
        )


class ObservedCalls(nn.Module):
    """Module that runs the observed graph of a part that fits a call, and traces a further graph if none fits.

    Args:
        plan: the part.
        run: the quantization that it belongs to.
    """

    def __init__(self, plan: PartPlan, run: PartsRun) -> None:
        super().__init__()
        vars(self).update(plan=plan, run=run, fitting={})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the graph, or the float module if the call cannot be traced."""
        own = vars(self)
        plan, kind = own["plan"], kind_of(args, kwargs)
        if kind not in own["fitting"]:
            own["fitting"][kind] = self._graph_for(Batch(args, kwargs))
        observed = own["fitting"][kind]
        if observed is None:
            return plan.module(*args, **kwargs)
        return nn.Module.__call__(observed, *args, **kwargs)

    def _graph_for(self, batch: Batch) -> ObservedModel | None:
        plan, run = vars(self)["plan"], vars(self)["run"]
        observed: ObservedModel | None = plan.fitting(batch)
        if observed is not None:
            return observed
        if run.is_fixed and not plan.programs:
            return None
        if run.is_fixed:
            raise InputError(
                f"part {plan.path!r} gets a call that it does not get on the example: {batch}. With a checkpoint, all "
                "its graphs must be traced before calibration: give example_inputs with such a call, or calibrate "
                "without a checkpoint."
            )
        try:
            added: ObservedModel = plan.add_program(copied(batch), run.prepare)
        except FxqError as error:
            plan.why_float = words_of(error)
            return None
        return added


class LateCalls:
    """Hooks on a float module that the example does not call. They run the graphs of its part on its calls.

    The float module runs, and decides whether it can be a part: it must neither change its inputs nor keep a state.
    Weights that code outside of it reads are kept.

    Args:
        plan: the part.
        run: the quantization that it belongs to.
        module: copy of the float module in the observed model.
    """

    def __init__(self, plan: PartPlan, run: PartsRun, module: nn.Module) -> None:
        self.plan, self.run, self.graphs = plan, run, ObservedCalls(plan, run)
        self.running: list[Batch] = []
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for path, parameter in list(module.named_parameters(remove_duplicate=False)):
            owner, _, own = path.rpartition(".")
            name, on_read = f"{plan.path}.{names[id(parameter)]}", partial(self._read, parameter.detach())
            parameters: Any = module.get_submodule(owner)._parameters
            parameters[own] = AbsentTensor.like(parameter, name, on_read)
        for inner in module.modules():
            if isinstance(inner, nn.RNNBase):
                inner._init_flat_weights()  # otherwise done in the first call, which would count as a state
        self.calls = RecordedCalls(state=snapshot_of(module))
        module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._leave, with_kwargs=True)

    def _read(self, parameter: Tensor, name: str) -> Tensor:
        """Value of a parameter."""
        if not self.running and isinstance(self.run.weights[name], AbsentTensor):
            self.run.weights[name] = parameter.clone()
        return parameter

    def _enter(self, module: Any, args: Any, kwargs: Any) -> None:
        self.running.append(copied(Batch(args, kwargs)))
        self.calls.enter(args, kwargs)

    def _leave(self, module: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.calls.leave()
        batch = self.running.pop()
        if self.calls.refused:
            self.plan.why_float = self.calls.refused
            self.plan.programs.clear()
        else:
            self.graphs(*batch.args, **batch.kwargs)
