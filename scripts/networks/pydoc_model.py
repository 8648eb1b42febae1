"""A language model of 10 M parameters that is trained on the documentation of Python's standard library.

    python -m scripts.networks.pydoc_model                 train it unless its weights are there, report on it
    python -m scripts.networks.pydoc_model --steps 100     another number of steps, with weights of its own

The texts are docstrings and the topics of `help()`, from the files of the Python that runs. A tenth of the documents is
held out. Weights and vocabulary lie in `networks` of the folder that `FXQ_CACHE` names, or of the user's cache of fxq.
Seeded: on one machine, with the same Python and number of threads, two runs write the same weights.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import math
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from platformdirs import user_cache_path
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import RandomSampler

from scripts.networks.language import perplexity

STEPS = 4000
"""Steps of training."""
STEPS_PER_MINUTE = 100
"""Steps in a minute on one core, to tell how long training takes."""
BATCH, LENGTH = 2, 128
"""Rows of a step, and tokens of a row."""
WARM_UP = 100
"""Steps in which the learning rate rises."""
WORDS = 4096
"""Size of the vocabulary."""
SIZES = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 6,
    "num_key_value_heads": 6, "max_position_embeddings": 512,
}  # fmt: skip
"""Sizes of the Llama; its head is its embedding."""
END = "<|end|>"
"""Token between two documents, number 0."""
TESTS = {"test", "tests", "idle_test"}
"""Folders of the library whose texts are left out: not every installation has them."""


def documents() -> list[str]:
    """Docstrings of each file of the standard library, each docstring once, and the topics of `help()`, sorted."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    texts = ["\n\n".join(fresh) for path in library_files() if (fresh := new_docstrings(path, seen))]
    return texts + [text for _, text in sorted(topics.items())]


def library_files() -> Iterator[Path]:
    """Files of the standard library without its tests, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    for name in sorted(sys.stdlib_module_names):
        files = [root / f"{name}.py", *sorted((root / name).rglob("*.py"))]
        yield from (path for path in files if path.exists() and not TESTS & set(path.relative_to(root).parts))


def new_docstrings(path: Path, seen: set[str]) -> list[str]:
    """Docstrings of a file that are not in `seen`, which they are added to."""
    nodes = ast.walk(ast.parse(path.read_bytes()))
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    texts = dict.fromkeys(ast.get_docstring(node) for node in nodes if isinstance(node, kinds))
    fresh = [text for text in texts if text and text not in seen]
    seen.update(fresh)
    return fresh


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """Documents for training, and every tenth, which is held out."""
    return [text for i, text in enumerate(texts) if i % 10 != 9], texts[9::10]


def in_rows(tokenizer: Any, texts: list[str], length: int = LENGTH) -> Tensor:
    """Documents one after the other as int64[rows, length] of tokens; the last ones that fill no row are left out.

    Args:
        tokenizer: the tokenizer.
        texts: the documents.
        length: number of tokens in a row.
    """
    end = tokenizer.token_to_id(END)
    tokens = [token for encoded in tokenizer.encode_batch(texts) for token in (end, *encoded.ids)]
    return torch.tensor(tokens[: len(tokens) // length * length]).reshape(-1, length)


def vocabulary(texts: list[str]) -> Any:
    """Byte-level BPE tokenizer whose merges are the most frequent ones of some texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def trained(rows: Tensor, steps: int, rate: float = 1e-3, seed: int = 0) -> Any:
    """Llama that predicts the next token: AdamW, whose rate falls to 0 in the last third.

    Args:
        rows: int64[count, length] of tokens.
        steps: number of steps.
        rate: highest learning rate.
        seed: seed of the first weights and of the order of the rows.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = LlamaConfig(vocab_size=WORDS, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, **SIZES)
    model = LlamaForCausalLM(sizes)
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 1, 3 * (steps - step) / steps)
    )
    order = torch.tensor(list(RandomSampler(rows, num_samples=steps * BATCH)))
    for chosen in track(order.split(BATCH), "training", console=Console(stderr=True)):
        batch = rows[chosen]
        logits = model(batch, use_cache=False).logits[:, :-1]
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def folder_of(steps: int) -> Path:
    """Folder of the model: its name has the version of Python, the steps, and a digest of the other settings."""
    settings = hashlib.sha256(repr((SIZES, WORDS, BATCH, LENGTH)).encode()).hexdigest()[:8]
    root = Path(os.environ.get("FXQ_CACHE") or user_cache_path("fxq")).expanduser()
    return root / "networks" / f"pydoc-{platform.python_version()}-{steps}-{settings}"


def pydoc_model(steps: int = STEPS) -> tuple[Any, Any, Tensor]:
    """The model in float32, its tokenizer and int64[rows, 128] of tokens held out; it is trained at the first call.

    Args:
        steps: steps of training; models of different numbers lie side by side.
    """
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = folder_of(steps)
    if not folder.exists():
        minutes = math.ceil(steps / STEPS_PER_MINUTE)
        print(f"training {steps} steps, kept in {folder}: takes about {minutes} min on one core", file=sys.stderr)
        train_into(folder, steps)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = load_file(folder / "rows.safetensors")["held_out"]
    return LlamaForCausalLM.from_pretrained(folder).eval(), tokenizer, rows


def train_into(folder: Path, steps: int) -> None:
    """Train and write model, tokenizer and held-out rows to a folder, which is there only when it is complete."""
    training, held_out = split(documents())
    tokenizer = vocabulary(training)
    model = trained(in_rows(tokenizer, training), steps)
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    model.save_pretrained(unfinished)
    tokenizer.save(str(unfinished / "tokenizer.json"))
    save_file({"held_out": in_rows(tokenizer, held_out)}, unfinished / "rows.safetensors")
    if folder.exists():
        shutil.rmtree(unfinished)  # another process was faster
    else:
        unfinished.rename(folder)


def report(model: Any, tokenizer: Any, rows: Tensor) -> Iterator[str]:
    """Lines about a model: its size, what it loses on rows of tokens, and a text that it writes."""
    yield f"{model.num_parameters() / 1e6:.1f} M parameters"
    loss = math.log(perplexity(model, rows))
    size = len("".join(tokenizer.decode_batch(rows.tolist())).encode()) / rows.numel()
    yield f"held out: {loss:.3g} nats per token, {loss / size / math.log(2):.3g} bits per byte"
    start = torch.tensor([tokenizer.encode("Return the").ids])
    yield tokenizer.decode(model.generate(start, max_new_tokens=60, do_sample=False)[0].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of training")
    parser.add_argument("--threads", type=int, default=1, help="threads of training")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, tokenizer, rows = pydoc_model(arguments.steps)
    for line in report(model, tokenizer, rows[:64]):
        print(line)


if __name__ == "__main__":
    main()
