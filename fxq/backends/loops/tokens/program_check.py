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
"""Minimum SQNR where inputs of layers are rounded: values halfway between two integers may go to either."""
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
        difference: text about the last value that has less; empty if none has.
    """

    program: Callable[..., Any]
    names: Sequence[str]
    values: list[Tensor]
    least: float
    new: Sequence[int | None] = ()
    difference: str = ""

    def __call__(self, *inputs: Any) -> Any:
        results = self.program(*inputs)
        is_list = isinstance(results, list)
        new = self.new or [None] * len(self.values)
        of_program = results if is_list else [results]
        for name, value, result, count in zip(self.names, self.values, of_program, new, strict=True):
            is_like = value.shape == result.shape
            ratio = sqnr(_last(value, count), _last(result, count)) if is_like else float("nan")
            if not ratio >= self.least:  # NaN included
                self.difference = f"{name}, {ratio:.1f} dB, at least {self.least:.0f} dB were expected"
        return self.values if is_list else self.values[0]


def _last(value: Tensor, count: int | None) -> Tensor:
    """Last entries of a value along axis 2; None: all of it."""
    return value if count is None else value[:, :, -count:]
