"""`fxq.prepare`, `calibrate` and `convert` of models that trace only in part, with checkpoints."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import fxq
from fxq.errors import CalibrationError, FxqWarning, InputError, RecipeError, TraceError
from fxq.results import ObservedParts
from tests.support.partly_traceable import model_and_data

pytestmark = pytest.mark.any_cpu

EXACT = fxq.Recipe.static(backend="reference", optimize="coverage")


def outputs(model, batch):
    with torch.no_grad():
        return [leaf for leaf in tree_leaves(model(*copy.deepcopy(batch))) if isinstance(leaf, torch.Tensor)]


def equal(a, b, data):
    return all(all(map(torch.equal, outputs(a, batch), outputs(b, batch))) for batch in data)


def quietly(function, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxqWarning)
        return function(*args, **options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["detector", "custom loop"])
def test_steps_give_what_quantize_gives(name):
    model, data = model_and_data(name)
    observed = fxq.prepare(model, EXACT, example_inputs=data[0])
    assert isinstance(observed, ObservedParts) and observed.calibrated
    assert list(observed.history) == list(observed.parts)
    assert fxq.calibrate(observed, data) is observed and observed.batches_seen == 4
    with pytest.warns(FxqWarning, match="is quantized in"):
        q = fxq.convert(observed)
    by_hand = fxq.prepare(model, EXACT, example_inputs=data[0])
    for batch in data:
        want, got = outputs(model, batch), outputs(by_hand, batch)
        assert all(torch.allclose(w, g, atol=1e-4) for w, g in zip(want, got, strict=True))
    whole = quietly(fxq.quantize, model, EXACT, data=data)
    assert q.ledger == whole.ledger and q.recipe == EXACT and isinstance(q, type(model))
    assert equal(q, whole, data) and equal(quietly(fxq.convert, by_hand), whole, data)
    assert equal(quietly(fxq.convert, observed), q, data)  # again
    with pytest.raises(InputError, match="the model is quantized already"):
        fxq.quantize(observed, EXACT, data=data)
    with pytest.raises(InputError, match="cannot be pickled"):
        pickle.dumps(observed)


@pytest.mark.slow
def test_conversion_with_other_recipes():
    model, data = model_and_data("detector")
    observed = fxq.prepare(model, EXACT, example_inputs=data[0], observe_all=True)
    with pytest.raises(CalibrationError, match="has seen no data"):
        fxq.convert(observed)
    fxq.calibrate(observed, data)
    for recipe in (EXACT.override("backbone.2.*", fxq.FLOAT), EXACT.override("scores", fxq.FLOAT)):
        q, whole = quietly(fxq.convert, observed, recipe), quietly(fxq.quantize, model, recipe, data=data)
        assert (
            q.ledger.count("int8") == whole.ledger.count("int8") < quietly(fxq.convert, observed).ledger.count("int8")
        )
        assert equal(q, whole, data) and q.recipe == recipe
    with pytest.raises(RecipeError, match=r"backbone\.9.* selects nothing in the parts"):
        quietly(fxq.convert, observed, EXACT.override("backbone.9", fxq.FLOAT))
    with pytest.raises(RecipeError, match="parts are chosen before calibration"):
        fxq.convert(observed, EXACT.parts("backbone.*"))


def test_dynamic_recipes_need_no_calibration():
    model, data = model_and_data("custom loop")
    observed = fxq.prepare(model, fxq.Recipe.dynamic(backend="reference"), example_inputs=data[0])
    assert not observed.calibrated
    q = quietly(fxq.convert, observed)
    assert q.ledger.coverage > 0.9
    got, want = outputs(q, data[1])[0], outputs(model, data[1])[0]
    assert 20 * torch.log10(want.norm() / (want - got).norm()) > 25


class Stop(Exception):
    """Interruption of a calibration."""


@pytest.mark.slow
def test_an_interrupted_calibration_continues(tmp_path):
    model, data = model_and_data("detector", 5)
    path = tmp_path / "c.safetensors"

    def interrupted():
        yield from data[:3]
        raise Stop

    with pytest.raises(Stop):
        fxq.calibrate(fxq.prepare(model, EXACT, example_inputs=data[0]), interrupted(), checkpoint=path, every=0)
    observed, seen = fxq.prepare(model, EXACT, example_inputs=data[0]), []
    observed.model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    fxq.calibrate(observed, data, checkpoint=path)
    assert len(seen) == 2 and torch.equal(seen[0], data[3][0])
    whole = quietly(fxq.quantize, model, EXACT, data=data)
    assert equal(quietly(fxq.convert, observed), whole, data)
    assert equal(quietly(fxq.quantize, model, EXACT, data=data, checkpoint=path), whole, data)  # the finished file
    with pytest.raises(InputError, match=r"batch 0: .*another batch"):
        quietly(fxq.quantize, model, EXACT, data=data[::-1], checkpoint=path)
    loop, _ = model_and_data("loop on data")
    with pytest.raises(InputError, match="of another model or recipe"):
        quietly(fxq.quantize, loop, EXACT, data=data, checkpoint=path)


def test_with_a_checkpoint_all_kinds_of_calls_are_in_the_example(tmp_path):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x, flip=False):
            return -self.layer(x) if flip else self.layer(x)

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x, flip=True) if x.mean() > 1 else self.inner(x)

    model, data = Sometimes().eval(), [torch.randn(4, 16), torch.randn(4, 16) + 5]
    with pytest.raises(InputError, match="part 'inner' gets a call that it does not get on the example"):
        fxq.quantize(model, EXACT, data=data, checkpoint=tmp_path / "c.safetensors")


def test_attributes_that_cannot_be_copied_are_shared():
    class WithModule(nn.Module):
        def __init__(self):
            super().__init__()
            self.library, self.layer = torch, nn.Linear(16, 16)

        def forward(self, x):
            return self.layer(x).sum() if float(self.library.mean(x)) > 1e9 else self.layer(x)

    model, x = WithModule().eval(), torch.randn(4, 16)
    q = quietly(fxq.quantize, model, EXACT, data=[x])
    assert q.library is torch and q.ledger.coverage == 1.0
    assert torch.allclose(q(x), model(x), atol=0.05)

    model.draws = (i for i in range(3))
    with pytest.raises(InputError, match="attribute 'draws' of the model is a generator"):
        quietly(fxq.quantize, model, EXACT.parts("layer"), data=[x])
    with pytest.raises(
        TraceError, match=r"a value that depends .* in parts either: attribute 'draws' of the model is a generator"
    ):
        quietly(fxq.quantize, model, EXACT, data=[x])
