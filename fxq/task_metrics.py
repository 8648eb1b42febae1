"""Metrics of tasks, for `fxq.search` and `fxq.compare`: agreement with the float model on text, boxes and others.

Each function runs the float model on the data once, and returns a metric: a function of a model that returns a number,
where larger is better and the float model itself has the largest value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxq.common.data import Batch, batches
from fxq.common.metrics import tensors
from fxq.errors import InputError

__all__ = ["OutputMetric", "boxes", "cosine", "log_mel", "text", "top_class"]

Score = Callable[[Sequence[Any], Sequence[Any]], float]


@dataclass(frozen=True, eq=False)
class OutputMetric:
    """Metric that compares a model's outputs with those of the float model on a fixed set of batches.

    Attributes:
        data: the batches.
        expected: output of the float model for each batch.
        score: function of the outputs of a model and those of the float model, a list each, that returns the metric.
    """

    data: tuple[Batch, ...]
    expected: tuple[Any, ...]
    score: Score

    def __call__(self, model: nn.Module) -> float:
        """Return the metric of a model."""
        return self.score(_outputs(model, self.data), self.expected)


def _outputs(model: nn.Module, data: Iterable[Batch]) -> list[Any]:
    with torch.no_grad():
        return [model(*batch.args, **batch.kwargs) for batch in data]


def _against(model: nn.Module, data: Iterable[Any], score: Score) -> OutputMetric:
    recorded = tuple(batches(data, model))
    return OutputMetric(recorded, tuple(_outputs(model, recorded)), score)


def _first(output: Any) -> Tensor:
    """First floating-point tensor of an output."""
    floats = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
    if not floats:
        raise InputError("the model returns no floating-point tensor, which the metric compares.")
    return floats[0].float()


def top_class(model: nn.Module, data: Iterable[Any]) -> OutputMetric:
    """Share of the predictions whose class of the highest score is the float model's, from 0 to 1.

    Args:
        model: the float model; its first output tensor holds scores of classes along the last axis.
        data: batches, as for `fxq.quantize`.

    Raises:
        InputError: the data cannot be used, or the model returns no floating-point tensor.

    Example:
        >>> float_model, x = nn.Linear(4, 3).eval(), torch.randn(16, 4)
        >>> metric = top_class(float_model, [x])
        >>> metric(float_model)
        1.0
    """
    return _against(model, data, _top_class)


def _top_class(outputs: Sequence[Any], expected: Sequence[Any]) -> float:
    equal = [_first(a).argmax(-1) == _first(b).argmax(-1) for a, b in zip(outputs, expected, strict=True)]
    return float(torch.cat([part.flatten() for part in equal]).float().mean())


def cosine(model: nn.Module, data: Iterable[Any]) -> OutputMetric:
    """Mean cosine similarity of embeddings with the float model's, from -1 to 1.

    Args:
        model: the float model; the last axis of its first output tensor is that of the embedding.
        data: batches, as for `fxq.quantize`.

    Raises:
        InputError: the data cannot be used, or the model returns no floating-point tensor.
    """
    return _against(model, data, _cosine)


def _cosine(outputs: Sequence[Any], expected: Sequence[Any]) -> float:
    pairs = zip(outputs, expected, strict=True)
    similar = [torch.cosine_similarity(_first(a), _first(b), dim=-1).flatten() for a, b in pairs]
    return float(torch.cat(similar).mean())


def text(model: nn.Module, data: Iterable[Any], decode: Callable[[Any], Sequence[str]]) -> OutputMetric:
    """Agreement of read or recognized text with the float model's: 1 minus the rate of character edits.

    The rate is the number of insertions, deletions and substitutions (Levenshtein 1966), divided by the number of
    characters of the float model's text.

    Args:
        model: the float model.
        data: batches, as for `fxq.quantize`.
        decode: function of an output of the model that returns the texts of the batch.

    Raises:
        InputError: the data cannot be used.
    """
    return _against(model, data, partial(_text, decode=decode))


def _text(outputs: Sequence[Any], expected: Sequence[Any], decode: Callable[[Any], Sequence[str]]) -> float:
    edits = count = 0
    for a, b in zip(outputs, expected, strict=True):
        for read, right in _decoded(decode, a, b):
            edits += edit_distance(read, right)
            count += len(right)
    return 1.0 - edits / max(count, 1)


def _decoded(decode: Callable[[Any], Sequence[Any]], a: Any, b: Any) -> list[tuple[Any, Any]]:
    """Decoded parts of an output, each with the float model's."""
    parts, expected = decode(a), decode(b)
    if isinstance(parts, str) or len(parts) != len(expected):
        returned = "a single text" if isinstance(parts, str) else f"{len(parts)} entries instead of {len(expected)}"
        raise InputError(f"decode returned {returned}: it must return one entry, maybe an empty one, for each input.")
    return list(zip(parts, expected, strict=True))


def edit_distance(a: str, b: str) -> int:
    """Smallest number of insertions, deletions and substitutions of characters that turn one text into the other."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


Detections = tuple[Tensor, Tensor, Tensor]
"""Boxes float[N, 4] as two corners, scores float[N] and classes int[N] of an image."""


def boxes(
    model: nn.Module,
    data: Iterable[Any],
    decode: Callable[[Any], Sequence[Detections]],
    overlap: float = 0.5,
    least: float = 0.0,
) -> OutputMetric:
    """Average precision of detected boxes, with the float model's detections as the truth, from 0 to 1.

    The mean over classes of the area under the curve of precision and recall (Everingham et al. 2010, "The Pascal
    Visual Object Classes Challenge", section 4.2, with all points of the curve).

    Args:
        model: the float model.
        data: batches, as for `fxq.quantize`.
        decode: function of an output of the model that returns, for each image of the batch, boxes float[N, 4]
            (x1, y1, x2, y2), scores float[N] and classes int[N], after thresholds and non-maximum suppression.
        overlap: intersection over union from which a box counts as found.
        least: score from which the float model's boxes are the truth. Those below are neither to be found nor false.
            With a threshold of `decode` well below it, a score that crosses it changes little.

    Raises:
        InputError: the data cannot be used, or the float model detects nothing in it.
    """
    metric = _against(model, data, partial(_boxes, decode=decode, overlap=overlap, least=least))
    if not any(bool((scores >= least).any()) for output in metric.expected for _, scores, _ in decode(output)):
        raise InputError("the float model detects no box in the data, so nothing can be compared.")
    return metric


def _boxes(outputs: Sequence[Any], expected: Sequence[Any], decode: Any, overlap: float, least: float = 0.0) -> float:
    images = [pair for a, b in zip(outputs, expected, strict=True) for pair in _decoded(decode, a, b)]
    classes = sorted({int(c) for _, (_, scores, labels) in images for c in labels[scores >= least]})
    return sum(_average_precision(images, c, overlap, least) for c in classes) / max(len(classes), 1)


def _average_precision(
    images: Sequence[tuple[Detections, Detections]], label: int, overlap: float, least: float
) -> float:
    """Area under the curve of precision and recall of one class."""
    scores: list[float] = []
    hits: list[bool] = []
    total = 0
    for (a, confidence, labels), (b, right_scores, right_labels) in images:
        of_class, chosen = right_labels == label, labels == label
        sure, boxes = right_scores >= least, b.reshape(-1, 4)
        right, unsure = boxes[of_class & sure], boxes[of_class & ~sure]
        total += len(right)
        free = torch.ones(len(right), dtype=torch.bool)
        order = confidence[chosen].argsort(descending=True, stable=True)
        for box, score in zip(a[chosen][order], confidence[chosen][order].tolist(), strict=True):
            shared = torch.where(free, _overlap(box, right), torch.zeros(len(right)))
            best = int(shared.argmax()) if len(right) else -1
            hit = best >= 0 and float(shared[best]) >= overlap
            if hit:
                free[best] = False
            elif bool((_overlap(box, unsure) >= overlap).any()):
                continue  # as objects marked as difficult in the source
            scores.append(score)
            hits.append(hit)
    order = torch.tensor(scores).argsort(descending=True, stable=True)
    right_so_far = torch.tensor(hits, dtype=torch.float64)[order].cumsum(0)
    precision = right_so_far / torch.arange(1, len(scores) + 1)
    recall = right_so_far / total
    precision = precision.flip(0).cummax(0).values.flip(0) if len(scores) else precision
    return float((recall.diff(prepend=torch.zeros(1, dtype=torch.float64)) * precision).sum())


def _overlap(box: Tensor, others: Tensor) -> Tensor:
    """Intersection over union of a box with each of the others."""
    low, high = torch.maximum(box[:2], others[:, :2]), torch.minimum(box[2:], others[:, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = (others[:, 2:] - others[:, :2]).prod(-1)
    return shared / ((box[2:] - box[:2]).prod() + areas - shared).clamp(min=1e-12)


def log_mel(model: nn.Module, data: Iterable[Any], rate: int, bands: int = 80) -> OutputMetric:
    """Agreement of generated sound with the float model's: minus the mean distance of log-mel spectrograms, in dB.

    Of sounds of different lengths, the first part that both have is compared.

    Args:
        model: the float model; the last axis of its first output tensor is time.
        data: batches, as for `fxq.quantize`.
        rate: samples per second.
        bands: number of mel bands.

    Raises:
        InputError: the data cannot be used, or the model returns no floating-point tensor.
    """
    return _against(model, data, partial(_log_mel, rate=rate, bands=bands))


def _log_mel(outputs: Sequence[Any], expected: Sequence[Any], rate: int, bands: int) -> float:
    distances = []
    for a, b in zip(outputs, expected, strict=True):
        first, second = (spectrogram(_first(x), rate, bands) for x in (a, b))
        length = min(first.shape[-1], second.shape[-1])
        distances.append((first[..., :length] - second[..., :length]).abs().mean())
    return -float(torch.stack(distances).mean())


def spectrogram(sound: Tensor, rate: int, bands: int) -> Tensor:
    """Log-mel spectrogram in dB, float[..., bands, frames], with windows of 1024 samples and a floor of -80 dB."""
    flat = sound.reshape(-1, sound.shape[-1])
    size = 1024
    padded = nn.functional.pad(flat, (0, max(0, size - flat.shape[-1])))
    power = torch.stft(padded, size, size // 4, window=torch.hann_window(size), return_complex=True).abs().square()
    mel = _mel_filters(rate, bands, size) @ power
    return 10 * torch.log10(mel.clamp(min=1e-8))


def _mel_filters(rate: int, bands: int, size: int) -> Tensor:
    """Triangular filters float[bands, size // 2 + 1] at equal distances on the mel scale (O'Shaughnessy 1987)."""
    highest = 2595 * math.log10(1 + rate / 2 / 700)
    centers = 700 * (10 ** (torch.linspace(0, highest, bands + 2) / 2595) - 1)
    frequency = torch.linspace(0, rate / 2, size // 2 + 1)
    rising = (frequency - centers[:-2, None]) / (centers[1:-1] - centers[:-2])[:, None]
    falling = (centers[2:, None] - frequency) / (centers[2:] - centers[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0)
