"""`ProgramCheck` compares the results of a program with those of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxq.common.metrics import sqnr

MIN_AGREEMENT_DB = 80.0
"""Minimum SQNR of the results of programs against the graph. They differ in the order of float32 sums."""
MIN_ROUNDED_AGREEMENT_DB = 40.0
"""Minimum SQNR where inputs of layers or entries of states are rounded: values halfway between two integers may go to
either."""
MIN_JOINED_AGREEMENT_DB = 15.0
"""Minimum SQNR of a program with attentions that rounds inputs of layers. If one value goes to the other integer, all
later layers differ. The programs between attentions, with the same steps, have been compared one by one before."""


@dataclass
class ProgramCheck:
    """Program that compares its results with those of the graph, and returns those of the graph.

    Each program of a call is thus run on the graph's own values. Otherwise a value that one program rounds to another
    integer, which is no error, would change all values after it.

    Attributes:
        program: computes some values of the graph.
        names: names of these values.
        values: these values, as the graph computes them.
        least: minimum SQNR of each.
        new: number of last entries of each state, along axis 2, that are compared; None for other values, and for all.
        ratios: SQNR of each value in the last call.
    """

    program: Callable[..., Any]
    names: Sequence[str]
    values: list[Tensor]
    least: float
    new: Sequence[int | None] = ()
    ratios: Sequence[float] = ()

    def __call__(self, *inputs: Any) -> Any:
        results = self.program(*inputs)
        is_list = isinstance(results, list)
        new = self.new or [None] * len(self.values)
        self.ratios = [
            sqnr(_last(value, count), _last(result, count)) if value.shape == result.shape else float("nan")
            for value, result, count in zip(self.values, results if is_list else [results], new, strict=True)
        ]
        return self.values if is_list else self.values[0]


def _last(value: Tensor, count: int | None) -> Tensor:
    """Last entries of a value along axis 2; None: all of it."""
    return value if count is None else value[:, :, -count:]


class BestAgreement:
    """Best agreement of the results of programs with those of the graph, over some calls.

    Where inputs of layers are rounded, a value halfway between two integers may go to the other one. What follows then
    differs in this call, but a wrong program differs in all calls.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._best: dict[tuple[int, int], float] = {}  # by number of the program, and of its result

    def difference(self, checks: Sequence[ProgramCheck]) -> str:
        """Note the results of a call. Returns text about one that has not agreed in any call; empty if all have."""
        self.calls, text = self.calls + 1, ""
        for i, check in enumerate(checks):
            for k, (name, ratio) in enumerate(zip(check.names, check.ratios, strict=True)):
                best = self._best.get((i, k), float("-inf"))
                best = self._best[i, k] = ratio if ratio > best else best  # NaN never is
                if best < check.least:
                    text = f"{name}, {best:.1f} dB, at least {check.least:.0f} dB were expected"
        return text
