"""Networks that the demo and the benchmarks quantize: plain torch.nn, no quantization in them.

FSRCNN and DigitsNet come with trained weights (`load_demo_networks`, trained by train_demo.py). The ImageNet networks
repeat torchvision's structure and module names, so a torchvision checkpoint fits them; their weights are random and
`realistic` gives them the batch-norm statistics that a trained network has.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

DEMO_WEIGHTS = Path(__file__).with_name("demo_weights.safetensors")
Network = TypeVar("Network", bound=nn.Module)


class FSRCNN(nn.Module):
    """Super-resolution of a luma picture: (N, channels, h, w) in [0, 1] to (N, channels, scale * h, scale * w).

    `d` is the number of features, `s` the number they shrink to, `m` the number of 3x3 mapping layers between.
    The output is not clamped.  Source: Dong, Loy, Tang 2016, "Accelerating the Super-Resolution Convolutional Neural
    Network", section 3.2; the default is its FSRCNN(56, 12, 4).
    """

    def __init__(self, scale: int = 2, d: int = 56, s: int = 12, m: int = 4, channels: int = 1) -> None:
        super().__init__()
        self.extract = nn.Sequential(nn.Conv2d(channels, d, 5, padding=2), nn.PReLU(d))
        self.shrink = nn.Sequential(nn.Conv2d(d, s, 1), nn.PReLU(s))
        mapping = [layer for _ in range(m) for layer in (nn.Conv2d(s, s, 3, padding=1), nn.PReLU(s))]
        self.mapping = nn.Sequential(*mapping)
        self.expand = nn.Sequential(nn.Conv2d(s, d, 1), nn.PReLU(d))
        self.upsample = nn.ConvTranspose2d(d, channels, 9, stride=scale, padding=4, output_padding=scale - 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shrink(self.extract(x))
        x = self.expand(self.mapping(x))
        y: Tensor = self.upsample(x)
        return y


class DigitsBlock(nn.Module):
    """Residual block, (N, inputs, h, w) to (N, outputs, h / stride, w / stride), written with functional ReLUs."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.project: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.project = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.project is None else self.project(x)
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + identity)


class DigitsNet(nn.Module):
    """Residual classifier of 8x8 digits: (N, 1, 8, 8) in [0, 1] to (N, 10) logits.

    The basic block of He et al. 2016, "Deep Residual Learning", section 3.3, at the size of scikit-learn's digits.
    """

    def __init__(self, narrow: int = 32, wide: int = 48, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, narrow, 3, padding=1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU())
        self.block1 = DigitsBlock(narrow, narrow)
        self.block2 = DigitsBlock(narrow, wide, stride=2)
        self.block3 = DigitsBlock(wide, wide)
        self.fc = nn.Linear(wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block3(self.block2(self.block1(self.stem(x))))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        y: Tensor = self.fc(x)
        return y


def load_demo_networks(path: Path = DEMO_WEIGHTS) -> tuple[FSRCNN, DigitsNet]:
    """The two demo networks with the weights that train_demo.py wrote, in eval mode."""
    tensors = load_file(path)
    fsrcnn, digits_net = FSRCNN(), DigitsNet()
    for prefix, network in (("fsrcnn.", fsrcnn), ("digits.", digits_net)):
        own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        network.load_state_dict(own)
        network.eval()
    return fsrcnn, digits_net


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


def _conv_norm_relu6(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    """Expand 1x1, depthwise 3x3, linear 1x1.  Source: Sandler et al. 2018, section 3.3; names as in torchvision."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand_ratio: int) -> None:
        super().__init__()
        hidden = inputs * expand_ratio
        self.use_res_connect = stride == 1 and inputs == outputs
        layers: list[nn.Module] = [] if expand_ratio == 1 else [_conv_norm_relu6(inputs, hidden, 1)]
        layers.append(_conv_norm_relu6(hidden, hidden, 3, stride, groups=hidden))
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
        layers: list[nn.Module] = [_conv_norm_relu6(3, 32, 3, stride=2)]
        inputs = 32
        for expansion, outputs, repeats, stride in self.BLOCKS:
            for i in range(repeats):
                layers.append(InvertedResidual(inputs, outputs, stride if i == 0 else 1, expansion))
                inputs = outputs
        self.features = nn.Sequential(*layers, _conv_norm_relu6(inputs, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), (1, 1))
        y: Tensor = self.classifier(torch.flatten(x, 1))
        return y


def resnet18(classes: int = 1000) -> ResNet:
    """ResNet-18 with default random weights, in train mode: seed with torch.manual_seed, then `realistic`."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes)


def resnet50(classes: int = 1000) -> ResNet:
    """ResNet-50 with default random weights, in train mode: seed with torch.manual_seed, then `realistic`."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes)


def mobilenet_v2(classes: int = 1000) -> MobileNetV2:
    """MobileNetV2 with default random weights, in train mode: seed with torch.manual_seed, then `realistic`."""
    return MobileNetV2(classes)


RESIDUAL_BLOCKS = (DigitsBlock, BasicBlock, Bottleneck, InvertedResidual)


def realistic(model: Network, input_shape: tuple[int, ...], seed: int = 0, batches: int = 4) -> Network:
    """Give every batch norm of `model` the values a trained network has; returns the same model, in eval mode.

    gamma is near 1 (near 0.5 at the end of a residual branch, which keeps the sum from growing block after block), beta
    near 0, and the running statistics are those of the activations on `batches` batches of standard normal noise of
    `input_shape` (N, C, h, w), N raised to 8 if smaller: feed the model torch.randn. The same seed gives the same
    values; torch's own generator is not touched.
    """
    generator = torch.Generator().manual_seed(seed)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    ends = {id(_last_norm(block)) for block in model.modules() if isinstance(block, RESIDUAL_BLOCKS)}
    momenta = [norm.momentum for norm in norms]
    model.eval()
    with torch.no_grad():
        for norm in norms:
            middle = 0.5 if id(norm) in ends else 1.0
            spread = torch.randn(norm.num_features, generator=generator) * 0.2
            norm.weight.copy_(middle * (1 + spread).clamp(0.3, 1.7))
            norm.bias.copy_(torch.randn(norm.num_features, generator=generator) * 0.15)
            norm.reset_running_stats()
            norm.momentum = None  # a plain average over the batches
            norm.train()
        for _ in range(batches):
            model(torch.randn(max(input_shape[0], 8), *input_shape[1:], generator=generator))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model.eval()


def _last_norm(block: nn.Module) -> nn.BatchNorm2d:
    """The batch norm whose output the block adds to its shortcut."""
    branch = [module for name, module in block.named_modules() if not name.startswith(("downsample", "project"))]
    return [module for module in branch if isinstance(module, nn.BatchNorm2d)][-1]
