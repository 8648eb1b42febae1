"""The networks of bench_accuracy.py: trained ones, each with what it is calibrated on, and how it is judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.bench.accuracy_data import (
    PHOTOGRAPHS,
    crops_of,
    efficientnet_lite,
    face_networks,
    photograph,
    pitch_network,
    pixels,
    scenes,
    tones,
)
from scripts.bench.accuracy_faces import detect, matched
from scripts.bench.number import sqnr
from scripts.demo import sequence_subjects
from scripts.demo.data import digits, held_out_pairs, psnr, training_pairs
from scripts.demo.sequence_data import docstrings, sentence_encoder, tokenize
from scripts.demo.sequence_subjects import Calls, Part, cosine
from scripts.networks.demo import load_demo_networks


@dataclass(frozen=True)
class Subject:
    """A trained network, and how it is judged.

    Attributes:
        name: its name.
        parts: what is quantized.
        outputs: runs the parts on the data to judge, which is not what they are calibrated on.
        judge: the quantities of a table's row, by name: what float gives, and what a contender gives.
        is_transformer: whether there is attention in it.
    """

    name: str
    parts: Sequence[Part]
    outputs: Callable[[Calls], Any]
    judge: Callable[[Any, Any], dict[str, float]]
    is_transformer: bool = False


# ---- quantities


def percent(right: Tensor) -> float:
    return 100 * float(right.double().mean())


def joined(outputs: Any) -> Tensor:
    """All values of tensors in lists and tuples, in one row."""
    return outputs.flatten() if isinstance(outputs, Tensor) else torch.cat([joined(output) for output in outputs])


def agreement(a: Tensor, b: Tensor) -> dict[str, float]:
    """Of logits (N, classes): SQNR; how often the top class is the same, and the standard error of that.

    Example:
        >>> agreement(torch.eye(4), torch.eye(4)[[0, 1, 2, 0]])["agreement, %"]
        75.0
    """
    same = percent(a.argmax(1) == b.argmax(1))
    return {"SQNR, dB": sqnr(a, b), "agreement, %": same, "± points": math.sqrt(same * (100 - same) / len(a))}


# ---- ImageNet

TWO = PHOTOGRAPHS[:2]


def imagenet(folders: Sequence[Path], count: int) -> Subject:
    """EfficientNet-Lite0: calibrated on 112 crops of seven photographs, judged on other crops of them."""
    return _imagenet("EfficientNet-Lite0", PHOTOGRAPHS, PHOTOGRAPHS, count)


def imagenet_two(folders: Sequence[Path], count: int) -> Subject:
    """EfficientNet-Lite0: calibrated on 112 crops of two photographs, judged on crops of the others."""
    return _imagenet("EfficientNet-Lite0, two photographs", TWO, PHOTOGRAPHS[2:], count)


def _imagenet(name: str, calibrated: Sequence[str], judged: Sequence[str], count: int, size: int = 0) -> Subject:
    side = (224, 240, 260)[size]
    model, data = efficientnet_lite(size), crops_of(calibrated, 112, "calibration", side).split(8)
    batches = crops_of(judged, count, "judged", side).split(25)
    parts = [Part(model, (data[0],), [(batch,) for batch in data])]
    return Subject(name, parts, lambda calls: torch.cat([calls[0](batch) for batch in batches]), agreement)


def imagenet_larger(folders: Sequence[Path], count: int, size: int = 2) -> Subject:
    """EfficientNet-Lite1 or Lite2, as EfficientNet-Lite0."""
    return _imagenet(f"EfficientNet-Lite{size}", PHOTOGRAPHS, PHOTOGRAPHS, count, size)


# ---- sentences


def sentences(folders: Sequence[Path], count: int) -> Subject:
    """MiniLM on docstrings: calibrated on 256, judged on 300 others, whose details are sought for each summary."""
    texts = docstrings(256 + 300)
    data = [tokenize([f"{text.summary} {text.details}" for text in texts[i : i + 8]]) for i in range(0, 256, 8)]
    summaries = [tokenize([text.summary for text in texts[i : i + 20]]) for i in range(256, len(texts), 20)]
    details = [tokenize([text.details for text in texts[i : i + 20]]) for i in range(256, len(texts), 20)]

    def outputs(calls: Calls) -> Tensor:
        return torch.cat([calls[0](*batch) for batch in (*summaries, *details)])

    def judge(a: Tensor, b: Tensor) -> dict[str, float]:
        nearest = [queries @ answers.T for queries, answers in (embeddings.chunk(2) for embeddings in (a, b))]
        cosines = torch.nn.functional.cosine_similarity(a.double(), b.double())
        return {
            "SQNR, dB": sqnr(a, b),
            "mean cosine": float(cosines.mean()),
            "least cosine": float(cosines.min()),
            "same nearest, %": percent(nearest[0].argmax(1) == nearest[1].argmax(1)),
        }

    parts = [Part(sentence_encoder(), tuple(summaries[0]), [tuple(batch) for batch in data])]
    return Subject("MiniLM", parts, outputs, judge, is_transformer=True)


# ---- faces

BACKGROUNDS = ("china.jpg", "rocket.jpg", "motorcycle_left.png", "chelsea.png")
"""Photographs that the faces of pictures to judge are put into."""


def faces(folders: Sequence[Path], count: int) -> Subject:
    """MTCNN: calibrated on two pictures, judged on the astronaut and eleven pictures with eight faces each.

    The three networks together by the faces they find, and each alone on what float gives it to read.
    """
    networks = face_networks()
    pictures = [pixels(photograph("astronaut.png")), *scenes(BACKGROUNDS, first=12, count=11)]
    with torch.no_grad():
        data = inputs_of(networks, scenes(("flower.jpg", "coffee.png"), first=0, count=2, of_each=6))
        fresh = inputs_of(networks, pictures)

    def outputs(calls: Calls) -> tuple[list[Tensor], list[list[Any]]]:
        alone = [[call(*inputs) for inputs in batches] for call, batches in zip(calls, fresh, strict=True)]
        return [detect(calls, picture) for picture in pictures], alone

    def judge(a: Any, b: Any) -> dict[str, float]:
        noise = [sqnr(*map(joined, pair)) for pair in zip(a[1], b[1], strict=True)]
        names = (f"{letter}-Net, dB" for letter in "PRO")
        return {**same_faces(a[0], b[0]), **dict(zip(names, noise, strict=True))}

    parts = [Part(network, batches[0], batches) for network, batches in zip(networks, data, strict=True)]
    return Subject("MTCNN", parts, outputs, judge)


def inputs_of(networks: Calls, pictures: Sequence[Tensor]) -> list[list[tuple[Tensor, ...]]]:
    """Inputs of each of MTCNN's networks on these pictures."""
    seen: list[list[tuple[Tensor, ...]]] = [[] for _ in networks]

    def recording(i: int) -> Callable[[Tensor], Any]:
        def call(x: Tensor) -> Any:
            seen[i].append((x,))
            return networks[i](x)

        return call

    for picture in pictures:
        detect([recording(i) for i in range(len(networks))], picture)
    return seen


def same_faces(a: Sequence[Tensor], b: Sequence[Tensor]) -> dict[str, float]:
    """Of the boxes found in each picture: how many are the same, how well they overlap, and how many are new."""
    overlaps = [value for wanted, boxes in zip(a, b, strict=True) for value in matched(wanted, boxes)]
    return {
        "same faces": len(overlaps),
        "of": sum(map(len, a)),
        "others": sum(map(len, b)) - len(overlaps),
        "mean box IoU": sum(overlaps) / max(len(overlaps), 1),
    }


# ---- sounds


def voices(folders: Sequence[Path], count: int) -> Subject:
    """Resemblyzer's LSTM on spoken prompts, as demo_sequence.py calibrates and judges it."""
    sounds = sequence_subjects.speech(folders, 10**6)
    judge = lambda a, b: {"SQNR, dB": sqnr(a, b), "mean cosine": cosine(a, b)}  # noqa: E731
    return Subject(sounds.name, sounds.parts, sounds.outputs, judge)


def pitches(folders: Sequence[Path], count: int) -> Subject:
    """CREPE, the smallest: calibrated on 256 tones, judged on 1000 others."""
    data, judged = tones(256, seed=0).split(16), tones(1000, seed=1).split(50)

    def judge(a: Tensor, b: Tensor) -> dict[str, float]:
        """A step of the pitches is 20 cents, a fifth of a semitone."""
        apart = (a.argmax(1) - b.argmax(1)).abs()
        return {"SQNR, dB": sqnr(a, b), "same pitch, %": percent(apart == 0), "to 20 cents, %": percent(apart <= 1)}

    parts = [Part(pitch_network(), (data[0],), [(batch,) for batch in data])]
    return Subject("CREPE tiny", parts, lambda calls: torch.cat([calls[0](batch) for batch in judged]), judge)


# ---- the networks of scripts/demo/quickstart.py


def digit(folders: Sequence[Path], count: int) -> Subject:
    """The digits network: calibrated on 320 of the training digits, judged on those it was not trained on."""
    data = digits()
    batches = [(batch,) for batch in data.train_images[:320].split(64)]

    def judge(a: Tensor, b: Tensor) -> dict[str, float]:
        return {"accuracy, %": percent(b.argmax(1) == data.test_labels), **agreement(a, b)}

    parts = [Part(load_demo_networks()[1], batches[0], batches)]
    return Subject("digits", parts, lambda calls: calls[0](data.test_images), judge)


def resolution(folders: Sequence[Path], count: int) -> Subject:
    """FSRCNN: calibrated on 320 patches of its training regions, judged on the regions held out."""
    low = training_pairs().low
    batches = [(batch,) for batch in low[:: len(low) // 320][:320].split(16)]
    pairs = list(held_out_pairs().values())

    def judge(a: Sequence[Tensor], b: Sequence[Tensor]) -> dict[str, float]:
        quality = [psnr(picture, pair.high) for picture, pair in zip(b, pairs, strict=True)]
        return {"PSNR, dB": sum(quality) / len(quality), "SQNR, dB": sqnr(joined(a), joined(b))}

    parts = [Part(load_demo_networks()[0], (pairs[0].low,), batches)]
    return Subject("FSRCNN", parts, lambda calls: [calls[0](pair.low) for pair in pairs], judge)


SUBJECTS: Mapping[str, Callable[[Sequence[Path], int], Subject]] = {
    "imagenet": imagenet,
    "imagenet-two": imagenet_two,
    "sentences": sentences,
    "faces": faces,
    "voices": voices,
    "pitches": pitches,
    "digits": digit,
    "resolution": resolution,
}
"""Made from the folders that packages may be in, and the number of crops to judge EfficientNet-Lite0 on."""
