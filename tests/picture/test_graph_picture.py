import shutil
import subprocess
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import pytest

from fxq.errors import RenderError
from fxq.graph.view import GraphView, NodeView
from fxq.picture import dot as dot_module
from fxq.picture import routing as sheet
from fxq.picture.columns import Box, Group, Picture, columns, nest
from fxq.picture.graph_picture import picture, render
from fxq.text.colours import CHANGES, LOOKS, clip, escape

pytestmark = pytest.mark.any_cpu

needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz's `dot` on the PATH")
NASTY = '<img src=x onerror=alert(1)> "quoted" {braces|bars} \\N \\l &amp; 猫 é'


def small():
    """A bit of every kind."""
    return GraphView(
        (
            NodeView("x", "io", "input", shape=(1, 3, 8, 8), dtype="float32"),
            NodeView("w", "constant", "conv.weight", shape=(64, 3, 7, 7), dtype="int8", scale="0.1..0.2 (axis 0)"),
            NodeView("q", "convert", "quantize", inputs=("x",), dtype="uint8", scale="0.02", zero_point="128"),
            NodeView(
                "conv", "int8", "conv2d_relu", ("conv2d(stride=(2, 2))", "relu"), inputs=("q", "w"), path="body.conv"
            ),
            NodeView("flat", "moves", "flatten", inputs=("conv",), path="body.flat"),
            NodeView("seen", "observer", "Histogram", inputs=("flat",), path="body.flat"),
            NodeView("slope", "float", "prelu", inputs=("seen",), reason="no int8 kernel", source="net.py:41"),
            NodeView(
                "late", "op", "add", inputs=("slope", "slope"), options="alpha=2", made_by="fuse", origins=("a", "b")
            ),
            NodeView("size", "size", "size", inputs=("slope",)),
            NodeView("unread", "constant", "left.over", shape=(2,)),
            NodeView("output", "io", "output", inputs=("late",)),
        ),
        "small",
    )


def network(blocks):
    """Residual blocks `layer<i>.<j>`: three ops and an add each."""
    nodes, last = [NodeView("x", "io", "input")], "x"
    for i in range(blocks):
        path, start = f"layer{i // 4}.{i % 4}", last
        for part in ("conv1", "conv2", "conv3"):
            name = f"{path}.{part}".replace(".", "_")
            shape = (1, 64, 56, 56)
            nodes.append(
                NodeView(name, "int8", "conv2d", inputs=(last,), path=f"{path}.{part}", shape=shape, dtype="uint8")
            )
            last = name
        nodes.append(NodeView(f"add{i}", "int8", "add", inputs=(last, start), path=path))
        last = f"add{i}"
    return GraphView((*nodes, NodeView("output", "io", "output", inputs=(last,))), "network")


def size_of(svg):
    return tuple(float(svg.split(f'{side}="')[1].split("pt")[0]) for side in ("width", "height"))


STARTS = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF", ".dot": b"digraph"}


@needs_dot
@pytest.mark.parametrize("ending", STARTS)
@pytest.mark.parametrize("graph", [small(), network(14), GraphView(())], ids=["small", "network", "empty"])
def test_every_format(tmp_path, graph, ending):
    path = render(graph, str(tmp_path / "new folder" / f"g{ending}"))
    assert path == tmp_path / "new folder" / f"g{ending}"
    assert path.read_bytes().startswith(STARTS[ending])


@pytest.mark.parametrize("name", ["g.jpg", "g", "g.SVGZ"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(RenderError, match=r"\.svg, \.png, \.pdf, \.dot"):
        render(small(), tmp_path / name)


def test_without_dot_svg_says_how_to_install_it_and_dot_text_works(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RenderError, match=r"apt install graphviz.*brew install graphviz.*\.dot"):
        render(small(), tmp_path / "g.svg")
    assert not (tmp_path / "g.svg").exists()
    assert "conv2d_relu" in render(small(), tmp_path / "g.dot").read_text()


def test_a_path_that_cannot_be_written_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RenderError, match="cannot write"):
        render(small(), tmp_path / "file" / "g.dot")


@needs_dot
def test_dot_text_is_good_dot(tmp_path):
    path = render(network(3), tmp_path / "g.dot")
    subprocess.run(["dot", "-Tsvg", str(path), "-o", str(tmp_path / "g.svg")], check=True, timeout=60)


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
    assert all(look.meaning in header for look in LOOKS.values())
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


@pytest.mark.parametrize("text", ["", "\x00", 'a<b>&"\\'])
def test_escaped_text_is_never_empty_nor_markup(text):
    assert escape(text) and not set(escape(text)) & set('<>"\\\x00')


def test_long_names_are_clipped_in_the_middle():
    assert clip("a" * 30 + "b" * 30, 20) == "a" * 13 + "…" + "b" * 6


# ---- modules


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


@needs_dot
def test_modules_are_clusters_of_the_svg(tmp_path):
    svg = render(network(4), tmp_path / "g.svg").read_text()
    assert svg.count('class="cluster"') >= 4 and ">layer0.3<" in svg


# ---- columns


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


@needs_dot
@pytest.mark.parametrize("blocks", [8, 16, 50])
def test_a_long_network_has_the_shape_of_a_slide(tmp_path, blocks):
    width, height = size_of(render(network(blocks), tmp_path / "g.svg").read_text())
    assert 1.1 < width / height < 2.3


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


@needs_dot
def test_where_dot_fails_with_frames_the_column_is_drawn_without(tmp_path, monkeypatch):
    def run(text, form, **options):
        if form == "json0" and 'subgraph "cluster' in text:
            raise RenderError("dot failed: assertion")
        return dot_module.run(text, form, **options)

    monkeypatch.setattr(sheet, "run", run)
    svg = render(network(8), tmp_path / "g.svg").read_text()
    assert 'class="cluster"' not in svg and "layer0_3_conv1" in svg


# ---- time


def test_building_takes_time_in_proportion():
    def seconds(blocks):
        graph = network(blocks)
        start = time.perf_counter()
        drawn = picture(graph, "t")
        dot_module.source(drawn)
        columns(drawn, blocks // 6)
        return time.perf_counter() - start

    seconds(20)
    small_time, large_time = (min(seconds(n) for _ in range(3)) for n in (125, 500))
    assert large_time < 10 * small_time  # four times the nodes; sixteen would be quadratic


@needs_dot
def test_two_thousand_nodes_take_seconds(tmp_path):
    start = time.perf_counter()
    render(network(500), tmp_path / "g.svg")
    assert time.perf_counter() - start < 30


def test_an_empty_picture_has_a_source():
    assert dot_module.source(Picture("x", (), ())).startswith("digraph")
