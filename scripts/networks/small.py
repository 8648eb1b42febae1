"""Small networks of kinds that the other files do not have: plain torch.nn, random weights, no quantization in them."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _two_convs(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Segmentation: (N, 3, h, w) to (N, classes, h, w); h and w are multiples of 8.

    Source: Ronneberger et al. 2015, "U-Net", figure 1, with padded convolutions, batch norms and fewer channels.
    """

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128), classes: int = 4) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.stem = _two_convs(3, widths[0])
        self.down = nn.ModuleList(_two_convs(narrow, wide) for narrow, wide in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, stride=2) for narrow, wide in pairs[::-1])
        self.join = nn.ModuleList(_two_convs(2 * narrow, narrow) for narrow, _ in pairs[::-1])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        kept = []
        for layers in self.down:
            kept.append(x)
            x = layers(F.max_pool2d(x, 2))
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([kept.pop(), up(x)], dim=1))
        y: Tensor = self.head(x)
        return y


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of images (N, C, h, w)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, layer norm, two linear layers with GELU between, scaled and added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.3))  # begins at 1e-6, and is about this after training

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(F.gelu(self.wide(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Classifier: (N, 3, h, w) to (N, classes).

    Source: Liu et al. 2022, "A ConvNet for the 2020s", section 2, of the widths and depths of timm's convnext_atto.
    """

    def __init__(
        self,
        widths: tuple[int, ...] = (40, 80, 160, 320),
        depths: tuple[int, ...] = (2, 2, 6, 2),
        classes: int = 1000,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, stride=4), ChannelNorm(widths[0], eps=1e-6)]
        for i, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            if i:
                layers += [ChannelNorm(widths[i - 1], eps=1e-6), nn.Conv2d(widths[i - 1], width, 2, stride=2)]
            layers += [ConvNeXtBlock(width) for _ in range(depth)]
        self.features = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(widths[-1], eps=1e-6), nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.features(x).mean((2, 3))))
        return y
