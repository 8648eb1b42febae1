"""Where things are in the graphs of the report: nothing lies on anything else, and edges run around boxes."""

from itertools import combinations, pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.report.report import report_data, write_page
from tests.support.browser import opened
from tests.support.helpers import REFERENCE
from tests.support.models import batch, build

pytestmark = pytest.mark.any_cpu


class Branches(nn.Module):
    """Three modules in parallel, twice, and a value that jumps over both."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(self.branch(k) for k in (1, 3, 5)) for _ in range(2))
        self.stem, self.head = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(24, 2, 1)

    @staticmethod
    def branch(kernel):
        return nn.Sequential(nn.Conv2d(12, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, kernel, padding=kernel // 2), nn.ReLU())

    def forward(self, x):
        first = x = F.relu(self.stem(x))
        for block in self.blocks:
            x = torch.cat([branch(x) for branch in block], 1)
        return self.head(torch.cat([x, first], 1)), first.mean((2, 3))


class Twice(nn.Module):
    """A module of several ops called twice, with something in between."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())

    def forward(self, x, y):
        return {"sum": self.body(x) + self.body(torch.tanh(y))}


def long_chain():
    """More layers than one group shows."""
    return nn.Sequential(*(layer for _ in range(31) for layer in (nn.Linear(4, 4), nn.ReLU())))


NETWORKS = {
    "branches": (Branches, [torch.rand(1, 3, 8, 8)]),
    "twice": (Twice, [(torch.rand(2, 4), torch.rand(2, 4))]),
    "chain": (long_chain, [torch.rand(2, 4)]),
    "dense": (lambda: build("dense"), [batch("dense", 2)]),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), [torch.rand(1, 5, 16)]),
}


@pytest.fixture(scope="module", params=NETWORKS)
def report(request, tmp_path_factory):
    make, data = NETWORKS[request.param]
    qmodel = fxq.quantize(make().eval(), REFERENCE, data=data)
    return qmodel, write_page(report_data(qmodel), tmp_path_factory.mktemp("layout") / f"{request.param}.html")


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 9])
def test_nothing_lies_on_anything_else_after_any_pass(browser, report, depth):
    qmodel, path = report
    with opened(browser, path, f"depth={depth}") as page:
        for mode in ("graph", "diff"):
            page.evaluate("mode => fxq.go({ mode })", mode)
            for i in range(len(qmodel.history)):
                page.evaluate("i => fxq.step(i)", i)
                drawn = page.evaluate("fxq.drawn()")
                assert drawn["boxes"]
                assert list(overlaps(drawn)) == []
                assert list(crossings(drawn)) == []


@pytest.mark.one_in(5)
def test_every_edge_is_drawn(browser, report):
    qmodel, path = report
    with opened(browser, path, "depth=9") as page:
        ends = {(wire["from"], wire["to"]) for wire in page.evaluate("fxq.drawn()")["wires"]}
    final = qmodel.history[-1].graph
    assert ends >= {
        (name, node.name)
        for node in final
        for name in node.inputs
        if final[name].kind != "constant" and node.kind != "constant"
    }


def overlaps(drawn):
    """Boxes or frames of one group that share an area, and those that leave it."""
    frames = {frame["name"]: frame for frame in drawn["frames"]}
    for name, things in by_frame(drawn).items():
        for thing in things:
            if name in frames and not contains(frames[name], thing):
                yield "outside", thing["name"], name
        for thing, neighbour in combinations(things, 2):
            if overlap(thing, neighbour):
                yield "overlap", thing["name"], neighbour["name"]


def by_frame(drawn):
    """Boxes and frames by the group that they are in."""
    things = {}
    for thing in (*drawn["boxes"], *drawn["frames"]):
        things.setdefault(thing["frame"], []).append(thing)
    return things


def contains(outer, inner):
    return all(
        outer[low] <= inner[low] + 0.1 and inner[low] + inner[size] <= outer[low] + outer[size] + 0.1
        for low, size in (("x", "width"), ("y", "height"))
    )


def overlap(a, b):
    return all(
        a[low] < b[low] + b[size] - 0.1 and b[low] < a[low] + a[size] - 0.1
        for low, size in (("x", "width"), ("y", "height"))
    )


def crossings(drawn):
    """Wires that run through a box or a frame of the group that they are in."""
    things = by_frame(drawn)
    for wire in drawn["wires"]:
        points = [point for stroke in wire["strokes"] for point in sampled(stroke)]
        for thing in things[wire["frame"]]:
            if any(inside(thing, *point) for point in points):
                yield wire["from"], wire["to"], "through", thing["name"]


def inside(box, x, y, edge=2):
    return (
        box["x"] + edge < x < box["x"] + box["width"] - edge and box["y"] + edge < y < box["y"] + box["height"] - edge
    )


def sampled(stroke, steps=8):
    """Points along a stroke: straight, or as the page curves it, vertical at both ends of every piece."""
    points = list(zip(stroke["points"][::2], stroke["points"][1::2], strict=True))
    for (px, py), (qx, qy) in pairwise(points):
        for k in range(1, steps):
            t = k / steps
            s = t if stroke["ortho"] else t * t * (3 - 2 * t)
            y = py + t * (qy - py) if stroke["ortho"] else py + (qy - py) * (1.5 * t * (1 - t) + t**3)
            yield px + s * (qx - px), y


@pytest.mark.one_in(5)
def test_two_graphs_side_by_side_move_together(browser, report):
    _, path = report
    with opened(browser, path, "depth=9&pass=fuse&mode=side") as page:
        name = page.evaluate("fxq.drawn('after').boxes[0].name")
        before = page.evaluate("name => fxq.where(name, 'after')", name)
        page.locator(".pane[data-side=before] canvas.graph").hover()
        page.mouse.wheel(0, 300)
        page.evaluate("fxq.painted()")
        assert page.evaluate("name => fxq.where(name, 'after')", name) != before
