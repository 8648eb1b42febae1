"""Near misses: rules that almost matched, with the reason why matching stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxq.rewriting.pattern import Rule

MIN_MATCHED_OPS = 2
"""Matched ops of a near miss. Smaller patterns must match whole, and then be refused."""


@dataclass(frozen=True)
class NearMiss:
    """Rule that almost matched at a node, and the reason why it did not.

    Attributes:
        rule: name of the rule.
        source: `file:line` of its pattern.
        node: name, in the graph before the pass, of the node that was tried as the pattern's first output.
        matched: number of ops that matched: at least two, or all of them.
        of: number of ops in the pattern.
        reason: why matching stopped. If all ops matched: a user outside the match, a guard, or the pass refused it.
    """

    rule: str
    source: str
    node: str
    matched: int
    of: int
    reason: str

    def __str__(self) -> str:
        return f"{self.rule} ({self.source}) at %{self.node}: {self.matched} of {self.of} ops matched: {self.reason}"


class Refusal:
    """Furthest point that matching of one rule at one node reached. Its reason is formatted on demand.

    Attributes:
        matched: number of ops that matched; the size of the pattern plus 1 if all matched and were then refused; -1
            before the first try.
    """

    __slots__ = ("_about", "_why", "matched")

    def __init__(self) -> None:
        self.matched = -1
        self._why: Callable[..., str] = str
        self._about: tuple[Any, ...] = ("not tried",)

    def record(self, matched: int, why: Callable[..., str], *about: Any) -> None:
        """Record a reason, `why(*about)`, if more ops matched than before."""
        if matched > self.matched:
            self.matched, self._why, self._about = matched, why, about

    @property
    def reason(self) -> str:
        """Reason why matching stopped."""
        return self._why(*self._about)


class NearMisses:
    """Collector of the near misses of one pass: for each rule and node, that of the last try."""

    def __init__(self) -> None:
        self._refusals: dict[fx.Node, dict[Rule, Refusal]] = {}

    def record(self, rule: Rule, node: fx.Node, refusal: Refusal) -> None:
        """Record that a rule was tried at a node and did not match."""
        if refusal.matched >= MIN_MATCHED_OPS or refusal.matched > rule.size:
            self._refusals.setdefault(node, {})[rule] = refusal
        elif node in self._refusals:
            self._refusals[node].pop(rule, None)

    def discard_matched(self, rule: Rule, nodes: Sequence[fx.Node]) -> None:
        """Drop the near misses of rules up to this size at nodes that this rule matched: they are no news."""
        for node in nodes:
            refusals = self._refusals.get(node)
            if refusals:
                self._refusals[node] = {missed: r for missed, r in refusals.items() if missed.size > rule.size}

    def all(self) -> tuple[NearMiss, ...]:
        """Near misses with their reasons as text."""
        return tuple(
            NearMiss(rule.name, rule.source, node.name, min(refusal.matched, rule.size), rule.size, refusal.reason)
            for node, refusals in self._refusals.items()
            for rule, refusal in refusals.items()
        )
