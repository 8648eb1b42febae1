"""Whole graphs as they are timed: which of several changes is taken."""

import time

import torch
from torch import nn

import fxq
from fxq.cost import whole
from fxq.cost.whole import quickest
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


def test_a_change_sees_copies_of_the_nodes():
    manager = managed()
    seen = []

    def change(rewriter, copies):
        seen.append(copies)

    quickest(manager.gm, manager.context, [change])
    (copies,) = seen
    assert list(copies) == list(manager.gm.graph.nodes)[:-1] and not set(copies) & set(copies.values())
    assert [n.name for n in copies.values()] == [n.name for n in copies]
