"""split-inputs: write inputs of convolutions as sums of two 8-bit values where one is too coarse for quiet rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.common.data import Batch
from fxq.common.isolation import seeded
from fxq.common.metrics import tensors
from fxq.graph.grid import grid_of
from fxq.graph.info import Decision, Plan, info
from fxq.graph.program import IsolatedGraph
from fxq.graph.query import is_op, plan_of
from fxq.graph.run import Runner
from fxq.graph.unit import calls_of
from fxq.ops import OPS
from fxq.paired.paired_run import Side
from fxq.patterns.conversion_rules import reads_float
from fxq.pipeline.context import Context
from fxq.pipeline.float_moves import read_floats
from fxq.pipeline.float_values import CachedFloatForm, LayerValues
from fxq.pipeline.in_float import run_in_float
from fxq.pipeline.samples import on_samples
from fxq.quant.qparams import QParams
from fxq.quant.spec import QuantConfig
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.grid_edits import on_grid
from fxq.rewriting.rewriter import Rewriter
from fxq.rewriting.unit_edits import split_unit

_CONVS = (*OPS.family("conv"), *OPS.family("conv_transpose"))
FEW_SAMPLES = 2
"""Maximum number of samples that a large model runs on."""
WINDOW = 256
"""Maximum number of consecutive values of an output that are compared together."""
WITHOUT = 'recipe.without_pass("split-inputs")'
COARSE = "a layer reads its value, and one grid of 8 bits is too coarse for that"
REST = "the part of an input that its grid rounds off"
SUM = "adds the products of both parts of an input"
ONE_GRID = "one grid is too coarse for quiet parts of its input, but"
"""Note on an input that is left alone, before the obstacle."""
READS_SUM = "it reads the sum of two products"


@dataclass(frozen=True)
class SplitInputs(Pass):
    """Write the input of a convolution as the sum of two 8-bit values, where its quiet rows have few steps of the grid.

    Before: conv1d(dequantize(quantize(x)), dequantize(w_int8), b)
    After: add(conv1d(dequantize(quantize(x - c)), dequantize(w_int8)), conv1d(c, dequantize(w_int8), b)), with
    c = dequantize(quantize(x)); the second grid divides one step of the first
    Keeps: the integers of the weights and of c, and the output up to the rounding of x, which becomes smaller.

    In networks that generate sound, pauses and quiet parts are rounded to a few steps of a grid that fits the loud
    parts, which leaves noise in them. A network that recognizes something loses nothing by that: there, the large
    values matter. So the pass first counts the rows (vectors of channels) of each input that have a large error on
    their grid. Then it runs the graph in float on recorded samples, once as it is and once with these inputs
    rounded, and compares the outputs in windows of up to `WINDOW` values. If few windows have a large error, nothing is
    changed. Ops without weights that compute such an input on integers run in float.
    It runs after `fallback`, since float ops that read x must not read c in its place. Where kernels emit integers
    only, as in the backends fbgemm, qnnpack and onnxruntime, and where an op such as a pad moves integers to a layer,
    the layer gets a note in the ledger instead. Inputs with dynamic ranges are left alone.

    Args:
        share: share of the rows of an input, and of the windows of an output, that may have a large error, 0 to 1.
        least: SQNR in dB below which the error of a row of an input is large. 20 dB is an error of a tenth.
        worst: SQNR in dB below which the error of a window of an output is large. 10 dB is an error of a third.
        samples: about how many samples to run, at most `FEW_SAMPLES` of a large model.
    """

    share: float = 0.1
    least: float = 20.0
    worst: float = 10.0
    samples: int = 8

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "share": (0.0, 1.0),
        "least": (-math.inf, math.inf),
        "worst": (-math.inf, math.inf),
        "samples": (1, math.inf),
    }
    name: ClassVar[str] = "split-inputs"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    def applies(self, configs: Collection[QuantConfig]) -> bool:
        return any(config.activation is not None for config in configs)

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Find the inputs with large errors, test whether these reach the output, and split the inputs then."""
        context, gm = rewriter.context, rewriter.gm
        inputs = {
            x.quantize: x for node in rewriter.nodes("quantize") if (x := _input(gm, node, self.least)) is not None
        }
        if not inputs or not context.samples:
            return
        most = min(self.samples, FEW_SAMPLES) if context.is_large else self.samples
        coarse = on_samples(context, most, partial(self._coarse, gm, context, inputs))
        if not coarse:
            return
        if on_samples(context, most, partial(self._large_errors, gm, _rounding(coarse))) <= self.share:
            return
        self._split(rewriter, [layer_input for layer_input in coarse if not layer_input.obstacle])
        for layer_input in coarse:
            for layer, _ in layer_input.layers if layer_input.obstacle else ():
                rewriter.describe(layer, note="; ".join(filter(None, (info(layer).note, layer_input.obstacle))))

    def _coarse(
        self, gm: fx.GraphModule, context: Context, inputs: Mapping[fx.Node, _Input], batches: Sequence[Batch]
    ) -> list[_Input]:
        """Inputs with more rows than allowed whose error is large."""
        for layer_input in inputs.values():
            layer_input.errors = _Errors(self.least)  # of these batches alone: the pass may try smaller ones again
        floats = context.floats.of(gm, context)
        see = {node: layer_input.see for node, layer_input in inputs.items()}
        for batch in batches:
            _run(gm, batch, see, inputs, floats)
        return [x for x in inputs.values() if x.errors.share > self.share]

    def _large_errors(
        self, gm: fx.GraphModule, rounding: Mapping[fx.Node, Callable[[Tensor], Tensor]], batches: Sequence[Batch]
    ) -> float:
        """Largest share of the windows of an output whose error is large if some values are rounded."""
        errors: dict[int, _Errors] = {}
        for batch in batches:
            wants, gots = (tensors(_run(gm, batch, at)) for at in ({}, rounding))
            for i, (want, got) in enumerate(zip(wants, gots, strict=True)):
                if want.is_floating_point() and want.shape == got.shape:
                    errors.setdefault(i, _Errors(self.worst)).add(*(_windows(value) for value in (want, got)))
        return max((error.share for error in errors.values()), default=0.0)

    def _split(self, rewriter: Rewriter[Context], inputs: Sequence[_Input]) -> None:
        """Split inputs, once the ops that are fused to their layers, and those that compute them, run in float."""
        for layer_input in inputs:
            layer_input.layers = [(_opened(rewriter, *layer), layer[1]) for layer in layer_input.layers]
        self._move_sources_to_float(rewriter, inputs)
        for layer_input in inputs:
            _write(rewriter, layer_input, self._reason(layer_input))

    def _move_sources_to_float(self, rewriter: Rewriter[Context], inputs: Sequence[_Input]) -> None:
        """Let ops without weights that compute the inputs read and compute floats: integers would be as coarse."""
        for node in _sources(rewriter.gm, inputs):
            with rewriter.attributed("run_in_float", run_in_float):
                run_in_float(rewriter, node, "off the grid", COARSE, WITHOUT)
        read_floats(rewriter)
        rewriter.erase_unused()

    def _reason(self, layer_input: _Input) -> str:
        return (
            f"its input is the sum of two values of {layer_input.grid.bits} bits: in one, "
            f"{100 * layer_input.errors.share:.0f} % of its rows would have less than {self.least:g} dB"
        )


@dataclass
class _Errors:
    """Number of vectors with large errors.

    Attributes:
        limit: SQNR in dB below which an error is large.
        vectors: number of vectors that are not zero.
        large: number of those whose error is large.
    """

    limit: float
    vectors: int = 0
    large: int = 0

    def add(self, values: Tensor, others: Tensor) -> None:
        """Add vectors, (N, C), and their rounded values."""
        signal, noise = values.square().sum(1), (values - others).square().sum(1)
        self.vectors += int(signal.count_nonzero())
        self.large += int(((signal < 10 ** (self.limit / 10) * noise) & (signal > 0)).count_nonzero())

    @property
    def share(self) -> float:
        """Share of the vectors with a large error."""
        return self.large / max(self.vectors, 1)


@dataclass
class _Input:
    """Quantized input of convolutions.

    Attributes:
        quantize: node that quantizes it.
        grid: its grid.
        layers: the convolutions that read it, each with its dequantized input.
        axis: axis of the channels, counted from the end.
        errors: errors of its rows on the grid.
        obstacle: why it cannot be split, for the ledger; empty if it can.
    """

    quantize: fx.Node
    grid: QParams
    layers: Sequence[tuple[fx.Node, fx.Node]]
    axis: int
    errors: _Errors
    obstacle: str

    def see(self, x: Tensor) -> Tensor:
        """Add the errors of values, (N, C, ...), and return the values."""
        rows, rounded = (v.movedim(self.axis, -1).flatten(0, -2) for v in (x, self.grid.rounded(x)))
        self.errors.add(rows, rounded)
        return x

    @property
    def fine_grid(self) -> QParams:
        """Grid that divides one step of `grid`, from minus half a step to half a step."""
        steps = self.grid.qmax - self.grid.qmin
        middle = self.grid.qmin + (steps + 1) // 2
        return QParams.per_tensor(self.grid.s / (steps - 1), middle, self.grid.qmin, self.grid.qmax, self.grid.dtype)


def _input(gm: fx.GraphModule, node: fx.Node, least: float) -> _Input | None:
    """Input that a node quantizes, if it has one grid and convolutions read it; else None."""
    grid = grid_of(gm, node)
    read: Any = node.args[0]
    if grid is None or grid.axis is not None or is_op(read, "dequantize") or _is_rest(read):
        return None
    readers = [(user, dq) for dq in node.users if is_op(dq, "dequantize") for user in dq.users]
    layers = [(user, dq) for user, dq in readers if _is_layer(gm, user, dq)]
    if not layers or any(_is_rest(user) for user, _ in readers):
        return None
    able = [layer for layer in layers if not _emits_integers(layer[0])]
    plan, obstacle = plan_of(read), ""
    if plan is not None and plan.precision == "moves":
        obstacle = f"{ONE_GRID} %{read.name} moves integers, which are as coarse"
    elif not able or _emits_integers(read):
        obstacle = f"{ONE_GRID} a kernel of this backend emits integers only"
    axis = calls_of(gm, layers[0][0])[0].op.traits.channels or 0
    return _Input(node, grid, able or layers, axis, _Errors(least), obstacle)


def _emits_integers(node: fx.Node) -> bool:
    """Whether the kernel that computes a value emits integers only."""
    plan = plan_of(node)
    return plan is not None and plan.emits is not None


def _is_rest(node: fx.Node) -> bool:
    """Whether a node computes the second part of an input."""
    rounded: Any = node.args[1] if is_op(node, "sub") else None
    return (
        is_op(rounded, "dequantize") and is_op(rounded.args[0], "quantize") and rounded.args[0].args[0] is node.args[0]
    )


def _is_layer(gm: fx.GraphModule, node: fx.Node, read: fx.Node) -> bool:
    """Whether a node is a convolution on integers, and `read` its input alone."""
    plan, calls = info(node).plan, calls_of(gm, node)
    if plan is None or plan.precision != "int8" or not calls:
        return False
    elsewhere = any(read in call.activations for call in calls[1:])
    return calls[0].op.name in _CONVS and calls[0].activations == (read,) and not elsewhere


def _sources(gm: fx.GraphModule, inputs: Sequence[_Input]) -> list[fx.Node]:
    """Ops without weights that compute inputs on integers, and those that compute what such an op reads."""
    ops: dict[fx.Node, None] = {}
    todo: list[Any] = [layer_input.quantize.args[0] for layer_input in inputs]
    while todo:
        node = todo.pop()
        plan, calls = info(node).plan, calls_of(gm, node)
        heavy = any(call.op.traits.heavy or call.op.traits.weight for call in calls)
        if node in ops or plan is None or plan.precision != "int8" or heavy:
            continue
        ops[node] = None
        read = (r.args[0] for r in node.all_input_nodes if is_op(r, "dequantize") and is_op(r.args[0], "quantize"))
        todo += [quantize.args[0] for quantize in read]
    return list(ops)


def _rounding(inputs: Sequence[_Input]) -> dict[fx.Node, Callable[[Tensor], Tensor]]:
    """Functions that round inputs, by node."""
    return {layer_input.quantize: layer_input.grid.rounded for layer_input in inputs}


class _Run(CachedFloatForm):
    """Run of a graph in float that passes the values of some nodes to functions, and goes on with what they return."""

    def __init__(self, at: Mapping[fx.Node, Callable[[Tensor], Tensor]], *args: Any) -> None:
        super().__init__(*args)
        self._at = at

    def compute(self, node: fx.Node) -> Any:
        value = super().compute(node)
        return self._at[node](value) if node in self._at else value


def _run(
    gm: fx.GraphModule,
    batch: Batch,
    at: Mapping[fx.Node, Callable[[Tensor], Tensor]],
    needed: Collection[fx.Node] = (),
    floats: LayerValues | None = None,
) -> Any:
    """Run a qdq graph in float on a batch. Returns its output.

    Args:
        gm: the qdq graph.
        batch: the batch.
        at: function of the value of some nodes, whose result replaces the value.
        needed: nodes whose values are needed, if outputs of layers are cached.
        floats: cached outputs of layers; then there is no output.
    """

    def start(program: IsolatedGraph, batch: Batch) -> Runner:
        return _Run(at, gm, batch, floats or LayerValues(), needed, {}, program.modules)

    with torch.no_grad(), seeded():
        return Side(IsolatedGraph(gm, gm.graph), [batch], start).run()[0]


def _windows(value: Tensor) -> Tensor:
    """Windows of up to `WINDOW` consecutive values, (N, size). The few values that remain are left out."""
    flat = value.flatten()
    size = max(len(flat) // max(-(-len(flat) // WINDOW), 1), 1)
    return flat[: len(flat) // size * size].view(-1, size)


def _opened(rewriter: Rewriter[Context], node: fx.Node, dq: fx.Node) -> fx.Node:
    """Split ops that are fused to a layer from it, since they will read a sum. Returns the layer, which reads `dq`."""
    after, others = info(node).fused.parts[1:], set(dq.users) - {node}
    if len(calls_of(rewriter.gm, node)) == 1:
        return node
    split_unit(rewriter, node, 1)
    decision = Decision("float", "off the grid", READS_SUM, WITHOUT, rewriter.name)
    for rest in rewriter.nodes():
        if info(rest).origins in after:
            rewriter.describe(rest, plan=Plan(decision))
    (layer,) = set(dq.users) - others
    return layer


def _write(rewriter: Rewriter[Context], layer_input: _Input, why: str) -> None:
    """Add the second part of an input, and the products of the layers with it.

    The second part reads the input in float, so that float ops need not read the rounded one.
    """
    quantize, about = layer_input.quantize, info(layer_input.layers[0][0])
    value: Any = quantize.args[0]
    copies = [user for user in quantize.users if is_op(user, "dequantize")]
    first = next(node for node in rewriter.nodes() if node in copies)
    typed, name = (info(value).shape, torch.float32), f"{value.name}_fine"
    rest = rewriter.call("sub", value, first, after=first, name=name, typed=typed)
    rewriter.describe(rest, path=about.path, source=about.source, plan=Plan(Decision("float", text=REST)))
    _, fine = on_grid(rewriter, rest, rest, layer_input.fine_grid, name, like=layer_input.layers[0][0])
    for copy in copies:
        rewriter.reroute(copy, value, only=lambda user: user is not rest and reads_float(user))
    for node, _ in layer_input.layers:
        _add_product(rewriter, node, fine, why)


def _add_product(rewriter: Rewriter[Context], node: fx.Node, fine: fx.Node, why: str) -> None:
    """Add the product of a layer with the second part of its input to the layer's result.

    Args:
        rewriter: rewriter of the qdq graph.
        node: the layer.
        fine: second part of its input.
        why: reason, for the ledger.
    """
    (call,) = calls_of(rewriter.gm, node)
    plan, typed = info(node).plan, (info(node).shape, torch.float32)
    assert plan is not None  # it is a layer on integers
    options: dict[str, Any] = {name: value for name, value in node.kwargs.items() if name != "bias"}
    product = rewriter.call(
        call.op.name, fine, call.tensors["weight"], after=node, name=f"{node.name}_fine", typed=typed, **options
    )
    rewriter.describe(product, path=info(node).path, source=info(node).source, plan=plan)
    total = rewriter.call("add", node, product, after=product, name=f"{node.name}_sum", typed=typed)
    rewriter.reroute(node, total, only=lambda user: user is not total)
    times = plan.cost
    if times is not None and times.int8_us is not None:
        times = replace(times, int8_us=2 * times.int8_us)
    about = info(node)
    rewriter.describe(total, path=about.path, source=about.source, origins=about.origins)
    rewriter.describe(total, plan=Plan(Decision("float", text=SUM), cost=times))
    rewriter.describe(node, note="; ".join(filter(None, (about.note, why))))
