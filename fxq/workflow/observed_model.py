"""The observed model, between prepare and convert: the graph with what finds the ranges of values."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import fx, nn

from fxq.common.data import Batch
from fxq.common.isolation import autocast_on
from fxq.display.notebook import html
from fxq.display.tables import line, text
from fxq.errors import InputError
from fxq.pipeline.float_values import FloatValues
from fxq.pipeline.history import History
from fxq.pipeline.manager import PassManager
from fxq.pipeline.samples import record
from fxq.quant.observer_base import Observer


class ObservedModel(fx.GraphModule):
    """The model with observers, ready for calibration: call it on data, then `fxq.convert` it, as often as you like.

    Attributes:
        manager: the pipeline so far.
        traced: the pipeline behind tracing, from where it can be run with another recipe.
        unfused: the graph before anything was fused, as lines.
        batches_seen: number of calls since it was prepared.
        others: with `backend="fastest"`, the same model as other backends see it, which is shown the same data.
        same_as: which of these, or 0 for the first, has the same graph, and sees the data in its place.
        absent: the backends that this machine has not, and why.
        stored_in: the checkpoint that the last calibration was written to, and how many batches were seen then.
    """

    manager: PassManager
    traced: PassManager
    unfused: tuple[str | None, ...]
    batches_seen: int
    others: tuple[ObservedModel, ...] | None = None
    same_as: int | None = None
    absent: Mapping[str, str] = MappingProxyType({})
    stored_in: tuple[Path, int] | None = None

    @classmethod
    def from_manager(cls, manager: PassManager, traced: PassManager, unfused: tuple[str | None, ...]) -> ObservedModel:
        """Wrap the graph of a manager that has inserted observers."""
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
        """The first value whose range is to be found on data; empty where all are measured at run time, or float."""
        observers = (module for module in self.modules() if isinstance(module, Observer) and not module.paused)
        return next((observer.name for observer in observers), "")

    def take_calibration(self, other: ObservedModel) -> None:
        """Take over what another model with the same graph has seen."""
        self.batches_seen, self.manager.context.samples[:] = other.batches_seen, other.manager.context.samples
        for name, module in other.named_modules():
            if isinstance(module, Observer):
                self.set_submodule(name, copy.deepcopy(module))

    def forget_float_values(self) -> None:
        """Free the float outputs of layers that calibration and conversion cache; another conversion computes them."""
        for one in (self, *(self.others or ())):
            one.manager.context.floats.clear()
            one.manager.context.floats = FloatValues()

    def _repr_html_(self) -> str:
        """In a notebook: how far it is, and the passes so far."""
        seen = f": {self.batches_seen} batch{'' if self.batches_seen == 1 else 'es'} seen"
        return html([line(text("ObservedModel", "strong"), seen)]) + self.history._repr_html_()

    def __deepcopy__(self, memo: dict[int, Any]) -> ObservedModel:
        manager = copy.copy(self.manager)
        manager.gm = super().__deepcopy__(memo)
        known = manager.context
        manager.context = replace(
            known, samples=list(known.samples), floats=FloatValues(), units=dict(known.units), regions={}
        )
        manager.history, manager._views = copy.deepcopy(self.history, memo), {}
        copied = ObservedModel.from_manager(manager, self.traced, self.unfused)
        copied.batches_seen, copied.absent, copied.same_as = self.batches_seen, self.absent, self.same_as
        copied.others = copy.deepcopy(self.others, memo)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        raise InputError(
            "an observed model cannot be pickled: it holds the float model and a pipeline that has not run to its end. "
            "copy.deepcopy it, or pickle the quantized model."
        )


def _record(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count the batch, and keep a few samples of the first ones."""
    assert isinstance(model, ObservedModel)
    on = autocast_on()
    if on:
        raise InputError(
            f"torch.autocast is on for {', '.join(on)}, so that the observers would see values of lower precision than "
            "the quantized model computes. Call the observed model outside it, or use fxq.calibrate."
        )
    record(model.manager.context, Batch(args, kwargs))
    model.batches_seen += 1
    for other in model.others or ():
        if other.same_as is None:
            other(*args, **kwargs)
