from dataclasses import replace

import pytest
import torch
from torch import nn

import fxq
from fxq.display.tables import plain
from fxq.graph.view import GraphView, NodeView
from fxq.picture.diff import diff
from fxq.picture.diff_summary import MAX_SUMMARY_LINES, summary
from tests.support.helpers import REFERENCE, steps


def pairs(count):
    """input → conv0 → relu0 → conv1 → relu1 → ..., every conv with a weight."""
    nodes = [NodeView("x", "io", "input")]
    for i in range(count):
        before = nodes[-1].name
        nodes += [
            NodeView(f"w{i}", "constant", f"l{i}.weight"),
            NodeView(f"conv{i}", "op", "conv2d", inputs=(before, f"w{i}"), dtype="float32", origins=(f"conv{i}",)),
            NodeView(f"relu{i}", "op", "relu", inputs=(f"conv{i}",), dtype="float32", origins=(f"relu{i}",)),
        ]
    return GraphView(tuple(nodes), "before")


def fused(count, made_by="fuse: conv2d_relu (patterns/fusions/conv.py:12)"):
    """Graph of `pairs(count)` with a unit for every pair."""
    nodes = [NodeView("x", "io", "input")]
    for i in range(count):
        before = nodes[-1].name
        nodes += [
            NodeView(f"w{i}", "constant", f"l{i}.weight"),
            NodeView(
                f"unit{i}",
                "op",
                "conv2d_relu",
                inputs=(before, f"w{i}"),
                made_by=made_by,
                origins=(f"conv{i}", f"relu{i}"),
            ),
        ]
    return GraphView(tuple(nodes), "after")


def told(before, after):
    """Lines of the summary as text."""
    return [" ".join(line.split()) for line in plain([summary(diff(before, after))]).splitlines()]


def changed(graph, **changes):
    return GraphView(
        tuple(replace(node, **changes) if node.kind in ("op", "int8") else node for node in graph), "after"
    )


def test_what_was_replaced_alike_is_told_once():
    assert told(pairs(9), fused(9)) == ["+ 9 × conv2d, relu → conv2d_relu unit0 … unit8 fuse: conv2d_relu"]


def test_one_and_two():
    assert told(pairs(1), fused(1)) == ["+ 1 × conv2d, relu → conv2d_relu unit0 fuse: conv2d_relu"]
    assert told(pairs(2), fused(2)) == ["+ 2 × conv2d, relu → conv2d_relu unit0, unit1 fuse: conv2d_relu"]


def test_what_changed_alike():
    after = changed(pairs(3), kind="int8", dtype="uint8", scale="0.1", zero_point="3")
    assert told(pairs(3), after) == [
        "~ 3 × conv2d op → int8; float32 → uint8; gets a scale conv0 … conv2",
        "~ 3 × relu op → int8; float32 → uint8; gets a scale relu0 … relu2",
    ]
    scaled = changed(after, scale="0.2")
    assert told(after, scaled) == [
        "~ 3 × conv2d another scale conv0 … conv2",
        "~ 3 × relu another scale relu0 … relu2",
    ]
    assert "loses its scale" in told(after, pairs(3))[0]


def test_an_op_that_became_another():
    after = GraphView(tuple(replace(n, label="x86.conv") if n.label == "conv2d" else n for n in pairs(4)))
    assert told(pairs(4), after) == ["~ 4 × conv2d → x86.conv conv0 … conv3"]


def test_the_most_frequent_comes_first():
    after = GraphView(tuple(n for n in pairs(3) if n.name not in ("relu0", "relu1", "conv2")))
    assert [line.split()[:4] for line in told(pairs(3), after)][:2] == [
        ["-", "2", "×", "relu"],
        ["-", "1", "×", "conv2d"],
    ]


def test_a_node_that_takes_in_another():
    """A batch norm that is folded into its conv, which then reads other weights and has the origins of both."""
    before = pairs(2)
    after = GraphView(
        tuple(
            replace(n, inputs=("x", "w9"), origins=(n.name, n.name.replace("conv", "relu"))) if "conv" in n.name else n
            for n in before
            if "relu" not in n.name
        )
    )
    assert told(before, after) == ["> 2 × conv2d, relu → conv2d conv0, conv1"]
    assert diff(before, after).joined == {"relu0": ("conv0",), "relu1": ("conv1",)}
    assert not diff(before, after).became and "went into conv0" in diff(before, after).to_text()


def test_what_reads_something_else():
    before = pairs(3)
    after = GraphView(tuple(replace(n, inputs=("x",)) if n.name in ("relu1", "relu2") else n for n in before))
    assert told(before, after) == ["> 2 × relu reads conv2d → input relu1, relu2"]
    swapped = GraphView(tuple(replace(n, inputs=n.inputs[::-1]) if n.label == "conv2d" else n for n in before))
    assert told(before, swapped) == ["> 3 × conv2d reads the same values in another order conv0 … conv2"]
    weightless = GraphView(tuple(replace(n, inputs=n.inputs[:1]) if n.label == "conv2d" else n for n in before))
    assert told(before, weightless) == ["> 3 × conv2d reads constant → nothing conv0 … conv2"]


def test_no_more_lines_than_fit_a_screen():
    after = GraphView(tuple(replace(n, label=f"op{i}") for i, n in enumerate(pairs(30))))
    lines = told(pairs(30), after)
    assert len(lines) == MAX_SUMMARY_LINES + 1 and lines[-1] == "and 31 more kinds of change"


def test_print_tells_a_story_where_the_lines_do_not_fit():
    changes = diff(pairs(40), fused(40))
    brief = changes.to_text(full=False).splitlines()
    assert len(brief) == 3 and brief[0] == "before → after: 40 added, 80 removed"
    assert brief[-1] == 'every node: print(diff.to_text()); a picture: diff.render("diff.svg")'
    assert len(changes.to_text().splitlines()) == 121 and str(changes) == changes.to_text()
    small = diff(pairs(2), fused(2))
    assert small.to_text(full=False) == small.to_text()


def test_a_real_network_fits_a_screen():
    torch.manual_seed(0)
    layers = [m for _ in range(20) for m in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
    qmodel = fxq.quantize(nn.Sequential(*layers).eval(), REFERENCE, data=[torch.randn(1, 4, 6, 6)])
    changes = fxq.diff(qmodel.history["decompose"], qmodel.history["fuse"])
    text = changes.to_text(full=False)
    assert "20 ×  conv2d, batch_norm, relu → conv2d_relu" in text and len(text.splitlines()) < 8
    folded = fxq.diff(qmodel.history["decompose"], qmodel.history["fold-batch-norm"])
    assert "20 ×  conv2d, batch_norm → conv2d" in folded.to_text(full=False)
    assert "went into" in folded.to_text()


@pytest.mark.slow
def test_linear_in_the_nodes():
    def work(count):
        changes = diff(pairs(count), fused(count))
        return steps(lambda: summary(changes))

    work(10)
    assert work(200) < 2.3 * work(100)
