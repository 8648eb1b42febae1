"""Boxes and edges on a sheet."""

from dataclasses import replace
from itertools import pairwise

import pytest

from fxq.graph.view import GraphView
from fxq.picture import routing as sheet
from fxq.picture.graph_picture import picture
from tests.pictures import needs_dot, network

pytestmark = pytest.mark.any_cpu


@needs_dot
def test_a_value_read_everywhere_reaches_every_column():
    graph = network(16)
    view = GraphView(tuple(replace(n, inputs=(*n.inputs, "x")) if n.label == "add" else n for n in graph))
    placed = sheet.lay_out(picture(view, "t"))
    from_x = [column for wire, column, _ in placed.lines if wire.tail == "x"]
    assert sorted(from_x) == list(range(1, len(placed.columns)))
    for wire, column, corners in placed.lines:
        assert corners[0] == placed.points[wire.exit] and corners[-1] == placed.points[wire.entry(column)]
        for (x, y), (u, v) in pairwise(corners):
            assert x == u or y == v


@needs_dot
def test_boxes_do_not_overlap():
    placed = sheet.lay_out(picture(network(20), "t"))
    frames = [
        [float(n) for n in where["bb"].split(",")]
        for name, where in placed.placed.items()
        if name.startswith("cluster 0")
    ]
    assert len(frames) > 4
    for i, (a, b, c, d) in enumerate(frames):
        assert not any(a < g and e < c and b < h and f < d for e, f, g, h in frames[i + 1 :])
