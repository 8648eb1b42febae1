"""Families of transformers' models that generate, quantized: what goes through, and how near to float it is.

    python -m scripts.coverage.generators                  all families, with eager and sdpa attention
    python -m scripts.coverage.generators Llama T5         some of them
    python -m scripts.coverage.generators --dtype bfloat16 models with weights of 16 bits
    python -m scripts.coverage.generators --attention sdpa with one kind of attention
    python -m scripts.coverage.generators --out table.md   also as a Markdown table

Models are small and random. Columns: SQNR of the logits of 32 greedy steps with a cache after a padded prompt, of
a graph in float and of int8 weights, each sequence as long as its tokens are those of float; whether all tokens, and
those of a beam search with two beams, are float's. Where tokens of int8 weights differ from float's, the margin between
float's two largest logits at the first such step is given in units of the rounding noise, which is the standard
deviation of the error of a difference of two logits, in the median step.

A model with weights of 16 bits is computed in float32 once it is quantized. It is compared with the float model
converted to float32; the last column has the tokens of int8 weights against those of the model in 16 bits.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tabulate import tabulate

import fxq
from scripts.coverage.outputs import sqnr
from scripts.networks.generators import CASES, generator, prompt, vision_language

HEADERS = ("family", "attention", "float", "tokens", "beams", "int8", "tokens", "16 bits", "seconds", "verdict")
RECIPES = (fxq.Recipe.weight_only(backend="reference").override("*", fxq.FLOAT), fxq.Recipe.weight_only())
VISION_LANGUAGE, ATTENTIONS = "Llava", ("eager", "sdpa")
STEPS, BEAMS, MIN_GRAPH_SQNR_DB, MIN_INT8_SQNR_DB = 32, 2, 80.0, 30.0
MAX_MARGIN = 4.0
"""Largest margin of float's two largest logits, in units of the rounding noise, that rounding may reverse."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="families (default: all)")
    parser.add_argument("--attention", nargs="*", choices=ATTENTIONS, default=ATTENTIONS, help="default: both")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the weights")
    parser.add_argument("--out", type=Path, help="file for the table")
    arguments = parser.parse_args()
    console = Console()
    rows = []
    for family, attention in (*CASES, *((VISION_LANGUAGE, attention) for attention in ATTENTIONS)):
        if attention in arguments.attention and (not arguments.families or family in arguments.families):
            rows.append(_row(family, attention, getattr(torch, arguments.dtype)))
            console.print(*rows[-1])
    table = tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True)
    console.print(table, soft_wrap=True)
    if arguments.out is not None:
        arguments.out.write_text(f"{table}\n", encoding="utf-8")


def _row(family: str, attention: str, dtype: torch.dtype) -> tuple[str, ...]:
    model, inputs, options = _case(family, attention)
    if dtype is not torch.float32:
        model = _in_16_bits(model, attention, dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fxq.FxqWarning)
            return family, attention, *_measured(model, inputs, options)
    except fxq.FxqError as error:
        return family, attention, *["-"] * (len(HEADERS) - 3), f"{type(error).__name__}: {error}"


def _case(family: str, attention: str) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    """Float model of a family, a padded prompt, and options of `fxq.quantize`."""
    if family != VISION_LANGUAGE:
        return generator(family, attention), prompt(family), {}
    model, inputs = vision_language(attention)
    beams = {
        name: tensor.repeat_interleave(BEAMS, 0) for name, tensor in inputs.items()
    }  # a graph is for so many images
    return model, inputs, {"example_inputs": {"image": inputs, "beams": beams}}


def _in_16_bits(model: Any, attention: str, dtype: torch.dtype) -> Any:
    """Model as it is read from a checkpoint of 16 bits, some of whose tensors the library keeps in float32."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        read = type(model).from_pretrained(folder, dtype=dtype).eval()
    read.set_attn_implementation(attention)
    read.generation_config = model.generation_config
    return read


def _measured(model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> tuple[str, ...]:
    """Columns of a row after the family and its attention."""
    begin = time.process_time()
    exact, integer = (fxq.quantize(model, recipe, **options) for recipe in RECIPES)
    seconds = time.process_time() - begin
    is_16_bits = model.dtype is not torch.float32
    wide = copy.deepcopy(model).float() if is_16_bits else model
    want, got, rounded = (_generated(each_model, inputs) for each_model in (wide, exact, integer))
    beams = _beam_difference(wide, exact, inputs)
    narrow = _generated(model, _converted(inputs, model.dtype)) if is_16_bits else want
    graph, weights = compare(want, got), compare(want, rounded)
    failures = [
        text
        for text, fails in {
            f"the graph in float is under {MIN_GRAPH_SQNR_DB:.0f} dB": not graph.sqnr_db >= MIN_GRAPH_SQNR_DB,
            "the graph in float gives other tokens": graph.steps < STEPS,
            f"beam search: {beams}": beams != "",
            f"int8 is under {MIN_INT8_SQNR_DB:.0f} dB": not weights.sqnr_db >= MIN_INT8_SQNR_DB,
            f"tokens of int8 differ at a margin of {weights.margin:.1f} noise": weights.margin > MAX_MARGIN,
        }.items()
        if fails
    ]
    return (
        "equal" if graph.sqnr_db == math.inf else f"{graph.sqnr_db:.0f} dB",
        str(graph),
        "no" if beams else "yes",
        f"{weights.sqnr_db:.0f} dB",
        str(weights),
        str(compare(narrow, rounded)) if is_16_bits else "",
        f"{seconds:.0f}",
        "; ".join(failures) or "ok",
    )


def _beam_difference(model: Any, quantized: Any, inputs: dict[str, torch.Tensor]) -> str:
    """Why a beam search with two beams does not give the same tokens; empty if it does."""
    options = {"max_new_tokens": 12, "num_beams": BEAMS, "do_sample": False}
    try:
        got = quantized.generate(**inputs, **options)
    except fxq.FxqError as error:
        return f"{type(error).__name__}: {error}"
    return "" if torch.equal(model.generate(**inputs, **options), got) else "other tokens"


def _converted(inputs: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


def _generated(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
    """Sequences and logits of greedy steps."""
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(**inputs, max_new_tokens=STEPS, **options)


@dataclass(frozen=True)
class Comparison:
    """Greedy steps of a model beside those of another one.

    Attributes:
        sqnr_db: SQNR of the logits, of each sequence up to its first other token.
        steps: number of steps whose tokens are the same in all sequences.
        margin: margin of the two largest logits at the first other tokens, the largest of all sequences, in units of
            the rounding noise; 0 if all tokens are the same.
    """

    sqnr_db: float
    steps: int
    margin: float

    def __str__(self) -> str:
        return "all" if self.steps == STEPS else f"{self.steps} of {STEPS}, margin {self.margin:.1f}"


def compare(want: Any, got: Any) -> Comparison:
    """Compare greedy steps, each sequence as long as its tokens are the same.

    Args:
        want: result of `generate` with logits.
        got: result of the other model.
    """
    wanted, logits = (torch.stack(result.logits).double() for result in (want, got))  # [steps, batch, vocabulary]
    differs = (want.sequences != got.sequences).T[-len(wanted) :]
    comparable = differs.cumsum(0) - differs.long() == 0  # no other token before
    firsts = differs & comparable
    error = (wanted - logits)[comparable]
    noise = error.std(-1).median() * 2**0.5  # the step that is compared counts little
    margins = wanted[firsts].topk(2).values.diff().abs()
    return Comparison(
        sqnr_db=sqnr(wanted[comparable], logits[comparable]),
        steps=int((differs.any(1).cumsum(0) == 0).sum()),
        margin=float(margins.max() / noise) if bool(differs.any()) else 0.0,
    )


if __name__ == "__main__":
    main()
