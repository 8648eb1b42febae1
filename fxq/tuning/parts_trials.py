"""Evaluation of candidate recipes on a model that is quantized in parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fxq.common.data import Batch
from fxq.common.isolation import untouched, without_autocast
from fxq.common.metrics import tensors
from fxq.errors import InputError
from fxq.ledger.ledger import Ledger
from fxq.parts.choose import call, recipe_of_part
from fxq.parts.observed_parts import ObservedParts
from fxq.parts.parts_model import with_parts
from fxq.parts.quantize_parts import PartsRun
from fxq.pipeline.manager import PassManager
from fxq.recipe.recipe import Recipe
from fxq.tuning.trials import Trials, settled
from fxq.tuning.tunable_layer import TunableLayer, layers_of
from fxq.workflow.observed_model import ObservedModel
from fxq.workflow.steps import converted, prepared


class PartsTrials(Trials):
    """Calibrated model in parts on which candidate recipes are evaluated. Candidates are of the float model's class."""

    def prepare(self) -> None:
        """Choose the parts, and prepare them with observers on all values."""

        def prepare(module: nn.Module, recipe: Recipe, example: Batch) -> ObservedModel:
            return prepared(module, recipe, example, observe_all=True)

        self.run = PartsRun(self.model, self.recipe, self.batches[0], prepare).begin("")

    def calibrate(self, advance: Callable[[], None] = lambda: None) -> None:
        """Run the float model and the observers on the data, see `Trials.calibrate`."""
        with torch.no_grad(), without_autocast():
            for batch in self.batches:
                with untouched(self.model):
                    self.wants.append([t.detach() for t in tensors(call(self.model, batch))])
                advance()
        self.check_wants()
        ObservedParts(self.run).calibrate(iter(self.batches), len(self.batches), False)

    @property
    def types(self) -> Mapping[str, type[nn.Module]]:
        """Module type by module path."""
        return {path: type(module) for path, module in self.model.named_modules(remove_duplicate=False)}

    def ledger(self) -> Ledger:
        """Return the rows of the ledgers of all parts, with the prices of ops."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a low SQNR is expected here
            self._ledgers = {
                name: converted(observed, recipe_of_part(self.recipe, plan.path, plan.module)).ledger
                for plan in self.run.choice.parts
                for name, observed in plan.programs.items()
            }
        return Ledger(tuple(entry for ledger in self._ledgers.values() for entry in ledger))

    def layers(self, recipe: Recipe, ledger: Ledger) -> list[TunableLayer]:
        """Return the layers of all parts that run on integers with a recipe."""
        layers: dict[Any, TunableLayer] = {}
        for own in self._managers(recipe).values():
            for name, manager in own.items():
                rows = self._ledgers[name] if ledger else Ledger(())
                layers = {**{layer.selectors: layer for layer in layers_of(manager, rows)}, **layers}
        order = {path: i for i, path in enumerate(self.types)}
        return sorted(layers.values(), key=lambda layer: order.get(layer.path, len(order)))

    def managers(self, recipe: Recipe) -> list[PassManager]:
        """Return the managers of all qdq graphs of a recipe."""
        return [manager for own in self._managers(recipe).values() for manager in own.values()]

    def candidate_model(self, recipe: Recipe) -> nn.Module:
        """Return a model of the float model's class, whose parts compute in exact integer arithmetic."""
        graphs = {
            path: {name: manager.gm.eval() for name, manager in own.items()}
            for path, own in self._managers(recipe).items()
        }
        model: nn.Module = with_parts(self.model, self.run.programs_of(graphs), self.run.weights)
        return model.eval()

    def sqnr(self, gm: nn.Module) -> float:
        """Return dB of a model's output against the float model's over all data, see `Trials.sqnr`.

        Raises:
            InputError: the shape of an output depends on values.
        """
        with torch.no_grad():
            for batch, wants in zip(self.batches, self.wants, strict=True):
                if [t.shape for t in tensors(call(gm, batch))] != [t.shape for t in wants]:
                    raise InputError(
                        "the shape of an output depends on values, so that it has no SQNR: pass a metric to fxq.search."
                    )
        return super().sqnr(gm)

    def _managers(self, recipe: Recipe) -> dict[str, dict[str, PassManager]]:
        """Managers of the qdq graphs of a recipe, by the path of the part and the name of the graph."""
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {
                plan.path: {
                    name: settled(observed, recipe_of_part(recipe, plan.path, plan.module))
                    for name, observed in plan.programs.items()
                }
                for plan in self.run.choice.parts
            }

    def __copy__(self) -> PartsTrials:
        copied = object.__new__(PartsTrials)
        vars(copied).update(vars(self))
        return copied

    def _pickled(self) -> bytes:
        raise InputError(
            "a model that is quantized in parts cannot be sent to other processes: use a ThreadPoolExecutor or no "
            "executor."
        )
