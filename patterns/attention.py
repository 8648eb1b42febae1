"""Attention and encoder layers of torch.nn, written with ops of the table. For decompose."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from fxq.graph.info import info
from fxq.ops import OPS
from fxq.rewriting.rewriter import Rewriter

Values = tuple[Any, ...]


class CannotExpand(Exception):
    """A module in a form that has no expansion; the message is the reason that the ledger gives."""


class Expansion:
    """Ops in the place of the call of one module: made before it, under the paths of the modules inside it.

    Attributes:
        ops: those made so far.
    """

    def __init__(self, rewriter: Rewriter, node: fx.Node) -> None:
        self.rewriter = rewriter
        self.node = node
        self.ops: list[fx.Node] = []

    def call(self, op: str, *args: Any, at: str = "", **options: Any) -> fx.Node:
        """A call of an op; `at` is the path, inside the module, of what makes it."""
        path = ".".join(part for part in (str(self.node.target), at) if part)
        name = path.replace(".", "_") if at.rpartition(".")[2] not in ("", "self_attn") else op
        made = self.rewriter.call(op, *args, like=self.node, before=self.node, name=name, **options)
        self.rewriter.describe(made, path=path, origins=(made.name,))
        self.ops.append(made)
        return made

    def read(self, path: str, tensor: Tensor | None) -> fx.Node | None:
        """A parameter of the module, by its path inside it; None stays None."""
        if tensor is None:
            return None
        return self.rewriter.read(f"{self.node.target}.{path}", tensor, before=self.node, like=self.node)

    def part(self, path: str, tensor: Tensor | None) -> fx.Node | None:
        """A part of a parameter, as a constant of that name."""
        if tensor is None:
            return None
        return self.rewriter.constant(tensor, f"{self.node.target}.{path}", before=self.node, like=self.node)

    def linear(self, x: fx.Node, layer: nn.Linear, at: str) -> fx.Node:
        """A linear layer inside the module."""
        weight, bias = self.read(f"{at}.weight", layer.weight), self.read(f"{at}.bias", layer.bias)
        return self.call("linear", x, weight, bias, at=at)

    def norm(self, x: fx.Node, layer: nn.Module, at: str) -> fx.Node:
        """A layer norm inside the module."""
        if type(layer) is not nn.LayerNorm:
            raise CannotExpand(f"its norm is a {type(layer).__name__}")
        weight, bias = self.read(f"{at}.weight", layer.weight), self.read(f"{at}.bias", layer.bias)
        shape = tuple(layer.normalized_shape)
        return self.call("layer_norm", x, weight, bias, at=at, normalized_shape=shape, eps=layer.eps)

    def activation(self, x: fx.Node, function: Any, at: str) -> fx.Node:
        """A function inside the module: a module or a plain function that the table knows."""
        is_module = isinstance(function, nn.Module)
        found = OPS.of_module(function) if is_module else OPS.of_call(function)
        name = getattr(function, "__name__", type(function).__name__)
        if found is None:
            raise CannotExpand(f"its activation {name} is not in the op table")
        op, spelling = found
        bound = op.bind_module(spelling, function, (x,), {}) if is_module else op.bind(spelling, (x,), {})
        if not isinstance(bound, dict) or any(isinstance(v, Tensor) for v in bound.values()):
            raise CannotExpand(f"its activation {name} is no plain function")
        return self.call(op.name, x, at=at, **{k: v for k, v in bound.items() if k in op.options})


def _bound(module: nn.Module, node: fx.Node) -> dict[str, Any]:
    bound = inspect.signature(module.forward).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


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


def attention(make: Expansion, module: nn.MultiheadAttention, node: fx.Node, weights: bool) -> Values:
    """(output, attention weights): the weights only where somebody reads them."""
    given = _bound(module, node)
    masks = (given["key_padding_mask"], given["attn_mask"])
    weights = weights and given["need_weights"]
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


def encoder_layer(make: Expansion, module: nn.TransformerEncoderLayer, node: fx.Node, weights: bool) -> Values:
    """The output of one layer."""
    given = _bound(module, node)
    return (_layer(make, module, "", given["src"], (given["src_key_padding_mask"], given["src_mask"])),)


def encoder(make: Expansion, module: nn.TransformerEncoder, node: fx.Node, weights: bool) -> Values:
    """The output of all layers and the norm behind them."""
    given = _bound(module, node)
    if given["src_key_padding_mask"] is not None and module.use_nested_tensor:
        raise CannotExpand("it sets what its padding mask leaves out to zero (enable_nested_tensor=True)")
    x = given["src"]
    for i, layer in enumerate(module.layers):
        x = _layer(make, layer, f"layers.{i}", x, (given["src_key_padding_mask"], given["mask"]))
    return (make.norm(x, module.norm, "norm") if module.norm is not None else x,)


EXPANSIONS: dict[type[nn.Module], Callable[..., Values]] = {
    nn.MultiheadAttention: attention,
    nn.TransformerEncoderLayer: encoder_layer,
    nn.TransformerEncoder: encoder,
}
"""How modules are written with ops: functions of (expansion, module, node, whether attention weights are read)."""
