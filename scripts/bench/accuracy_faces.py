"""MTCNN's cascade: three networks, float or quantized, find the faces of a picture. And how alike two findings are.

Source: Zhang et al. 2016, "Joint Face Detection and Alignment using Multi-task Cascaded Convolutional Networks",
section II; thresholds and sizes as in facenet-pytorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_FACE_PIXELS = 20
"""Pixels of the smallest face that is looked for."""
THRESHOLDS = (0.6, 0.7, 0.7)
"""Least probability of a face, by network."""
SHRINK = 0.709
"""Ratio of the sizes at which a picture is looked at."""
CELL, STRIDE = 12, 2
"""Pixels that the first network sees at once, and from one place to the next."""


def detect(calls: Sequence[Callable[..., Any]], picture: Tensor) -> Tensor:
    """The faces of a picture.

    Args:
        calls: the three networks.
        picture: (3, height, width) float32 from 0 to 255.

    Returns:
        Boxes (N, 4) float32: left, top, right, bottom in pixels.
    """
    boxes = proposed(calls[0], picture)
    for call, side, threshold in zip(calls[1:], (24, 48), THRESHOLDS[1:], strict=True):
        boxes = squared(boxes)
        inside = (boxes[:, 2:].minimum(_corner(picture)) - boxes[:, :2].clamp(min=0) >= 1).all(1)
        boxes = boxes[inside]
        if not len(boxes):
            return boxes
        corrections, probabilities = call(torch.stack([cut(picture, box, side) for box in boxes]))[:2]
        sure = probabilities[:, 1] > threshold
        boxes, corrections, scores = boxes[sure], corrections[sure], probabilities[sure, 1]
        if side == 48:
            boxes = corrected(boxes, corrections)
            return boxes[best(boxes, scores, 0.7, of_smaller=True)]
        kept = best(boxes, scores, 0.7)
        boxes = corrected(boxes[kept], corrections[kept])
    return boxes


def proposed(call: Callable[..., Any], picture: Tensor) -> Tensor:
    """Boxes (N, 4) that the first network proposes as faces, at all sizes."""
    height, width = picture.shape[1:]
    scale, candidates = CELL / MIN_FACE_PIXELS, []
    while min(height, width) * scale >= CELL:
        size = int(height * scale + 1), int(width * scale + 1)
        corrections, probabilities = call(scaled(F.interpolate(picture[None], size, mode="area")))
        y, x = (probabilities[0, 1] >= THRESHOLDS[0]).nonzero().unbind(1)
        corner = STRIDE * torch.stack([x, y], 1)
        boxes = torch.cat([(corner + 1) / scale, (corner + CELL) / scale], 1).floor()
        scores, moves = probabilities[0, 1, y, x], corrections[0, :, y, x].T
        kept = best(boxes, scores, 0.5)
        candidates.append((boxes[kept], scores[kept], moves[kept]))
        scale *= SHRINK
    boxes, scores, moves = (torch.cat(parts) for parts in zip(*candidates, strict=True))
    kept = best(boxes, scores, 0.7)
    return corrected(boxes[kept], moves[kept])


def cut(picture: Tensor, box: Tensor, side: int) -> Tensor:
    """A box of the picture, as far as it is inside, at `side` pixels: (3, side, side) from -1 to 1."""
    left, top = (max(0, int(value)) for value in box[:2])
    right, bottom = (int(value) for value in box[2:].minimum(_corner(picture)))
    part = picture[None, :, top : max(bottom, top + 1), left : max(right, left + 1)]
    return scaled(F.interpolate(part, (side, side), mode="area"))[0]


def scaled(x: Tensor) -> Tensor:
    """Pixels from 0 to 255 -> from -1 to 1."""
    return (x - 127.5) / 128


def corrected(boxes: Tensor, moves: Tensor) -> Tensor:
    """Boxes with their sides moved, in units of their own size."""
    return boxes + moves * (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2)


def squared(boxes: Tensor) -> Tensor:
    """The squares around the same centres, with the longer side."""
    centre, half = (boxes[:, :2] + boxes[:, 2:]) / 2, (boxes[:, 2:] - boxes[:, :2]).amax(1, keepdim=True) / 2
    return torch.cat([centre - half, centre + half], 1)


def best(boxes: Tensor, scores: Tensor, most: float, of_smaller: bool = False) -> Tensor:
    """Indices of the boxes that overlap none of a higher score by more than `most`, the best first."""
    left, kept = scores.argsort(descending=True, stable=True), []
    while len(left):
        kept.append(left[0])
        left = left[1:][overlap(boxes[left[:1]], boxes[left[1:]], of_smaller)[0] <= most]
    return torch.stack(kept) if kept else left


def overlap(a: Tensor, b: Tensor, of_smaller: bool = False) -> Tensor:
    """The area that boxes share: (N, M), as part of what both cover together, or of the smaller one."""
    low, high = a[:, None, :2].maximum(b[:, :2]), a[:, None, 2:].minimum(b[:, 2:])
    shared = (high - low).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1) for boxes in (a, b)]
    whole = areas[0][:, None].minimum(areas[1]) if of_smaller else areas[0][:, None] + areas[1] - shared
    return shared / whole.clamp(min=1e-9)


def matched(wanted: Tensor, boxes: Tensor, least: float = 0.5) -> list[float]:
    """The overlaps of the boxes that two findings share, each box in one pair, the closest pairs first."""
    overlaps, pairs = overlap(wanted, boxes), []
    while overlaps.numel() and float(overlaps.max()) >= least:
        row, column = divmod(int(overlaps.argmax()), overlaps.shape[1])
        pairs.append(float(overlaps[row, column]))
        overlaps[row], overlaps[:, column] = -1.0, -1.0
    return pairs


def _corner(picture: Tensor) -> Tensor:
    """Width and height."""
    return torch.tensor([picture.shape[2], picture.shape[1]], dtype=torch.float32)
