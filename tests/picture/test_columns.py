"""Pictures in columns: nested modules, order, cuts, and arrows that are cut."""

from dataclasses import replace

import pytest

from fxq.graph.view import GraphView
from fxq.picture.columns import Box, Group, boxes_of, columns, in_columns, nest
from fxq.picture.graph_picture import picture
from tests.support.pictures import network

pytestmark = pytest.mark.any_cpu


def _paths(group):
    return [_paths_of(item) for item in group.items if isinstance(item, Group)]


def _paths_of(group):
    return (group.path, _paths(group)) if _paths(group) else group.path


def boxes(*where):
    return [Box(f"b{i}", "x", 40, path=path) for i, path in enumerate(where)]


def test_modules_nest():
    tree = nest(boxes("", "a.0.c", "a.0.d", "a.0.e", "a.1.c", "a.1.d", "a.1.e", ""))
    assert _paths(tree) == [("a", ["a.0", "a.1"])]


def test_a_module_with_one_child_is_named_once():
    assert _paths(nest(boxes("features.0.x", "features.0.y", "features.0.z"))) == ["features.0"]


def test_small_modules_have_no_frame():
    assert _paths(nest(boxes("a", "a", "b", "b"))) == []


def test_a_node_without_a_path_belongs_where_its_neighbours_are():
    assert nest(boxes("a.0", "a.0", "", "a.0", "b")).items[0].size == 4


def test_a_module_called_again_later_gets_a_second_frame():
    assert _paths(nest(boxes("a", "a", "a", "b", "b", "b", "a", "a", "a"))) == ["a", "b", "a"]


def test_columns_keep_the_order_and_cut_between_modules():
    drawn = picture(network(12), "t")
    runs = columns(drawn, 4)
    assert [box for run in runs for box in run] == list(drawn.boxes)
    assert len(runs) == 4
    for run in runs[:-1]:
        assert run[-1].key.startswith("add")


def test_columns_are_alike_in_height():
    heights = [len(run) for run in columns(picture(network(40), "t"), 8)]
    assert max(heights) <= 2 * min(heights)


def test_an_arrow_between_columns_ends_and_begins_at_a_name():
    graph = network(16)
    reading_x = GraphView(tuple(replace(n, inputs=(*n.inputs, "x")) if n.label == "add" else n for n in graph))
    drawn = picture(reading_x, "t")
    parts, arrows = in_columns(drawn, 4)
    column = {box.key: c for c, part in enumerate(parts) for box in boxes_of(part)}
    label = {box.key: box.label for part in parts for box in boxes_of(part)}
    assert len(parts) == 4
    assert all(column[arrow.tail] == column[arrow.head] for arrow in arrows)
    from_x = [arrow for arrow in arrows if ">x →<" in label[arrow.tail]]
    assert {column[arrow.tail] for arrow in from_x} == {1, 2, 3}
    inside = [arrow for arrow in drawn.arrows if column[arrow.tail] == column[arrow.head]]
    (to_others,) = [arrow for arrow in arrows if arrow.tail == "x" and arrow not in inside]
    assert f"and {len(from_x) - 1} more" in label[to_others.head]
    assert set(inside) <= set(arrows)
