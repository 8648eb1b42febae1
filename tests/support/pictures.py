"""Graphs to draw, and helpers for pictures."""

import shutil
from dataclasses import replace

import pytest

from fxq.graph.view import GraphView, NodeView

needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz's `dot` on the PATH")


def small():
    """Graph with a node of every kind."""
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


def lowered(layers=()):
    """A qdq graph, and the same with a region of two outputs, `body`, in its place; its engine's layers."""
    ops = ("conv2d", "relu", "conv2d", "sigmoid", "mul", "add", "mean")
    precisions = ("int8", "int8", "int8", "float", "int8", "int8", "float")
    before = (
        NodeView("x", "io", "input"),
        NodeView("w", "constant", "w", dtype="int8"),
        NodeView("x_q", "convert", "quantize", inputs=("x",)),
        NodeView("x_dq", "convert", "dequantize", inputs=("x_q",)),
        NodeView("a", "int8", "conv2d", inputs=("x_dq", "w"), origins=("a",)),
        NodeView("a_q", "convert", "quantize", inputs=("a",)),
        NodeView("a_dq", "convert", "dequantize", inputs=("a_q",), dtype="float32"),
        NodeView("b_weight_dq", "convert", "dequantize", inputs=("w",)),
        NodeView("b", "int8", "conv2d", inputs=("a_dq", "b_weight_dq"), origins=("b",), dtype="float32"),
        NodeView("y", "float", "bessel", inputs=("b",)),
        NodeView("z_q", "convert", "quantize", inputs=("y",)),
        NodeView("output", "io", "output", inputs=("z_q", "a_dq")),
    )
    after = (
        before[0],
        NodeView(
            "body",
            "int8",
            "engine.region",
            ops,
            inputs=("x",),
            origins=("a", "b"),
            precisions=precisions,
            layers=layers,
        ),
        NodeView("a_dq", "int8", "getitem", inputs=("body",), dtype="float32"),
        NodeView("b", "int8", "getitem", inputs=("body",), origins=("b",), dtype="float32"),
        *before[-3:],
    )
    return GraphView(before, "qdq"), GraphView(after, "lowered")


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
