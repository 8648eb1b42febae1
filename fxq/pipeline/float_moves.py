"""Edits by which ops read and move floats in place of integers."""

from __future__ import annotations

from torch import fx

from fxq.graph.info import Decision, Plan
from fxq.graph.query import plan_of
from fxq.patterns.conversion_rules import has_float_reader, has_integer_reader, move_unrounded, read_float
from fxq.pipeline.candidates import UNREAD
from fxq.rewriting.match import Match
from fxq.rewriting.rewriter import Rewriter


def move_floats(rewriter: Rewriter, value: fx.Node) -> None:
    """Let the chain of data-moving ops that ends with `value` move floats, so that `value` is not rounded twice.

    Before: transpose(dequantize(quantize(reshape(dequantize(quantize(x))))))    After: transpose(reshape(x))
    The rule `move_unrounded` (`patterns/conversion_rules.py`) rewrites each op. The decision is about the whole chain:
    it begins after the last op whose integers have another reader. If a kernel that emits only integers computes `x`,
    nothing is changed.
    """
    chain: list[Match] = []
    node = value
    while not has_integer_reader(value) and (match := rewriter.match_at(move_unrounded, node)) is not None:
        chain.append(match)
        node = match.x.node
    plan = plan_of(node)
    if plan is not None and plan.emits is not None:
        return
    for match in chain:
        rewriter.rewrite(match)
        decision = Decision("float", "no integer neighbour", UNREAD, decided_by=rewriter.name)
        rewriter.describe(match.root.node, plan=Plan(decision))
    rewriter.erase_unused()


def read_floats(rewriter: Rewriter) -> None:
    """Apply `read_float` to the values with a float reader. At all others it is not applicable, and no near miss."""
    for node in rewriter.nodes("quantize"):
        match = rewriter.match_at(read_float, node) if has_float_reader(node) else None
        if match is not None:
            rewriter.rewrite(match)
