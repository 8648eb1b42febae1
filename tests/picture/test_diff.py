import shutil
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn

from fxq.errors import InputError, RenderError
from fxq.graph.view import GraphView, NodeView
from fxq.picture.diff import Diff, diff
from fxq.picture.diff_picture import picture

pytestmark = pytest.mark.any_cpu

needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz's `dot` on the PATH")


def chain(length, name="chain"):
    """input → op0 → op1 → ... → output"""
    nodes = [NodeView("x", "io", "input")]
    for i in range(length):
        before = nodes[-1].name
        nodes.append(
            NodeView(f"op{i}", "op", "relu", inputs=(before,), dtype="float32", shape=(1, 8), origins=(f"op{i}",))
        )
    return GraphView((*nodes, NodeView("output", "io", "output", inputs=(nodes[-1].name,))), name)


def changed(graph, **changes):
    """The graph with some nodes replaced; None removes one."""
    nodes = [changes.get(node.name, node) for node in graph]
    return GraphView(tuple(node for node in nodes if node is not None), "after")


def keys(drawn):
    return [box.key for box in drawn.boxes]


FUSED = changed(
    chain(6),
    op2=None,
    op3=NodeView("fused", "op", "relu_relu", ("relu", "relu"), inputs=("op1",), origins=("op2", "op3")),
    op4=replace(chain(6)["op4"], inputs=("fused",)),
)


def test_every_class_of_difference():
    found = diff(chain(6), FUSED)
    assert (found.added, found.removed, found.rewired) == (("fused",), ("op2", "op3"), ("op4",))
    assert not found.changed
    assert found.became == {"op2": ("fused",), "op3": ("fused",)}
    assert found.counts == {"added": 1, "removed": 2, "changed": 0, "rewired": 1}
    assert found and not found.is_empty


def test_a_change_names_its_fields():
    before = chain(3)
    after = changed(before, op1=replace(before["op1"], kind="int8", dtype="uint8", scale="0.1", zero_point="3"))
    (change,) = diff(before, after).changed
    assert (change.name, change.fields) == ("op1", ("kind", "dtype", "scale", "zero_point"))
    assert change.by_field["dtype"] == "dtype float32 → uint8"
    assert change.by_field["zero_point"] == "zero point none → 3"


def test_a_node_may_be_both_changed_and_rewired():
    before = chain(3)
    found = diff(before, changed(before, op2=replace(before["op2"], dtype="uint8", inputs=("op0",))))
    assert found.rewired == ("op2",) and [change.name for change in found.changed] == ["op2"]


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


@pytest.mark.parametrize(("radius", "around"), [(0, 0), (1, 2), (3, 6)])
def test_radius_keeps_the_neighbourhood(radius, around):
    before = chain(40)
    found = diff(before, changed(before, op20=replace(before["op20"], dtype="uint8")))
    drawn = picture(found, radius, "t")
    nodes = [key for key in keys(drawn) if not key.startswith("left out")]
    assert nodes == [f"op{i}" for i in range(20 - around // 2, 21 + around // 2)]
    first, last = (box for box in drawn.boxes if box.key.startswith("left out"))
    assert f"… {21 - around // 2} unchanged nodes" in first.label  # the input and op0 to op19, less those kept
    assert f"… {20 - around // 2} unchanged nodes" in last.label
    assert keys(drawn)[0] == first.key and keys(drawn)[-1] == last.key


def test_a_radius_below_zero_is_refused(tmp_path):
    with pytest.raises(InputError, match="radius"):
        diff(chain(1), chain(2)).render(tmp_path / "d.dot", radius=-1)


def test_removed_nodes_stand_next_to_what_they_became():
    drawn = picture(diff(chain(6), FUSED), 1, "t")
    i = keys(drawn).index("fused")
    assert keys(drawn)[i - 1] == "became fused"
    assert "op2" in drawn.boxes[i - 1].label and "op3" in drawn.boxes[i - 1].label
    pens = {(arrow.tail, arrow.head): arrow.pen.style for arrow in drawn.arrows}
    assert pens["became fused", "fused"] == "dotted"
    assert pens["op1", "became fused"] == pens["became fused", "op4"] == "dashed"
    assert pens["op1", "fused"] == pens["fused", "op4"] == pens["op4", "op5"] == "solid"


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
    assert "50 ×" in header and "op relu → relu6" in header


def test_legend_shows_only_what_is_there():
    header = picture(diff(chain(6), FUSED), 1, "t").header
    assert "+ added" in header and "− removed" in header and "&gt; rewired" in header and "~ changed" not in header


@needs_dot
@pytest.mark.parametrize("ending", [".svg", ".png", ".pdf", ".dot"])
def test_renders(tmp_path, ending):
    path = diff(chain(6), FUSED).render(tmp_path / f"d{ending}")
    assert path.stat().st_size > 500


@needs_dot
def test_no_difference_renders_a_small_picture_that_says_so(tmp_path):
    text = diff(chain(60), chain(60)).render(tmp_path / "d.svg").read_text()
    assert "no difference" in text and text.count('class="node"') == 2  # the header and one box


@needs_dot
def test_many_changes_are_laid_out_in_columns(tmp_path):
    before = chain(120)
    after = GraphView(tuple(replace(n, label="relu6") if n.label == "relu" else n for n in before))
    svg = diff(before, after).render(tmp_path / "d.svg").read_text()
    width, height = (float(svg.split(f'{side}="')[1].split("pt")[0]) for side in ("width", "height"))
    assert 1 < width / height < 2.5


def test_a_wrong_ending_is_refused(tmp_path):
    with pytest.raises(RenderError, match=r"\.svg, \.png, \.pdf, \.dot"):
        diff(chain(1), chain(2)).render(tmp_path / "d.jpg")


def test_time_grows_with_the_nodes_not_their_square():
    def seconds(length):
        before = chain(length)
        after = GraphView(
            tuple(replace(n, name=f"new_{n.name}", inputs=tuple(f"new_{i}" for i in n.inputs)) for n in before)
        )
        start = time.perf_counter()
        picture(diff(before, after), 1, "t")
        return time.perf_counter() - start

    seconds(100)
    small, large = (min(seconds(n) for _ in range(3)) for n in (500, 2000))
    assert large < 10 * small  # four times the nodes; sixteen would be quadratic
