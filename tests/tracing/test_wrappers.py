"""Models in wrappers, and models whose weights are computed before every call."""

import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fxq
from fxq.common.metrics import sqnr
from tests.support.helpers import REFERENCE

X, IMAGES = torch.linspace(-1, 1, 32).reshape(8, 4), torch.linspace(-1, 1, 384).reshape(2, 3, 8, 8)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda m: nn.DataParallel(torch.compile(m))])
def test_wrappers_are_taken_off(wrap, caplog):
    model = small()
    with caplog.at_level(logging.INFO, logger="fxq"):
        qmodel = fxq.quantize(wrap(model).eval(), REFERENCE, data=[X])
    assert torch.equal(qmodel(X), fxq.quantize(model, REFERENCE, data=[X])(X))
    assert list(qmodel.qparams()) == ["0", "2"]
    assert "the model is wrapped in a" in caplog.text


@pytest.mark.parametrize("recipe", [fxq.Recipe.static(backend="fastest"), fxq.Recipe.qat(backend="reference")], ids=str)
def test_wrappers_are_taken_off_once(recipe, caplog):
    with caplog.at_level(logging.INFO, logger="fxq"):
        fxq.prepare(nn.DataParallel(small()), recipe, example_inputs=X)
    assert caplog.text.count("the model is wrapped in a") == 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), nn.DataParallel])
def test_a_wrapped_part_is_traced_through(wrap):
    model = nn.Sequential(wrap(small()), nn.Linear(2, 3)).eval()
    qmodel = fxq.quantize(model, REFERENCE, data=[X])
    assert [(e.op, e.precision) for e in qmodel.ledger] == [
        ("linear", "int8"), ("relu", "int8"), ("linear", "int8"), ("linear", "int8")
    ]  # fmt: skip
    with torch.no_grad():
        assert sqnr(model(X), qmodel(X)) > 30
    kept = fxq.quantize(model, REFERENCE.leaf("0"), data=[X])
    assert [e.precision for e in kept.ledger] == ["float", "int8"]


@pytest.mark.parametrize("part", ["", "0"])
def test_a_part_compiled_in_place_is_traced_through(part):
    """`module.compile()` keeps the type of the module, but replaces its call."""
    model = nn.Sequential(small(), nn.Linear(2, 3)).eval()
    expected = fxq.quantize(model, REFERENCE, data=[X])(X)
    model.get_submodule(part).compile(backend="eager")
    assert torch.equal(fxq.quantize(model, REFERENCE, data=[X])(X), expected)


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(nn.functional.linear(x, self.w))


@pytest.mark.parametrize("inside", [True, False])
def test_a_parametrized_module_of_the_users_own_is_traced_into(inside):
    """Its class is defined by torch.nn, so that it was once taken for a layer of torch."""
    torch.manual_seed(0)
    own = Own()
    parametrize.register_parametrization(own, "w", Symmetric())
    model = (nn.Sequential(own, nn.ReLU()) if inside else own).eval()
    qmodel = fxq.quantize(model, REFERENCE, data=[X])
    assert [e.op for e in qmodel.ledger.where(lambda e: e.precision == "int8")] == ["linear", "linear"] + [
        "relu"
    ] * inside
    with torch.no_grad():
        assert sqnr(model(X), qmodel(X)) > 30
