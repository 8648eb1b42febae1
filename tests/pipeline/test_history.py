"""The snapshots of a run: what they hold, how they are found, and how they print."""

import gc
import math
import pickle
import re
import types

import pytest
import torch
from torch import fx, nn

import fxq
from fxq.errors import InputError
from fxq.passes import Canonicalize, Fuse, Trace
from fxq.pipeline.history import Snapshot
from fxq.recipe.pass_base import Stage
from tests.support.graphs import full_text
from tests.support.helpers import REFERENCE, managed
from tests.support.models import two_linears
from tests.support.pictures import lowered

X = torch.linspace(-1, 1, 32).reshape(8, 4)
CHECKED = REFERENCE.with_check("numeric")


def test_a_snapshot_per_pass_by_name_and_number():
    manager = managed(two_linears(), X)
    manager.run([Trace(), Canonicalize(), Fuse()])
    history = manager.history
    assert history.names == ["trace", "canonicalize", "fuse"] and len(history) == 3
    assert history["fuse"] is history[2] is history[-1] and list(history)[1] is history["canonicalize"]
    assert str(history["fuse"].graph) == full_text(manager.gm)
    assert [e.rule for e in history["fuse"].edits] == ["linear_relu"]
    assert all(s.seconds > 0 and s.sqnr is None for s in history)
    with pytest.raises(InputError, match="unknown pass in the history 'fues'; did you mean 'fuse'"):
        history["fues"]


def test_a_snapshot_stays_as_it_was():
    manager = managed(two_linears(), X)
    manager.run([Trace(), Canonicalize()])
    before = str(manager.history["canonicalize"].graph)
    manager.run([Fuse()])
    assert str(manager.history["canonicalize"].graph) == before != str(manager.history["fuse"].graph)


def test_a_region_counts_as_its_ops():
    step = Snapshot("lower", 0.1, (), lowered()[1], Stage.LOWERED)
    assert step.count() == 7
    assert (step.count("int8"), step.count("float"), step.count("convert")) == (5 + 2, 2 + 1, 1)


def test_the_table():
    history = fxq.quantize(two_linears(), REFERENCE, data=[X]).history
    header, _, *rows = str(history).splitlines()
    assert re.split("  +", header) == [
        *("pass", "ms", "edits", "nodes", "int8 ops", "conversions", "float ops", "edits by rule")
    ]
    assert [row.split()[0] for row in rows] == history.names
    fused = dict(zip(history.names, (row.split() for row in rows), strict=True))["fuse"]
    assert fused[2:7] == ["1", "4", "0", "0", "0"]  # edits; input, unit, linear and output; nothing is decided yet
    assert fused[7:] == ["1", "linear_relu"]
    decided = dict(zip(history.names, (row.split() for row in rows), strict=True))["insert-qdq"]
    assert decided[4:] == ["2", "6", "0"]  # two layers; quantize, dequantize of input and between, two weights


def test_the_table_shows_sqnr_where_it_was_measured():
    history = fxq.quantize(two_linears(), CHECKED, data=[X]).history
    assert "  SQNR dB  " in str(history).splitlines()[0]
    assert [s.sqnr for s in history][:2] == [math.inf, math.inf]


def test_a_snapshot_prints_its_name_edits_and_graph():
    manager = managed(two_linears(), X)
    manager.run([Trace(), Canonicalize(), Fuse()])
    first, *rest = str(manager.history["fuse"]).splitlines()
    assert first.startswith("fuse: 1 edits in ") and "\n".join(rest) == full_text(manager.gm)


def reachable(start):
    """Every object that `start` refers to, code and types left out."""
    skipped = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
    seen, todo = {}, [start]
    while todo:
        value = todo.pop()
        if id(value) not in seen and not isinstance(value, skipped):
            seen[id(value)] = value
            todo.extend(gc.get_referents(value))
    return list(seen.values())


def test_snapshots_hold_no_tensors_modules_or_nodes():
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3)).eval()
    history = fxq.quantize(model, REFERENCE, data=[torch.rand(1, 3, 8, 8)]).history
    objects = reachable(history)
    assert any(isinstance(v, fxq.results.Snapshot) for v in objects)  # the walk goes in
    assert not [v for v in objects if isinstance(v, (torch.Tensor, nn.Module, fx.Node, fx.Graph))]
    assert len(pickle.dumps(history)) < 64 * 64 * 9 * 4 / 2  # less than half of one weight
