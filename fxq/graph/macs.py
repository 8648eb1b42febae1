"""Multiply-accumulates of an op, from shapes: what `ledger.coverage` weighs ops by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, fx, nn

from fxq.graph.info import info
from fxq.graph.query import flat_nodes, op_of, submodule

Shape = tuple[int, ...]


def macs_of(gm: fx.GraphModule, node: fx.Node) -> int:
    """Multiply-accumulates of one call, for the batch that the shapes were found with; 0 where there are none.

    convolution          values of its output x weights of one output channel
    its transpose        values of its input x weights of one input channel
    linear, matmul, bmm  values of its output x length of the inner axis
    attention            queries x keys x (length of a query + length of a value), for each head
    an unknown module    for each weight inside: its values x the positions that the module works on. This is exact for
                         recurrent layers and for layers that keep the positions, and an estimate for others.

    Other ops (norms, activations, additions) count as 0: beside these they are small, and it is these that integer
    kernels are for.
    """
    if node.op == "call_module":
        return _module_macs(node, submodule(gm, node))
    op = op_of(node)
    label = op.name if op is not None else str(getattr(node.target, "__name__", node.target))
    formula = _FORMULAS.get(label)
    shapes = [info(a).shape if isinstance(a, fx.Node) else None for a in node.args]
    out = info(node).shape
    if formula is None or out is None:
        return 0
    try:
        return int(formula(out, *shapes))
    except (TypeError, IndexError):  # a shape that is not known, or a call that is written in a way of its own
        return 0


def _conv(out: Shape, _: Any, weight: Shape, *__: Any) -> int:
    return math.prod(out) * math.prod(weight[1:])


def _conv_transpose(_: Shape, x: Shape, weight: Shape, *__: Any) -> int:
    return math.prod(x) * math.prod(weight[1:])


def _product(out: Shape, x: Shape, *_: Any) -> int:
    """A linear layer or a matrix product: x (..., inner)."""
    return math.prod(out) * x[-1]


def _added_product(out: Shape, _: Any, x: Shape, *__: Any) -> int:
    """addmm, baddbmm: the first argument is what is added."""
    return math.prod(out) * x[-1]


def _attention(_: Shape, query: Shape, key: Shape, value: Shape, *__: Any) -> int:
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


_FORMULAS: dict[str, Callable[..., int]] = {
    **{f"conv{n}d": _conv for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _conv_transpose for n in (1, 2, 3)},
    **dict.fromkeys(("linear", "matmul", "__matmul__", "mm", "bmm"), _product),
    **dict.fromkeys(("addmm", "baddbmm"), _added_product),
    "scaled_dot_product_attention": _attention,
}


def _module_macs(node: fx.Node, module: nn.Module | None) -> int:
    if module is None:
        return 0
    tensors = [node, *(n for n in flat_nodes((node.args, node.kwargs)))]
    shape = next((s for n in tensors if (s := info(n).shape) is not None), None)
    if shape is None:
        return 0
    return sum(w.numel() * _positions(shape, w.dim()) for w in _weights(module))


def _weights(module: nn.Module) -> Iterator[Tensor]:
    """The weights inside that are multiplied with: matrices and filters, not tables that are looked up in."""
    tables = [m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    looked_up = {id(p) for table in tables for p in table.parameters(recurse=False)}
    return (p for p in module.parameters() if p.dim() >= 2 and id(p) not in looked_up)


def _positions(shape: Shape, weight_dim: int) -> int:
    """How often a weight is used: (N, C, ...) has channels second for a filter, (..., C) last for a matrix."""
    channels = 1 if weight_dim > 2 and len(shape) > 1 else len(shape) - 1
    return math.prod(shape[:channels] + shape[channels + 1 :])
