"""Networks of the gallery that read texts in pictures."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage
from torch import Tensor

import fxq
from scripts.bench.accuracy_contenders import FilePart
from scripts.bench.accuracy_data import photograph, pixels
from scripts.bench.accuracy_faces import overlap
from scripts.bench.accuracy_subjects import Subject
from scripts.bench.number import sqnr
from scripts.demo.gallery_exhibit import FLOAT_COLOUR, INT8_COLOUR, beside, package, with_boxes
from scripts.demo.gallery_vision import as_image
from scripts.demo.sequence_subjects import Calls, Part
from scripts.networks.ocr import Craft, Crnn

# ---- texts

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
    return package("rapidocr_onnxruntime") / "models" / "ch_PP-OCRv4_rec_infer.onnx"


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
    rows, read = lines(60, seed=1)[:6], reader(recognizer())
    image = Image.new("RGB", (700, 52 * len(rows)), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=18)
    for i, (_, x) in enumerate(rows):
        image.paste(as_image((x[0] + 1) * 127.5), (0, 52 * i))
        for y, colour, left in ((a[i], FLOAT_COLOUR, 335), (b[i], INT8_COLOUR, 520)):
            draw.text((left, 52 * i + 12), read(y)[0], fill=colour, font=font)
    return image


# ---- words in pictures

LETTERS = ["", *"0123456789!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ €ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"]
"""Letters of EasyOCR's English recognizer; the first one is none."""
SIGNS = (
    "harbour", "LISBON", "quantize", "42", "window", "EXIT", "market", "2026", "bridge", "Platform", "coffee", "north",
    "Street", "TICKET", "garden", "theatre", "river", "MUSEUM", "19.90", "open", "school", "Bakery", "station", "hotel",
    "Victoria", "closed", "LIBRARY", "107", "airport", "Welcome", "parking", "FLOWERS", "Queen", "lunch", "Gallery",
    "MADRID", "ferry", "Zurich", "jazz", "WORKSHOP", "1984", "pizza", "Kitchen", "south", "EXPRESS", "village", "Books",
)  # fmt: skip
"""Words on signs that are put into photographs."""
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSansMono")
"""Fonts of signs, beside Pillow's own: matplotlib brings them."""
WIDE, HIGH, LINE, WIDEST = 320, 256, 64, 320
"""Size of pictures that are searched for words, and of the crops that are read."""


@dataclass(frozen=True)
class View:
    """A photograph with signs.

    Attributes:
        picture: (3, HIGH, WIDE) from 0 to 255.
        words: what is on the signs.
        boxes: (N, 4), around the words.
    """

    picture: Tensor
    words: list[str]
    boxes: Tensor


def sign_font(draw: random.Random) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """A drawn font of a drawn size."""
    size, name = draw.randint(14, 24), draw.choice(("", *FONTS))
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    return ImageFont.truetype(folder / f"{name}.ttf", size) if name else ImageFont.load_default(size)


def signs(names: Sequence[str], count: int, seed: int) -> list[View]:
    """Photographs with 6 signs each, of drawn words, fonts, sizes and colours."""
    draw, views = random.Random(seed), []
    for i in range(count):
        image = photograph(names[i % len(names)]).resize((WIDE, HIGH))
        words, boxes = [], []
        for k, word in enumerate(draw.sample(SIGNS, 6)):
            font = sign_font(draw)
            left, top, right, bottom = font.getbbox(word)
            cell = (k % 2 * WIDE // 2, k // 2 * HIGH // 3)
            x = cell[0] + draw.randint(8, max(9, int(WIDE // 2 - right - 10)))
            y = cell[1] + draw.randint(8, max(9, int(HIGH // 3 - bottom - 10)))
            dark, light = draw.randint(0, 90), draw.randint(150, 255)
            if draw.random() < 0.3:
                dark, light = light, dark
            canvas = ImageDraw.Draw(image)
            canvas.rectangle([x + left - 6, y + top - 6, x + right + 6, y + bottom + 6], fill=(light,) * 3)
            canvas.text((x, y), word, fill=(dark,) * 3, font=font)
            words.append(word)
            boxes.append([x + left, y + top, x + right, y + bottom])
        views.append(View(pixels(image), words, torch.tensor(boxes, dtype=torch.float32)))
    return views


def searched(picture: Tensor) -> Tensor:
    """Picture (3, h, w) from 0 to 255 as CRAFT reads it."""
    mean, deviation = (torch.tensor(x)[:, None, None] for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return ((picture / 255 - mean) / deviation)[None]


def words_found(regions: Tensor, least: float = 0.7) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Boxes of words, scores and classes of each image of CRAFT's output, for words that lie level.

    Source: EasyOCR's `getDetBoxes_core`, with boxes along the axes in place of turned ones.
    """
    results = []
    for letters, links in regions.numpy():
        islands, _ = ndimage.label((letters > 0.4) | (links > 0.4))
        boxes, scores = [], []
        for number, (rows, columns) in enumerate(ndimage.find_objects(islands), 1):
            inside = islands[rows, columns] == number
            score = float(letters[rows, columns][inside].max())
            if inside.sum() < 10 or score < least:
                continue
            y, x = (inside & (letters[rows, columns] > 0.4)).nonzero()
            height, width = inside.shape
            more = int(2 * (inside.sum() * min(width, height) / (width * height)) ** 0.5) // 2 + 1
            top, left = rows.start, columns.start
            corners = (x.min() + left - more, y.min() + top - more, x.max() + left + more, y.max() + top + more)
            boxes.append([2.0 * float(corner) for corner in corners])
            scores.append(score)
        box = torch.tensor(boxes).reshape(-1, 4)
        results.append((box, torch.tensor(scores), torch.zeros(len(scores), dtype=torch.int64)))
    return results


def line_of(picture: Tensor, box: Tensor) -> Tensor:
    """Box of a picture as CRNN reads it: grey, LINE pixels high, its last column repeated to WIDEST."""
    left, top, right, bottom = box.clamp(min=0).round().int().tolist()
    grey = as_image(picture).convert("L").crop((left, top, min(right, WIDE), min(bottom, HIGH)))
    width = max(1, min(WIDEST, round(LINE * grey.width / max(1, grey.height))))
    values = torch.from_numpy(np.array(grey.resize((width, LINE), Image.Resampling.BICUBIC), dtype=np.float32))
    return F.pad(values[None] / 127.5 - 1, (0, WIDEST - width), mode="replicate")[None]


def word_of(logits: Tensor) -> str:
    """The likeliest letters, without repetitions."""
    row = logits[0].argmax(-1).tolist()
    return "".join(LETTERS[k] for k, last in zip(row, [0, *row], strict=False) if k != last)


@dataclass(frozen=True)
class Reading:
    """Words of a picture, found and read.

    Attributes:
        regions: CRAFT's output.
        boxes: of words, (N, 4).
        words: what CRNN reads in each.
    """

    regions: Tensor
    boxes: Tensor
    words: list[str]


def read_signs(calls: Calls, view: View) -> Reading:
    """Find and read the words of a picture."""
    regions = calls[0](searched(view.picture))
    ((boxes, _, _),) = words_found(regions)
    return Reading(regions, boxes, [word_of(calls[1](line_of(view.picture, box))) for box in boxes])


def words_right(view: View, reading: Reading) -> int:
    """How many of a picture's words are read, in a box that covers most of theirs."""
    if not len(reading.boxes):
        return 0
    shared = overlap(view.boxes, reading.boxes, of_smaller=True)
    return sum(
        any(reading.words[i] == word for i in (row > 0.5).nonzero().flatten().tolist())
        for word, row in zip(view.words, shared, strict=True)
    )


def ocr_networks() -> tuple[Craft, Crnn]:
    """EasyOCR's detector and its English recognizer."""
    folder = package("easyocr_en_models") / "models"
    networks = Craft(), Crnn()
    for name, network in zip(("craft_mlt_25k", "english_g2"), networks, strict=True):
        weights = torch.load(folder / f"{name}.pth", weights_only=True, map_location="cpu")
        network.load_state_dict({key.removeprefix("module."): value for key, value in weights.items()})
        network.requires_grad_(False).eval()
    return networks


def easyocr(folders: Sequence[Path], count: int) -> Subject:
    """EasyOCR: calibrated on 6 photographs with 36 signs, judged on 40 others with 240 signs.

    The truth of the boxes is what float finds with a score of 0.7; both rankings have those from 0.5.
    """
    networks = ocr_networks()
    calibration = signs(("flower.jpg", "coffee.png", "motorcycle_left.png"), 6, seed=0)
    views = judged_signs()
    inputs = [searched(view.picture) for view in views]
    metric = fxq.task_metrics.boxes(networks[0], inputs, partial(words_found, least=0.5), least=0.7)

    def judge(a: Sequence[Reading], b: Sequence[Reading]) -> dict[str, float]:
        right = sum(words_right(view, reading) for view, reading in zip(views, b, strict=True))
        regions = [torch.stack([reading.regions for reading in side]) for side in (a, b)]
        return {
            "words right, %": 100 * right / sum(len(view.words) for view in views),
            "AP of boxes, %": 100 * metric.score([reading.regions for reading in b], [y.regions for y in a]),
            "CRAFT, dB": sqnr(*regions),
        }

    lines = [(line_of(view.picture, box),) for view in calibration for box in view.boxes]
    parts = [
        Part(networks[0], (inputs[0],), [(searched(view.picture),) for view in calibration]),
        Part(networks[1], lines[0], lines),
    ]
    return Subject("EasyOCR (CRAFT, CRNN)", parts, lambda calls: [read_signs(calls, view) for view in views], judge)


def judged_signs() -> list[View]:
    """Photographs with signs that EasyOCR is judged on."""
    return signs(("china.jpg", "rocket.jpg", "chelsea.png"), 40, seed=1)


def signs_read(subject: Subject, a: Sequence[Reading], b: Sequence[Reading]) -> Image.Image:
    """Two photographs with boxes and what is read, in float (red) and in int8 (blue)."""
    views, height = judged_signs(), 13
    images = []
    for i in (0, 1):
        image = with_boxes(views[i].picture, a[i].boxes, b[i].boxes, HIGH)
        draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=height)
        for reading, colour, line in ((a[i], FLOAT_COLOUR, 0), (b[i], INT8_COLOUR, 1)):
            for (left, top, _, bottom), word in zip(reading.boxes.tolist(), reading.words, strict=True):
                first = bottom if bottom + 2.5 * height < HIGH else top - 2.5 * height
                place = (left, first + height * line)
                draw.text(place, word, fill=colour, font=font, stroke_width=2, stroke_fill="white")
        images.append(image)
    return beside(images)
