"""Whole graphs as they are timed: which of several changes is taken."""

import logging
import time

import torch
from torch import nn

import fxq
from fxq.cost import whole
from fxq.cost.whole import quickest
from fxq.graph.info import info
from fxq.graph.query import plan_of
from fxq.pipeline.in_float import run_in_float
from fxq.rewriting.rewriter import Rewriter
from tests.support.graphs import until


def managed():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    return until(model, torch.randn(2, 8), "propagate", fxq.Recipe.static(backend="x86"))


def test_the_shortest_time_wins(monkeypatch):
    manager = managed()
    before = str(manager.gm.graph)
    monkeypatch.setattr(whole, "lowered_copy", lambda gm, graph, context, change: change)

    def busy(seconds):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    changes = [lambda *a, s=s: busy(s) for s in (0.02, 0.0, 0.01)]
    assert quickest(manager.gm, manager.context, changes) == 1
    assert str(manager.gm.graph) == before


def test_noise_does_not_decide_between_equals(monkeypatch):
    """A later one has to be clearly faster than one before it."""
    manager = managed()
    monkeypatch.setattr(whole, "lowered_copy", lambda gm, graph, context, change: change)
    for times, wanted in (([1.0, 0.95, 0.9], 0), ([1.0, 0.8, 0.75], 1), ([1.0, 0.9, 0.5], 2)):
        monkeypatch.setattr(
            whole, "interleaved", lambda calls, *_, times=times, **__: dict(zip(calls, times, strict=True))
        )
        assert quickest(manager.gm, manager.context, [lambda *a: None] * 3) == wanted


def test_one_that_does_not_run_is_not_taken():
    manager = managed()

    def fails(rewriter, copies):
        raise RuntimeError("no")

    assert quickest(manager.gm, manager.context, [fails, lambda rewriter, copies: None]) == 1
    assert quickest(manager.gm, manager.context, [fails, fails]) == 0


def test_layers_can_return_to_float_in_copies(caplog):
    """The float weights, which no node of a qdq graph reads, are in the copies, too."""
    manager = managed()
    layers = [node for node in manager.gm.graph.nodes if (plan := plan_of(node)) is not None and not plan.in_float]

    def to_float(rewriter, copies):
        for node in layers:
            run_in_float(rewriter, copies[node], "slower", "", "")
        seen.append(sum(info(read).stands_for != "" for copy in copies.values() for read in copy.all_input_nodes))

    seen = []
    with caplog.at_level(logging.DEBUG, "fxq"):
        quickest(manager.gm, manager.context, [to_float])
    assert layers and seen == [0] and "cannot be timed" not in caplog.text


def test_layers_can_return_to_float_in_forks():
    manager, x = managed(), torch.randn(2, 8)
    fork = manager.fork()
    rewriter = Rewriter(fork.gm, fork.context)
    for node in rewriter.nodes():
        if (plan := plan_of(node)) is not None and not plan.in_float:
            run_in_float(rewriter, node, "slower", "", "")
    fork.gm.recompile()
    torch.testing.assert_close(fork.gm(x), manager.gm(x), rtol=0.1, atol=0.05)  # the rounding of 8 bits


def test_a_change_sees_copies_of_the_nodes():
    manager = managed()
    seen = []

    def change(rewriter, copies):
        seen.append(copies)

    quickest(manager.gm, manager.context, [change])
    (copies,) = seen
    assert list(copies) == list(manager.gm.graph.nodes)[:-1] and not set(copies) & set(copies.values())
    assert [n.name for n in copies.values()] == [n.name for n in copies]
