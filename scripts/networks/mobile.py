"""Networks of depthwise separable convolutions: plain torch.nn, no quantization in them.

They repeat torchvision's structure and module names, so a torchvision checkpoint fits them. The weights are random;
`realistic` gives them the batch-norm statistics that a trained network has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _conv_norm(
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    activation: type[nn.Module] | None = nn.ReLU6,
    eps: float = 1e-5,
) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    layers: list[nn.Module] = [conv, nn.BatchNorm2d(outputs, eps=eps)]
    if activation is not None:
        layers.append(activation(inplace=True))
    return nn.Sequential(*layers)


class InvertedResidual(nn.Module):
    """Expand 1x1, depthwise 3x3, linear 1x1.  Source: Sandler et al. 2018, section 3.3; names as in torchvision."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand_ratio: int) -> None:
        super().__init__()
        hidden = inputs * expand_ratio
        self.use_res_connect = stride == 1 and inputs == outputs
        layers: list[nn.Module] = [] if expand_ratio == 1 else [_conv_norm(inputs, hidden, 1)]
        layers.append(_conv_norm(hidden, hidden, 3, stride, groups=hidden))
        layers += [nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return x + y if self.use_res_connect else y


class MobileNetV2(nn.Module):
    """MobileNetV2: (N, 3, h, w) to (N, classes) logits.

    Source: Sandler et al. 2018, "MobileNetV2: Inverted Residuals and Linear Bottlenecks", table 2; names as in
    torchvision.
    """

    # expansion, outputs, repeats, stride of the first
    BLOCKS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv_norm(3, 32, 3, stride=2)]
        inputs = 32
        for expansion, outputs, repeats, stride in self.BLOCKS:
            for i in range(repeats):
                layers.append(InvertedResidual(inputs, outputs, stride if i == 0 else 1, expansion))
                inputs = outputs
        self.features = nn.Sequential(*layers, _conv_norm(inputs, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), (1, 1))
        y: Tensor = self.classifier(torch.flatten(x, 1))
        return y


class SqueezeExcitation(nn.Module):
    """x times a factor in [0, 1] per channel, computed from the channels' means.

    Source: Hu et al. 2018, "Squeeze-and-Excitation Networks", section 3; names as in torchvision.
    """

    def __init__(self, channels: int, squeezed: int, activation: type[nn.Module], gate: type[nn.Module]) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)
        self.activation = activation()
        self.scale_activation = gate()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.fc2(self.activation(self.fc1(self.avgpool(x))))
        y: Tensor = self.scale_activation(scale) * x
        return y


class MBConv(nn.Module):
    """Expand 1x1, depthwise, squeeze-and-excite where given, linear 1x1, and a shortcut where the shapes agree.

    Source: Tan and Le 2019, "EfficientNet", section 4; names as in torchvision, whose MobileNetV3 block has the same.
    In eval mode only: without stochastic depth.
    """

    def __init__(
        self,
        inputs: int,
        expanded: int,
        outputs: int,
        kernel: int,
        stride: int,
        activation: type[nn.Module],
        excite: SqueezeExcitation | None,
        eps: float,
    ) -> None:
        super().__init__()
        self.use_res_connect = stride == 1 and inputs == outputs
        layers: list[nn.Module] = []
        if expanded != inputs:
            layers.append(_conv_norm(inputs, expanded, 1, activation=activation, eps=eps))
        layers.append(_conv_norm(expanded, expanded, kernel, stride, expanded, activation, eps))
        if excite is not None:
            layers.append(excite)
        layers.append(_conv_norm(expanded, outputs, 1, activation=None, eps=eps))
        self.block = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return x + y if self.use_res_connect else y


class MobileNetV3Large(nn.Module):
    """MobileNetV3-Large: (N, 3, h, w) to (N, classes) logits.

    Source: Howard et al. 2019, "Searching for MobileNetV3", table 1; names as in torchvision.
    """

    # kernel, expanded, outputs, squeeze-and-excite, activation, stride
    BLOCKS = (
        (3, 16, 16, False, nn.ReLU, 1),
        (3, 64, 24, False, nn.ReLU, 2),
        (3, 72, 24, False, nn.ReLU, 1),
        (5, 72, 40, True, nn.ReLU, 2),
        (5, 120, 40, True, nn.ReLU, 1),
        (5, 120, 40, True, nn.ReLU, 1),
        (3, 240, 80, False, nn.Hardswish, 2),
        (3, 200, 80, False, nn.Hardswish, 1),
        (3, 184, 80, False, nn.Hardswish, 1),
        (3, 184, 80, False, nn.Hardswish, 1),
        (3, 480, 112, True, nn.Hardswish, 1),
        (3, 672, 112, True, nn.Hardswish, 1),
        (5, 672, 160, True, nn.Hardswish, 2),
        (5, 960, 160, True, nn.Hardswish, 1),
        (5, 960, 160, True, nn.Hardswish, 1),
    )
    EPS = 1e-3

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv_norm(3, 16, 3, 2, activation=nn.Hardswish, eps=self.EPS)]
        inputs = 16
        for kernel, expanded, outputs, with_excite, activation, stride in self.BLOCKS:
            squeezed = _multiple_of_8(expanded // 4)
            excite = SqueezeExcitation(expanded, squeezed, nn.ReLU, nn.Hardsigmoid) if with_excite else None
            layers.append(MBConv(inputs, expanded, outputs, kernel, stride, activation, excite, self.EPS))
            inputs = outputs
        self.features = nn.Sequential(*layers, _conv_norm(inputs, 960, 1, activation=nn.Hardswish, eps=self.EPS))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(960, 1280), nn.Hardswish(inplace=True), nn.Dropout(0.2), nn.Linear(1280, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(self.avgpool(self.features(x)), 1)
        y: Tensor = self.classifier(x)
        return y


class EfficientNetB0(nn.Module):
    """EfficientNet-B0: (N, 3, h, w) to (N, classes) logits.  Source: Tan and Le 2019, table 1; names as in torchvision.

    In eval mode only: without stochastic depth.
    """

    # expansion, kernel, stride of the first, outputs, repeats
    STAGES = (
        (1, 3, 1, 16, 1),
        (6, 3, 2, 24, 2),
        (6, 5, 2, 40, 2),
        (6, 3, 2, 80, 3),
        (6, 5, 1, 112, 3),
        (6, 5, 2, 192, 4),
        (6, 3, 1, 320, 1),
    )
    EPS = 1e-5

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv_norm(3, 32, 3, 2, activation=nn.SiLU)]
        inputs = 32
        for expansion, kernel, stride, outputs, repeats in self.STAGES:
            blocks: list[nn.Module] = []
            for i in range(repeats):
                expanded = inputs * expansion
                excite = SqueezeExcitation(expanded, inputs // 4, nn.SiLU, nn.Sigmoid)
                step = stride if i == 0 else 1
                blocks.append(MBConv(inputs, expanded, outputs, kernel, step, nn.SiLU, excite, self.EPS))
                inputs = outputs
            layers.append(nn.Sequential(*blocks))
        self.features = nn.Sequential(*layers, _conv_norm(inputs, 1280, 1, activation=nn.SiLU))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(self.avgpool(self.features(x)), 1)
        y: Tensor = self.classifier(x)
        return y


def _multiple_of_8(channels: int) -> int:
    """The nearest multiple of 8, at least 8 and not less than nine tenths of `channels`, as in torchvision."""
    nearest = max(8, (channels + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * channels else nearest


def mobilenet_v2(classes: int = 1000) -> MobileNetV2:
    """MobileNetV2 with default random weights, in train mode: seed with torch.manual_seed, then `realistic`."""
    return MobileNetV2(classes)


def mobilenet_v3_large(classes: int = 1000) -> MobileNetV3Large:
    """MobileNetV3-Large with default random weights, in train mode: seed with torch.manual_seed, then `realistic`."""
    return MobileNetV3Large(classes)


def efficientnet_b0(classes: int = 1000) -> EfficientNetB0:
    """EfficientNet-B0 with default random weights, in train mode: seed with torch.manual_seed, then `realistic`."""
    return EfficientNetB0(classes)
