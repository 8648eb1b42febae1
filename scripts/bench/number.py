"""One measured number, its target, and the table of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from tabulate import tabulate
from torch import Tensor


@dataclass(frozen=True)
class Number:
    """One measured number.

    Attributes:
        subject: what was measured: a network, or a part of the pipeline.
        what: the quantity, with its unit.
        value: the number.
        least, most: the bounds that it must keep, where it has a target.
        detail: what it was computed from.
    """

    subject: str
    quantity: str
    value: float
    least: float | None = None
    most: float | None = None
    detail: str = ""

    @property
    def target(self) -> str:
        """The bound as text; empty where there is none."""
        if self.least is not None:
            return f"≥ {self.least:g}"
        return f"≤ {self.most:g}" if self.most is not None else ""

    @property
    def passed(self) -> bool | None:
        """Whether it keeps its bound; None where there is none."""
        if self.least is None and self.most is None:
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)


Subject = Callable[[float], Iterator[Number]]
"""Measures one subject, each latency for so many seconds."""


def table(numbers: list[Number]) -> str:
    marks = {True: "pass", False: "FAIL", None: ""}
    rows = [[n.subject, n.quantity, n.value, n.target, marks[n.passed], n.detail] for n in numbers]
    return tabulate(rows, headers=["subject", "quantity", "measured", "target", "", "from"], floatfmt=".2f")


def sqnr(reference: Tensor, other: Tensor) -> float:
    """Signal to quantization noise in dB: 10 log10(sum(reference^2) / sum((reference - other)^2))."""
    noise = (reference.double() - other.double()).square().sum()
    return float(10 * torch.log10(reference.double().square().sum() / noise))
