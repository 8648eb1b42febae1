import copy
import io
import pickle

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import InputError
from fxq.workflow.observed_model import ObservedModel
from tests.support.helpers import REFERENCE

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.PReLU()).eval()


def test_steps_give_the_same_as_quantize():
    observed = fxq.prepare(network(), REFERENCE, example_inputs=X)
    assert isinstance(observed, ObservedModel) and observed.history.names[-1] == "insert-observers"
    assert torch.allclose(observed(X), network()(X), rtol=1e-5, atol=1e-6)
    observed(X / 2)
    assert observed.batches_seen == 2
    stepped = fxq.convert(observed)
    whole = fxq.quantize(network(), REFERENCE, data=[X, X / 2])
    assert str(stepped.history[-1].graph) == str(whole.history[-1].graph)
    assert torch.equal(stepped(X), whole(X))


def test_calibrate_shows_data_to_the_observers():
    observed = fxq.prepare(network(), REFERENCE, example_inputs=X)
    assert fxq.calibrate(observed, [X, (X / 2,), {"input": X}], progress=False) is observed
    assert observed.batches_seen == 3


def test_converting_twice_or_something_else():
    observed = fxq.prepare(network(), REFERENCE, example_inputs=X)
    observed(X)
    assert torch.equal(fxq.convert(observed)(X), fxq.convert(observed)(X))
    with pytest.raises(InputError, match=r"takes the model that fxq\.prepare returned, not a Sequential"):
        fxq.convert(network())


def test_a_copied_observed_model_calibrates_on_its_own():
    observed = fxq.prepare(network(), REFERENCE, example_inputs=X)
    duplicate = copy.deepcopy(observed)
    duplicate(X)
    assert duplicate.batches_seen == 1 and observed.batches_seen == 0
    assert torch.equal(fxq.convert(duplicate)(X), fxq.quantize(network(), REFERENCE, data=[X])(X))


def test_an_observed_model_is_not_pickled():
    observed = fxq.prepare(network(), REFERENCE, example_inputs=X)
    for write in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(InputError, match=r"cannot be pickled: .* or pickle the quantized model"):
            write(observed)


def test_calibrating_by_hand_under_autocast_is_refused():
    observed = fxq.prepare(network(), REFERENCE, example_inputs=X)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match=r"torch\.autocast is on for cpu"):
        observed(X)
    assert observed.batches_seen == 0
