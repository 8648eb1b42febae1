"""Exported programs: the same int8 model as from the module, sizes checked, state refused."""

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.helpers import REFERENCE
from tests.support.models import batch, build, call

DYNAMIC = torch.export.Dim("batch", min=1, max=64)


class Model(nn.Module):
    """Keyword and nested inputs, nested outputs, a size in the graph."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x, *, more):
        y = self.head(self.stem(x).mean((2, 3)))
        y = y.view(x.shape[0], 2, -1) + more["shift"]
        return {"out": y, "parts": [y, x]}


def inputs(n=4, size=8):
    return {"x": torch.randn(n, 3, size, size), "more": {"shift": torch.ones(2)}}


@pytest.fixture(scope="module")
def exported():
    torch.manual_seed(0)
    model, example = Model().eval(), inputs()
    shapes = {"x": {0: DYNAMIC}, "more": {"shift": None}}
    program = torch.export.export(model, (example["x"],), {"more": example["more"]}, dynamic_shapes=shapes)
    return model, program, example


def test_unread_indices_do_not_keep_a_pooling_in_float():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveMaxPool2d(2), nn.Conv2d(4, 2, 1)).eval()
    x = torch.randn(2, 3, 8, 8)
    qmodel = fxq.quantize(torch.export.export(model, (x,)), fxq.Recipe.static(backend="reference"), data=[x])
    assert {entry.op: entry.precision for entry in qmodel.ledger} == {"conv2d": "int8", "adaptive_max_pool2d": "moves"}


def test_the_program_keeps_paths_signature_and_sizes(exported):
    model, program, example = exported
    recipe = REFERENCE.override("head", fxq.FLOAT).override(nn.Conv2d, fxq.QuantConfig())
    qmodel = fxq.quantize(program, recipe, data=[example])
    assert list(qmodel.qparams()) == ["stem.0"]
    assert {e.path: e.precision for e in qmodel.ledger if e.path} == {
        "stem.0": "int8", "stem.1": "folded", "stem.2": "int8", "head": "float"
    }  # fmt: skip
    batch = inputs(7)
    with torch.no_grad():
        assert sqnr(model(**batch), qmodel(**batch)) > 30
    assert list(qmodel(**batch)) == ["out", "parts"] and isinstance(qmodel(**batch)["parts"], list)


@pytest.mark.parametrize(("n", "size"), [(4, 9), (65, 8)])
def test_sizes_that_the_program_was_not_exported_for(exported, n, size):
    _, program, example = exported
    qmodel = fxq.quantize(program, REFERENCE, data=[example])
    with pytest.raises(fxq.InputError, match=r"x has the shape .*exported for \[1\.\.64, 3, 8, 8\].*dynamic_shapes"):
        qmodel(**inputs(n, size))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["residual", "called_twice", "shared_weight", "dict_output", "prelu_chain"])
def test_the_same_layers_run_on_integers(name):
    model, example = build(name), batch(name)
    args, kwargs = (
        ((), example) if isinstance(example, dict) else (example if isinstance(example, tuple) else (example,), {})
    )
    expected = fxq.quantize(model, REFERENCE, data=[example])
    qmodel = fxq.quantize(torch.export.export(model, args, kwargs), REFERENCE, data=[example])
    assert set(qmodel.qparams()) == set(expected.qparams())
    assert qmodel.ledger.count("int8") == expected.ledger.count("int8")
    assert sqnr(call(expected, example), call(qmodel, example)) > 35


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        self.seen.add_(1)
        return self.fc(x)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: Counts().eval(), "changes seen in place"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout()), "exported in train mode"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "changes 1.num_batches_tracked in place"),
    ],
)
def test_programs_with_state_are_refused(model, words):
    x = torch.randn(3, 4)
    with pytest.raises(fxq.InputError, match=words):
        fxq.quantize(torch.export.export(model(), (x,)), REFERENCE, data=[x])


def test_an_op_that_the_table_does_not_have_stays_in_float():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return torch.special.bessel_j0(self.fc(x))

    x = torch.randn(3, 4)
    qmodel = fxq.quantize(torch.export.export(Model().eval(), (x,)), REFERENCE, data=[x])
    assert [e.precision for e in qmodel.ledger] == ["int8", "float"]
    assert "not in the op table" in qmodel.ledger[1].reason


def test_the_module_of_a_program_is_refused():
    """A program that was exported in train mode stays in it: eval() raises."""
    program = torch.export.export(nn.Sequential(nn.Linear(4, 4)).eval(), (torch.rand(2, 4),))
    with pytest.raises(fxq.InputError, match="the module of an exported program; give the program"):
        fxq.prepare(program.module(), "static", example_inputs=torch.rand(2, 4))
