"""The networks of demo_sequence.py, each with what it is calibrated on, judged on and timed with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.demo.sequence_data import (
    END,
    START,
    docstrings,
    prompts,
    sentence_encoder,
    speech_encoder,
    spelled,
    spelling_networks,
    tokenize,
    words,
)

Calls = Sequence[Callable[..., Any]]
"""The parts of a network, float or quantized."""
CALIBRATION = 128
"""Sentences, words to calibrate on: others than those that are judged. Of the speech, a quarter of the prompts."""


@dataclass(frozen=True)
class Part:
    """A part of a network that is quantized by itself.

    Attributes:
        model: the float module.
        example: its inputs as they are timed.
        data: inputs to calibrate on.
    """

    model: nn.Module
    example: tuple[Tensor, ...]
    data: Sequence[tuple[Tensor, ...]]


@dataclass(frozen=True)
class Subject:
    """A trained network, and how it is judged.

    Attributes:
        name: its name.
        parts: what is quantized.
        outputs: runs the parts on the data to judge.
        agreement: of the float outputs with others, by kind; 1 is the same.
        timed: runs the parts on one input.
        goals: what fxq is to reach, by quantizer and kind of agreement.
    """

    name: str
    parts: Sequence[Part]
    outputs: Callable[[Calls], Any]
    agreement: Callable[[Any, Any], dict[str, float]]
    timed: Callable[[Calls], object]
    goals: Mapping[str, Mapping[str, float]]


def sentences(folders: Sequence[Path], count: int) -> Subject:
    """MiniLM on the docstrings of Python's library: whose details belong to a summary?"""
    model = sentence_encoder()
    documented = docstrings(CALIBRATION + count)
    calibration, texts = documented[:CALIBRATION], documented[CALIBRATION:]
    summaries = [tokenize([text.summary for text in texts[i : i + 10]]) for i in range(0, len(texts), 10)]
    details = [tokenize([text.details for text in texts[i : i + 10]]) for i in range(0, len(texts), 10)]
    data = [tokenize([*calibration[i], *calibration[i + 1]]) for i in range(0, CALIBRATION, 2)]
    example = tokenize([" ".join(text.details for text in calibration)], most=128)

    def outputs(calls: Calls) -> tuple[Tensor, Tensor]:
        return torch.cat([calls[0](*batch) for batch in summaries]), torch.cat([calls[0](*batch) for batch in details])

    def agreement(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> dict[str, float]:
        best = [(queries @ answers.T).argmax(1) for queries, answers in (a, b)]
        return {"cosine": cosine(torch.cat(a), torch.cat(b)), "top-1": float((best[0] == best[1]).double().mean())}

    goals = {
        "fxq dynamic": {"cosine": 0.99, "top-1": 0.97},
        "fxq static": {"cosine": 0.98, "top-1": 0.97},
    }
    parts = [Part(model, tuple(example), data)]
    return Subject("MiniLM", parts, outputs, agreement, lambda calls: calls[0](*example), goals)


def speech(folders: Sequence[Path], count: int) -> Subject:
    """Resemblyzer's encoder on spoken prompts of 1.6 seconds."""
    model = speech_encoder()
    mels = prompts(folders)
    calibration, judged = mels[: len(mels) // 4], mels[len(mels) // 4 :][:count]

    def outputs(calls: Calls) -> Tensor:
        return torch.cat([calls[0](batch) for batch in judged.split(8)])

    def agreement(a: Tensor, b: Tensor) -> dict[str, float]:
        return {"cosine": cosine(a, b)}

    example = judged[:1]
    parts = [Part(model, (example,), [(batch,) for batch in calibration.split(8)])]
    goals = {"fxq dynamic": {"cosine": 0.995}, "fxq static": {"cosine": 0.99}}
    return Subject("Resemblyzer", parts, outputs, agreement, lambda calls: calls[0](example), goals)


def spelling(folders: Sequence[Path], count: int) -> Subject:
    """g2p-en on words of a dictionary."""
    encoder, decoder = spelling_networks()
    spoken_words = words(folders, CALIBRATION + count)
    letters = [spelled(word) for word in spoken_words]
    calibration, judged = letters[:CALIBRATION], letters[CALIBRATION:]
    steps: list[tuple[Tensor, Tensor]] = []

    def recording(*inputs: Tensor) -> Any:
        steps.append((inputs[0], inputs[1]))
        return decoder(*inputs)

    with torch.no_grad():
        for word in calibration:
            spoken((encoder, recording), word)
    parts = [
        Part(encoder, (judged[0],), [(word,) for word in calibration]),
        Part(decoder, steps[0], steps),
    ]
    return Subject(
        "g2p-en",
        parts,
        lambda calls: [spoken(calls, word) for word in judged],
        lambda a, b: {"same words": sum(x == y for x, y in zip(a, b, strict=True)) / len(a)},
        lambda calls: spoken(calls, judged[0]),
        {"fxq dynamic": {"same words": 0.99}, "fxq static": {"same words": 0.99}},
    )


def spoken(calls: Calls, word: Tensor, most: int = 20) -> list[int]:
    """The phonemes of a word, the likeliest at every step."""
    encoder, decoder = calls
    hidden, sound, phonemes = encoder(word), torch.tensor([START]), []
    for _ in range(most):
        scores, hidden = decoder(sound, hidden)
        sound = scores.argmax(-1)
        if int(sound) == END:
            break
        phonemes.append(int(sound))
    return phonemes


def cosine(a: Tensor, b: Tensor) -> float:
    """The mean cosine of the rows of two (N, width) tensors."""
    return float(F.cosine_similarity(a.double(), b.double(), dim=-1).mean())


SUBJECTS: dict[str, Callable[[Sequence[Path], int], Subject]] = {
    "sentences": sentences,
    "speech": speech,
    "words": spelling,
}
