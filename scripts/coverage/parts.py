"""Quantize detectors of torchvision in parts: their post-processing depends on data, so that no graph holds them.

    python -m scripts.coverage.parts                     Faster R-CNN, SSD, RetinaNet, Mask R-CNN
    python -m scripts.coverage.parts --only ssd          models whose name contains a text

Random weights, so that nothing is downloaded. It needs `pip install --no-deps torchvision==0.28.0` beside fxq. A row:
number of parts, share of the multiply-accumulates on integers, dB of the outputs of the parts (lowest), seconds of CPU
time to quantize, whether the saved file computes the same when loaded, size of the report page.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fxq
from scripts.coverage.torchvision import import_torchvision

MODELS = ("fasterrcnn_mobilenet_v3_large_320_fpn", "ssdlite320_mobilenet_v3_large", "fasterrcnn_resnet50_fpn",
          "ssd300_vgg16", "retinanet_resnet50_fpn", "maskrcnn_resnet50_fpn")  # fmt: skip
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
        vars(extension)["_has_ops"] = lambda: True
        _libraries.append(library)
    options = {"weights": None, "weights_backbone": None, "num_classes": 8}
    return {name: lambda name=name: getattr(detection, name)(**options).eval() for name in MODELS if only in name}


_libraries: list[Any] = []


def measured(name: str, build: Callable[[], nn.Module]) -> list[Any]:
    """Row of the table for one model."""
    torch.manual_seed(0)
    model = build()
    data = [([torch.rand(3, SIZE, SIZE)],) for _ in range(2)]
    with warnings.catch_warnings(record=True) as heard, torch.no_grad():
        warnings.simplefilter("always")
        start = time.process_time()
        q: Any = fxq.quantize(model, fxq.Recipe.static(optimize="coverage"), data=data)
        seconds = time.process_time() - start
        print(name, *(str(w.message)[:600] for w in heard if isinstance(w.message, fxq.FxqWarning)), sep="\n  ")
        wants = tree_leaves(q(*data[0]))
        with TemporaryDirectory() as folder:
            loaded = fxq.load(q.save(Path(folder) / "model.fxq"), into=model)
            same = all(map(torch.equal, wants, tree_leaves(loaded(*data[0]))))
            report = q.report(Path(folder) / "report.html").stat().st_size
    sqnrs = [graph.output_sqnr for graph in q.parts.values() if graph.output_sqnr is not None]
    return [name, len(q.parts), f"{q.ledger.coverage:.1%}", f"{min(sqnrs):.1f}", f"{seconds:.0f}", same, report >> 10]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    rows = [measured(name, build) for name, build in detectors(parser.parse_args(arguments).only).items()]
    print(tabulate(rows, ("model", "parts", "integers", "dB", "seconds", "file", "page KiB")))


if __name__ == "__main__":
    main()
