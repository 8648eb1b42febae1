"""Train mode is refused where it makes a difference, and nowhere else."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import spectral_norm

import fxq
from fxq.common.data import Batch
from fxq.common.metrics import sqnr
from fxq.common.train_mode import different_in_train_mode, first_in_train_mode, fixed_statistics
from tests.support.helpers import REFERENCE, module


def named(name, forward):
    return type(name, (nn.Module,), {"forward": forward})


Plain = named("Plain", lambda self, x: x * 2)
Drops = named("Drops", lambda self, x: F.dropout(x, 0.5, self.training))
Gets = named("Gets", lambda self, x: F.dropout(x, 0.5, getattr(self, "training")))  # noqa: B009
Inside = named("Inside", lambda self, x: (lambda: x if self.training else -x)())


class Property(nn.Module):
    @property
    def hot(self):
        return self.training

    def forward(self, x):
        return x if self.hot else -x


def decorated(function):
    return lambda *args: function(*args)


Decorated = named("Decorated", decorated(Inside.forward))


class Hook:
    def __call__(self, module, inputs, output):
        return output if module.training else -output


def hooked(hook):
    relu = nn.ReLU()
    relu.register_forward_hook(hook)
    return relu


def with_own_forward():
    relu = nn.ReLU()
    relu.forward = lambda x: x if relu.training else -x
    return relu


MODE_INDEPENDENT = {
    "activation": nn.ReLU,
    "layers": lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.GELU(), nn.LayerNorm(4)),
    "dropout of nothing": lambda: nn.Dropout(0.0),
    "instance norm": lambda: nn.InstanceNorm2d(3),
    "batch norm without statistics": lambda: nn.BatchNorm2d(3, track_running_stats=False),
    "lstm": lambda: nn.LSTM(3, 3, 2),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0),
    "user": Plain,
    "hook": lambda: hooked(lambda module, inputs, output: -output),
}
MODE_DEPENDENT = {
    "dropout": nn.Dropout,
    "batch norm": lambda: nn.BatchNorm1d(3),
    "subclass": lambda: type("Mine", (nn.BatchNorm2d,), {})(3),
    "instance norm": lambda: nn.InstanceNorm2d(3, track_running_stats=True),
    "rrelu": nn.RReLU,
    "lstm": lambda: nn.LSTM(3, 3, 2, dropout=0.1),
    "attention": lambda: nn.MultiheadAttention(4, 2, 0.1),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 4),
    "user": Drops,
    "getattr": Gets,
    "inner function": Inside,
    "property": Property,
    "decorated": Decorated,
    "inherited": type("Mine", (Drops,), {}),
    "hook": lambda: hooked(lambda module, inputs, output: output if module.training else -output),
    "hook object": lambda: hooked(Hook()),
    "own forward": with_own_forward,
    "spectral norm": lambda: spectral_norm(nn.Linear(3, 3)),
    "script": lambda: torch.jit.script(nn.ReLU()),
}


@pytest.mark.parametrize("make", MODE_INDEPENDENT.values(), ids=MODE_INDEPENDENT)
def test_what_does_not_look_at_the_mode(make):
    assert first_in_train_mode(nn.Sequential(make())) is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize("make", MODE_DEPENDENT.values(), ids=MODE_DEPENDENT)
def test_what_does(make):
    assert first_in_train_mode(nn.Sequential(make())).startswith("0")
    assert first_in_train_mode(nn.Sequential(make()).eval()) is None


def test_a_model_without_such_modules_is_quantized_as_it_is():
    """An activation that a forward had made, in train mode as all new modules are, stopped it."""
    torch.manual_seed(0)
    layers = {"a": nn.Conv2d(3, 8, 3), "act": nn.ReLU(), "drop": nn.Dropout(0.0), "b": nn.Conv2d(8, 4, 3)}
    model = module(lambda self, x: self.b(self.drop(self.act(self.a(x)))), **layers).train()
    x = torch.randn(2, 3, 8, 8)
    qmodel = fxq.quantize(model, REFERENCE, data=[x])
    assert model.training and model.act.training and not qmodel.training
    with torch.no_grad():
        assert sqnr(model(x), qmodel(x)) > 30
    again = fxq.quantize(copy.deepcopy(model).eval(), REFERENCE, data=[x])
    with torch.no_grad():
        assert torch.equal(qmodel(x), again(x))


def test_one_module_that_looks_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout()).train()
    with pytest.raises(fxq.InputError, match=r"while its module '2' is in train mode: call model.eval\(\) first"):
        fxq.quantize(model, REFERENCE, data=[torch.rand(2, 4)])


class Counts(nn.Module):
    """Keeps how often it was trained with."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.steps += 1
        return x


class Two(nn.Module):
    """Returns more in train mode."""

    def forward(self, x):
        return (x, x) if self.training else x


class Fails(nn.Module):
    """Wants targets in train mode."""

    def forward(self, x, targets=None):
        return x if not self.training else targets["boxes"]


class Unused(nn.Module):
    """Looks at the mode where it makes no difference."""

    def forward(self, x, rate=0.0):
        return F.dropout(x, rate, self.training)


@pytest.mark.parametrize("kind", [Drops, nn.RReLU, Counts, Two, Fails, lambda: nn.TransformerEncoderLayer(4, 2, 4)])
def test_what_computes_or_keeps_something_else(kind):
    model, batch = nn.Sequential(nn.Linear(4, 4), kind(), Unused()).eval(), Batch((torch.randn(2, 3, 4),))
    before = copy.deepcopy(model.state_dict())
    difference = different_in_train_mode(model, batch, [])
    assert difference
    assert all(path.startswith("1") for path in difference)
    assert not any(m.training for m in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert different_in_train_mode(model, batch, list(model[1].modules())) == []


class Partly(nn.Module):
    """Batch norms that are trained, and some that are not: by its own train(), and by the code that calls one."""

    def __init__(self):
        super().__init__()
        self.trained, self.left, self.called, self.both = (nn.BatchNorm1d(3) for _ in range(4))

    def train(self, mode=True):
        super().train(mode)
        self.left.eval()
        self.trained.weight.data.fill_(1.0 if mode else 2.0)  # as layers do that have a sum of two weights in eval mode
        return self

    def forward(self, x):
        y = F.batch_norm(self.left(self.trained(x)), self.called.running_mean, self.called.running_var)
        return F.batch_norm(self.both(y), self.both.running_mean, self.both.running_var, None, training=False)


def test_batch_norms_that_are_not_trained():
    model, x = Partly().eval(), torch.randn(5, 3)
    before = copy.deepcopy(model.state_dict())
    statistics = fixed_statistics(model, Batch((x,)))
    assert statistics == ["left", "called"]
    assert fixed_statistics(model, Batch((x[:1],))) == ["left"]  # one sample is no batch to train with
    assert different_in_train_mode(model, Batch((x,)), [model.trained, model.both]) == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(m.training for m in model.modules())
