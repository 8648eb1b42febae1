"""Models that are hard to trace, and what tests ask of any model that is traced."""

import torch
from torch import nn

import fxq
from fxq.common.data import Batch
from fxq.common.metrics import sqnr
from fxq.workflow.fastest import prepared_for_recipe
from tests.support.helpers import REFERENCE

X = torch.linspace(-1, 1, 768).reshape(4, 3, 8, 8)


def conv(inputs=3, outputs=3):
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def close(model, *inputs, **named):
    """The quantized model as one graph, not in parts; it is within 30 dB of the float model on these inputs."""
    model, batch = model.eval(), Batch(inputs, named)
    observed = fxq.calibrate(prepared_for_recipe(model, REFERENCE, batch), [batch])
    qmodel = fxq.convert(observed)
    with torch.no_grad():
        assert sqnr(model(*inputs, **named), qmodel(*inputs, **named)) > 30
    return qmodel


class Data(nn.Module):
    """Asks `ask` of a value that depends on the data."""

    def __init__(self, ask):
        super().__init__()
        self.a, self.ask = conv(), ask

    def forward(self, x):
        return self.ask(self.a(x))


def caught(y):
    try:
        return y + int(y.sum())
    except TypeError:
        return y
    except Exception:
        return y + 1


def resized(y):
    """No graph can hold it: the tensor gets another size in its place."""
    z = y * 2
    z.resize_(y.numel())
    return y + z.view_as(y)


class Keeps(nn.Module):
    """Sets an attribute on itself in forward."""

    def __init__(self):
        super().__init__()
        self.a, self.last, self.all, self.calls = conv(), None, [], 0
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.last = self.a(x)
        self.all.append(self.last)
        self.calls += 1
        return self.last


class Counts(Keeps):
    def forward(self, x):
        self.count.add_(1)
        return self.a(x)


def words(n, length, masked):
    ids = torch.arange(n * length).reshape(n, length) % 30
    return {"input_ids": ids, **({"attention_mask": (ids > 2).long()} if masked else {})}
