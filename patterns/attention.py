"""Attention and encoder layers of torch.nn, written with ops of the table. For decompose."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from fxq.graph.info import info
from fxq.rewriting.expansion import CannotExpand, Expand, Expansion

Values = tuple[Any, ...]


def _attend(
    make: Expansion, module: nn.MultiheadAttention, at: str, inputs: tuple[fx.Node, ...], masks: Values, weights: bool
) -> tuple[fx.Node, fx.Node | None]:
    """The output, and the attention of each head (N, H, L, S) where it is wanted."""
    _check_attention(module, inputs)
    if not module.batch_first:
        inputs = _once(inputs, lambda x: make.call("transpose", x, at=at, dim0=0, dim1=1))
    query, key, value = (_heads(make, x, module.num_heads, at) for x in _project(make, module, at, inputs))
    mask = make.call("attention_mask", *masks, at=at, heads=module.num_heads) if any(masks) else None
    attention = None
    if weights:
        scores = make.call("matmul", query, make.call("transpose", key, at=at, dim0=-2, dim1=-1), at=at)
        scores = make.call("mul", scores, 1 / math.sqrt(module.head_dim), at=at)
        scores = make.call("add", scores, mask, at=at) if mask is not None else scores
        attention = make.call("softmax", scores, at=at, dim=-1)
        mixed = make.call("matmul", attention, value, at=at)
    else:
        mixed = make.call("scaled_dot_product_attention", query, key, value, mask, at=at)
    joined = make.call("flatten", make.call("transpose", mixed, at=at, dim0=1, dim1=2), at=at, start_dim=-2)
    prefix = f"{at}." if at else ""
    output = make.linear(joined, module.out_proj, f"{prefix}out_proj")
    if not module.batch_first:
        output = make.call("transpose", output, at=at, dim0=0, dim1=1)
    return output, attention


def _check_attention(module: nn.MultiheadAttention, inputs: tuple[fx.Node, ...]) -> None:
    if type(module) is not nn.MultiheadAttention:
        raise CannotExpand(f"its attention is a {type(module).__name__}")
    if module.bias_k is not None or module.add_zero_attn:
        raise CannotExpand("it adds keys of its own (add_bias_kv, add_zero_attn)")
    if module.training and module.dropout:
        raise CannotExpand("it drops values at random (training=True)")
    if any(len(info(x).shape or ()) != 3 for x in inputs):
        raise CannotExpand("its inputs have no batch axis")


def _once(values: tuple[fx.Node, ...], function: Callable[[fx.Node], fx.Node]) -> tuple[fx.Node, ...]:
    """The function of each value; of one that is there several times, one result."""
    made = {value: function(value) for value in dict.fromkeys(values)}
    return tuple(made[value] for value in values)


def _project(make: Expansion, module: nn.MultiheadAttention, at: str, inputs: tuple[fx.Node, ...]) -> list[fx.Node]:
    """Query, key and value (N, L, E): one layer for neighbours that read the same."""
    query, key, value = inputs
    if not module._qkv_same_embed_dim:
        runs = [(0, 1), (1, 2), (2, 3)]
    else:
        runs = [(0, 3)] if query is key is value else [(0, 1), (1, 3)] if key is value else [(0, 1), (1, 2), (2, 3)]
    return [y for first, last in runs for y in _project_run(make, module, at, inputs[first], first, last)]


def _project_run(
    make: Expansion, module: nn.MultiheadAttention, at: str, x: fx.Node, first: int, last: int
) -> list[fx.Node]:
    """The projections `first` to `last` of query, key and value, which all read x."""
    prefix = f"{at}." if at else ""
    count = last - first
    name = prefix + {3: "in_proj", 2: "kv_proj", 1: f"{'qkv'[first]}_proj"}[count]
    rows = slice(first * module.embed_dim, last * module.embed_dim)
    weight, bias = module.in_proj_weight, module.in_proj_bias
    if count == 3:
        read = make.read(f"{name}_weight", weight), make.read(f"{name}_bias", bias)
    else:
        own = make.read(f"{name}_weight", getattr(module, f"{'qkv'[first]}_proj_weight")) if weight is None else None
        part = make.part(f"{name}.bias", bias[rows] if bias is not None else None)
        read = own if own is not None else make.part(f"{name}.weight", weight[rows]), part
    y = make.call("linear", x, *read, at=name)
    return [y] if count == 1 else [make.call("chunk", y, at=at, chunks=count, dim=-1, index=i) for i in range(count)]


def _heads(make: Expansion, x: fx.Node, heads: int, at: str) -> fx.Node:
    """(N, L, E) -> (N, H, L, E/H)."""
    split = make.call("unflatten", x, at=at, dim=-1, sizes=(heads, -1))
    return make.call("transpose", split, at=at, dim0=1, dim1=2)


def attention(make: Expansion, module: nn.MultiheadAttention) -> Values:
    """(output, attention weights): the weights only where somebody reads them."""
    given = make.given
    masks = (given["key_padding_mask"], given["attn_mask"])
    weights = given["need_weights"] and make.is_read(1)
    output, each = _attend(make, module, "", (given["query"], given["key"], given["value"]), masks, weights)
    if each is not None and given["average_attn_weights"]:
        each = make.call("mean", each, dim=1)
    return output, each


def _layer(make: Expansion, module: nn.Module, at: str, x: fx.Node, masks: Values) -> fx.Node:
    if type(module) is not nn.TransformerEncoderLayer:
        raise CannotExpand(f"its layers are {type(module).__name__}")
    if module.training:
        raise CannotExpand("it is in training mode")
    prefix = f"{at}." if at else ""

    def attend(y: fx.Node) -> fx.Node:
        return _attend(make, module.self_attn, f"{prefix}self_attn", (y, y, y), masks, False)[0]

    def feed(y: fx.Node) -> fx.Node:
        y = make.linear(y, module.linear1, f"{prefix}linear1")
        y = make.activation(y, module.activation, f"{prefix}activation")
        return make.linear(y, module.linear2, f"{prefix}linear2")

    def norm(y: fx.Node, which: str) -> fx.Node:
        return make.norm(y, getattr(module, which), f"{prefix}{which}")

    if module.norm_first:
        x = make.call("add", x, attend(norm(x, "norm1")), at=at)
        return make.call("add", x, feed(norm(x, "norm2")), at=at)
    x = norm(make.call("add", x, attend(x), at=at), "norm1")
    return norm(make.call("add", x, feed(x), at=at), "norm2")


def encoder_layer(make: Expansion, module: nn.TransformerEncoderLayer) -> fx.Node:
    """The output of one layer."""
    given = make.given
    return _layer(make, module, "", given["src"], (given["src_key_padding_mask"], given["src_mask"]))


def encoder(make: Expansion, module: nn.TransformerEncoder) -> fx.Node:
    """The output of all layers and the norm behind them."""
    given = make.given
    if given["src_key_padding_mask"] is not None and module.use_nested_tensor:
        raise CannotExpand("it sets what its padding mask leaves out to zero (enable_nested_tensor=True)")
    x = given["src"]
    for i, layer in enumerate(module.layers):
        x = _layer(make, layer, f"layers.{i}", x, (given["src_key_padding_mask"], given["mask"]))
    return make.norm(x, module.norm, "norm") if module.norm is not None else x


ATTENTION: dict[type[nn.Module], Expand] = {
    nn.MultiheadAttention: attention,
    nn.TransformerEncoderLayer: encoder_layer,
    nn.TransformerEncoder: encoder,
}
"""How modules of attention are written with ops."""
