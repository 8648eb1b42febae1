"""Measure 4-bit weights of small models of texts: what they lose, and what calibration data wins back.

    python -m scripts.bench.int4                          all models whose packages are installed
    python -m scripts.bench.int4 --only iglm              one model
    python -m scripts.bench.int4 --variant "fxq int4"     only variants whose name starts so
    python -m scripts.bench.int4 --json numbers.json      the numbers as data too

The loss of language models and of g2p-en is the KL divergence of the next token's distribution from the float model's,
in nats per token; that of MiniLM is 1 minus the cosine of the embeddings, as a mean. Both are measured on sequences
that no variant has seen. IgLM is judged on sequences that it draws itself, SmolLM2 and MiniLM on docstrings of Python's
library, g2p-en on words of these, pydoc on documentation that it was not trained on: the first call trains it, see
`scripts.networks.pydoc_model`. SmolLM2's weights come from blocks of 32 with 4 bits, so that only other block sizes say
something about the tools. "won back" is the share of the loss of rounding to nearest, with one range per block and all
layers in 4 bits. Bits count scales and zero points of all weights in integers, also of embeddings and heads.
Seconds are of CPU time, on one thread where the tool allows it; the peak is that of the process, which makes one
variant only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

import fxq
from scripts.bench import history
from scripts.bench.int4_contenders import CONTENDERS, Contender
from scripts.bench.timing import threads_set_to
from scripts.networks.int4_subjects import NOT_INSTALLED, SUBJECTS, Subject
from scripts.networks.language import perplexity

ROUNDED = "fxq rounded"
"""Variant that the share of others is relative to."""


@dataclass(frozen=True)
class Result:
    """Numbers of one variant of a model; `measure` names the loss, and `note` says why it failed."""

    model: str
    variant: str
    loss: float | None = None
    perplexity: float | None = None
    bits: float | None = None
    seconds: float | None = None
    peak_gb: float | None = None
    measure: str = ""
    note: str = ""


def rounded(subject: Subject) -> Any:
    """Everything in 4 bits, with the range of each block."""
    spec = fxq.TensorSpec(bits=4, per=64, observer="minmax")
    recipe = everywhere(fxq.Recipe.weight_only(weight=spec), subject)
    return fxq.quantize(
        subject.model, recipe, example_inputs=None if subject.is_transformers_model else subject.calibration
    )


def everywhere(recipe: fxq.Recipe, subject: Subject, bits: int | None = None) -> fxq.Recipe:
    """Recipe that gives embeddings and the head a number of bits; None: the spec of the other layers."""
    config = recipe.config if bits is None else fxq.Recipe.weight_only(bits=bits).config
    recipe = recipe.override(torch.nn.Embedding, config)
    return recipe.override("lm_head", config) if subject.is_transformers_model else recipe


def plain(
    bits: int,
    per: int | None,
    reads_data: bool,
    all_layers: bool = False,
    head_bits: int | None = None,
    rank: int | None = None,
) -> Callable[[Subject], Any]:
    """The default of fxq with a number of bits and a block size, with or without calibration data.

    With `all_layers`, embeddings and the head have these bits, too, or `head_bits`. With `rank`, a matrix of this rank
    corrects each layer.
    """

    def quantized(subject: Subject) -> Any:
        batches = batches_of(subject) if reads_data else None
        recipe = fxq.Recipe.weight_only(bits=bits, per=per)
        recipe = everywhere(recipe, subject, head_bits) if all_layers else recipe
        recipe = recipe.insert_pass(fxq.passes.LowRank(rank=rank), after="gptq") if rank is not None else recipe
        example = None if subject.is_transformers_model or reads_data else subject.calibration
        return fxq.quantize(subject.model, recipe, data=batches, example_inputs=example)

    return quantized


def batches_of(subject: Subject) -> list[Any]:
    """Calibration data in batches of 8 sequences."""
    parts = subject.calibration.split(8)
    return [{"input_ids": rows} if subject.is_transformers_model else rows for rows in parts]


def searched(budget: str) -> Callable[[Subject], Any]:
    """The bits and blocks of each weight that `fxq.search` chooses within a budget, with calibration data."""

    def quantized(subject: Subject) -> Any:
        batches = batches_of(subject)
        result = fxq.search(subject.model, fxq.Recipe.weight_only(bits=4), batches, budget=budget)
        return fxq.quantize(subject.model, result.recipe, data=batches)

    return quantized


def outputs(model: Any, rows: Tensor) -> Tensor:
    """Output of a model, or its logits."""
    value = model(rows)
    return value if isinstance(value, Tensor) else value.logits


VARIANTS: dict[str, Callable[[Subject], Any]] = {
    ROUNDED: rounded,
    "fxq int4": plain(4, None, reads_data=False),
    "fxq int4, data": plain(4, None, reads_data=True),
    "fxq int4, all": plain(4, None, reads_data=False, all_layers=True),
    "fxq int4, all, data": plain(4, None, reads_data=True, all_layers=True),
    "fxq int4, all, rank 4, data": plain(4, None, reads_data=True, all_layers=True, rank=4),
    "fxq int3, all, data": plain(3, None, reads_data=True, all_layers=True),
    "fxq int3, all, rank 16, data": plain(3, None, reads_data=True, all_layers=True, rank=16),
    "fxq int3, all, blocks of 32, data": plain(3, 32, reads_data=True, all_layers=True),
    "fxq int4, blocks of 128, head in 6 bits, data": plain(4, 128, True, all_layers=True, head_bits=6),
    "fxq search, 4.5 bits": searched("4.5 bits"),
    "fxq int4, blocks of 128, data": plain(4, 128, reads_data=True),
    "fxq int4, blocks of 32, data": plain(4, 32, reads_data=True),
    "fxq int8": plain(8, None, reads_data=False),
    **CONTENDERS,
}
"""Functions that quantize a subject, by name."""


def divergence(model: Any, quantized: Any, rows: Tensor) -> float:
    """KL divergence of the quantized model's distributions from the float model's, in nats per token."""
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in rows.split(4):
            wanted, actual = (outputs(m, batch).float().log_softmax(-1) for m in (model, quantized))
            total += float((wanted.exp() * (wanted - actual)).sum())
            count += wanted[..., 0].numel()
    return total / count


def distance(model: Any, quantized: Any, rows: Tensor) -> float:
    """1 minus the cosine of the outputs of the quantized and the float model, as a mean."""
    with torch.no_grad():
        pairs = [[outputs(m, batch).double() for m in (model, quantized)] for batch in rows.split(4)]
    return 1 - float(torch.cat([torch.cosine_similarity(*pair, dim=-1) for pair in pairs]).mean())


MEASURES: dict[str, Callable[[Any, Any, Tensor], float]] = {"KL": divergence, "1 - cosine": distance}


def stored_bits(quantized: Any) -> float | None:
    """Mean bits per value of integer weights of a model, shared ones counted once; None if it has none."""
    if isinstance(quantized, Contender):
        return quantized.bits
    # all programs of a language model share their weights
    program = quantized.programs.models[0] if hasattr(quantized, "programs") else quantized
    kernels = dict(program.named_modules())
    shared = {entry: getattr(kernels.get(f"fxq_kernels.{entry.into}"), "weight", None) for entry in program.ledger}
    # recurrent layers have no weight of that name, and layers with a low-rank correction are never shared
    shared = {entry: weight for entry, weight in shared.items() if entry.weight_bits}
    entries = {id(entry) if w is None else w.data_ptr(): entry for entry, w in shared.items()}.values()
    values = sum(entry.weight_values for entry in entries)
    return sum(entry.weight_bits * entry.weight_values for entry in entries) / values if values else None


def measured(name: str, variant: str, rows: int) -> Result:
    """Result of one variant of one model on a number of sequences."""
    with threads_set_to(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject = SUBJECTS[name]()
        judged = subject.judged[:rows]
        start = time.process_time()
        try:
            quantized = VARIANTS[variant](subject)
        except Exception as error:  # it is a result, too
            return Result(
                name, variant, measure=subject.measure, note=f"{type(error).__name__}: {error}".splitlines()[0][:100]
            )
        seconds = time.process_time() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        loss = MEASURES[subject.measure](subject.model, quantized, judged)
        of_tokens = perplexity(quantized, judged) if subject.is_transformers_model else None
    return Result(name, variant, loss, of_tokens, stored_bits(quantized), seconds, peak, subject.measure)


def in_process(name: str, variant: str, rows: int, limit: int) -> Result:
    """`measured` in a process of its own, so that the peak is that of the variant, and none stops the others.

    Args:
        name: model.
        variant: variant.
        rows: number of sequences that are judged.
        limit: number of seconds of CPU time after which the process ends.
    """
    context = multiprocessing.get_context("spawn")
    limits = resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY)
    with ProcessPoolExecutor(1, context, resource.setrlimit, limits) as pool:
        try:
            return pool.submit(measured, name, variant, rows).result()
        except BrokenProcessPool:
            return Result(name, variant, note=f"ended by the system, after {limit} s or for lack of memory")


def table(results: list[Result]) -> str:
    """Table of results, with the share of the loss of rounding that is won back."""
    base = {result.model: result.loss for result in results if result.variant == ROUNDED}

    def row(result: Result) -> Iterator[object]:
        whole = base.get(result.model)
        share = 1 - result.loss / whole if result.loss is not None and whole else None
        yield from (result.model, result.variant, result.measure, result.loss)
        yield None if share is None else f"{share:.0%}"
        yield from (result.perplexity, result.bits, result.seconds, result.peak_gb, result.note)

    headers = ("model", "variant", "measure", "loss", "won back", "perplexity", "bits", "CPU s", "peak GB", "")
    return tabulate([list(row(result)) for result in results], headers, floatfmt=".3g", missingval="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SUBJECTS, action="append", help="only this model; may be repeated")
    parser.add_argument("--variant", action="append", default=[], help="only variants whose name starts so")
    parser.add_argument("--rows", type=int, default=64, help="maximum number of sequences that are judged")
    parser.add_argument("--limit", type=int, default=1800, help="seconds of CPU time after which a variant is stopped")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    history.add_argument(parser)
    arguments = parser.parse_args()
    variants = [name for name in VARIANTS if not arguments.variant or name.startswith(tuple(arguments.variant))]
    results = []
    for name in arguments.only or SUBJECTS:
        try:
            SUBJECTS[name]()  # may train the model, which no limit should end
        except NOT_INSTALLED as error:
            results.append(Result(name, "", note=str(error)))
            continue
        for variant in variants:
            results.append(in_process(name, variant, arguments.rows, arguments.limit))
            print(results[-1], file=sys.stderr)
    print(table(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    quantities = {"KL": ("KL to float", "nats"), "1 - cosine": ("1 - cosine to float", "")}
    numbers = [
        (f"{r.model}, {r.variant}", *number)
        for r in results
        if r.loss is not None
        for number in (
            (quantities[r.measure][0], r.loss, quantities[r.measure][1]),
            ("CPU seconds to quantize", r.seconds, "s"),
            *([("bits per weight", r.bits, "")] if r.bits is not None else []),
        )
    ]
    history.append(arguments.history, "bench.int4", numbers)


if __name__ == "__main__":
    main()
