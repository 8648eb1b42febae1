"""Where conversions stand beside ops that only move values."""

from __future__ import annotations

from torch import fx

from fxq.graph.query import is_op, op_of


def convert_before_moves(gm: fx.GraphModule) -> None:
    """Let `dequantize` stand right behind the integers, and ops that only move values behind it.

    `dequantize(move(x))` becomes `move(dequantize(x))`, which is the same. OpenVINO takes a layer for one of integers
    only there: it moves the conversion behind the move itself. What attention returns is rounded behind the moves, so
    that they can become part of it: `dequantize(move(quantize(x)))` becomes `dequantize(quantize(move(x)))`.

    Args:
        gm: a region in qdq form; it is edited in place.
    """
    for node in gm.graph.nodes:
        one_grid = is_op(node, "dequantize") and isinstance(node.kwargs["scale"], float) and "axis" not in node.kwargs
        moves = _moves_before(node) if one_grid else []
        if not moves:
            continue
        first, last, integers = moves[-1], moves[0], moves[-1].args[0]
        assert isinstance(integers, fx.Node)
        of_attention = is_op(integers, "quantize") and is_op(integers.args[0], "scaled_dot_product_attention")
        if of_attention and len(integers.users) == 1:
            first.args = (integers.args[0], *first.args[1:])
            last.append(integers)
            integers.args = (last, *integers.args[1:])
            node.args = (integers, *node.args[1:])
        else:
            node.replace_all_uses_with(last)
            first.prepend(node)
            node.args = (integers, *node.args[1:])
            first.args = (node, *first.args[1:])


def _moves_before(node: fx.Node) -> list[fx.Node]:
    """The ops that only move values on the way to a node, from behind, where nothing else reads them on the way."""
    moves: list[fx.Node] = []
    read = node.args[0]
    while isinstance(read, fx.Node) and len(read.users) == 1 and len(read.all_input_nodes) == 1:
        op = op_of(read)
        if op is None or not (op.traits.layout and op.traits.view) or read.args[0] is not read.all_input_nodes[0]:
            break
        moves.append(read)
        read = read.args[0]
    return moves
