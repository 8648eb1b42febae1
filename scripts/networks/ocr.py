"""EasyOCR's two networks: CRAFT, which finds words in pictures, and CRNN, which reads them.

Layers have the names that the files of weights give them.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _convolution(inputs: int, outputs: int, kernel: int = 3) -> list[nn.Module]:
    """Convolution of unchanged size, batch norm and ReLU."""
    return [nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2), nn.BatchNorm2d(outputs), nn.ReLU()]


class _Vgg(nn.Module):
    """VGG16 with batch norm to its 13th convolution, and two more; layers are numbered through the slices."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512):
            layers += _convolution(inputs, width) if width else [nn.MaxPool2d(2, 2)]
            inputs = width or inputs
        ends = (0, 13, 20, 30, 39)  # after a ReLU, but the last one, after a batch norm
        for i, (start, end) in enumerate(pairwise(ends), 1):
            numbered = {str(number): layers[number] for number in range(start, end)}
            self.add_module(f"slice{i}", nn.Sequential(OrderedDict(numbered)))
        self.slice5 = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1),
            nn.Conv2d(512, 1024, 3, padding=6, dilation=6),
            nn.Conv2d(1024, 1024, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """(N, 3, h, w) -> features of each slice."""
        features = []
        for layers in (self.slice1, self.slice2, self.slice3, self.slice4, self.slice5):
            features.append(x := layers(x))
        return tuple(features)


class _Merge(nn.Module):
    """Two convolutions of features and those of a finer scale."""

    def __init__(self, inputs: int, middle: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(*_convolution(inputs, middle, 1), *_convolution(middle, outputs))

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        """Features of one size -> (N, outputs, h, w)."""
        merged: Tensor = self.conv(torch.cat([first, *others], 1))
        return merged


def _enlarged(x: Tensor, other: Tensor) -> Tensor:
    """Features in the size of others."""
    return F.interpolate(x, size=other.shape[2:], mode="bilinear", align_corners=False)


class Craft(nn.Module):
    """CRAFT: where letters are, and which of them belong to one word.

    Source: Baek et al. 2019, "Character Region Awareness for Text Detection", section 3.1, as in EasyOCR.
    """

    def __init__(self) -> None:
        super().__init__()
        self.basenet = _Vgg()
        self.upconv1, self.upconv2 = _Merge(1536, 512, 256), _Merge(768, 256, 128)
        self.upconv3, self.upconv4 = _Merge(384, 128, 64), _Merge(192, 64, 32)
        sizes = ((32, 32, 3), (32, 32, 3), (32, 16, 3), (16, 16, 1))
        layers = [(nn.Conv2d(a, b, kernel, padding=kernel // 2), nn.ReLU()) for a, b, kernel in sizes]
        self.conv_cls = nn.Sequential(*[layer for pair in layers for layer in pair], nn.Conv2d(16, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, h, w), normalized as for ImageNet -> regions of letters and links, (N, 2, h / 2, w / 2)."""
        fine, second, third, fourth, coarse = self.basenet(x)
        y = self.upconv1(coarse, fourth)
        y = self.upconv2(_enlarged(y, third), third)
        y = self.upconv3(_enlarged(y, second), second)
        y = self.upconv4(_enlarged(y, fine), fine)
        regions: Tensor = self.conv_cls(y)
        return regions


class _Recurrent(nn.Module):
    """Bidirectional LSTM and a linear layer."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(inputs, hidden, bidirectional=True, batch_first=True)
        self.linear = nn.Linear(2 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(N, steps, inputs) -> (N, steps, hidden)."""
        result: Tensor = self.linear(self.rnn(x)[0])
        return result


class Crnn(nn.Module):
    """CRNN: 7 convolutions, two bidirectional LSTM layers, and a letter for each step of 4 pixels.

    Source: Shi et al. 2015, "An End-to-End Trainable Neural Network for Image-based Sequence Recognition", table 1, as
    in EasyOCR.
    """

    def __init__(self, letters: int = 97, width: int = 256) -> None:
        super().__init__()
        a, b, c, d = width // 8, width // 4, width // 2, width
        layers = [nn.Conv2d(1, a, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, 2)]
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, 2)]
        layers += [nn.Conv2d(b, c, 3, padding=1), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d((2, 1), (2, 1))]
        for inputs in (c, d):
            layers += [nn.Conv2d(inputs, d, 3, padding=1, bias=False), nn.BatchNorm2d(d), nn.ReLU()]
        layers += [nn.MaxPool2d((2, 1), (2, 1)), nn.Conv2d(d, d, 2), nn.ReLU()]
        self.FeatureExtraction = nn.ModuleDict({"ConvNet": nn.Sequential(*layers)})
        self.SequenceModeling = nn.Sequential(_Recurrent(d, d), _Recurrent(d, d))
        self.Prediction = nn.Linear(d, letters)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 64, w) from -1 to 1 -> logits (N, steps, letters); the first letter is none."""
        features = self.FeatureExtraction["ConvNet"](x).mean(2).transpose(1, 2)
        logits: Tensor = self.Prediction(self.SequenceModeling(features))
        return logits
