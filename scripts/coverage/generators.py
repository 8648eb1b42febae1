"""Families of transformers' models that generate, quantized: what goes through, and how near to float it is.

    python -m scripts.coverage.generators                  all families, with eager and sdpa attention
    python -m scripts.coverage.generators Llama T5         some of them
    python -m scripts.coverage.generators --out table.md   also as a Markdown table

Models are small and random. Columns: SQNR of the logits of 32 greedy steps with a cache after a padded prompt, of
a graph in float and of int8 weights (as long as the tokens are those of float); whether all tokens, and those of a beam
search with two beams, are float's.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tabulate import tabulate

import fxq
from scripts.networks.generators import CASES, generator, prompt

HEADERS = ("family", "attention", "graph in float", "tokens", "beams", "int8 weights", "tokens", "seconds")
RECIPES = (fxq.Recipe.weight_only(backend="reference").override("*", fxq.FLOAT), fxq.Recipe.weight_only())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="families (default: all)")
    parser.add_argument("--out", type=Path, help="file for the table")
    arguments = parser.parse_args()
    console = Console()
    rows = []
    for family, attention in CASES:
        if not arguments.families or family in arguments.families:
            rows.append(_row(family, attention))
            console.print(*rows[-1])
    table = tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True)
    console.print(table)
    if arguments.out is not None:
        arguments.out.write_text(f"{table}\n", encoding="utf-8")


def _row(family: str, attention: str) -> tuple[str, ...]:
    model, inputs = generator(family, attention), prompt(family)
    begin = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fxq.FxqWarning)
            exact, integer = (fxq.quantize(model, recipe) for recipe in RECIPES)
    except fxq.FxqError as error:
        return (family, attention, f"{type(error).__name__}: {error}")
    seconds = time.process_time() - begin
    want, got, rounded = (_steps(each_model, inputs) for each_model in (model, exact, integer))
    beams = [m.generate(**inputs, max_new_tokens=12, num_beams=2, do_sample=False) for m in (model, exact)]
    return (
        family,
        attention,
        _decibels(want, got),
        _tokens(want, got),
        "yes" if torch.equal(*beams) else "no",
        _decibels(want, rounded),
        _tokens(want, rounded),
        f"{seconds:.0f}",
    )


def _steps(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(**inputs, max_new_tokens=32, **options)


def _same(want: Any, got: Any) -> int:
    """Number of steps whose tokens are alike."""
    differs = (want.sequences != got.sequences).any(0)[-32:]
    return int(differs.int().argmax()) if bool(differs.any()) else 32


def _tokens(want: Any, got: Any) -> str:
    steps = _same(want, got)
    return "all" if steps == 32 else f"{steps} of 32"


def _decibels(want: Any, got: Any) -> str:
    count = min(_same(want, got) + 1, 32)
    wanted, logits = torch.stack(want.logits)[:count].double(), torch.stack(got.logits)[:count].double()
    error = float((wanted - logits).square().sum())
    return f"{10 * torch.log10(wanted.square().sum() / error):.0f} dB" if error else "equal"


if __name__ == "__main__":
    main()
