"""low-rank: correct the rounded weights of linear layers by a matrix of low rank. Optional."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import dropwhile, takewhile
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.errors import RecipeError
from fxq.graph.info import Decision, Plan, info
from fxq.graph.query import is_op
from fxq.graph.region import integer_weight, is_weight_only
from fxq.graph.unit import Calls, calls_of
from fxq.paired.integer_layers import IntegerLayer
from fxq.paired.layer_fit import LayerFit, LayerInputs, note
from fxq.paired.low_rank_factors import LowRankFactors, missing_weight, root_of
from fxq.paired.output_error import OutputError
from fxq.paired.paired_run import PairedRun
from fxq.paired.reconstruction import Reconstruction
from fxq.pipeline.context import Context
from fxq.quant.qparams import QParams
from fxq.quant.spec import QuantConfig, TensorSpec
from fxq.recipe.pass_base import Stage
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class LowRank(LayerFit):
    """Correct the weights of weight-only linear layers by the product of two thin matrices in 8 bits.

    Before: linear(x, dequantize(w_int4), b)
    After: linear(x, dequantize(w_int4), b) + linear(linear(x, dequantize(down_int8)), dequantize(up_int8))
    Keeps: the integers of the weight. up @ down, of rank `rank`, is close to the error that its rounding made.

    With data, the error of the layer's output on the recorded samples counts, and the inputs are from the quantized
    graph with the layers before it corrected; without data, the squared error of the weight. The factors cost about
    8 * rank * (K + N) / (K * N) bits per weight of a layer with K inputs and N outputs, which the ledger counts, and
    two more products per call. Smaller blocks cost bits, too: compare both, since `gptq` leaves few errors of low rank.
    Other layers stay as they are, with a note in the ledger: convolutions, recurrent layers, embeddings, layers that
    share their weight, and layers with no more than `rank` inputs or outputs.
    Insert it after the integers are chosen: `recipe.insert_pass(fxq.passes.LowRank(), after="gptq")`. Checkpoints of
    other tools (GPTQ, compressed-tensors) cannot hold the factors; ONNX files can.
    Source: Zhang et al. 2024 (QERA, arXiv 2410.06040), theorem 1 (the factors of least output error); Zhang et al. 2024
    (LQER, arXiv 2402.02446), section 3 (a low-rank correction in 8 bits).

    Args:
        rank: rank of the correction, less than the number of inputs and of outputs of a layer.
        samples: number of recorded samples to use.
        trust: how strongly the fit stays close to the float weight if there are few patches, see `LayerFit`.
        max_bits: maximum number of bits of the weights of the layers; layers with more bits stay as they are.

    Raises:
        RecipeError: no linear layer of the model has more than `rank` inputs and outputs, or a later pass would choose
            other integers.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
        >>> recipe = fxq.Recipe.weight_only(bits=3).insert_pass(fxq.passes.LowRank(rank=8), after="gptq")
        >>> qmodel = fxq.quantize(model, recipe, data=[torch.rand(16, 64) for _ in range(4)])
        >>> [entry.reason for entry in qmodel.ledger if entry.op == "linear"]
        ['corrected by a matrix of rank 8', 'corrected by a matrix of rank 8']
    """

    rank: int = 16
    trust: float = 0.5
    max_bits: int = 4

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        **LayerFit.bounds,
        "rank": (1, math.inf),
        "max_bits": (2, 8),
    }
    name: ClassVar[str] = "low-rank"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    def applies(self, configs: Collection[QuantConfig]) -> bool:
        weights = [config.weight for config in configs if config.weight is not None and config.activation is None]
        return any(weight.format == "integer" and weight.bits <= self.max_bits for weight in weights)

    def scratch_bytes(self, rows: tuple[int, int, int]) -> int:
        _, outputs, inputs = rows
        return 4 * (_SQUARES * inputs**2 + _COPIES * outputs * inputs + 3 * min(outputs, inputs) ** 2)

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Note which layers stay as they are, then correct the others, in order."""
        _check_place(rewriter.context)
        layers = self.layers_by_node(rewriter.gm, rewriter.nodes())
        self._note_others(rewriter, layers)
        if rewriter.context.samples:
            super().run(rewriter)
            return
        with torch.no_grad():
            for node, of_node in layers.items():
                for layer in of_node:
                    missing = layer.real.float() - _rounded(layer, rewriter.gm)
                    _write(rewriter, node, LowRankFactors.of(missing, self.rank))

    def takes(self, layer: IntegerLayer) -> bool:
        (node,) = layer.weight.users
        takes = layer.is_linear and layer.grid.bits <= self.max_bits and is_weight_only(node, Calls((layer.form.call,)))
        return takes and not _is_corrected(node) and self.rank < min(layer.real.shape)

    def fit(
        self, rewriter: Rewriter[Context], layer: IntegerLayer, runs: PairedRun, inputs: LayerInputs
    ) -> Callable[[], None] | None:
        """Choose the factors of a layer."""
        (node,) = layer.weight.users
        rounded, ranks = _rounded(layer, rewriter.gm), rewriter.context.ranks

        def make() -> Any:
            """Factors as data; empty if there is nothing to correct, None if the inputs are not finite."""
            error = OutputError(inputs.trusting(self.trust), layer.on_rows().weight)
            root = root_of(error)
            if root is None:
                return None
            chosen = LowRankFactors.of(missing_weight(rounded, error, root), self.rank, root)
            return chosen.as_data() if chosen is not None else ()

        data = ranks.from_first(make, str(rounded.device), f"{self}: weight of {layer.label}")
        if data is None:
            note(rewriter, node, "no low-rank correction: its inputs are too large, or not finite")
            return None
        factors = LowRankFactors.from_data(*data) if data else None
        if factors is not None:
            runs.compared.put(layer.weight, rounded + factors.product())
        return partial(_write, rewriter, node, factors)

    def layers_by_node(self, gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> dict[fx.Node, list[IntegerLayer]]:
        layers = super().layers_by_node(gm, nodes)
        return {node: of_node for node, of_node in layers.items() if not any(layer.tables for layer in of_node)}

    def _is_low_bit(self, gm: fx.GraphModule, node: fx.Node) -> bool:
        """Whether a node is a weight-only layer with integers of at most `max_bits`."""
        calls = calls_of(gm, node)
        if not calls or not is_weight_only(node, calls):
            return False
        weight = integer_weight(gm, calls[0].tensors.get(calls[0].op.traits.weight or ""))
        return weight is not None and weight.qparams.bits <= self.max_bits

    def _note_others(self, rewriter: Rewriter[Context], corrected: Collection[fx.Node]) -> None:
        """Note why layers that the pass could be expected to correct stay as they are."""
        is_whole, reasons = rewriter.context.selecting is None, dict[fx.Node, str]()
        for node in rewriter.nodes():
            if node not in corrected and self._is_low_bit(rewriter.gm, node) and not _is_corrected(node):
                reasons[node] = self._reason(rewriter.gm, node)
        if is_whole and not corrected and any(self._is_too_small(rewriter.gm, node) for node in reasons):
            raise RecipeError(
                f"{self.name}: rank is {self.rank}, and no linear layer of the model with at most {self.max_bits} bits "
                "has more inputs and outputs than that. Choose a smaller rank."
            )
        for node, reason in reasons.items():
            note(rewriter, node, f"no low-rank correction: {reason}")

    def _reason(self, gm: fx.GraphModule, node: fx.Node) -> str:
        """Why a weight-only layer is not corrected."""
        (call, *_) = calls_of(gm, node)
        if call.op.name != "linear":
            return "only linear layers have one"
        if self._is_too_small(gm, node):
            shape = info(call.tensors["weight"]).shape or ()
            return f"its weight is {' x '.join(map(str, shape))}, and rank is {self.rank}"
        return "its weight is shared with another layer"

    def _is_too_small(self, gm: fx.GraphModule, node: fx.Node) -> bool:
        """Whether a node is a linear layer with no more than `rank` inputs or outputs."""
        (call, *_) = calls_of(gm, node)
        return call.op.name == "linear" and self.rank >= min(info(call.tensors["weight"]).shape or (0,))


def _check_place(context: Context) -> None:
    """Raise `RecipeError` if a later pass chooses other integers, whose errors are others, or kernels exist already."""
    steps = context.recipe.pipeline
    earlier = list(takewhile(lambda step: not isinstance(step, LowRank), steps))
    if len(earlier) < len(steps) and any(step.gives is Stage.LOWERED for step in earlier):
        raise RecipeError(f'{LowRank.name} runs before lower: recipe.insert_pass(fxq.passes.LowRank(), after="gptq").')
    later = dropwhile(lambda step: not isinstance(step, LowRank), steps)
    name = next((step.name for step in later if isinstance(step, Reconstruction)), None)
    if name is not None:
        raise RecipeError(
            f"{LowRank.name} corrects the errors of integers that {name} would choose anew: insert it after {name}, "
            f'recipe.insert_pass(fxq.passes.LowRank(), after="{name}").'
        )


_SQUARES = 6
"""Matrices of inputs by inputs in memory: products and their errors, as sums, with trust and as means, and the root."""
_COPIES = 8
"""Tensors of the shape of a weight in memory: the weight, its grid, integers, errors, and the product of factors."""
FACTOR = TensorSpec(bits=8, signed=True, symmetric=True, observer="minmax")
"""Spec of the factors. `down` has a scale for each row."""


def correction_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """Nodes that add a correction to the output of a layer: both factors and the sum, in order; empty if none do."""
    for total in node.users:
        for outer in total.all_input_nodes if is_op(total, "add") else ():
            if outer is not node and any(info(weight).corrects for weight in outer.all_input_nodes):
                return outer.all_input_nodes[0], outer, total
    return ()


def _is_corrected(node: fx.Node) -> bool:
    """Whether a layer has a correction, or belongs to one."""
    return bool(correction_of(node)) or any(info(weight).corrects for weight in node.all_input_nodes)


def _rounded(layer: IntegerLayer, gm: fx.GraphModule) -> Tensor:
    """Weight that the integers of a layer represent, float32, (O, K)."""
    return layer.form.weight(layer.on_rows().real(layer.form.rows(layer.integers(gm))))


def _write(rewriter: Rewriter[Context], node: fx.Node, factors: LowRankFactors | None) -> None:
    """Add the product of the factors and the input to the output of a layer. None: there is nothing to correct."""
    if factors is None:
        return
    with rewriter.attributed("low_rank", LowRank):
        end, (x, weight, *_) = node.next, node.args
        name = info(weight).stands_for.removeprefix("fxq_data.").replace(".", "_")  # type: ignore[arg-type]
        down = _weight(rewriter, f"{name}_down", factors.down, factors.down_grid, node, end)
        up = _weight(rewriter, f"{name}_up", factors.up, factors.up_grid, node, end)
        inner = rewriter.call("linear", x, down, None, like=node, before=end, name=f"{node.name}_down")
        outer = rewriter.call("linear", inner, up, None, like=node, before=end, name=f"{node.name}_up")
        for part, grid in ((inner, factors.down_grid), (outer, factors.up_grid)):
            spec = replace(FACTOR, per="tensor" if grid.axis is None else "channel")
            plan = Plan(Decision("weight-only", decided_by=rewriter.name), weight=spec)
            rewriter.describe(part, plan=plan, note="")
        total = rewriter.call("add", node, outer, like=node, before=end, name=f"{node.name}_corrected")
        why = "adds the low-rank correction of a weight"
        rewriter.describe(total, plan=Plan(Decision("float", "", why, decided_by=rewriter.name)), note="")
        rewriter.reroute(node, total, only=lambda user: user is not total)
    note(rewriter, node, f"corrected by a matrix of rank {len(factors.down)}")


def _weight(
    rewriter: Rewriter[Context], name: str, integers: Tensor, grid: QParams, layer: fx.Node, before: fx.Node
) -> fx.Node:
    """Add the dequantized integers of a factor, before a node, and return their node."""
    constant = rewriter.constant(integers, f"{name}_int8", before=before)
    by_row = grid.axis is not None
    scale = rewriter.constant(grid.scale, f"{name}_scale", before=before) if by_row else grid.s
    options: dict[str, Any] = {"scale": scale, "zero_point": 0, "qmin": grid.qmin, "qmax": grid.qmax, "axis": grid.axis}
    typed = tuple(integers.shape), torch.float32
    dq = rewriter.call("dequantize", constant, before=before, name=f"{name}_dq", typed=typed, **options)
    rewriter.describe(dq, path=info(layer).path, source=info(layer).source, corrects=True)
    return dq
