"""Rules that almost matched: why matching stopped, kept where somebody may ask for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxq.rewriting.pattern import Rule

LEAST = 2
"""Ops of a pattern. One that found fewer of them did not come near, unless those are all that it has."""


@dataclass(frozen=True)
class NearMiss:
    """A rule that almost matched, and why it did not.

    Attributes:
        rule: its name.
        source: `file:line` of its pattern.
        node: the node that was tried as the pattern's first output, by its name in the graph before the pass.
        matched: how many ops of the pattern were found: two at least, or all of them.
        of: how many ops the pattern has.
        reason: why it stopped there; where all were found, what refused them: a reader outside, a guard, the pass.
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
    """The furthest point that matching reached. Why it stopped there is worded when somebody asks.

    Attributes:
        matched: ops of the pattern that were found; one more than it has where all were found and then refused; -1
            before anything was tried.
    """

    __slots__ = ("_about", "_why", "matched")

    def __init__(self) -> None:
        self.matched = -1
        self._why: Callable[..., str] = str
        self._about: tuple[Any, ...] = ("not tried",)

    def record(self, matched: int, why: Callable[..., str], *about: Any) -> None:
        """Keep a reason, `why(*about)`, if it lies further than what is known."""
        if matched > self.matched:
            self.matched, self._why, self._about = matched, why, about

    @property
    def reason(self) -> str:
        """Why it stopped there."""
        return self._why(*self._about)


class NearMisses:
    """Collects the near misses of one pass: one for each rule and node, the last try of several."""

    def __init__(self) -> None:
        self._found: dict[fx.Node, dict[Rule, Refusal]] = {}

    def note(self, rule: Rule, node: fx.Node, refusal: Refusal) -> None:
        """A rule was tried at a node, and did not match."""
        if refusal.matched >= LEAST or refusal.matched > rule.size:
            self._found.setdefault(node, {})[rule] = refusal
        elif node in self._found:
            self._found[node].pop(rule, None)

    def took(self, rule: Rule, nodes: Sequence[fx.Node]) -> None:
        """A rule took these nodes: smaller ones would have lost them, and those of its size were not the right ones."""
        for node in nodes:
            known = self._found.get(node)
            if known:
                self._found[node] = {other: r for other, r in known.items() if other.size > rule.size}

    def all(self) -> tuple[NearMiss, ...]:
        """The near misses, in words."""
        return tuple(
            NearMiss(rule.name, rule.source, node.name, min(refusal.matched, rule.size), rule.size, refusal.reason)
            for node, found in self._found.items()
            for rule, refusal in found.items()
        )
