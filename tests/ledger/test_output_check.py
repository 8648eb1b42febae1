"""The last check: what the quantized model returns against the float model, on record and in a warning."""

import copy
import json
import math
import pickle
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.errors import RecipeError
from fxq.ledger import output_check
from fxq.pipeline import float_ops
from fxq.tracing.fidelity import run_model
from tests.support.helpers import REFERENCE, module

X = torch.linspace(-1, 1, 4 * 8).reshape(4, 8)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).eval()


@dataclass(frozen=True)
class DropTanh(fxq.Pass):
    """A pass that is wrong: tanh(x) -> x."""

    name = "drop-tanh"
    needs = gives = fxq.extend.Stage.CANONICAL

    def run(self, rewriter):
        for node in rewriter.nodes("tanh"):
            rewriter.replace(node, node.args[0])


def silent(model, recipe, data):
    """The quantized model, where no warning is expected."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxq.FxqWarning)
        return fxq.quantize(model, recipe, data=data)


def test_the_output_is_compared_over_all_recorded_batches():
    model, batches = net(), [X, 3 * X, torch.cos(X)]
    qmodel = silent(model, REFERENCE, batches)
    with torch.no_grad():
        want, got = [model(x) for x in batches], [qmodel(x) for x in batches]
    assert qmodel.output_sqnr == pytest.approx(sqnr(want, got), abs=1e-6)
    assert 25 < qmodel.output_sqnr < 60


def test_the_model_does_not_run_again_on_samples_of_the_example(monkeypatch):
    model, ran = net(), []
    monkeypatch.setattr(output_check, "run_model", lambda m, batch, fixed: ran.append(batch) or m(*batch.args))
    example = torch.cat([X, torch.cos(X)])
    qmodel = fxq.quantize(model, REFERENCE, data=[X, torch.sin(X)], example_inputs=example)
    assert [torch.equal(batch.args[0], torch.sin(X)) for batch in ran] == [True]
    with torch.no_grad():
        want, got = ([m(x) for x in (X, torch.sin(X))] for m in (model, qmodel))
    assert qmodel.output_sqnr == pytest.approx(sqnr(want, got), abs=1e-3)


def test_it_stands_in_the_last_line_of_the_ledger_and_in_its_data():
    ledger = silent(net(), REFERENCE, [X]).ledger
    assert str(ledger).splitlines()[-1].endswith(f"; output {ledger.output_sqnr:.1f} dB SQNR")
    assert json.loads(ledger.to_json())["output_sqnr"] == ledger.output_sqnr
    assert ledger.where(op="linear").output_sqnr == ledger.output_sqnr


def test_a_pass_that_changes_the_numbers_is_seen():
    recipe = REFERENCE.insert_pass(DropTanh(), after="canonicalize")
    with pytest.warns(fxq.FxqWarning, match=r"output is at .* dB SQNR(.|\n)*recipe.with_check\(\)"):
        qmodel = fxq.quantize(net(), recipe, data=[20 * X])
    assert qmodel.output_sqnr < 5
    assert silent(net(), recipe.with_min_sqnr(None), [20 * X]).output_sqnr == qmodel.output_sqnr


def test_the_layers_with_the_largest_error_are_named_with_the_line_that_mends_them():
    model = net()
    coarse = fxq.QuantConfig(
        activation=fxq.TensorSpec(bits=2), weight=fxq.TensorSpec(2, True, True, "channel", "minmax")
    )
    recipe = REFERENCE.override("2", coarse)
    with pytest.warns(fxq.FxqWarning, match="output is at") as caught:
        qmodel = fxq.quantize(model, recipe, data=[X])
    (text,) = [str(w.message) for w in caught]
    named = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    assert named[0].startswith("2 (linear, ") and named[0].endswith("recipe.override('2', fxq.FLOAT)")
    assert silent(model, recipe.override("2", fxq.FLOAT), [X]).output_sqnr > 12 > qmodel.output_sqnr


def test_a_higher_bar():
    with pytest.warns(fxq.FxqWarning, match=r"the recipe asks for 90 dB[^\0]*effort=\"best\" also tries equalization"):
        fxq.quantize(net(), REFERENCE.with_min_sqnr(90), data=[X])


def test_an_output_that_is_not_finite():
    model = module(lambda self, x: 1 / self.fc(x), fc=nn.Linear(2, 2, bias=False))
    model.fc.weight.data = torch.eye(2)
    with pytest.warns(fxq.FxqWarning, match="output is not finite where the float model's is"):
        qmodel = fxq.quantize(model, REFERENCE, data=[torch.tensor([[1.0, 1e-4]])])  # 1e-4 is rounded to 0
    assert math.isnan(qmodel.output_sqnr)


def test_a_large_output_does_not_hide_a_small_one():
    model = module(lambda self, x: {"boxes": 500 * self.boxes(x), "scores": self.out(self.scores(x).tanh())},
                   boxes=nn.Linear(8, 4), scores=nn.Linear(8, 8), out=nn.Linear(8, 3))  # fmt: skip
    recipe = REFERENCE.insert_pass(DropTanh(), after="canonicalize")
    with pytest.warns(fxq.FxqWarning, match="output is at"):
        qmodel = fxq.quantize(model, recipe, data=[20 * X])
    want, got = model(20 * X), qmodel(20 * X)
    assert sqnr(want, got) > 25
    assert qmodel.output_sqnr == pytest.approx(sqnr(want["scores"], got["scores"]), abs=1e-6)


def test_the_same_infinities_are_no_error():
    mask = torch.zeros(8).index_fill_(0, torch.tensor([1, 4]), -math.inf)
    model = module(lambda self, x: self.fc(x) + self.mask, fc=nn.Linear(8, 8))
    model.register_buffer("mask", mask)
    assert 25 < silent(model, REFERENCE, [X]).output_sqnr < 70


def test_an_output_whose_size_follows_from_values_is_not_compared():
    model = module(lambda self, x: (y := self.fc(x), y[y > 1e-4]), fc=nn.Linear(2, 2, bias=False))
    model.fc.weight.data = torch.eye(2)
    data = [torch.tensor([[1.0, 1e-3]])]  # 1e-3 is rounded to 0
    with pytest.warns(fxq.FxqWarning, match=r"output 1 is not compared, .* it is \(1,\), and \(2,\) in the model"):
        qmodel = fxq.quantize(model, REFERENCE, data=data)
    assert qmodel.output_sqnr > 25
    with pytest.warns(fxq.FxqWarning, match="output 1 is not compared"):
        assert fxq.compare(model, qmodel, data).output_sqnr == pytest.approx(qmodel.output_sqnr, abs=1e-3)


def test_no_float_output_has_no_sqnr():
    model = module(lambda self, x: self.fc(x).argmax(1), fc=nn.Linear(8, 8))
    qmodel = silent(model, REFERENCE, [X])
    assert qmodel.output_sqnr is None and "output" not in str(qmodel.ledger).splitlines()[-1]


def test_random_numbers_are_the_same_in_both():
    model = module(lambda self, x: self.fc(x) + torch.rand(4, 3), fc=nn.Linear(8, 3))
    assert silent(model, REFERENCE, [X]).output_sqnr > 25


@pytest.mark.slow
def test_a_large_network_is_compared_on_fewer_samples(monkeypatch):
    sizes = []

    def compared(gm, context, batches):
        sizes.extend(len(batch.args[0]) for batch in batches)
        return [50.0]

    monkeypatch.setattr(output_check, "_compared", compared)
    silent(net(), REFERENCE, [X] * 8)
    monkeypatch.setattr(float_ops, "_MIN_LARGE_MACS", 10)
    silent(net(), REFERENCE, [X] * 8)
    assert sizes == [4] * 16  # an SQNR of a few output values would be noise
    monkeypatch.setattr(output_check, "MIN_OUTPUT_VALUES", 8)
    silent(net(), REFERENCE, [X] * 8)
    silent(net(), REFERENCE, [X])
    assert sizes[16:] == [1] * 4 + [4]


def test_the_copy_keeps_it():
    qmodel = silent(net(), REFERENCE, [X])
    assert copy.deepcopy(qmodel).output_sqnr == pickle.loads(pickle.dumps(qmodel)).output_sqnr == qmodel.output_sqnr


@pytest.mark.parametrize("bad", ["12", math.nan])
def test_the_bar_is_a_number(bad):
    with pytest.raises(RecipeError, match="min_sqnr"):
        REFERENCE.with_min_sqnr(bad)


@pytest.mark.parametrize("bar", [None, 20.5, 12.0])
def test_the_bar_is_kept_in_a_file(tmp_path, bar):
    recipe = REFERENCE.with_min_sqnr(bar)
    recipe.save(tmp_path / "r.toml")
    assert fxq.Recipe.load(tmp_path / "r.toml") == recipe


def nearly_nothing():
    """Two linear layers whose difference is smaller than a rounding step of either."""
    first, two = nn.Linear(8, 8), nn.Linear(8, 8)
    two.weight.data = first.weight.data + 1e-3 * torch.cos(torch.arange(64.0)).reshape(8, 8)
    two.bias.data = first.bias.data.clone()
    return {"one": first, "two": two}


def test_a_large_output_does_not_cover_for_a_small_one():
    torch.manual_seed(0)
    model = module(lambda self, x: (1e3 * self.one(x), self.one(x) - self.two(x)), **nearly_nothing())
    with pytest.warns(fxq.FxqWarning, match="output is at"):
        qmodel = fxq.quantize(model, REFERENCE, data=[X, torch.cos(X)])
    with torch.no_grad():
        wants, gots = zip(*[(model(x), qmodel(x)) for x in (X, torch.cos(X))], strict=True)
    large, small = (sqnr([w[i] for w in wants], [g[i] for g in gots]) for i in (0, 1))
    assert large > 30 and small < 12
    assert qmodel.output_sqnr == pytest.approx(small, abs=1e-6)
    assert fxq.compare(model, qmodel, [X, torch.cos(X)]).output_sqnr == pytest.approx(small, abs=1e-6)


def test_layers_are_named_also_where_their_small_errors_are_what_is_left():
    torch.manual_seed(0)
    model = module(lambda self, x: self.one(x) - self.two(x), **nearly_nothing())
    with pytest.warns(fxq.FxqWarning, match="output is at") as caught:
        qmodel = fxq.quantize(model, REFERENCE, data=[X])
    (text,) = [str(w.message) for w in caught]
    assert "recipe.override('one', fxq.FLOAT)" in text and "recipe.override('two', fxq.FLOAT)" in text
    assert min(e.fault_sqnr for e in qmodel.ledger.worst(2)) > qmodel.output_sqnr + 10


def test_a_model_that_draws_random_numbers_is_not_blamed_on_a_layer():
    """The kernel's result lies in memory otherwise than the float layer's, so that dropout leaves out others."""
    noisy = module(lambda self, x: nn.functional.dropout(self.conv(x), training=True), conv=nn.Conv2d(3, 4, 3))
    recipe = REFERENCE.with_min_sqnr(1e3)
    with pytest.warns(fxq.FxqWarning, match="the float model draws random numbers"):
        fxq.quantize(noisy, recipe, data=[torch.randn(2, 3, 8, 8)])


def test_a_model_below_min_sqnr_runs_once_more(monkeypatch):
    seeds = []
    monkeypatch.setattr(output_check, "run_model", lambda *args, seed: seeds.append(seed) or run_model(*args, seed))
    with pytest.warns(fxq.FxqWarning, match="the recipe asks for 1000 dB"):
        fxq.quantize(net(), REFERENCE.with_min_sqnr(1e3), example_inputs=X, data=[X])
    assert seeds == [1]
