"""Last check of `quantize`: compares the outputs of the finished model with the float model's."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, fx

from fxq.common.data import Batch, place_in, samples_in
from fxq.common.isolation import copied, seeded, without_autocast
from fxq.common.metrics import Agreement, tensors
from fxq.errors import InputError, warn
from fxq.graph.run import Runner
from fxq.ledger.ledger import Ledger
from fxq.pipeline.context import Context
from fxq.tracing.fidelity import part_for, run_model, same_values

log = logging.getLogger("fxq")

LARGE_MODEL_SAMPLES = 4
"""Number of samples that a large model is compared on, if they have enough output values."""
MIN_OUTPUT_VALUES = 512
"""Number of values of each output that are compared at least, if so many are recorded: an SQNR of fewer is noise."""
MAX_NAMED_LAYERS = 3
"""Number of layers that a warning names."""
MAX_DB_ABOVE_OUTPUT = 10.0
"""Layers whose SQNR is this many dB above the output's add little to its error, and are not named in a warning."""


def output_sqnrs(gms: Sequence[fx.GraphModule], context: Context) -> list[float | None]:
    """Return the SQNR of the outputs of graphs against the user's model, over recorded calibration samples.

    If there are several float outputs, it is the minimum over them, so that large values (boxes in pixels) do not hide
    small ones (scores). A large model runs on `LARGE_MODEL_SAMPLES` samples, or on more if it has few output values.

    Args:
        gms: the graphs; the user's model runs once for all of them.
        context: holds the float model, the recorded samples, and the example, which is used if samples do not run.

    Returns:
        dB for each graph, see `fxq.common.metrics.sqnr`; None if the model returns no float tensor.

    Source: Krishnamoorthi 2018, section 3.
    """
    with torch.no_grad(), without_autocast():
        try:
            return _compared(gms, context, _samples(context) or [context.example])
        except (InputError, RuntimeError, IndexError, ValueError) as error:
            # the first samples of a batch are recorded; models whose axis 0 does not count samples cannot run on them
            log.info("the output is compared on the example instead of recorded samples: %s", error)
            return _compared(gms, context, [context.example])


def _samples(context: Context) -> list[Batch]:
    """Recorded samples to compare on."""
    if not context.is_large:
        return context.samples
    per_sample = samples_in(context.example) or 1
    sizes = [output.numel() / per_sample for output in tensors(context.outputs) if output.is_floating_point()]
    needed = math.ceil(MIN_OUTPUT_VALUES / max(min(sizes, default=0.0), 1.0))
    return context.some_samples(max(LARGE_MODEL_SAMPLES, needed))


def _compared(gms: Sequence[fx.GraphModule], context: Context, batches: Sequence[Batch]) -> list[float | None]:
    agreements: list[dict[int, Agreement]] = [{} for _ in gms]  # by the position of the output
    for batch in batches:
        results = []
        for gm in gms:
            own_batch = copied(batch)  # a forward may change its inputs in place
            with context.untouched(), seeded():  # the graph shares leaves with the user's model
                results.append(list(tensors(Runner(gm, own_batch).run())))  # generating code would take longer
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
    """Add an output to the agreements. Warn instead if the shapes differ, since they depend on rounded values.

    Args:
        outputs: agreement of each output, by its position.
        place: position of the output.
        want: float32, output of the reference.
        got: output of the quantized model.
    """
    if want.shape == got.shape:
        outputs.setdefault(place, Agreement()).add(want, got)
        return
    warn(
        f"output {place} is not compared, since its shape depends on values, which are rounded: it is "
        f"{tuple(got.shape)}, and {tuple(want.shape)} in the model that it is compared with."
    )


def rank(sqnr: float | None) -> float:
    """Sort key of an SQNR: NaN and None are the worst."""
    return -math.inf if sqnr is None or math.isnan(sqnr) else sqnr


def check_output(ledger: Ledger, context: Context) -> None:
    """Warn if the output's SQNR is below the recipe's `min_sqnr`, and name remedies."""
    output_sqnr, min_sqnr, preset = ledger.output_sqnr, context.recipe.min_sqnr, context.recipe.preset
    if min_sqnr is None or output_sqnr is None or output_sqnr >= min_sqnr:
        return
    if _draws_random_numbers(context):
        warn(
            f"the output is at {output_sqnr:.1f} dB SQNR against the float model's, but this number means nothing: the "
            "float model draws random numbers, as dropout with training=True does, and its own outputs differ between "
            "calls. Compare without randomness; recipe.with_min_sqnr(None) turns this warning off."
        )
        return
    layers = ledger.worst(MAX_NAMED_LAYERS)
    # if no layer is near the output's SQNR, all are named: signals may cancel, or tensors mix large and small values
    max_db = output_sqnr + MAX_DB_ABOVE_OUTPUT
    layers = layers.where(lambda e: math.isnan(output_sqnr) or e.fault_sqnr < max_db) or layers
    lines = "".join(f"\n  {e.path or e.name} ({e.op}, {e.fault_sqnr:.1f} dB): {e.remedy}" for e in layers)
    remedies = f" The layers with the largest own errors, and the remedy for each:{lines}\n" if lines else " "
    not_finite = "not finite where the float model's is, or vice versa"
    text = not_finite if math.isnan(output_sqnr) else f"at {output_sqnr:.1f} dB SQNR"
    others = 'effort="best" also tries equalization, other observers and other rounding. ' if preset == "static" else ""
    warn(
        f"the output is {text}, against the float model on recorded calibration data; the recipe asks for "
        f"{min_sqnr:g} dB (min_sqnr).{remedies}{others}If the recipe has passes of your own, recipe.with_check() "
        "compares the output after every pass and names the one that changes the numbers. print(qmodel.ledger) shows "
        "all layers."
    )


def _draws_random_numbers(context: Context) -> bool:
    """Whether the outputs of the float model for the example differ between two seeds."""
    run = partial(run_model, context.model, context.example, context.recipe.concrete_args)
    second = run(seed=1)
    # `outputs` has another seed, and may be rounded otherwise, as the traced graph computed them
    return not same_values(context.outputs, second) and not same_values(run(seed=0), second)
