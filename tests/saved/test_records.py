"""Records as plain data and back, and every wrong kind of value refused, with its place."""

import json
import math

import pytest
import torch

import fxq
from fxq.graph.info import EngineLayer
from fxq.ledger.float_record import Distribution, FloatRecord, RecordedInput
from fxq.ledger.ledger import Entry, Ledger, ReducedRange
from fxq.recipe.pass_base import Stage
from fxq.saved.records import from_plain, to_plain

pytestmark = pytest.mark.any_cpu
RECORD = FloatRecord(
    {"a": Distribution(-1, 2.5, (1, 2), (-1.0, 2.0))}, (RecordedInput("", (1, 3), torch.float32),), 8, "Net", {"w": 7}
)
LEDGER = Ledger(
    (Entry("a", "a", "conv2d", "int8", macs=9, sqnr=math.inf), Entry("b", "", "relu", "float")),
    None,
    ReducedRange("weights", {"weights": 3.0}),
)


def through_json(kind, value):
    return from_plain(kind, json.loads(json.dumps(to_plain(value))))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (FloatRecord, RECORD),
        (Ledger, LEDGER),
        (tuple[EngineLayer, ...], (EngineLayer(("a", "b"), "Convolution", "int8", "int8", 2.5),)),
        (Stage, Stage.QDQ),
        (torch.dtype | None, torch.uint8),
        (torch.dtype | None, None),
        (dict[str, list[int]], {"a": [1, 2], "b": []}),
        (tuple[str, int], ("a", 1)),
    ],
)
def test_there_and_back(kind, value):
    assert through_json(kind, value) == value


def test_defaults_are_left_out():
    assert to_plain(Entry("a", "b", "relu", "float")) == {"name": "a", "path": "b", "op": "relu", "precision": "float"}


@pytest.mark.parametrize(
    ("kind", "data", "why"),
    [
        (int, True, "expected a int, not True"),
        (int, 1.5, "expected a int, not 1.5"),
        (float, "1", "expected a number, not '1'"),
        (str, None, "expected a string, not None"),
        (torch.dtype, "torch.load", "expected a dtype, not 'torch.load'"),
        (torch.dtype, "__class__", "expected a dtype"),
        (Stage, 70, "expected one of 0, 1"),
        (Stage, [5], "expected one of"),
        (tuple[int, ...], [1, "x"], "1: expected a int, not 'x'"),
        (tuple[int, ...], {"a": 1}, "expected a list"),
        (tuple[int, str], [1], "expected a list of 2"),
        (dict[str, int], [1], "expected a table"),
        (int | None, "x", "expected a int"),
        (FloatRecord, {"mood": 1}, "a FloatRecord has the fields values, .*: see 'mood'"),
        (FloatRecord, {"values": {}}, "see 'inputs'"),
        (
            Ledger,
            {"entries": [{"name": "a", "path": "b", "op": 3, "precision": ""}]},
            "entries: 0: op: expected a string, not 3",
        ),
        (ReducedRange, {"role": "biases", "sqnr": {}}, "role: expected one of"),
        (int, "x" * 1000, r"not 'x+\.\.\.\.$"),
    ],
)
def test_refused(kind, data, why):
    with pytest.raises(fxq.InputError, match=why):
        from_plain(kind, data)


def test_what_no_file_holds():
    for value in (torch.ones(1), {1: 2}, object(), {"a": len}, {1, 2}):
        with pytest.raises(fxq.InputError, match="a file cannot hold"):
            to_plain(value)
