"""The last check of `quantize`: what the finished model returns, against what the float model returns."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from fxq.common.data import Batch, place_in, samples_in
from fxq.common.isolation import copied, seeded, untouched, without_autocast
from fxq.common.metrics import Agreement, tensors
from fxq.errors import InputError, warn
from fxq.ledger.ledger import Ledger
from fxq.pipeline.context import Context
from fxq.tracing.fidelity import part_for, run_model, same_values

log = logging.getLogger("fxq")

FEW = 8
"""How many samples a large model is compared on."""
WORST, NEAR = 3, 10.0
"""How many layers a warning names, and how many dB above the output: those that are higher add little to its error."""


def output_sqnrs(gms: Sequence[fx.GraphModule], context: Context) -> list[float | None]:
    """SQNR of the outputs of graphs against the user's model, over recorded calibration samples, a few for a large one.

    Of several float outputs, it is that of the one that is furthest off: boxes in pixels must not hide scores.

    Args:
        gms: the graphs; the user's model runs once for all of them.
        context: the float model, the recorded samples, and the example for where the graph runs on none of them.

    Returns:
        dB for each graph, see `fxq.common.metrics.sqnr`; None where the model returns no float tensor.

    Source: Krishnamoorthi 2018, section 3.
    """
    with torch.no_grad(), without_autocast():
        try:
            large = context.original is not None and context.original.is_large
            few = context.some_samples(FEW) if large else context.samples or [context.example]
            return _compared(gms, context, few)
        except (InputError, RuntimeError, IndexError, ValueError) as error:
            # recorded are the first samples of a batch; a model whose first axis does not count samples cannot run them
            log.info("the output is compared on the example instead of recorded samples: %s", error)
            return _compared(gms, context, [context.example])


def _compared(gms: Sequence[fx.GraphModule], context: Context, batches: Sequence[Batch]) -> list[float | None]:
    agreements: list[dict[int, Agreement]] = [{} for _ in gms]  # by the place of the output
    for batch in batches:
        results = []
        for gm in gms:
            own_batch = copied(batch)  # a forward may change its inputs in place
            with untouched(context.model), seeded():  # the graph shares leaves with the user's model
                results.append(list(tensors(gm(*own_batch.args, **own_batch.kwargs))))
        wants = _outputs_of_example(context, batch, results[0]) if results else None
        if wants is None:
            wants = list(tensors(run_model(context.model, batch, context.recipe.concrete_args)))
        results.insert(0, wants)
        for place, (want, *gots) in enumerate(zip(*results, strict=True)):
            if want.is_floating_point():
                for outputs, got in zip(agreements, gots, strict=True):
                    add_output(outputs, place, want, got)
    return [min((output.sqnr for output in outputs.values()), key=rank, default=None) for outputs in agreements]


def _outputs_of_example(context: Context, batch: Batch, results: Sequence[Tensor]) -> list[Tensor] | None:
    """Outputs of the float model for samples of the example, or None if the samples are not from it.

    Args:
        context: holds the example and the float model's outputs for it.
        batch: the samples.
        results: outputs of a graph for them, whose shapes tell which axes hold samples.
    """
    start, some, count = place_in(context.example, batch), samples_in(batch), samples_in(context.example)
    wholes = list(tensors(context.outputs))
    if start is None or len(wholes) != len(results) or (some != count and not context.divisible):
        return None
    if some == count:
        return wholes
    pairs = list(zip(wholes, results, strict=True))
    if any(whole.dim() != part.dim() for whole, part in pairs):
        return None
    parts = [part_for(whole, part, start, some or 0, count or 0) for whole, part in pairs]
    return parts if [part.shape for part in parts] == [result.shape for result in results] else None


def add_output(outputs: dict[int, Agreement], place: int, want: Tensor, got: Tensor) -> None:
    """Take in an output. Where its shape follows from values, rounding may change it: that is said, not compared."""
    if want.shape == got.shape:
        outputs.setdefault(place, Agreement()).add(want, got)
        return
    warn(
        f"output {place} is not compared where its shape follows from values, which are rounded: it is "
        f"{tuple(got.shape)}, and {tuple(want.shape)} in the model that it is compared with."
    )


def rank(sqnr: float | None) -> float:
    """How good an SQNR is: nothing is worse than NaN, and than none, of which nothing is known."""
    return -math.inf if sqnr is None or math.isnan(sqnr) else sqnr


def check_output(ledger: Ledger, context: Context) -> None:
    """Warn when the output is further from the float model's than the recipe's `min_sqnr`, with what would mend it."""
    found, least = ledger.output_sqnr, context.recipe.min_sqnr
    if least is None or found is None or found >= least:
        return
    runs = (run_model(context.model, context.example, context.recipe.concrete_args, seed) for seed in (0, 1))
    if not same_values(*runs):
        warn(
            f"the output is at {found:.1f} dB SQNR against the float model's, but that says nothing: the float model "
            "itself draws random numbers, as dropout with training=True does, and gives other outputs each time. "
            "Compare without them; recipe.with_min_sqnr(None) turns this off."
        )
        return
    layers = ledger.worst(WORST)
    # where none is near, small errors are left as their signals cancel out, or are drowned by others in the same tensor
    layers = layers.where(lambda e: math.isnan(found) or e.fault_sqnr < found + NEAR) or layers
    ways = "".join(f"\n  {e.path or e.name} ({e.op}, {e.fault_sqnr:.1f} dB): {e.remedy}" for e in layers)
    named = f" The layers whose own error is largest, and what mends it:{ways}\n" if ways else " "
    other = "not finite where the float model's is, or the other way round"
    text = other if math.isnan(found) else f"at {found:.1f} dB SQNR"
    warn(
        f"the output is {text}, against the float model on recorded calibration data; the recipe asks for {least:g} dB "
        f"(min_sqnr).{named}Where a pass of your own is in the recipe: recipe.with_check() compares after every pass, "
        "and names the one that changes the numbers. print(qmodel.ledger) shows all layers."
    )
