"""The picture of candidates: every point where it belongs."""

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxq.tuning.pareto_picture import HEIGHT, WIDTH, ParetoPoint, pareto_svg

SVG = "{http://www.w3.org/2000/svg}"


def circles(svg):
    drawn = ElementTree.fromstring(svg).iter(f"{SVG}circle")
    return [(float(c.get("cx")), float(c.get("cy")), float(c.get("r")), c.find(f"{SVG}title").text) for c in drawn]


def test_points_lie_by_cost_and_score():
    points = [
        ParetoPoint(0.0, 20.0, "a", front=True),
        ParetoPoint(2.0, 40.0, "b < c", front=True, chosen=True),
        ParetoPoint(1, 10, "d"),
    ]
    svg = pareto_svg(points, 30.0, "ms", "dB")
    (ax, ay, small, _), (bx, by, large, label), (dx, dy, _, _) = circles(svg)
    assert ax < dx < bx and by < ay < dy and large > small and label == "b < c"
    line = next(ElementTree.fromstring(svg).iter(f"{SVG}polyline")).get("points")
    assert line == f"{ax},{ay} {bx},{by}"
    assert "target: 30" in svg and ">ms<" in svg


number = st.floats(-1e9, 1e9, allow_nan=False)


@given(st.lists(st.tuples(number, number), max_size=5), number)
def test_all_is_inside(pairs, least):
    svg = pareto_svg([ParetoPoint(x, y, "p", True) for x, y in pairs], least, "across", "up")
    assert len(circles(svg)) == len(pairs)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y, _, _ in circles(svg))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_left_out(value):
    assert len(circles(pareto_svg([ParetoPoint(0, value, "a"), ParetoPoint(1, 2, "b")], 1.0, "", ""))) == 1
