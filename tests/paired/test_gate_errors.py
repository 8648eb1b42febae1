"""Mean errors of the gates of recurrent layers, which correct-bias adds to their biases."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.estimates import trusted
from tests.support.helpers import REFERENCE

PLAIN = REFERENCE.without_pass("correct-bias")
FIXED = fxq.TensorSpec(signed=True, symmetric=True, range="fixed")
"""Spec of states from -1 to 1."""
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class States(nn.Module):
    """Hidden states of a recurrent layer."""

    def __init__(self, kind, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layer = KINDS[kind](8, 6, **options).eval()
        with torch.no_grad():
            for name in ("weight_ih_l0", "weight_hh_l0"):
                weight = getattr(self.layer, name)
                weight.mul_(0.004).add_(0.0004)
                weight[:, 0] = 0.2  # one large entry per channel: int8 rounds the others badly

    def forward(self, x):
        return self.layer(x)[0]


def inputs(samples=4, steps=32):
    return 1 + torch.rand(steps, samples, 8, generator=torch.Generator().manual_seed(1))


def quantized(model, recipe, data):
    return fxq.quantize(model, recipe, data=[data], progress=False)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_come_nearer_to_those_in_float(kind):
    model, fresh = States(kind), 1 + torch.rand(32, 8, 8)
    plain, corrected = (quantized(model, recipe, inputs()) for recipe in (PLAIN, REFERENCE))
    with torch.no_grad():
        wanted = model(fresh)
        assert sqnr(wanted, corrected(fresh)) > sqnr(wanted, plain(fresh)) + 3  # dB


def rounded(values, scale):
    return (values / scale).round() * scale


@pytest.mark.parametrize("kind", KINDS)
def test_biases_get_the_mean_error_of_each_product(kind):
    """The errors are computed here from the float layer and the grids of the quantized model."""
    model, x = States(kind), inputs()
    recipe = replace(REFERENCE, config=replace(REFERENCE.config, state=FIXED))
    got = quantized(model, recipe, x).qparams()["layer.l0"]
    with torch.no_grad():
        states = torch.cat([torch.zeros(1, 4, 6), model(x)[:-1]])
    assert got.input_zero_point == 0
    for name, read, scale in (("ih", x, got.input_scale), ("hh", states, 1 / 127)):
        weight, bias = (getattr(model.layer, f"{role}_{name}_l0").detach().double() for role in ("weight", "bias"))
        errors = read.double() @ weight.T - rounded(read.double(), scale) @ rounded(weight, 0.2 / 127).T
        parts = errors.transpose(0, 1).flatten(0, 1).tensor_split(8)  # of 16 time steps each
        shift = trusted(torch.stack([part.mean(0) for part in parts]))
        torch.testing.assert_close(got.biases[f"bias_{name}"].double() - bias, shift, atol=1e-6, rtol=0)
        assert shift.abs().max() > 1e-4


class Masked(States):
    """Sum of the hidden states at the time steps of a mask."""

    def forward(self, x, mask):
        return (super().forward(x) * mask[..., None]).sum(0)


def biases_of(model, *data):
    """Biases of the quantized layer, concatenated."""
    spec = fxq.TensorSpec(observer="minmax")
    recipe = fxq.Recipe.static(backend="reference", optimize="coverage", activation=spec, state=FIXED)
    return torch.cat([*fxq.quantize(model, recipe, data=[data], progress=False).qparams()["layer.l0"].biases.values()])


def test_time_steps_that_are_padding_do_not_count():
    x = inputs()
    x[0], x[1] = 1, 2  # so that the range does not depend on padding
    mask = (torch.arange(32)[:, None] < torch.tensor([32, 20, 28, 24])).float()
    others = torch.where(mask[..., None] > 0, x, 3 - x)  # in the same range
    model = Masked("gru")
    first, second = (biases_of(model, value, mask) for value in (x, others))
    assert torch.equal(first, second)
    assert not torch.equal(first, biases_of(model, others, torch.ones_like(mask)))


@pytest.mark.parametrize(("steps", "changes"), [(12, False), (16, True)])
def test_few_time_steps_change_nothing(steps, changes):
    """A fit needs as many as for other layers, 64."""
    model = States("lstm")
    before = torch.cat([model.layer.bias_ih_l0, model.layer.bias_hh_l0])
    assert torch.equal(biases_of(model, inputs(samples=4, steps=steps)), before) != changes


def test_single_steps_of_a_stream_are_added_up():
    model, x = States("gru"), inputs(samples=1, steps=128)
    stream = fxq.quantize(model, REFERENCE, data=list(x[:, None]), progress=False)
    changed = stream.qparams()["layer.l0"].biases["bias_ih"] - model.layer.bias_ih_l0
    assert changed.abs().max() > 1e-4


class Again(fxq.passes.CorrectBias):
    name = "correct-bias-again"


def test_a_second_run_changes_nothing():
    model, x = States("lstm"), inputs()
    recipe = REFERENCE.insert_pass(Again(), after="correct-bias")
    once, twice = (quantized(model, r, x).qparams()["layer.l0"].biases for r in (REFERENCE, recipe))
    assert all(torch.equal(once[name], twice[name]) for name in once)


def test_without_other_layers_no_integer_graph_runs(monkeypatch):
    monkeypatch.setattr("fxq.passes.correct_bias._fit", lambda *_: pytest.fail("there is nothing to fit"))
    model, x = States("lstm"), inputs(samples=16)
    assert quantized(model, REFERENCE, x).qparams()["layer.l0"].biases["bias_ih"].ne(model.layer.bias_ih_l0).any()


def test_layers_without_biases_stay_as_they_are():
    model = States("lstm", bias=False)
    plain, corrected = (quantized(model, recipe, inputs()) for recipe in (PLAIN, REFERENCE))
    assert torch.equal(plain(inputs()), corrected(inputs()))


def test_dynamic_ranges_are_corrected_too():
    model, x = States("lstm"), inputs()
    recipe = fxq.Recipe.dynamic(backend="reference", optimize="coverage")
    plain, corrected = (quantized(model, r, x) for r in (recipe.without_pass("correct-bias"), recipe))
    with torch.no_grad():
        assert sqnr(model(x), corrected(x)) > sqnr(model(x), plain(x)) + 3  # dB


def test_reversed_layers_start_at_the_end():
    """The first states are zeros, at the end of the sequence: the error of the states is none there."""
    model, x = States("rnn", bidirectional=True), inputs()
    with torch.no_grad():
        for name, parameter in [*model.layer.named_parameters()]:
            if name.endswith("_reverse"):
                parameter.copy_(getattr(model.layer, name.removesuffix("_reverse")))
    forward, reverse = (
        quantized(model, REFERENCE, value).qparams()[name]
        for value, name in ((x, "layer.l0"), (x.flip(0), "layer.l0_reverse"))
    )
    for name, bias in forward.biases.items():
        # parts come in reverse order, which weighs them otherwise
        torch.testing.assert_close(reverse.biases[name], bias, atol=5e-5, rtol=0)
        assert (bias - getattr(model.layer, f"{name}_l0")).abs().max() > 2e-4
