"""Residual networks: plain torch.nn, no quantization in them.

ResNet repeats torchvision's structure and module names, IResNet those of InsightFace, so their checkpoints fit. The
weights are random; `realistic` gives them the batch-norm statistics that a trained network has.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut.  Source: He et al. 2016, figure 5 left; names as in torchvision."""

    expansion = 1

    def __init__(self, inputs: int, planes: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        y: Tensor = self.relu(out)
        return y


class Bottleneck(nn.Module):
    """1x1, 3x3 with the stride, 1x1, shortcut.  Source: He et al. 2016, figure 5 right; names as in torchvision."""

    expansion = 4

    def __init__(self, inputs: int, planes: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, planes * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        y: Tensor = self.relu(out)
        return y


class ResNet(nn.Module):
    """ResNet: (N, 3, h, w) to (N, classes) logits.  Source: He et al. 2016, table 1; names as in torchvision."""

    def __init__(self, block: type[BasicBlock | Bottleneck], depths: tuple[int, ...], classes: int = 1000) -> None:
        super().__init__()
        self.inputs = 64
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._layer(block, 64, depths[0], stride=1)
        self.layer2 = self._layer(block, 128, depths[1], stride=2)
        self.layer3 = self._layer(block, 256, depths[2], stride=2)
        self.layer4 = self._layer(block, 512, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * block.expansion, classes)

    def _layer(self, block: type[BasicBlock | Bottleneck], planes: int, depth: int, stride: int) -> nn.Sequential:
        outputs = planes * block.expansion
        downsample = None
        if stride != 1 or self.inputs != outputs:
            downsample = nn.Sequential(nn.Conv2d(self.inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        first = block(self.inputs, planes, stride, downsample)
        self.inputs = outputs
        return nn.Sequential(first, *(block(outputs, planes, 1, None) for _ in range(depth - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = torch.flatten(self.avgpool(x), 1)
        y: Tensor = self.fc(x)
        return y


class IBasicBlock(nn.Module):
    """Norm, 3x3, norm, PReLU, 3x3 with the stride, norm, shortcut; nothing after the sum.

    Source: Deng et al. 2019, "ArcFace", section 3.1 (its "improved residual unit"); names as in InsightFace.
    """

    expansion = 1

    def __init__(self, inputs: int, planes: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.prelu = nn.PReLU(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.prelu(self.bn2(self.conv1(self.bn1(x))))
        out: Tensor = self.bn3(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return out


class IResNet(nn.Module):
    """ResNet for faces: (N, 3, 112, 112) to (N, features).  Source: Deng et al. 2019; names as in InsightFace."""

    def __init__(self, depths: tuple[int, ...], features: int = 512) -> None:
        super().__init__()
        self.inputs = 64
        self.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.prelu = nn.PReLU(64)
        self.layer1 = self._layer(64, depths[0])
        self.layer2 = self._layer(128, depths[1])
        self.layer3 = self._layer(256, depths[2])
        self.layer4 = self._layer(512, depths[3])
        self.bn2 = nn.BatchNorm2d(512)
        self.dropout = nn.Dropout(0.0)
        self.fc = nn.Linear(512 * 7 * 7, features)
        self.features = nn.BatchNorm1d(features)

    def _layer(self, planes: int, depth: int) -> nn.Sequential:
        downsample = nn.Sequential(nn.Conv2d(self.inputs, planes, 1, 2, bias=False), nn.BatchNorm2d(planes))
        first = IBasicBlock(self.inputs, planes, 2, downsample)
        self.inputs = planes
        return nn.Sequential(first, *(IBasicBlock(planes, planes, 1, None) for _ in range(depth - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.prelu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = torch.flatten(self.bn2(x), 1)
        y: Tensor = self.features(self.fc(self.dropout(x)))
        return y


def resnet18(classes: int = 1000) -> ResNet:
    """ResNet-18 with default random weights, in train mode: seed with torch.manual_seed, then `realistic`."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes)


def resnet50(classes: int = 1000) -> ResNet:
    """ResNet-50 with default random weights, in train mode: seed with torch.manual_seed, then `realistic`."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes)


def iresnet18(features: int = 512) -> IResNet:
    """IResNet-18 with default random weights, in train mode: seed with torch.manual_seed, then `realistic`."""
    return IResNet((2, 2, 2, 2), features)
