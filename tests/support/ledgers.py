"""Ledgers to ask, and the model and the recipes that they are made with."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.ledger.ledger import Entry, Ledger
from tests.support.helpers import REFERENCE
from tests.support.machine import X86, needs_x86

RECIPES = [REFERENCE, pytest.param(X86, marks=needs_x86)]
X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.drop = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5)

    def forward(self, x):
        return F.relu(self.drop(self.bn(self.conv(x))) + x)


class Net(nn.Module):
    """A stem, one block called twice, a head, and a float function."""

    def __init__(self):
        super().__init__()
        self.stem, self.block, self.same = nn.Conv2d(3, 4, 1), Block(), nn.Identity()
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = self.block(self.block(self.same(self.stem(x))))
        return torch.erf(self.head(x.mean((2, 3))))


def net():
    torch.manual_seed(0)
    return Net().eval()


SOME = Ledger(
    (
        Entry(
            "a", "layer1.conv", "conv2d", "int8", "a_relu", fix="recipe.override('layer1.conv', fxq.FLOAT)", macs=900
        ),
        Entry("r", "layer1.relu", "relu", "int8", "a_relu", sqnr=30.5, own_sqnr=41.25, float_us=12.0, int8_us=4.25),
        Entry("s", "layer2.silu", "silu", "float", "s", "silu has no integer form", sqnr=math.inf),
        Entry("d", "drop", "dropout", "folded", reason="has no effect on the output"),
        Entry(
            "h", "head", "linear", "float", "h", "the recipe says float", "recipe.override('head', 8)", macs=100, sqnr=9
        ),
    )
)


def names(ledger):
    return [e.name for e in ledger]


def pasted(line, recipe):
    """Recipe that this line of a remedy evaluates to."""
    return eval(line, {"recipe": recipe, "fxq": fxq})


QUICK = ("called_twice", "shapes", "upscaler", "squeeze_excite")
"""Networks that are enough where every line of a ledger is tried."""
