"""Small networks that the tests share, each with the inputs it takes.

`NETWORKS` lists them. `build(name)` makes one in eval mode, with the same weights each time and batch-norm statistics
that are not the initial ones; `batch(name, n)` makes n samples of its inputs, as one batch that `fxq.quantize` takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """Two residual blocks: the sum is read twice, the second time after a strided convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.conv3 = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.down = nn.Conv2d(8, 12, 1, stride=2)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = F.relu(self.stem(x))
        y = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(y)) + x)
        x = F.relu(self.conv3(x) + self.down(x))
        return self.head(x.mean((2, 3)))


class Dense(nn.Module):
    """Dense connections: every layer reads all values before it, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 4, 3, padding=1)
        self.c = nn.Conv2d(8, 4, 3, padding=1)
        self.d = nn.Conv2d(12, 4, 1)

    def forward(self, x):
        a = F.relu(self.a(x))
        b = F.relu(self.b(a))
        c = F.relu(self.c(torch.cat([a, b], 1)))
        return self.d(torch.cat([a, b, c], 1))


class CalledTwice(nn.Module):
    """One module called twice, on values of different ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.stem = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        x = torch.relu(self.conv(self.stem(x)))
        return self.conv(x * 3.0)


class SharedWeight(nn.Module):
    """Two modules that share one weight, with biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class SeveralInputs(nn.Module):
    """Two inputs, one of them with a default, two outputs as a tuple, one of which is read on."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 4, 3, padding=1)
        self.right = nn.Conv2d(2, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x, y, scale=1.0):
        z = F.relu(self.left(x) + self.right(y))
        return z, self.out(z) * scale


class DictOutput(nn.Module):
    """Keyword inputs, outputs in a dict that holds a list."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 2)])

    def forward(self, *, features: Tensor, offset: Tensor) -> dict[str, Any]:
        x = torch.relu(self.body(features + offset))
        return {"logits": [head(x) for head in self.heads], "features": x}


class Spellings(nn.Module):
    """Modules, functions, methods and operators in one network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(8, 8, 1, 1) / 3)
        self.clip = nn.ReLU6()
        self.fc = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x):
        x = self.clip(self.conv(x))
        y = F.conv2d(x, self.weight).relu()
        x = torch.add(x, y)
        x = F.max_pool2d(x, 2)
        x = x.flatten(1)
        return F.log_softmax(self.fc(x), dim=-1)


class Convolutions(nn.Module):
    """Depthwise, grouped, dilated, strided and rectangular convolutions, and one without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.ReLU6(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.Hardswish(),
            nn.Conv2d(8, 12, 3, padding=2, dilation=2, groups=4),
            nn.SiLU(),
            nn.Conv2d(12, 6, (3, 1), stride=(2, 1), padding=(1, 0)),
            nn.ReLU(),
            nn.Conv2d(6, 4, (1, 5)),
        )

    def forward(self, x):
        return self.layers(x)


class Paddings(nn.Module):
    """Every way to pad a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding="same"),
            nn.ReLU(),
            nn.Conv2d(4, 4, 2, padding="same"),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding="valid"),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=(0, 1), padding_mode="reflect"),
            nn.ReLU(),
            nn.ZeroPad2d((1, 2, 0, 1)),
            nn.Conv2d(4, 4, 3, padding=1, padding_mode="replicate"),
            nn.ReflectionPad2d(1),
            nn.Conv2d(4, 2, 3),
        )

    def forward(self, x):
        return self.layers(x)


class Sequence1d(nn.Module):
    """Convolutions over time, with pooling and a transposed linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv1d(4, 8, 5, padding=2)
        self.b = nn.Conv1d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.pool = nn.MaxPool1d(2)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.pool(F.relu(self.a(x)))
        x = F.relu(self.b(x))
        return self.head(x.transpose(1, 2))


class Upscaler(nn.Module):
    """Transposed convolution with kernel == stride, nearest interpolation and pixel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.b = nn.Conv2d(8, 8, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)
        self.c = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.up(F.relu(self.a(x))))
        x = F.relu(self.b(F.interpolate(x, scale_factor=2, mode="nearest")))
        return self.c(self.shuffle(x))


class PReLUChain(nn.Module):
    """FSRCNN in small: a PReLU after every convolution, a transposed convolution at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.extract, self.act1 = nn.Conv2d(1, 8, 5, padding=2), nn.PReLU(8)
        self.shrink, self.act2 = nn.Conv2d(8, 4, 1), nn.PReLU(4)
        self.map, self.act3 = nn.Conv2d(4, 4, 3, padding=1), nn.PReLU(4)
        self.expand, self.act4 = nn.Conv2d(4, 8, 1), nn.PReLU(8)
        self.up = nn.ConvTranspose2d(8, 1, 9, stride=2, padding=4, output_padding=1)

    def forward(self, x):
        x = self.act1(self.extract(x))
        x = self.act2(self.shrink(x))
        x = self.act3(self.map(x))
        x = self.act4(self.expand(x))
        return self.up(x)


class SqueezeExcite(nn.Module):
    """A squeeze-and-excitation block: the product of a tensor with one number per channel, and a hard swish."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.reduce = nn.Conv2d(8, 4, 1)
        self.expand = nn.Conv2d(4, 8, 1)
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = F.hardswish(self.stem(x))
        scale = F.hardsigmoid(self.expand(F.relu(self.reduce(self.pool(x)))))
        return self.out(x * scale)


class InPlace(nn.Module):
    """Ops that overwrite their input, with readers before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 6, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.b = nn.Conv2d(6, 6, 3, padding=1)
        self.c = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        x = self.a(x)
        self.relu(x)
        y = self.b(x)
        y += x
        z = self.c(y.relu_())
        z.add_(y)
        return z.clamp_(-1.0, 2.0)


class Shapes(nn.Module):
    """Reads sizes, and reshapes by them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.b = nn.Conv2d(2, 8, 3, padding=1)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = F.relu(self.a(x))
        x = x.view(x.size(0), 2, x.shape[2] * 2, -1)
        x = F.relu(self.b(x)).permute(0, 2, 3, 1)
        return self.fc(x)


def two_linears() -> nn.Module:
    """4 features in, 3 out."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def conv_block(stride: int = 1) -> nn.Module:
    """2 channels in and out."""
    return nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, stride=stride), nn.ReLU())


@dataclass(frozen=True)
class Network:
    """How to make a network and a batch of n samples for it."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Any]


def image(channels: int = 3, size: int = 8) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, channels, size, size)


NETWORKS: dict[str, Network] = {
    "residual": Network(Residual, image()),
    "dense": Network(Dense, image()),
    "called_twice": Network(CalledTwice, image()),
    "shared_weight": Network(SharedWeight, lambda n: torch.randn(n, 8)),
    "several_inputs": Network(SeveralInputs, lambda n: (torch.randn(n, 3, 8, 8), torch.randn(n, 2, 8, 8))),
    "dict_output": Network(DictOutput, lambda n: {"features": torch.randn(n, 6), "offset": torch.rand(6)}),
    "spellings": Network(Spellings, image()),
    "convolutions": Network(Convolutions, image()),
    "paddings": Network(Paddings, image()),
    "sequence": Network(Sequence1d, lambda n: torch.randn(n, 4, 24)),
    "upscaler": Network(Upscaler, image(size=6)),
    "prelu_chain": Network(PReLUChain, image(1)),
    "squeeze_excite": Network(SqueezeExcite, image()),
    "in_place": Network(InPlace, image()),
    "shapes": Network(Shapes, image()),
}


def build(name: str) -> nn.Module:
    """The network of that name in eval mode, the same weights each time."""
    return settled(NETWORKS[name].make)


def settled(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Model from `make`, in eval mode: seeded weights, batch-norm statistics and slopes as after training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                if module.track_running_stats:
                    module.running_mean.normal_(0.0, 0.3)
                    module.running_var.uniform_(0.5, 2.0)
                if module.affine:
                    nn.init.uniform_(module.weight, 0.5, 1.5)
                    nn.init.normal_(module.bias, 0.0, 0.3)
            if isinstance(module, nn.PReLU):
                nn.init.uniform_(module.weight, 0.05, 0.6)
    return model.eval()


def batch(name: str, n: int = 4, seed: int = 1) -> Any:
    """One batch of n samples for the network of that name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NETWORKS[name].inputs(n)


def call(model: nn.Module, inputs: Any) -> Any:
    """Run a model on a batch in any of its spellings: a tensor, positional inputs, or keyword inputs."""
    with torch.no_grad():
        if isinstance(inputs, dict):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
