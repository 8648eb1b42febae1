"""Choice of integer weights layer by layer, so that the output of each layer is close to its float output."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.common.data import naming_samples, samples_in
from fxq.common.isolation import seeded
from fxq.common.metrics import identical, token_weights
from fxq.common.progress import progress_bar
from fxq.errors import InputError
from fxq.graph.analysis.layer_matrix import LayerMatrix
from fxq.graph.grid import grid_of
from fxq.graph.info import info
from fxq.graph.query import constant, is_op, op_of, read_attribute
from fxq.graph.unit import OpCall, calls_of
from fxq.paired.integer_layers import IntegerLayer
from fxq.paired.output_error import InputProducts, OutputError, WeightRows
from fxq.paired.paired_run import PairedRun
from fxq.pipeline.context import Context
from fxq.recipe.pass_base import Pass
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class Reconstruction(Pass):
    """Base of the passes that choose the integers of weights by the error of each layer's output on recorded samples.

    The pass visits the linear, convolutional and recurrent layers in order. The input of a layer is from the quantized
    graph, with the integers chosen so far; the wanted output is from the float graph. A subclass implements `choose`,
    which returns the integers. A channel keeps its old integers if the new ones are not better. An embedding
    that shares the weight gets the integers, too, so that it is stored once. If correct-bias removes
    the mean error of a layer later, it does not count here, and the following layers run without it.

    All tokens of a sequence have the same weight, whatever their size, and padding has none. If a linear layer reads
    rounded tokens, their float values are used, since the rounding errors of a few large tokens say little about
    others.

    Weights with per-channel scales also get new scales: before `choose` those of least error with rounding to nearest,
    afterwards those that fit the chosen integers best. `choose` itself may change scales and zero points of blocks.

    Memory per layer is two matrices of products of its inputs, not the inputs; layers that read the same value share
    them. Patches of large inputs are drawn at random, many more than a weight has inputs. Of the samples, both graphs
    store the values that are still read.

    Args:
        samples: number of recorded samples to use.
        trust: weight of the float weight in the fit, as a number of patches for each input of the weight. It prevents
            that few patches determine integers that are wrong for other data.
        scales: whether to fit per-channel scales as well.
    """

    samples: int = 64
    trust: float = 4.0
    scales: bool = True

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"samples": (1, math.inf), "trust": (0.0, math.inf)}

    @property
    def samples_read(self) -> int:
        return self.samples

    @property
    def holds_out(self) -> bool:
        """Whether `trust_in` reads patches that are held out."""
        return False

    def takes(self, layer: IntegerLayer) -> bool:
        """Whether the pass chooses the integers of a layer."""
        return True

    @abstractmethod
    def choose(self, layer: WeightRows, error: OutputError) -> tuple[WeightRows, Tensor]:
        """Choose the integers of a layer's weight: whole numbers in float32, (G, R, K), with their grid."""

    def trust_in(self, layer: WeightRows, fit: OutputError, held_out: OutputError) -> float:
        """Choose the weight of the float weight in the fit of a layer.

        Args:
            layer: weight and grid.
            fit: error on the first part of each batch.
            held_out: error on the rest; there are none unless the pass `holds_out`.
        """
        return self.trust

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Run the graph and its float form side by side, node by node."""
        context = rewriter.context
        if not context.samples:
            raise InputError(
                f"{self.name} needs the inputs of layers, and no samples are recorded. Pass data: "
                "fxq.quantize(model, recipe, data=loader)."
            )
        nodes = rewriter.nodes()
        steps = {step.name: step for step in context.recipe.pipeline}
        least = steps["correct-bias"].options.get("least", 0) if "correct-bias" in steps else math.inf
        layers = self._layers_by_node(rewriter.gm, nodes)
        if not layers:
            return
        weights = sum(layer.real.numel() for of_node in layers.values() for layer in of_node)
        bar = progress_bar(self.name, weights, context.progress)
        with torch.no_grad(), seeded(), bar as advance:
            batches = context.some_samples(self.samples)
            all_layers = [layer for of_node in layers.values() for layer in of_node]
            tokens = {layer.x for layer in all_layers if layer.reads_tokens and not layer.reads_state}
            at_once = 1 if context.divisible and weights > _MANY_WEIGHTS else None
            floats = context.floats.of(rewriter.gm, context) if context.floats.batches else None
            runs = PairedRun.with_float_form(rewriter.gm, batches, tokens, floats, at_once=at_once)
            count = sum(samples_in(batch) or 1 for batch in batches)
            readers = Counter(layer.x for layer in all_layers)
            shared, of_value = _Products(), None
            for node in nodes:
                of_node = layers.pop(node, [])
                for layer in of_node:
                    if not layer.is_linear or layer.x is not of_value:
                        shared = self._products(layer, runs, count, is_only_reader=readers[layer.x] == 1)
                        of_value = layer.x if layer.is_linear else None
                    self._improve(rewriter, layer, runs, shared, least)
                    advance(layer.real.numel())
                if not layers:  # what follows, such as the head of a language model, may be large
                    break
                with naming_samples(self.name):
                    runs.step(node)

    def _layers_by_node(self, gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> dict[fx.Node, list[IntegerLayer]]:
        """Layers whose integers the pass chooses, by node."""
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
        yield IntegerLayer(form, x, weight, real, grid, bias if _is_corrected(node, bias) else None, x is node)

    def _products(self, layer: IntegerLayer, runs: PairedRun, samples: int, is_only_reader: bool) -> _Products:
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
        products = _Products.of(weight.float() if is_narrow else None)
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

    def _improve(
        self, rewriter: Rewriter[Context], layer: IntegerLayer, runs: PairedRun, products: _Products, least: float
    ) -> None:
        """Choose the integers of a layer and write them, if any channel has less error.

        Args:
            rewriter: rewriter of the graph.
            layer: the layer.
            runs: the paired run, before the node of the layer.
            products: products of its inputs.
            least: number of values per channel from which correct-bias corrects a layer.
        """
        grid, form = layer.on_rows(), layer.form
        bias = layer.bias if products.fit.count + products.held_out.count >= least else None
        fit, held_out = (
            OutputError(part, grid.weight, centred=bias is not None) for part in (products.fit, products.held_out)
        )
        error = OutputError(products.trusting(self.trust_in(grid, fit, held_out)), grid.weight, fit.centred)
        old, fits_scales = form.rows(layer.integers(rewriter.gm)), self.scales and layer.has_channel_scales
        new_grid, new = self.choose(grid.rescaled(error) if fits_scales else grid, error)
        new_grid = new_grid.fitted(new, error) if fits_scales else new_grid
        better = (error(new_grid.real(new), grid.real(old)) < 0)[:, :, None]
        new = torch.where(better, new, old)
        scale, zero_point = (
            torch.where(better, a, b) for a, b in ((new_grid.scale, grid.scale), (new_grid.zero_point, grid.zero_point))
        )
        new_grid = replace(grid, scale=scale, zero_point=zero_point)
        if bias is not None:
            corrected = read_attribute(rewriter.gm, str(bias.target)) + error.shift(new_grid.real(new)).flatten()
            runs.compared.put(bias, corrected)
        changed = {
            name: layer.per_scale(form.weight(getattr(new_grid, name)))
            for name in ("scale", "zero_point")
            if not torch.equal(getattr(new_grid, name), getattr(grid, name))
        }
        if changed or not torch.equal(new, old):
            with rewriter.attributed(self.name.replace("-", "_"), type(self)):
                layer.put(rewriter, form.weight(new), changed)
            runs.compared.put(layer.weight, form.weight(new_grid.real(new)))


@dataclass(frozen=True)
class _Products:
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
    def of(cls, weight: Tensor | None) -> _Products:
        """No products yet, with a weight as in `InputProducts`."""
        return cls(InputProducts(weight), InputProducts(weight))

    def trusting(self, patches: float) -> InputProducts:
        """Products of both parts with artificial patches, see `InputProducts.trusting`."""
        if patches not in self.trusted:
            self.trusted[patches] = self.fit.merged(self.held_out).trusting(patches)
        return self.trusted[patches]


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


def _is_corrected(node: fx.Node, bias: Any) -> bool:
    """Whether correct-bias will fit the bias of a layer, which must have no other reader."""
    plan = info(node).plan
    dynamic = plan is not None and plan.reads is not None and plan.reads.range == "dynamic"
    constant = isinstance(bias, fx.Node) and bias.op == "get_attr" and len(bias.users) == 1
    return constant and plan is not None and plan.precision == "int8" and not dynamic
