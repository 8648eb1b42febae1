"""observe-all: observers on every value, for recipes that are not known yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fxq.errors import CalibrationError
from fxq.graph.analysis.fill_constants import FillConstants
from fxq.graph.info import info
from fxq.quant.observer_base import Observer
from fxq.quant.observers import observer_for
from fxq.quant.spec import TensorSpec
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class ObserveAll(Pass):
    """Put observers behind every value that could take an integer form, whatever a recipe makes of it.

    Before: relu(conv2d(x, w, b))    After: watch(relu(watch(conv2d(watch(x), w, b))))
    Keeps: the output, exactly.

    It runs in the place of `fuse`, so that values inside of units are observed, too. `fxq.prepare(...,
    observe_all=True)` runs it instead of all passes from `fuse` to `insert-observers`.

    Attributes:
        observers: the observers of the recipe, as specs name them. A histogram is always there: it can answer for most
            others (see `Observer.answer_as`).
    """

    observers: tuple[str, ...] = ()

    name: ClassVar[str] = "observe-all"
    needs: ClassVar[Stage] = Stage.CANONICAL
    gives: ClassVar[Stage] = Stage.CANONICAL

    def run(self, rewriter: Rewriter) -> None:
        """One `Watch` for each value of floats that is no constant."""
        fill_constants = FillConstants(rewriter.gm)
        for value in rewriter.nodes():
            constants, about = tuple(sorted(fill_constants.of(value))), info(value)
            if value.op in ("get_attr", "output") or about.dtype is not torch.float32:
                continue
            watch = Watch([made for found in dict.fromkeys(((), constants)) for made in self._made(found)])
            target = rewriter.module(watch, value.name, "fxq_observers")
            node = rewriter.node("call_module", target, (value,), after=value, name=f"{value.name}_observer")
            rewriter.describe(
                node, shape=about.shape, dtype=about.dtype, path=about.path, source=about.source, origins=()
            )
            rewriter.reroute(value, node, only=lambda user, node=node: user is not node)  # type: ignore[misc]

    def _made(self, constants: tuple[float, ...]) -> list[Observer]:
        """The observers of a value: of those that say the same, one."""
        made: list[Observer] = []
        for text in ("histogram", *self.observers):
            observer = observer_for(TensorSpec(observer=text), constants=constants)
            if all(known.answer_as(observer) is None for known in made):
                made.append(observer)
        return made


class Watch(nn.Module):
    """Shows a value to several observers. Those that cannot take it, as it holds NaN or Inf, are taken off.

    Which of the values are to be integers is not known yet: a value that is not may be what it likes.
    """

    def __init__(self, observers: list[Observer]) -> None:
        super().__init__()
        self.observers = nn.ModuleList(observers)

    def forward(self, x: Tensor) -> Tensor:
        """The value, float32, any shape, as it came."""
        for name, observer in list(self.observers.named_children()):
            try:
                observer(x)
            except CalibrationError:
                delattr(self.observers, name)
        return x
