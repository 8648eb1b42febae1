"""The history of a model as data for the report page."""

import pytest

import fxq
from fxq.display.colours import clip
from fxq.picture.graph_picture import constants_read, node_lines
from fxq.report.report import report_data
from tests.support.helpers import REFERENCE
from tests.support.models import batch, build

pytestmark = [pytest.mark.any_cpu, pytest.mark.usefixtures("one_round")]


def test_the_graph_after_every_pass_is_there_in_order(qmodel, data):
    assert [p["name"] for p in data["passes"]] == qmodel.history.names
    for step, snapshot in zip(data["passes"], qmodel.history, strict=True):
        assert [data["nodes"][i]["name"] for i in step["nodes"]] == [node.name for node in snapshot.graph]
        assert step["stage"] == str(snapshot.stage)
        assert step["ms"] == pytest.approx(1e3 * snapshot.seconds, abs=1e-3)


def test_nodes_say_all_that_their_views_say(qmodel, data):
    last = {data["nodes"][i]["name"]: data["nodes"][i] for i in data["passes"][-1]["nodes"]}
    defaults = {"body": (), "options": "", "inputs": (), "path": "", "source": "", "made_by": "", "shape": None}
    defaults |= {"dtype": "", "scale": "", "zero_point": "", "reason": "", "note": "", "origins": ()}
    defaults |= {"precisions": (), "layers": ()}
    constants = constants_read(qmodel.history[-1].graph)
    for node in qmodel.history[-1].graph:
        values = {**defaults, **last[node.name]}
        lines = [text for _, text in values.pop("lines")]
        assert values == vars(node)
        assert lines == [clip(line.text) for line in node_lines(node, constants.get(node.name, ()))]
        assert clip(node.label if node.kind == "constant" else node.name) in lines
    (conv,) = [last[node.name] for node in qmodel.history[-1].graph if node.path == "stem" and node.kind == "int8"]
    assert ["detail", "stem_bias_corrected 8"] in conv["lines"]


def test_nodes_that_look_the_same_are_there_once(qmodel, data):
    graphs = [(snapshot.graph, constants_read(snapshot.graph)) for snapshot in qmodel.history]
    views = {(node, *constants.get(node.name, ())) for graph, constants in graphs for node in graph}
    assert len(data["nodes"]) == len(views)
    assert sum(len(p["nodes"]) for p in data["passes"]) > 2 * len(views)


def test_a_pass_says_what_it_changed(qmodel, data):
    fuse = qmodel.history.names.index("fuse")
    before, after = qmodel.history[fuse - 1].graph, qmodel.history[fuse].graph
    changed, order = (
        data["passes"][fuse]["diff"],
        [data["nodes"][i]["name"] for i in data["passes"][fuse]["diff"]["order"]],
    )
    assert data["passes"][0]["diff"] is None
    for name, (heir,) in changed["became"].items():
        assert (changed["mark"][name], changed["mark"][heir]) == ("removed", "added")
        assert name in before.by_name and set(before[name].origins) <= set(after[heir].origins)
        assert order.index(name) < order.index(heir)
    assert changed["became"]
    rewired = [name for name, mark in changed["mark"].items() if mark == "rewired"]
    assert rewired and all(changed["told"][name][0].startswith("reads ") for name in rewired)


def test_rewrites_are_the_edits(qmodel, data):
    (fuse,) = [p for p in data["passes"] if p["name"] == "fuse"]
    edits = qmodel.history["fuse"].edits
    assert edits
    assert fuse["rewrites"] == [vars(edit) for edit in edits]


def test_rules_that_almost_matched_are_there_with_the_reason():
    apart = REFERENCE.override(fxq.by_op("relu"), fxq.FLOAT)  # no unit of a convolution and a ReLU
    qmodel = fxq.quantize(build("residual"), apart, data=[batch("residual")])
    misses = {s.name: [vars(miss) for miss in s.near] for s in qmodel.history}
    assert any(misses.values())
    assert {p["name"]: p["near"] for p in report_data(qmodel)["passes"]} == misses
