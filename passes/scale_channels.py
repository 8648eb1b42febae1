"""scale-channels: scale the input channels of weight-only linear layers, so that rounding their weights costs less."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.common.data import Batch
from fxq.common.isolation import copied, seeded
from fxq.common.metrics import token_weights
from fxq.common.progress import progress_bar
from fxq.errors import InputError
from fxq.graph.info import Edge, info
from fxq.graph.program import IsolatedGraph
from fxq.graph.query import constant, flat_nodes, is_op, reads_only_metadata, swapped, unobserved
from fxq.graph.region import is_weight_only
from fxq.graph.run import Runner
from fxq.graph.unit import calls_of
from fxq.paired.paired_run import Side
from fxq.paired.used_rows import used_rows
from fxq.pipeline.context import Context
from fxq.pipeline.float_form import FloatForm
from fxq.pipeline.float_ops import divide_original
from fxq.quant.observers import observer_for
from fxq.quant.spec import QuantConfig
from fxq.quant.stored_grids import stored_grid
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class ScaleChannels(Pass):
    """Multiply the weights of weight-only linear layers by a factor per input channel, and divide their input by it.

    Before: linear(rms_norm(x, g), w)    After: linear(rms_norm(x, g / s), w * s)
    Also: linear(a * linear(x, v, b), w) becomes linear(a * linear(x, v / s, b / s), w * s), as in a gated MLP.
    Keeps: the output, to rounding in float32. No op is added, since the op before takes the inverse factors.

    Rounding then changes the weights of channels with large values less, and those of others more. s is the mean
    size of the channel on the recorded samples, to the power of `alpha`. Layers that read one value have the factors in
    common. They are scaled if that lowers the error of their outputs, with weights that are rounded to nearest.
    The op before is a norm with a weight, a multiplication by a weight, a linear layer, or a multiplication by the
    output of a linear layer. No other op may read what is divided, or the weights. Weights with grids of their own,
    from a quantized file, stay as they are. `fxq.compare` leaves out the values that are divided.
    Insert it after insert-observers: `recipe.insert_pass(fxq.passes.ScaleChannels(), after="insert-observers")`. The
    pass `gptq`, if the recipe has it, then rounds the scaled weights. Needs data.
    Source: Lin et al. 2023 (AWQ, arXiv 2306.00978), section 3.2.

    Args:
        alpha: power of the mean size of a channel.
        samples: number of recorded samples to use.
        gain: by how much the error must become smaller, relative to the error without factors.
        max_bits: maximum number of bits of the weights of the layers; layers with more bits stay as they are.

    Example:
        >>> model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32)).eval()
        >>> recipe = fxq.Recipe.weight_only(bits=4).insert_pass(fxq.passes.ScaleChannels(), after="insert-observers")
        >>> model[0].weight.data[::16] = 30.0  # a few large channels
        >>> x = torch.randn(512, 64)
        >>> qmodel = fxq.quantize(model, recipe, data=[x])
        >>> "scale_channels" in {edit.rule for edit in qmodel.history["scale-channels"].edits}
        True
    """

    alpha: float = 0.25
    samples: int = 64
    gain: float = 0.01
    max_bits: int = 4

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "alpha": (0.0, 1.0),
        "samples": (1, math.inf),
        "gain": (0.0, 1.0),
        "max_bits": (2, 8),
    }
    name: ClassVar[str] = "scale-channels"
    needs: ClassVar[Stage] = Stage.OBSERVED
    gives: ClassVar[Stage] = Stage.OBSERVED
    latest: ClassVar[Stage | None] = Stage.OBSERVED

    @property
    def samples_read(self) -> int:
        return self.samples

    def applies(self, configs: Collection[QuantConfig]) -> bool:
        weights = [config.weight for config in configs if config.weight is not None and config.activation is None]
        return any(weight.format == "integer" and weight.bits <= self.max_bits for weight in weights)

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Run the graph in float, choose the factors of each value when it is computed, then write them."""
        context, gm = rewriter.context, rewriter.gm
        if not context.samples:
            raise InputError(
                f"{self.name} needs the inputs of layers, and no samples are recorded. Pass data: "
                "fxq.quantize(model, recipe, data=loader)."
            )
        groups = {group.value: group for group in _groups(gm, rewriter.nodes(), self.max_bits)}
        batches, chosen = context.some_samples(self.samples), list[tuple[_Group, Tensor]]()
        tokens = {value for value, group in groups.items() if group.has_tokens}
        with torch.no_grad(), seeded(), progress_bar(self.name, len(groups), context.progress) as advance:
            used = [used_rows(IsolatedGraph(gm, gm.graph), batch, tokens, 1) for batch in batches]
            side = Side(IsolatedGraph(gm, gm.graph), batches, _float_run)
            for node in rewriter.nodes():
                if not groups:
                    break
                values = side.step(node)
                group = groups.pop(node, None)
                if group is not None:
                    real = [value[rows.get(node, ...)] for value, rows in zip(values, used, strict=True)]
                    factors = self._factors(gm, group, real)
                    chosen += [(group, factors)] if factors is not None else []
                    advance(1)
        divided = {origin: s for group, s in chosen for node in group.divided for origin in info(node).origins}
        divide_original(rewriter, divided)
        if context.original is not None:
            context.scaled = tuple(context.original.by_origin[o] for o in divided if o in context.original.by_origin)
        with rewriter.attributed("scale_channels", ScaleChannels):
            for group, factors in chosen:
                group.write(rewriter, factors)
        rewriter.erase_unused()

    def _factors(self, gm: fx.GraphModule, group: _Group, values: Sequence[Tensor]) -> Tensor | None:
        """Factors of the channels of a value, (C,); None if its layers have no smaller error with them.

        Args:
            gm: module of the graph.
            group: the value and its layers.
            values: the value for each batch, without padding.
        """
        rows = [value.reshape(-1, value.shape[-1]) for value in values]
        size = torch.stack([part.abs().sum(0) for part in rows]).sum(0)
        if not float(size.max()) > 0 or not bool(size.isfinite().all()):
            return None
        factors = size.clamp(min=_MIN_SIZE * size.max()) ** self.alpha
        factors = factors / (factors.max() * factors.min()).sqrt()
        most = math.ceil(_TOKENS / len(rows))
        x = torch.cat([part[:: max(len(part) // most, 1)] for part in rows])
        x = x * token_weights(x).sqrt()[:, None] if group.has_tokens else x
        plain, scaled = (
            sum(_error(layer.edge, layer.some_rows(gm), by, x) for layer in group.layers)
            for by in (torch.ones_like(factors), factors)
        )
        return factors if scaled < (1 - self.gain) * plain else None


_TOKENS = 512
"""Number of tokens on which the error is measured; up to twice as many, since they are evenly spaced."""
_MIN_SIZE = 1e-4
"""Smallest mean size of a channel, relative to that of the largest one. It limits the factors."""
_ROWS = 64
"""Number of rows of a weight on which the error is measured; up to twice as many, since rows are evenly spaced."""


@dataclass(frozen=True)
class _Layer:
    """Weight-only linear layer.

    Attributes:
        node: its node.
        x: its input.
        weight: `get_attr` node of its float weight.
        edge: integer form of the weight.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    edge: Edge

    def some_rows(self, gm: fx.GraphModule) -> Tensor:
        """Evenly spaced rows of the weight, (R, C)."""
        weight = _constant(gm, self.weight)
        return weight[:: max(len(weight) // _ROWS, 1)].detach()


@dataclass(frozen=True)
class _Group:
    """Value that linear layers read, and what takes its factors.

    Attributes:
        value: node of the value.
        layers: the layers.
        source: node of the op whose weight or bias is divided.
        names: names of these arguments of the op.
    """

    value: fx.Node
    layers: Sequence[_Layer]
    source: fx.Node
    names: Sequence[str]

    @property
    def has_tokens(self) -> bool:
        """Whether the value is a sequence of tokens, where a few tokens may be much larger than the others."""
        return len(info(self.value).shape or ()) > 2

    @property
    def divided(self) -> tuple[fx.Node, ...]:
        """Nodes whose values are divided by the factors."""
        return tuple(dict.fromkeys((self.source, self.value, *(layer.x for layer in self.layers))))

    def write(self, rewriter: Rewriter[Context], factors: Tensor) -> None:
        """Write the new weights into the graph."""
        (call,) = calls_of(rewriter.gm, self.source)
        for name in self.names:
            by_row = call.op.name == "linear" and name == "weight"
            _multiply(rewriter, self.source, name, 1 / (factors[:, None] if by_row else factors))
        for layer in self.layers:
            _multiply(rewriter, layer.node, "weight", factors)


def _multiply(rewriter: Rewriter[Context], node: fx.Node, name: str, by: Tensor) -> None:
    """Replace the constant that the first op of a node reads as argument `name` by its product with `by`."""
    read: Any = next(call for call in calls_of(rewriter.gm, node) if name in call.tensors).tensors[name]
    old = unobserved(rewriter.gm, read)
    path = str(old.target).removeprefix("fxq_data.").removesuffix("_scaled")
    new = rewriter.constant(_constant(rewriter.gm, old) * by, f"{path}_scaled", before=old.next, like=old)
    rewriter.describe(new, edges=info(old).edges)
    reader = node if read is old else read
    rewriter.update(reader, args=swapped(reader.args, {old: new}))


def _error(edge: Edge, weight: Tensor, factors: Tensor, x: Tensor) -> float:
    """Squared error of the output of some rows of a layer, rounded to nearest after they are multiplied by factors.

    Args:
        edge: integer form of the weight.
        weight: rows of the float weight, (R, C).
        factors: factors of the channels, (C,).
        x: inputs, (N, C).
    """
    observer = observer_for(edge.spec, edge.axis)
    observer(weight * factors)
    rounded = observer.qparams().rounded(weight * factors) / factors
    return float((x @ (rounded - weight).mT).square().sum())


def _float_run(program: IsolatedGraph, batch: Batch) -> Runner:
    return FloatForm(program.gm, copied(batch), program.graph, program.modules)


def _groups(gm: fx.GraphModule, nodes: Sequence[fx.Node], max_bits: int) -> Iterator[_Group]:
    """Yield the values whose factors can be moved into weights, with their layers."""
    constants = [tensor for node in nodes if (tensor := constant(gm, node)) is not None]
    readers = Counter(tensor.data_ptr() for tensor in constants)
    for value in nodes:
        layers = [_layer(gm, user, x, readers, max_bits) for user, x in _readers(value)]
        source = _source(gm, value, readers) if layers and None not in layers else None
        if source is not None:
            yield _Group(value, [layer for layer in layers if layer is not None], *source)


def _readers(value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the nodes that read a value, each with what it reads: the value, or its form after a reshape of tokens."""
    for user in value.users:
        if is_op(user, "reshape") and (info(user).shape or ())[-1:] == (info(value).shape or ())[-1:]:
            yield from _readers(user)
        elif not reads_only_metadata(user):
            yield user, value


def _layer(
    gm: fx.GraphModule, node: fx.Node, value: fx.Node, readers: Mapping[int, int], max_bits: int
) -> _Layer | None:
    """Weight-only linear layer that reads a value once; None if the node is no such layer."""
    calls = calls_of(gm, node)
    if not calls or calls[0].op.name != "linear" or not is_weight_only(node, calls):
        return None
    weight = _own_weight(gm, calls[0].tensors["weight"], readers)
    reads = [read for call in calls for read in flat_nodes(list(call.tensors.values()))]
    if weight is None or calls[0].tensors["x"] is not value or reads.count(value) != 1 or len(info(weight).edges) != 1:
        return None
    (edge,) = info(weight).edges
    takes = edge.spec.format == "integer" and edge.spec.bits <= max_bits
    return _Layer(node, value, weight, edge) if takes else None


def _source(
    gm: fx.GraphModule, value: fx.Node, readers: Mapping[int, int], multiplied: bool = False
) -> tuple[fx.Node, Sequence[str]] | None:
    """Node of the op that can divide the channels of a value, with the names of the arguments that are divided.

    None if there is none. With `multiplied`, the value is a factor of a product, and the product has been looked at.
    """
    calls = calls_of(gm, value)
    if len(calls) != 1 or info(value).edges:
        return None
    call = calls[0]
    if call.op.name == "mul" and not multiplied:
        for name in ("x", "other"):
            factor: Any = call.tensors[name]
            weight = _own_weight(gm, factor, readers)
            if weight is not None and info(weight).shape == (info(value).shape or ())[-1:]:
                return value, (name,)
        for name in ("other", "x"):
            factor = call.tensors[name]
            if isinstance(factor, fx.Node) and list(factor.users) == [value] and call.activations.count(factor) == 1:
                source = _source(gm, factor, readers, multiplied=True)
                if source is not None:
                    return source
        return None
    if call.op.name not in ("rms_norm", "layer_norm", "linear"):
        return None
    names = [name for name in ("weight", "bias") if call.tensors.get(name) is not None]
    weights = [weight for name in names if (weight := _own_weight(gm, call.tensors[name], readers)) is not None]
    if "weight" not in names or len(weights) < len(names) or not all(map(_by_channel, weights)):
        return None
    return (value, names) if call.op.name == "linear" or len(info(weights[0]).shape or ()) == 1 else None


def _by_channel(weight: fx.Node) -> bool:
    """Whether the scales of a weight, if it will be in integers, belong to one output channel each."""
    return all((edge.axis, edge.spec.block is None) in ((0, True), (1, False)) for edge in info(weight).edges)


def _own_weight(gm: fx.GraphModule, read: Any, readers: Mapping[int, int]) -> fx.Node | None:
    """`get_attr` node of a float32 weight that nothing else reads, and that has no grid of its own; else None."""
    node = unobserved(gm, read) if isinstance(read, fx.Node) else None
    tensor = constant(gm, node)
    if node is None or tensor is None or tensor.dtype != torch.float32 or stored_grid(tensor) is not None:
        return None
    return node if all(len(n.users) == 1 for n in (node, read)) and readers[tensor.data_ptr()] == 1 else None


def _constant(gm: fx.GraphModule, node: fx.Node) -> Tensor:
    """Tensor of a `get_attr` node."""
    tensor = constant(gm, node)
    assert tensor is not None  # `_own_weight` checks it
    return tensor
