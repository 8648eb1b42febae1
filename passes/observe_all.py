"""observe-all: put observers on every float value, for recipes that are chosen later."""

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
    """Insert observers after every float value, so that any recipe can be converted from one calibration.

    Before: relu(conv2d(x, w, b))    After: observers(relu(observers(conv2d(observers(x), w, b))))
    Keeps: the output, exactly.

    `fxq.prepare(..., observe_all=True)` runs it instead of all passes from `fuse` to `insert-observers`. Nothing is
    fused yet, so that values inside of units are observed, too.

    Args:
        observers: names of the observers of the recipe. A histogram is always included, since the ranges of most other
            observers can be computed from it (see `Observer.answer_as`).
    """

    observers: tuple[str, ...] = ()

    name: ClassVar[str] = "observe-all"
    needs: ClassVar[Stage] = Stage.CANONICAL
    gives: ClassVar[Stage] = Stage.CANONICAL

    def run(self, rewriter: Rewriter) -> None:
        """Insert an `ObserverSet` after each float32 value that is not a constant."""
        fill_constants = FillConstants(rewriter.gm)
        for value in rewriter.nodes():
            constants, about = tuple(sorted(fill_constants.of(value))), info(value)
            if value.op in ("get_attr", "output") or about.dtype is not torch.float32:
                continue
            observers = ObserverSet([o for left_out in dict.fromkeys(((), constants)) for o in self._for(left_out)])
            target = rewriter.module(observers, value.name, "fxq_observers")
            node = rewriter.node("call_module", target, (value,), after=value, name=f"{value.name}_observer")
            rewriter.describe(
                node, shape=about.shape, dtype=about.dtype, path=about.path, source=about.source, origins=()
            )
            rewriter.reroute(value, node, only=lambda user, node=node: user is not node)  # type: ignore[misc]

    def _for(self, constants: tuple[float, ...]) -> list[Observer]:
        """Observers of a value that leave out fill constants. None of them can answer for another."""
        observers: list[Observer] = []
        for text in ("histogram", *self.observers):
            observer = observer_for(TensorSpec(observer=text), constants=constants)
            if all(earlier.answer_as(observer) is None for earlier in observers):
                observers.append(observer)
        return observers


class ObserverSet(nn.Module):
    """Set of observers of one value. An observer that refuses a value, since it holds NaN or Inf, is removed.

    That is no error, since it is not decided yet whether the value becomes integers.
    """

    def __init__(self, observers: list[Observer]) -> None:
        super().__init__()
        self.observers = nn.ModuleList(observers)

    def forward(self, x: Tensor) -> Tensor:
        """Return x, float32 of any shape, after all observers have seen it."""
        for name, observer in list(self.observers.named_children()):
            try:
                observer(x)
            except CalibrationError:
                delattr(self.observers, name)
        return x
