"""The ops of a unit against a fusion: what its captures are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from fxq.graph.unit import Inner, OpCall
from fxq.rewriting.pattern import PatternNode, Rule

Bound = Mapping[PatternNode, Any]


def captures_of(rule: Rule, calls: Sequence[OpCall]) -> dict[str, Any] | None:
    """What the captures of a fusion are in a unit of these ops, by name; None where it is no unit of that fusion.

    They are as in `OpCall.tensors`: nodes of the outer graph, numbers, None. The fusion's guards are not asked.
    """
    if len(calls) != rule.size:
        return None
    for bound in _bound(rule.root, Inner(len(calls) - 1), calls, {}):
        if len({value for pattern, value in bound.items() if pattern.op is not None}) == rule.size:
            found = {pattern.name: value for pattern, value in bound.items() if pattern.op is None}
            return {name: found[name] for name in rule.captures}
    return None


def op_names(rule: Rule) -> list[str]:
    """The ops of a fusion, sorted."""
    found: dict[PatternNode, str] = {}
    left: list[Any] = list(rule.outputs)
    while left:
        pattern = left.pop()
        if isinstance(pattern, PatternNode) and pattern.op is not None:
            found[pattern] = pattern.op.name
            left.extend(pattern.inputs)
        elif isinstance(pattern, (tuple, list)):
            left.extend(pattern)
    return sorted(found.values())


def _bound(pattern: Any, value: Any, calls: Sequence[OpCall], known: Bound) -> Iterator[Bound]:
    """Every way in which a value is what the pattern says, besides what is known."""
    if isinstance(pattern, (tuple, list)):
        if isinstance(value, (tuple, list)) and len(pattern) == len(value):
            yield from _all_bound(pattern, value, calls, known)
    elif not isinstance(pattern, PatternNode):
        if pattern == value:
            yield known
    elif pattern in known:
        if known[pattern] == value:
            yield known
    elif pattern.op is None:
        if not isinstance(value, Inner):
            yield {**known, pattern: value}
    elif isinstance(value, Inner) and _fits(pattern, calls[value.index]):
        read = [calls[value.index].tensors.get(name) for name in pattern.op.tensors]
        swapped = [[*read[1::-1], *read[2:]]] if pattern.op.commutes else []
        for values in (read, *swapped):
            yield from _all_bound(pattern.inputs, values, calls, {**known, pattern: value})


def _all_bound(patterns: Any, values: Any, calls: Sequence[OpCall], known: Bound) -> Iterator[Bound]:
    ways = [known]
    for pattern, value in zip_longest(patterns, values):
        ways = [way for before in ways for way in _bound(pattern, value, calls, before)]
    yield from ways


def _fits(pattern: PatternNode, call: OpCall) -> bool:
    return call.op is pattern.op and all(call.options[key] == wanted for key, wanted in pattern.options.items())
