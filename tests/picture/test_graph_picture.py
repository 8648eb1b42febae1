import time
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from fxq.display.colours import CHANGES, LOOKS
from fxq.graph.info import EngineLayer
from fxq.graph.view import GraphView, NodeView
from fxq.picture import dot as dot_module
from fxq.picture.columns import Picture, columns
from fxq.picture.graph_picture import node_lines, node_tooltip, picture, render
from tests.support.pictures import lowered, needs_dot, network, small

pytestmark = pytest.mark.any_cpu


NASTY = '<img src=x onerror=alert(1)> "quoted" {braces|bars} \\N \\l &amp; 猫 é'


def size_of(svg):
    return tuple(float(svg.split(f'{side}="')[1].split("pt")[0]) for side in ("width", "height"))


def test_boxes_say_everything():
    by_key = {box.key: box for box in picture(small(), "t").boxes}
    conv = by_key["conv"].label
    assert all(
        text in conv for text in ("conv2d_relu", "conv2d stride=2", "→ relu", "weight 64×3×7×7 int8 per channel")
    )
    assert "scale 0.02 · zp 128" in by_key["q"].label
    assert "no int8 kernel" in by_key["slope"].label and "dashed" in by_key["slope"].label
    for text in ("made by: fuse", "stands for: a, b", "options: alpha=2"):
        assert text in by_key["late"].tooltip
    assert "source: net.py:41" in by_key["slope"].tooltip


def test_constants_are_folded_into_their_readers():
    drawn = picture(small(), "t")
    keys = [box.key for box in drawn.boxes]
    assert "w" not in keys and "unread" in keys
    assert [(a.tail, a.head) for a in drawn.arrows].count(("slope", "late")) == 1


def test_legend_counts_every_kind_that_is_there():
    header = picture(small(), "The title").header
    assert "The title" in header and "10 nodes" in header and "input, output · 2" in header
    assert all(look.meaning in header for kind, look in LOOKS.items() if kind != "weight-only")
    assert "float fallback" not in picture(network(1), "t").header


def test_kinds_read_without_colour():
    assert len({look.tag for look in LOOKS.values()}) == len(LOOKS)
    assert len({look.tag for look in CHANGES.values()}) == len(CHANGES)


@needs_dot
def test_model_text_reads_as_text(tmp_path):
    odd = NodeView(
        NASTY,
        "float",
        NASTY,
        (NASTY,),
        NASTY,
        text=NASTY,
        path=NASTY,
        source=NASTY,
        reason=NASTY,
        dtype=NASTY,
        scale=NASTY,
    )
    others = tuple(replace(odd, name=f"{NASTY}{i}", kind=kind, inputs=(NASTY,)) for i, kind in enumerate(LOOKS))
    controls = NodeView("\x00\x1b\ud800\n", "op", "", text="\x07")
    path = render(GraphView((odd, *others, controls)), tmp_path / "g.svg", title=NASTY)
    elements = list(ET.parse(path).getroot().iter())
    texts = [element.text for element in elements if element.tag.endswith("text")]
    assert any(
        text and "<img src=x onerror=alert(1)>" in text and '"quoted" {braces|bars} \\N \\l &amp; 猫' in text
        for text in texts
    )
    assert not any(element.tag.endswith(("img", "script")) for element in elements)
    tips = [value for element in elements for key, value in element.attrib.items() if key.endswith("title")]
    assert any(NASTY in tip for tip in tips)
    render(GraphView((odd, *others, controls)), tmp_path / "g.png", title=NASTY)


# ---- modules


# ---- columns


@pytest.mark.one_in(3)
@needs_dot
@pytest.mark.parametrize("blocks", [8, 16, 50])
def test_a_long_network_has_the_shape_of_a_slide(tmp_path, blocks):
    width, height = size_of(render(network(blocks), tmp_path / "g.svg").read_text())
    assert 1.1 < width / height < 2.3


# ---- time


def test_building_takes_time_in_proportion():
    def seconds(blocks):
        graph = network(blocks)
        start = time.thread_time()
        drawn = picture(graph, "t")
        dot_module.source(drawn)
        columns(drawn, blocks // 6)
        return time.thread_time() - start

    seconds(20)
    small_time, large_time = (min(seconds(n) for _ in range(3)) for n in (60, 240))
    assert large_time < 10 * small_time  # four times the nodes; sixteen would be quadratic


@pytest.mark.slow
@needs_dot
def test_two_thousand_nodes_take_seconds(tmp_path):
    start = time.perf_counter()
    render(network(500), tmp_path / "g.svg")
    assert time.perf_counter() - start < 30


def test_an_empty_picture_has_a_source():
    assert dot_module.source(Picture("x", (), ())).startswith("digraph")


LAYERS = (
    EngineLayer(("x_q",), "Subgraph", "float32", "convert", 12.3),
    EngineLayer((), "Reorder", "uint8", "moves", 40.0),
    EngineLayer(("a", "a_q"), "Convolution", "uint8", "int8", 1234.5),
    EngineLayer(("b",), "Convolution", "float32", "float", 713.0),
)


def test_a_region_says_how_many_ops_and_what_takes_longest():
    _, graph = lowered(LAYERS)
    assert [line.text for line in node_lines(graph["body"])] == [
        "body",
        "7 ops in 4 layers: 2 ms",
        "36% of it in float; slowest:",
        "1.23 ms  a  uint8",
        "713 µs  b  float32",
        "40 µs  Reorder  uint8",
    ]
    assert all(str(layer) in node_tooltip(graph["body"]) for layer in LAYERS)


def test_a_region_without_float_layers_does_not_speak_of_them():
    _, graph = lowered(LAYERS[:-1])
    assert [line.text for line in node_lines(graph["body"])][2] == "slowest:"


def test_a_region_whose_engine_says_nothing_counts_its_ops():
    _, graph = lowered()
    assert [line.text for line in node_lines(graph["body"])] == ["body", "7 ops"]
