"""A diff as a picture."""

from dataclasses import replace

import pytest

from fxq.errors import InputError, RenderError
from fxq.graph.view import GraphView
from fxq.picture.diff import diff
from fxq.picture.diff_picture import picture
from tests.support.pictures import FUSED, chain, changed, keys, lowered, needs_dot

pytestmark = pytest.mark.any_cpu


@pytest.mark.parametrize(("radius", "around"), [(0, 0), (1, 2), (3, 6)])
def test_radius_keeps_the_neighbourhood(radius, around):
    before = chain(40)
    changes = diff(before, changed(before, op20=replace(before["op20"], dtype="uint8")))
    drawn = picture(changes, radius, "t")
    nodes = [key for key in keys(drawn) if not key.startswith("unchanged ")]
    assert nodes == [f"op{i}" for i in range(20 - around // 2, 21 + around // 2)]
    first, last = (box for box in drawn.boxes if box.key.startswith("unchanged "))
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
    styles = {(arrow.tail, arrow.head): arrow.style.style for arrow in drawn.arrows}
    assert styles["became fused", "fused"] == "dotted"
    assert styles["op1", "became fused"] == styles["became fused", "op4"] == "dashed"
    assert styles["op1", "fused"] == styles["fused", "op4"] == styles["op4", "op5"] == "solid"


def test_legend_shows_only_what_is_there():
    header = picture(diff(chain(6), FUSED), 1, "t").header
    assert "+ added" in header and "− removed" in header and "&gt; rewired" in header and "~ changed" not in header


@pytest.mark.one_in(2)
@needs_dot
@pytest.mark.parametrize("ending", [".svg", ".png", ".pdf", ".dot"])
def test_renders(tmp_path, ending):
    path = diff(chain(6), FUSED).render(tmp_path / f"d{ending}")
    assert path.stat().st_size > 500


@needs_dot
def test_no_difference_renders_a_small_picture_that_says_so(tmp_path):
    text = diff(chain(60), chain(60)).render(tmp_path / "d.svg").read_text()
    assert "no difference" in text and text.count('class="node"') == 1


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


def test_what_a_region_replaced_is_one_box():
    drawn = picture(diff(*lowered()), 1, "t")
    (replaced,) = [box for box in drawn.boxes if box.key == "became body"]
    assert all(text in replaced.label for text in ("5 nodes", "quantize  x_q", "conv2d  a", "dequantize  b_weight_dq"))
    assert not {"x_q", "x_dq", "a", "a_q", "b_weight_dq"} & set(keys(drawn))


def test_many_nodes_that_became_one_are_counted():
    before = chain(30)
    nodes = [node for node in before if not node.name.startswith("op")]
    joined = replace(lowered()[1]["body"], name="all", inputs=("x",), origins=tuple(before.by_name)[1:-1])
    after = GraphView((nodes[0], joined, replace(nodes[1], inputs=("all",))))
    (replaced,) = [box for box in picture(diff(before, after), 1, "t").boxes if box.key == "became all"]
    assert "30 × relu" in replaced.label and "op7" not in replaced.label
