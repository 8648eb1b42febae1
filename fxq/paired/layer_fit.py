"""Visit of all layers with integer weights, in order, with the products of their inputs in both graphs."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.common.data import Batch, naming_samples, samples_in
from fxq.common.isolation import seeded
from fxq.common.metrics import identical, token_weights
from fxq.common.progress import progress_bar
from fxq.common.ranks import Ranks
from fxq.errors import InputError
from fxq.graph.analysis.layer_matrix import LayerMatrix
from fxq.graph.grid import grid_of
from fxq.graph.info import info
from fxq.graph.query import constant, is_op, op_of, read_attribute
from fxq.graph.unit import OpCall, calls_of
from fxq.paired.integer_layers import IntegerLayer
from fxq.paired.output_error import InputProducts
from fxq.paired.paired_run import PairedRun
from fxq.pipeline.context import Context
from fxq.pipeline.float_values import LayerValues
from fxq.recipe.pass_base import Pass
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class LayerFit(Pass):
    """Base of the passes that fit the weight of each layer, or a correction of it, by the error of its output.

    The pass visits the linear, convolutional and recurrent layers in order. The input of a layer is from the quantized
    graph, with what the pass has changed so far; the wanted output is from the float graph. A subclass implements
    `fit`.

    All tokens of a sequence have the same weight, whatever their size, and padding has none. If a linear layer reads
    rounded tokens, their float values are used, since the rounding errors of a few large tokens say little about
    others.

    If several processes work together (`Context.ranks`), each runs its share of the samples, and the products are
    summed.

    Memory per layer is two matrices of products of its inputs, not the inputs; layers that read the same value share
    them. Patches of large inputs are drawn at random, many more than a weight has inputs. Of the samples, both graphs
    store the values that are still read.

    Args:
        samples: number of recorded samples to use.
        trust: weight of the float weight in the fit, as a number of patches for each input of the weight. It prevents
            that few patches determine what is wrong for other data.
    """

    samples: int = 64
    trust: float = 4.0

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"samples": (1, math.inf), "trust": (0.0, math.inf)}

    @property
    def samples_read(self) -> int:
        return self.samples

    @property
    def holds_out(self) -> bool:
        """Whether `fit` needs products of patches that are held out."""
        return False

    def takes(self, layer: IntegerLayer) -> bool:
        """Whether the pass fits a layer."""
        return True

    @abstractmethod
    def fit(
        self, rewriter: Rewriter[Context], layer: IntegerLayer, runs: PairedRun, inputs: LayerInputs
    ) -> Callable[[], None] | None:
        """Fit a layer, and let the run compute with the fit: `runs.compared.put`.

        Args:
            rewriter: rewriter of the graph.
            layer: the layer.
            runs: the paired run, before the node of the layer.
            inputs: products of its inputs.

        Returns:
            Edits of the graph that wait until the run has ended, since they add nodes; None if there are none.
        """

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Run the graph and its float form side by side, node by node."""
        context = rewriter.context
        if not context.samples:
            raise InputError(
                f"{self.name} needs the inputs of layers, and no samples are recorded. Pass data: "
                "fxq.quantize(model, recipe, data=loader)."
            )
        nodes, late = rewriter.nodes(), list[Callable[[], None]]()
        layers = self.layers_by_node(rewriter.gm, nodes)
        if not layers:
            return
        weights = sum(layer.real.numel() for of_node in layers.values() for layer in of_node)
        bar = progress_bar(self.name, weights, context.progress)
        with torch.no_grad(), seeded(), bar as advance:
            samples = context.some_samples(self.samples)
            batches = context.share_of(samples)
            all_layers = [layer for of_node in layers.values() for layer in of_node]
            tokens = {layer.x for layer in all_layers if layer.reads_tokens and not layer.reads_state}
            at_once = 1 if context.divisible and weights > _MANY_WEIGHTS else None
            floats = _cached_floats(rewriter, batches)
            runs = PairedRun.with_float_form(rewriter.gm, batches, tokens, floats, at_once=at_once)
            count = sum(samples_in(batch) or 1 for batch in samples)
            readers = Counter(layer.x for layer in all_layers)
            inputs, of_value = LayerInputs(), None
            for node in nodes:
                of_node = layers.pop(node, [])
                for layer in of_node:
                    if not layer.is_linear or layer.x is not of_value:
                        inputs = self._inputs(layer, runs, count, is_only_reader=readers[layer.x] == 1)
                        about = f"{self}: inputs of {layer.label}"
                        inputs = inputs.summed(context.ranks, str(layer.real.device), about)
                        of_value = layer.x if layer.is_linear else None
                    edit = self.fit(rewriter, layer, runs, inputs)
                    late += [edit] if edit is not None else []
                    advance(layer.real.numel())
                if not layers:  # what follows, such as the head of a language model, may be large
                    break
                with naming_samples(self.name):
                    runs.step(node)
        for edit in late:
            edit()

    def layers_by_node(self, gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> dict[fx.Node, list[IntegerLayer]]:
        """Layers that the pass fits, by node."""
        readers = defaultdict[tuple[int, torch.Size], list[fx.Node]](list)
        for node in nodes:
            if is_op(node, "dequantize") and info(node).stands_for:
                readers[_place(read_attribute(gm, info(node).stands_for))].append(node)
        layers: dict[fx.Node, list[IntegerLayer]] = {}
        for node in nodes:
            for layer in filter(self.takes, self._layers(gm, node)):
                tables = [read for read in readers[_place(layer.real)] if read is not layer.weight]
                if all(_is_table_of(gm, layer, table) for table in tables):
                    layers.setdefault(node, []).append(replace(layer, tables=tuple(tables)))
        return layers

    def _layers(self, gm: fx.GraphModule, node: fx.Node) -> Iterator[IntegerLayer]:
        """Yield the layers of a node with integer weights. A recurrent op has two: for input and state."""
        for call in calls_of(gm, node):
            recurrence, weight = call.op.traits.recurrence, call.op.traits.weight
            if weight is not None and (recurrence is not None or LayerMatrix.takes(call)):
                yield from self._layer(gm, node, call, weight, call.tensors.get(call.op.traits.inputs[0]))
            if recurrence is not None and op_of(node) is call.op:
                yield from self._layer(gm, node, call, "weight_hh", node)

    def _layer(self, gm: fx.GraphModule, node: fx.Node, call: OpCall, name: str, x: Any) -> Iterator[IntegerLayer]:
        """Yield the layer of an op's weight, if this is in integers and has no other reader."""
        weight = call.tensors.get(name)
        if not (isinstance(x, fx.Node) and isinstance(weight, fx.Node) and is_op(weight, "dequantize")):
            return
        grid, stored, path = grid_of(gm, weight), constant(gm, weight.args[0]), info(weight).stands_for
        if grid is None or stored is None or stored.is_floating_point() or len(weight.users) > 1 or not path:
            return
        real, bias = read_attribute(gm, path), call.tensors.get(call.op.traits.bias or "")
        form = LayerMatrix(call, tuple(real.shape))
        yield IntegerLayer(form, x, weight, real, grid, bias if _has_fitted_bias(node, bias) else None, x is node)

    def _inputs(self, layer: IntegerLayer, runs: PairedRun, samples: int, is_only_reader: bool) -> LayerInputs:
        """Products of the inputs of a layer.

        Args:
            layer: the layer.
            runs: the paired run, before the node of the layer.
            samples: number of samples in the run.
            is_only_reader: whether no other layer reads the inputs.
        """
        form, weight = layer.form, layer.form.rows(layer.real)
        _, outputs, inputs = weight.shape
        is_narrow = is_only_reader and not self.holds_out and 2 * outputs < inputs
        products = LayerInputs.of(weight.float() if is_narrow else None)
        patches = math.ceil(max(_MIN_PATCHES, _PATCHES_PER_INPUT * inputs) / samples)
        for got, wanted in (runs.states if layer.reads_state else runs.values)(layer.x):
            got = wanted if layer.reads_rounded_tokens or torch.equal(got, wanted) else got
            for x, real in zip(form.patches(got, patches), form.patches(wanted, patches), strict=True):
                counts = token_weights(real[0]) if layer.reads_tokens else x.new_ones(x.shape[1])
                counts = counts / counts.mean()
                part = math.ceil((1 - _HELD_OUT) * x.shape[1]) if self.holds_out else x.shape[1]
                parts = (products.fit, slice(part)), (products.held_out, slice(part, None))
                for of_part, rows in parts[: 1 + self.holds_out]:
                    of_part.add(x[:, rows], None if got is wanted else real[:, rows], counts[rows])
        return products


@dataclass(frozen=True)
class LayerInputs:
    """Products of a value that layers read.

    Attributes:
        fit: those of the first part of each batch.
        held_out: those of the rest; there are none unless the pass `holds_out`.
        trusted: cache of `trusting`.
    """

    fit: InputProducts = field(default_factory=InputProducts)
    held_out: InputProducts = field(default_factory=InputProducts)
    trusted: dict[float, InputProducts] = field(default_factory=dict)

    @classmethod
    def of(cls, weight: Tensor | None) -> LayerInputs:
        """No products yet, with a weight as in `InputProducts`."""
        return cls(InputProducts(weight), InputProducts(weight))

    def summed(self, ranks: Ranks, device: str, about: str) -> LayerInputs:
        """Sums over the processes that work together, each with products of its own samples.

        Args:
            ranks: the processes.
            device: device of the sums.
            about: description of the inputs, equal in all of them.
        """
        if ranks.size == 1:
            return self
        parts = {"fit": self.fit, "held_out": self.held_out}
        own = {f"{part}.{name}": t for part, products in parts.items() for name, t in products.tensors().items()}
        sums = ranks.summed(own, device, about)
        fit, held_out = (products.from_tensors(_named(f"{part}.", sums)) for part, products in parts.items())
        return LayerInputs(fit, held_out)

    def trusting(self, patches: float) -> InputProducts:
        """Products of both parts with artificial patches, see `InputProducts.trusting`."""
        if patches not in self.trusted:
            self.trusted[patches] = self.fit.merged(self.held_out).trusting(patches)
        return self.trusted[patches]


def note(rewriter: Rewriter[Context], node: fx.Node, text: str) -> None:
    """Add a remark on a node for the user, once."""
    notes = [note for note in info(node).note.split("; ") if note]
    rewriter.describe(node, note="; ".join(dict.fromkeys((*notes, text))))


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _cached_floats(rewriter: Rewriter[Context], batches: list[Batch]) -> LayerValues | None:
    """Cached float outputs of layers on some batches; None if none are cached. Other recorded samples stay out."""
    context = rewriter.context
    if not context.floats.batches:
        return None
    return context.floats.of(rewriter.gm, context if context.ranks.size == 1 else replace(context, samples=batches))


_MANY_WEIGHTS = 2**24
"""Number of weights from which samples are searched for padding one by one, since that takes memory."""
_HELD_OUT = 0.25
"""Share of the patches of a batch, its last ones, that are held out while the fit is configured."""
_MIN_PATCHES = 4096
"""Minimum number of patches of all samples together."""
_PATCHES_PER_INPUT = 32
"""Number of patches for each input of a weight, if that is more than `_MIN_PATCHES`."""


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    """Address and shape of a tensor, which tied parameters have in common."""
    return tensor.data_ptr(), tensor.shape


def _is_table_of(gm: fx.GraphModule, layer: IntegerLayer, table: fx.Node) -> bool:
    """Whether a dequantized weight has the integers and the grid of a layer, and only embeddings read it."""
    old, own, grid = constant(gm, layer.weight.args[0]), constant(gm, table.args[0]), grid_of(gm, table)
    same = old is not None and own is not None and identical(old, own) and layer.grid.same_as(grid)
    return same and all(is_op(user, "embedding") for user in table.users)


def _has_fitted_bias(node: fx.Node, bias: Any) -> bool:
    """Whether correct-bias will fit the bias of a layer, which must have no other reader."""
    plan = info(node).plan
    dynamic = plan is not None and plan.reads is not None and plan.reads.range == "dynamic"
    constant = isinstance(bias, fx.Node) and bias.op == "get_attr" and len(bias.users) == 1
    return constant and plan is not None and plan.precision == "int8" and not dynamic
