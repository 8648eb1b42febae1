"""Networks of any number of ops, on tiny tensors: what takes time is the graph and not the arithmetic.

Each is made so that the signal neither fades nor explodes on the way, however long the way is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


def steady_linear() -> nn.Linear:
    """A linear layer near the identity."""
    layer = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        nn.init.eye_(layer.weight).add_(1e-4 * torch.randn(WIDTH, WIDTH))
        nn.init.zeros_(layer.bias)
    return layer


class Chain(nn.Sequential):
    """Linear and ReLU in turns, `ops` together: (N, 8) to (N, 8)."""

    def __init__(self, ops: int) -> None:
        super().__init__(*(layer for _ in range(ops // 2) for layer in (steady_linear(), nn.ReLU())))
        self.eval()
        self.example = torch.rand(16, WIDTH)


class ResidualBlock(nn.Module):
    """conv, norm, relu, conv, norm, add, relu: (N, 8, h, w) to the same."""

    OPS = 7

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH)
        nn.init.constant_(self.norm2.weight, 1e-3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + x)


class Residual(nn.Sequential):
    """Residual blocks, `ops` ops together: (N, 8, 4, 4) to the same."""

    def __init__(self, ops: int) -> None:
        super().__init__(*(ResidualBlock() for _ in range(ops // ResidualBlock.OPS)))
        self.eval()
        self.example = torch.rand(1, WIDTH, 4, 4)


class Slopes(nn.Sequential):
    """Convolution and PReLU in turns, `ops` together: an op without a kernel after every op that has one."""

    def __init__(self, ops: int) -> None:
        super().__init__(*(layer for _ in range(ops // 2) for layer in (self.steady_conv(), nn.PReLU(WIDTH))))
        self.eval()
        self.example = torch.rand(1, WIDTH, 4, 4)

    @staticmethod
    def steady_conv() -> nn.Conv2d:
        """A convolution near the identity."""
        layer = nn.Conv2d(WIDTH, WIDTH, 1)
        with torch.no_grad():
            nn.init.dirac_(layer.weight).add_(1e-4 * torch.randn(WIDTH, WIDTH, 1, 1))
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        return layer


class Recurrent(nn.Module):
    """One linear layer and a ReLU, called again and again, `ops` times together: one weight that all of them read."""

    def __init__(self, ops: int) -> None:
        super().__init__()
        self.layer, self.calls = steady_linear(), ops // 2
        self.eval()
        self.example = torch.rand(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = F.relu(self.layer(x))
        return x


class Fan(nn.Module):
    """Branches of a linear layer and a ReLU that all read the input, concatenated: one value with many readers.

    The branches are concatenated sixteen at a time, and the results again: a call of as many arguments as there are
    branches would be copied once for every argument that a pass replaces, by `torch.fx` itself.
    """

    GROUP = 16

    def __init__(self, ops: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(steady_linear() for _ in range(ops // 2))
        self.eval()
        self.example = torch.rand(1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = [F.relu(layer(x)) for layer in self.layers]
        while len(parts) > 1:
            parts = [torch.cat(parts[i : i + self.GROUP], dim=1) for i in range(0, len(parts), self.GROUP)]
        return parts[0]


Generated = Chain | Residual | Slopes | Recurrent | Fan
NETWORKS: dict[str, type[Generated]] = {
    "chain": Chain,
    "residual": Residual,
    "slopes": Slopes,
    "recurrent": Recurrent,
    "fan": Fan,
}
