"""Order of conversions and ops that only move values, as engines fuse them best."""

from __future__ import annotations

from torch import fx

from fxq.graph.query import is_op, op_of


def convert_before_moves(gm: fx.GraphModule) -> None:
    """Place `dequantize` directly after the integers that it reads, before ops that only move values.

    `dequantize(move(x))` becomes `move(dequantize(x))`, which computes the same. OpenVINO runs a layer on integers only
    in this form; its own passes place the conversion after the move. The result of attention is quantized after the
    moves, so that they can be fused into attention: `dequantize(move(quantize(x)))` becomes
    `dequantize(quantize(move(x)))`.

    Args:
        gm: Region in qdq form, edited in place.
    """
    for node in gm.graph.nodes:
        is_per_tensor = (
            is_op(node, "dequantize") and isinstance(node.kwargs["scale"], float) and "axis" not in node.kwargs
        )
        moves = _moves_before(node) if is_per_tensor else []
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
    """Ops that only move values directly before a node, the last one first, as long as nothing else reads them."""
    moves: list[fx.Node] = []
    value = node.args[0]
    while isinstance(value, fx.Node) and len(value.users) == 1 and len(value.all_input_nodes) == 1:
        op = op_of(value)
        if op is None or not (op.traits.layout and op.traits.view) or value.args[0] is not value.all_input_nodes[0]:
            break
        moves.append(value)
        value = value.args[0]
    return moves
