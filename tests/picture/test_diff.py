import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn

from fxq.errors import InputError
from fxq.graph.view import GraphView, NodeView
from fxq.picture.diff import Diff, diff
from fxq.picture.diff_picture import picture
from tests.support.pictures import FUSED, chain, changed, keys, lowered

pytestmark = pytest.mark.any_cpu


def test_every_class_of_difference():
    changes = diff(chain(6), FUSED)
    assert (changes.added, changes.removed, changes.rewired) == (("fused",), ("op2", "op3"), ("op4",))
    assert not changes.changed
    assert changes.became == {"op2": ("fused",), "op3": ("fused",)}
    assert changes.counts == {"added": 1, "removed": 2, "changed": 0, "rewired": 1}
    assert changes and not changes.is_empty


def test_a_change_names_its_fields():
    before = chain(3)
    after = changed(before, op1=replace(before["op1"], kind="int8", dtype="uint8", scale="0.1", zero_point="3"))
    (change,) = diff(before, after).changed
    assert (change.name, change.fields) == ("op1", ("kind", "dtype", "scale", "zero_point"))
    assert change.by_field["dtype"] == "dtype float32 → uint8"
    assert change.by_field["zero_point"] == "zero point none → 3"


def test_a_node_may_be_both_changed_and_rewired():
    before = chain(3)
    changes = diff(before, changed(before, op2=replace(before["op2"], dtype="uint8", inputs=("op0",))))
    assert changes.rewired == ("op2",) and [change.name for change in changes.changed] == ["op2"]


@pytest.mark.parametrize("field", ["path", "source", "made_by", "note", "reason", "text"])
def test_where_a_node_comes_from_is_no_difference(field):
    before = chain(2)
    assert diff(before, changed(before, op1=replace(before["op1"], **{field: "other"}))).is_empty


def test_text_is_aligned_and_says_what_happened():
    before = chain(6)
    after = changed(FUSED, op5=replace(before["op5"], dtype="uint8"))
    assert str(diff(before, after)).splitlines() == [
        "chain → after: 1 added, 2 removed, 1 changed, 1 rewired",
        "-  op2    relu       became fused",
        "-  op3    relu       became fused",
        "+  fused  relu_relu  reads op1",
        "~  op5    relu       dtype float32 → uint8",
        ">  op4    relu       reads op3 → fused",
    ]


def test_text_counts_constants_in_one_line():
    weights = tuple(NodeView(f"w{i}", "constant", f"l{i}.weight") for i in range(9))
    text = str(diff(chain(1), GraphView((*weights, *chain(1)))))
    assert text.splitlines()[1:] == ["+  9 constants  constant  w0, w1, w2, …"]


def test_text_of_no_difference():
    assert str(diff(chain(2), chain(2))) == "chain → chain: no difference"
    assert not diff(chain(2), chain(2))


class Net(nn.Module):
    def forward(self, x):
        return torch.relu(x) + 1


def test_takes_views_snapshots_and_graph_modules():
    gm = fx.symbolic_trace(Net())
    assert diff(gm, gm).is_empty
    assert diff(SimpleNamespace(graph=chain(2)), chain(3)).added == ("op2",)
    assert isinstance(diff(gm, SimpleNamespace(graph=chain(1))), Diff)


@pytest.mark.parametrize("wrong", [None, 3, "fuse", Net()])
def test_refuses_anything_else_and_says_what_it_takes(wrong):
    with pytest.raises(InputError, match=r"before is a .*snapshot.*GraphModule.*GraphView"):
        diff(wrong, chain(1))
    with pytest.raises(InputError, match="after is a"):
        diff(chain(1), wrong)


def test_a_change_of_a_weight_shows_in_its_reader():
    def graph(dtype):
        weight = NodeView("w", "constant", "fc.weight", shape=(4, 4), dtype=dtype)
        return GraphView((NodeView("x", "io", "input"), weight, NodeView("fc", "op", "linear", inputs=("x", "w"))))

    drawn = picture(diff(graph("float32"), graph("int8")), 1, "t")
    assert keys(drawn) == ["x", "fc"]
    assert "weight dtype float32 → int8" in drawn.boxes[1].label and "~ changed" in drawn.boxes[1].label


def test_a_change_everywhere_is_summed_up():
    before = chain(50)
    after = GraphView(tuple(replace(n, label="relu6") if n.label == "relu" else n for n in before))
    header = picture(diff(before, after), 1, "t").header
    assert "50 ×" in header and "~ relu → relu6" in header


@pytest.mark.slow
def test_time_grows_with_the_nodes_not_their_square():
    def seconds(length):
        before = chain(length)
        after = GraphView(
            tuple(replace(n, name=f"new_{n.name}", inputs=tuple(f"new_{i}" for i in n.inputs)) for n in before)
        )
        start = time.thread_time()
        picture(diff(before, after), 1, "t")
        return time.thread_time() - start

    seconds(100)
    small, large = (min(seconds(n) for _ in range(3)) for n in (250, 1000))
    assert large < 10 * small  # four times the nodes; sixteen would be quadratic


def test_conversions_inside_a_region_became_the_region():
    """A conversion between the region and an op outside did not become the region."""
    changes = diff(*lowered())
    inside = ("x_q", "x_dq", "a", "a_q", "b_weight_dq")
    assert changes.became == dict.fromkeys(inside, ("body",))
    assert list(changes.became) == list(inside)
    assert "+  1 ×  3 dequantize" not in changes.to_text() and "x_q" in changes.to_text()
    (line,) = [line for line in changes.to_text(full=False).splitlines() if "engine.region" in line and "+" in line]
    assert "body" in line
