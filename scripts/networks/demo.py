"""The networks of the demo: plain torch.nn, no quantization in them.

They come with trained weights (`load_demo_networks`, trained by train_demo.py). Larger networks, without weights, are
in networks_resnet.py and networks_mobile.py.
"""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

DEMO_WEIGHTS = Path(__file__).with_name("demo_weights.safetensors")


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
