"""The observed model, which `fxq.prepare` returns: the graph with observers that collect the ranges of values."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import fx, nn

from fxq.common.data import Batch, first_of
from fxq.common.isolation import autocast_on
from fxq.display.notebook import html
from fxq.display.tables import line, text
from fxq.errors import InputError
from fxq.pipeline.float_values import FloatValues
from fxq.pipeline.history import History
from fxq.pipeline.manager import PassManager
from fxq.pipeline.samples import record
from fxq.quant.observer_base import Observer
from fxq.workflow.time_estimate import Estimate


class ObservedModel(fx.GraphModule):
    """Model with observers: calibrate it by calling it on data, then `fxq.convert` it, any number of times.

    Attributes:
        manager: the pipeline so far.
        traced: the pipeline after tracing, from which it can run with another recipe.
        unfused: the graph before fusion, as lines.
        batches_seen: number of calls since it was prepared.
        others: with `backend="fastest"`, the models prepared for the other backends, which run on the same data.
        left_out: with `backend="fastest"`, those of backends that are left out of the calibration, see `without_slow`.
        same_as: index of a model with the same graph, whose statistics are copied, among the first model, `others` and
            `left_out`; None if this model runs on the data itself.
        time_estimate: estimate of the time of a call; None if unknown.
        absent: backends that are not available, with the reason for each.
        stored_in: path of the checkpoint of the last calibration, and the number of batches it had seen.
    """

    manager: PassManager
    traced: PassManager
    unfused: tuple[str | None, ...]
    batches_seen: int
    others: tuple[ObservedModel, ...] | None = None
    left_out: tuple[ObservedModel, ...] = ()
    same_as: int | None = None
    time_estimate: Estimate | None = None
    absent: Mapping[str, str] = MappingProxyType({})
    stored_in: tuple[Path, int] | None = None

    @classmethod
    def from_manager(cls, manager: PassManager, traced: PassManager, unfused: tuple[str | None, ...]) -> ObservedModel:
        """Wrap the graph of a manager whose passes have inserted observers."""
        observed = cls(manager.gm, manager.gm.graph, class_name="ObservedModel")
        observed.manager, observed.batches_seen = manager, 0
        observed.traced, observed.unfused = traced, unfused
        manager.gm = observed
        observed.eval()
        observed.register_forward_pre_hook(_record, with_kwargs=True)
        return observed

    @property
    def history(self) -> History:
        """One snapshot per pass so far."""
        return self.manager.history

    @property
    def calibrated(self) -> str:
        """Name of the first value whose range needs calibration; empty if all ranges are dynamic or values float."""
        observers = (module for module in self.modules() if isinstance(module, Observer) and not module.paused)
        return next((observer.name for observer in observers), "")

    def calibrate_on(self, batch: Mapping[str, Any]) -> None:
        """Calibrate on a batch of keyword inputs.

        Without ranges to calibrate, samples are recorded, and the graph runs on one of them only, since passes that
        need the samples run it again.
        """
        if not self.calibrated and self.manager.context.divisible:
            _record(self, (), dict(batch))
            self.forward(**first_of(Batch((), batch), 1).kwargs)
        else:
            nn.Module.__call__(self, **batch)  # the __call__ of `fx.GraphModule` would print errors

    def take_calibration(self, other: ObservedModel) -> None:
        """Copy the statistics and recorded samples of another model with the same graph."""
        self.batches_seen, self.manager.context.samples[:] = other.batches_seen, other.manager.context.samples
        for name, module in other.named_modules():
            if isinstance(module, Observer):
                self.set_submodule(name, copy.deepcopy(module))

    def forget_float_values(self) -> None:
        """Free the cached float outputs of layers; the next conversion computes them again."""
        for model in (self, *(self.others or ()), *self.left_out):
            model.manager.context.floats.clear()
            model.manager.context.floats = FloatValues()

    def _repr_html_(self) -> str:
        """Notebook view: the number of batches seen, and the history."""
        seen = f": {self.batches_seen} batch{'' if self.batches_seen == 1 else 'es'} seen"
        return html([line(text("ObservedModel", "strong"), seen)]) + self.history._repr_html_()

    def __deepcopy__(self, memo: dict[int, Any]) -> ObservedModel:
        manager = copy.copy(self.manager)
        manager.gm = super().__deepcopy__(memo)
        context = manager.context
        manager.context = replace(
            context, samples=list(context.samples), floats=FloatValues(), units=dict(context.units), regions={}
        )
        manager.history, manager._views = copy.deepcopy(self.history, memo), {}
        copied = ObservedModel.from_manager(manager, self.traced, self.unfused)
        copied.batches_seen, copied.absent, copied.same_as = self.batches_seen, self.absent, self.same_as
        copied.others, copied.left_out = copy.deepcopy((self.others, self.left_out), memo)
        copied.time_estimate = self.time_estimate
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        raise InputError(
            "an observed model cannot be pickled: it holds the float model and an unfinished pipeline. Copy it with "
            "copy.deepcopy, save its calibration (fxq.calibrate with a checkpoint), or pickle the quantized model."
        )


def _record(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: count the batch, and record samples of the first batches."""
    assert isinstance(model, ObservedModel)
    on = autocast_on()
    if on:
        raise InputError(
            f"torch.autocast is on for {', '.join(on)}, so observers would see values of lower precision than the "
            "quantized model computes. Call the observed model outside autocast, or use fxq.calibrate."
        )
    record(model.manager.context, Batch(args, kwargs))
    model.batches_seen += 1
    for sibling in model.others or ():
        if sibling.same_as is None:
            sibling(*args, **kwargs)
