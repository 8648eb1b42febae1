"""Measure 4-bit weights of small language models: what they lose, and what calibration data wins back.

    python -m scripts.bench.int4                          IgLM and SmolLM2, where their packages are installed
    python -m scripts.bench.int4 --only iglm              one model
    python -m scripts.bench.int4 --variant "fxq int4"     only variants whose name starts so
    python -m scripts.bench.int4 --json numbers.json      the numbers as data too

The loss is the KL divergence of the next token's distribution from the float model's, in nats per token, on sequences
that no variant has seen. IgLM is judged on sequences that it draws itself, SmolLM2 on docstrings of Python's library;
its weights come from blocks of 32 with 4 bits, so that only other block sizes say something about the tools. "won back"
is the share of the loss of rounding to nearest, with one range per block and all layers in 4 bits. Bits count scales
and zero points of all weights in integers, also of embeddings and heads. Seconds are of CPU time on one thread; the
peak is that of the process, which makes one variant only.
"""

from __future__ import annotations

import argparse
import json
import math
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
from types import SimpleNamespace
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

import fxq
from scripts.bench import history
from scripts.bench.timing import threads_set_to
from scripts.networks.language import antibodies, docstrings, iglm, perplexity, smollm2

ROUNDED = "fxq rounded"
"""Variant that the share of others is relative to."""


@dataclass(frozen=True)
class Subject:
    """A model with sequences of tokens, int64[rows, length].

    Attributes:
        model: the float model.
        calibration: sequences for calibration.
        judged: sequences that no variant sees.
    """

    model: Any
    calibration: Tensor
    judged: Tensor


@dataclass(frozen=True)
class Result:
    """Numbers of one variant of a model; `note` says why it failed."""

    model: str
    variant: str
    kl: float | None = None
    perplexity: float | None = None
    bits: float | None = None
    seconds: float | None = None
    peak_gb: float | None = None
    note: str = ""


def iglm_subject() -> Subject:
    """IgLM with 64 sequences of its own for calibration, and as many that are judged."""
    model = iglm()
    return Subject(model, antibodies(model, 64, seed=1), antibodies(model, 64, seed=2))


def smollm2_subject() -> Subject:
    """SmolLM2 with docstrings: 8 rows of 256 tokens for calibration, 8 that are judged."""
    model, tokenizer = smollm2()
    rows = docstrings(tokenizer)
    return Subject(model, rows[:8], rows[8:16])


SUBJECTS: dict[str, Callable[[], Subject]] = {"iglm": iglm_subject, "smollm2": smollm2_subject}


def rounded(subject: Subject) -> Any:
    """Everything in 4 bits, with the range of each block."""
    spec = fxq.TensorSpec(bits=4, per=64, observer="minmax")
    return fxq.quantize(subject.model, everywhere(fxq.Recipe.weight_only(weight=spec)))


def everywhere(recipe: fxq.Recipe) -> fxq.Recipe:
    """Recipe that gives embeddings and the head the bits of the other layers, too."""
    return recipe.override(torch.nn.Embedding, recipe.config).override("lm_head", recipe.config)


def plain(bits: int, per: int | None, reads_data: bool, all_layers: bool = False) -> Callable[[Subject], Any]:
    """The default of fxq with a number of bits and a block size, with or without calibration data.

    With `all_layers`, embeddings and the head have these bits, too.
    """

    def quantized(subject: Subject) -> Any:
        batches = [{"input_ids": rows} for rows in subject.calibration.split(8)] if reads_data else None
        recipe = fxq.Recipe.weight_only(bits=bits, per=per)
        return fxq.quantize(subject.model, everywhere(recipe) if all_layers else recipe, data=batches)

    return quantized


class OpenVinoModel:
    """Model of OpenVINO that is called like one of transformers; it computes in float32.

    Attributes:
        bits: mean bits per value of its integer weights.
    """

    def __init__(self, model: Any) -> None:
        import openvino

        options = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
        self._compiled, self.bits = openvino.compile_model(model, "CPU", options), bits_in_openvino(model)

    def __call__(self, rows: Tensor) -> Any:
        return SimpleNamespace(logits=torch.from_numpy(self._compiled(rows.numpy())[0]))


def bits_in_openvino(model: Any) -> float:
    """Mean bits per value of the integer weights of a model of OpenVINO, with their scales and zero points."""

    def constants(node: Any) -> Iterator[Any]:
        if node.get_type_name() == "Constant":
            yield node
        elif node.get_type_name() in ("Convert", "Subtract", "Multiply", "Reshape"):
            for value in node.input_values():
                yield from constants(value.get_node())

    bits, values = 0, 0
    for scaling in (op for op in model.get_ops() if op.get_type_name() == "Multiply"):
        parts = [(part.get_element_type(), math.prod(part.get_output_shape(0))) for part in constants(scaling)]
        if any(kind.get_type_name() in ("u4", "i4", "u8", "i8") for kind, _ in parts):
            bits += sum(kind.bitwidth * size for kind, size in parts)
            values += max(size for _, size in parts)
    return bits / values


def in_nncf(**options: Any) -> Callable[[Subject], Any]:
    """NNCF's default for 4 bits with blocks of 64, asymmetric, in its OpenVINO backend.

    Args:
        options: options of `nncf.compress_weights` that read data; without any, there is none.
    """

    def quantized(subject: Subject) -> Any:
        import nncf
        import openvino

        class Logits(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = subject.model

            def forward(self, rows: Tensor) -> Any:
                return self.model(rows, attention_mask=torch.ones_like(rows), use_cache=False).logits

        converted = openvino.convert_model(Logits().eval(), example_input=subject.calibration[:2])
        dataset = nncf.Dataset([row[None].numpy() for row in subject.calibration]) if options else None
        return OpenVinoModel(
            nncf.compress_weights(
                converted, mode=nncf.CompressWeightsMode.INT4_ASYM, group_size=64, dataset=dataset, **options
            )
        )

    return quantized


VARIANTS: dict[str, Callable[[Subject], Any]] = {
    ROUNDED: rounded,
    "fxq int4": plain(4, None, reads_data=False),
    "fxq int4, data": plain(4, None, reads_data=True),
    "fxq int4, all": plain(4, None, reads_data=False, all_layers=True),
    "fxq int4, all, data": plain(4, None, reads_data=True, all_layers=True),
    "fxq int4, blocks of 128, data": plain(4, 128, reads_data=True),
    "fxq int4, blocks of 32, data": plain(4, 32, reads_data=True),
    "fxq int8": plain(8, None, reads_data=False),
    "NNCF int4": in_nncf(),
    "NNCF int4, scale estimation": in_nncf(scale_estimation=True),
}
"""Functions that quantize a subject, by name."""


def divergence(model: Any, quantized: Any, rows: Tensor) -> float:
    """KL divergence of the quantized model's distributions from the float model's, in nats per token."""
    total = 0.0
    with torch.no_grad():
        for batch in rows.split(4):
            wanted, actual = (m(batch).logits.float().log_softmax(-1) for m in (model, quantized))
            total += float((wanted.exp() * (wanted - actual)).sum())
    return total / rows.numel()


def stored_bits(quantized: Any) -> float | None:
    """Mean bits per value of integer weights of a model, shared ones counted once; None if it has none."""
    if isinstance(quantized, OpenVinoModel):
        return quantized.bits
    program = quantized.programs.models[0]  # all programs share their weights
    kernels = {
        entry: program.get_submodule(f"fxq_kernels.{entry.into}") for entry in program.ledger if entry.weight_bits
    }
    entries = {kernel.weight.data_ptr(): entry for entry, kernel in kernels.items()}.values()
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
            return Result(name, variant, note=f"{type(error).__name__}: {error}".splitlines()[0][:100])
        seconds = time.process_time() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        losses = divergence(subject.model, quantized, judged), perplexity(quantized, judged)
    return Result(name, variant, *losses, stored_bits(quantized), seconds, peak)


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
    base = {result.model: result.kl for result in results if result.variant == ROUNDED}

    def row(result: Result) -> Iterator[object]:
        whole = base.get(result.model)
        share = 1 - result.kl / whole if result.kl is not None and whole else None
        yield from (result.model, result.variant, result.kl, None if share is None else f"{share:.0%}")
        yield from (result.perplexity, result.bits, result.seconds, result.peak_gb, result.note)

    headers = ("model", "variant", "KL", "won back", "perplexity", "bits", "CPU s", "peak GB", "")
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
        for variant in variants:
            try:
                results.append(in_process(name, variant, arguments.rows, arguments.limit))
            except SystemExit as error:  # its package is not installed
                results.append(Result(name, variant, note=str(error)))
            print(results[-1], file=sys.stderr)
    print(table(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    numbers = [(f"{r.model}, {r.variant}", "KL to float", r.kl, "nats") for r in results if r.kl is not None]
    history.append(arguments.history, "bench.int4", numbers)


if __name__ == "__main__":
    main()
