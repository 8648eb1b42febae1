"""Models, data and metrics for tests of tuning: in a module, so that they pickle."""

import torch
from torch import nn

import fxq

STATIC = fxq.Recipe.static(backend="reference")
DATA = [torch.rand(4, 3, 10, 10, generator=torch.Generator().manual_seed(i)) for i in range(2)]


class Wide(nn.Module):
    """A few layers; the values that `bad` reads differ by so much that integers cannot tell most of them apart."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, groups=6)
        self.bad, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.scales = nn.Parameter(torch.tensor([100.0, 1.0, 1.0, 1.0, 1.0, 1.0]))

    def forward(self, x):
        x = torch.relu(self.second(torch.relu(self.first(x)))).mean((2, 3))
        return self.last(torch.relu(self.bad(x * self.scales)))


def wide():
    torch.manual_seed(0)
    model = Wide().eval()
    with torch.no_grad():
        model.bad.weight[:, 0] *= 0.01
    return model


def agreement(model):
    """The share of the outputs that lie within a thousandth of what they should be."""
    with torch.no_grad():
        got, want = (torch.cat([network(x) for x in DATA]) for network in (model, wide()))
    return float(((got - want).abs() < 0.001).float().mean())
