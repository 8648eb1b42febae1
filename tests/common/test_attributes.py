"""Attributes of the float model on a quantized model: device, dtype, plain data, and the errors for the rest."""

import copy
import enum
import pickle
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

import fxq
from fxq.common.attributes import FloatAttributes
from fxq.errors import FxqError, NoAttributeError
from tests.support.helpers import REFERENCE, module

X = torch.linspace(-1, 1, 2 * 8).reshape(2, 8)


@dataclass
class Config:
    """As a model of HuggingFace's has one."""

    hidden: int = 8
    names: list = field(default_factory=lambda: ["a", "b"])


class Kind(enum.Enum):
    IMAGES = 1


class Holder:
    def __init__(self, tensor):
        self.tensor = tensor


class Images(list):
    """Made when they are asked for, 64 KiB each."""

    read = 0

    def __iter__(self):
        for i in range(1000):
            self.read += 1
            yield bytes([i % 256]) * (1 << 16)


class Base(nn.Module):
    framework = "here"
    limits = (1, 2)

    def generate(self, x):
        return self(x)


class Model(Base):
    version = 3

    def __init__(self):
        super().__init__()
        self.config, self.kind, self.labels = Config(), Kind.IMAGES, {"cat": 0, "dog": [1, 2]}
        self.threshold, self.name, self.size, self.nothing = 0.5, "net", torch.Size([3, 4]), None
        self.holder, self.callback, self.large = Holder(torch.ones(2)), lambda: 3, "x" * (1 << 21)
        self.local, self.array = type("Local", (), {})(), np.ones(3)
        self._private = 7
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.ones(3))

    @property
    def answer(self):
        return 42

    @staticmethod
    def helper():
        return 1

    @classmethod
    def build(cls):
        return cls()

    def infer(self, x):
        return self(x).argmax(1)

    def forward(self, x):
        return self.out(self.fc(x).relu())


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    model = Model().eval()
    return model, fxq.quantize(model, fxq.Recipe.static(optimize="coverage"), data=[X])


COPIES = [lambda q: q, copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("copied", COPIES)
def test_plain_data_is_handed_on(models, copied):
    model, qmodel = models[0], copied(models[1])
    for name in ("config", "kind", "labels", "threshold", "name", "size", "nothing", "framework", "limits", "version"):
        assert getattr(qmodel, name) == getattr(model, name) and hasattr(qmodel, name)
    assert isinstance(qmodel.config, Config) and qmodel.config is not model.config
    assert qmodel.config is qmodel.config


def test_neither_changes_through_the_other(models):
    model, qmodel = models
    duplicate = copy.deepcopy(qmodel)
    duplicate.config.names.append("c")
    duplicate.threshold = 0.75
    assert model.config.names == qmodel.config.names == ["a", "b"] and duplicate.config.names == ["a", "b", "c"]
    assert (model.threshold, qmodel.threshold, duplicate.threshold) == (0.5, 0.5, 0.75)


LEFT = {
    "generate": "its methods would run the float model",
    "infer": "write a module with that method",
    "helper": "its methods would run",
    "build": "its methods would run",
    "callback": "its methods would run",
    "answer": "it is a class or a property",
    "fc": "have become part of the graph",
    "mean": r"see qmodel\.graph and qmodel\.qparams\(\)",
    "holder": "it cannot be copied .*there is a Tensor inside",
    "array": "it cannot be copied .*there is a ndarray inside",
    "large": "it has more than 1 MiB",
    "local": "it cannot be copied",
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("name", LEFT)
def test_the_rest_says_why_not(models, copied, name):
    qmodel = copied(models[1])
    with pytest.raises(NoAttributeError, match=rf"no attribute '{name}': the float model has it, but .*{LEFT[name]}"):
        getattr(qmodel, name)
    assert not hasattr(qmodel, name) and getattr(qmodel, name, "default") == "default"
    assert issubclass(NoAttributeError, FxqError) and issubclass(NoAttributeError, AttributeError)


def test_a_data_set_is_not_read_to_its_end():
    """A data set on a model may be larger than the memory, and may compute its elements on access."""
    model = Model().eval()
    model.images = Images()
    assert "more than 1 MiB" in FloatAttributes.of(model).left["images"]
    assert 0 < model.images.read < 100


@pytest.mark.parametrize("name", ["bogus", "_private", "_also_private"])
def test_what_the_float_model_did_not_have(models, name):
    with pytest.raises(NoAttributeError, match=f"no attribute '{name}', and the float model had none"):
        getattr(models[1], name)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("copied", COPIES)
def test_device_and_dtype(backend, copied):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    qmodel = copied(fxq.quantize(model, fxq.Recipe.static(backend=backend, optimize="coverage"), data=[X]))
    assert (qmodel.device, qmodel.dtype) == (torch.device("cpu"), torch.float32) == (qmodel(X).device, qmodel(X).dtype)
    first = next(qmodel.parameters())
    assert (first.device, first.dtype, first.requires_grad) == (qmodel.device, qmodel.dtype, False)
    assert sum(p.numel() for p in qmodel.parameters() if p.requires_grad) == 0
    if backend == "reference":
        moved = copy.deepcopy(qmodel).to("meta")
        assert moved.device.type == "meta" == next(moved.parameters()).device.type
        assert copy.deepcopy(moved).device.type == "meta"


def test_names_that_a_quantized_model_needs():
    model = module(lambda self, x: self.device(x), device=nn.Linear(8, 2))
    with pytest.raises(FxqError, match="called 'device'"):
        fxq.quantize(model, REFERENCE.without_pass("correct-bias"), data=[X])  # which moves the bias out of it
