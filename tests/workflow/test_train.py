"""Training from end to end: what convert gives is what was trained."""

import copy
import threading
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.common.data import Batch
from fxq.common.metrics import sqnr
from fxq.errors import CalibrationError, FxqWarning, InputError, RecipeError
from fxq.graph.grid import grid_of
from fxq.graph.query import is_op
from fxq.graph.run import Runner
from fxq.quant.fake_quantize import FakeQuantizeWeight
from fxq.quant.qparams import dequantize
from tests.support.models import NETWORKS, batch, build
from tests.support.trainings import QAT, W4, called, prepared, rounded_values, trained

RECIPES = {
    "8 bits": QAT,
    "4 bits": fxq.Recipe.qat(backend="reference", weight=W4),
    "learned": fxq.Recipe.qat(backend="reference", weight=W4, learned=True),
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", NETWORKS)
def test_what_convert_gives_is_what_was_trained(name, recipe):
    training_model = prepared(build(name), batch(name, 4, seed=1), recipe)
    before = [p.detach().clone() for p in training_model.parameters()]
    losses = trained(training_model, [batch(name, 4, seed=seed) for seed in range(3)], rate=1e-3)
    assert all(loss == loss for loss in losses)
    assert any(not torch.equal(p, old) for p, old in zip(training_model.parameters(), before, strict=True))
    inputs = batch(name, 4, seed=9)
    with torch.no_grad():
        wanted = called(training_model.eval(), inputs)
    assert sqnr(wanted, called(fxq.convert(training_model), inputs)) > 60  # float rounding, and no step of a grid


@pytest.mark.parametrize("learned", [False, True])
def test_every_layer_is_within_a_step(learned):
    model = prepared(build("residual"), batch("residual"), fxq.Recipe.qat(backend="reference", learned=learned))
    trained(model, [batch("residual", seed=seed) for seed in range(4)])
    x = batch("residual", seed=9)
    rounded = rounded_values(model.eval(), x)
    quantized = fxq.convert(model)
    steps, runner = {}, Runner(quantized, Batch((x,)))
    for node in quantized.graph.nodes:
        value = runner.step(node)
        if is_op(node, "quantize"):
            grid = grid_of(quantized, node)
            steps[grid.s] = dequantize(value, grid)
    assert len(rounded) > 5
    for scale, value in rounded:
        assert (value - steps[scale]).abs().max() <= 1.001 * scale


@pytest.mark.parametrize("learned", [False, True])
def test_weights_in_the_middle_between_integers_keep_their_side(learned):
    """Training leaves many there; folding a batch norm, whose scale may be negative or zero, rounds them once more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1)).eval()
    x = torch.rand(4, 4, 9, 9)
    training_model = prepared(model, x, fxq.Recipe.qat(backend="reference", weight=W4, learned=learned))
    training_model(x)
    quantizer = next(
        m for m in training_model.modules() if isinstance(m, FakeQuantizeWeight) and m.edge[0].startswith("fxq_data.0")
    )
    conv, norm = training_model.get_submodule("0"), training_model.get_submodule("1")
    with torch.no_grad():
        quantizer.scale.fill_(2**-6)
        conv.weight.copy_((torch.randint(-6, 6, conv.weight.shape) + 0.5) * 2**-6)
        conv.weight[:, 0, 0, 0] = 7 * 2**-6  # so that the scale is this one where it is not learned
        norm.weight.copy_(torch.randn(16) + 0.1)
        norm.weight[3] = 0.0
        wanted = training_model.eval()(x)
    torch.testing.assert_close(fxq.convert(training_model)(x), wanted, rtol=0, atol=1e-5)


@given(st.integers(0, 10**6), st.sampled_from([2, 3, 8]), st.booleans(), st.integers(1, 3))
@settings(max_examples=8, deadline=None)
def test_any_small_network(seed, bits, symmetric, steps):
    torch.manual_seed(seed)
    channels = int(torch.randint(1, 6, ()))
    layers = [nn.Conv2d(3, 2 * channels, 3, groups=1), nn.BatchNorm2d(2 * channels), nn.ReLU6()]
    layers += [nn.Conv2d(2 * channels, 2 * channels, 1, groups=channels), nn.Hardswish(), nn.Flatten()]
    model, x = nn.Sequential(*layers, nn.Linear(32 * channels, 3)), torch.randn(4, 3, 6, 6)
    weight = fxq.TensorSpec(bits=bits, signed=True, symmetric=True, per="channel", observer="minmax")
    activation = fxq.TensorSpec(symmetric=symmetric, observer="moving_average:0.5")
    training_model = prepared(model, x, fxq.Recipe.qat(backend="reference", weight=weight, activation=activation))
    trained(training_model, [torch.randn(4, 3, 6, 6) for _ in range(steps)], rate=1e-3)
    with torch.no_grad():
        wanted = training_model.eval()(x)
    assert sqnr(wanted, fxq.convert(training_model)(x)) > 60


def test_training_finds_what_rounding_loses():
    """A regression that 2 bits of weights hurt: training with fake quantizers wins most of it back."""
    torch.manual_seed(0)
    teacher, x = nn.Linear(8, 4), torch.randn(512, 8)
    y = teacher(x).detach()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    def fit(network, steps):
        optimizer = torch.optim.Adam(network.parameters(), 1e-2)
        for _ in range(steps):
            optimizer.zero_grad()
            (network(x) - y).square().mean().backward()
            optimizer.step()

    def loss(network):
        with torch.no_grad():
            return float((network(x) - y).square().mean())

    fit(model, 300)
    weight = fxq.TensorSpec(bits=2, signed=True, symmetric=True, per="channel", observer="minmax")
    rounded = fxq.quantize(model.eval(), fxq.Recipe.static(backend="reference", weight=weight), data=[x])
    recipe = fxq.Recipe.qat(backend="reference", weight=weight, learned=True, freeze_weights_over=300)
    training_model = prepared(model, x, recipe)
    fit(training_model, 300)
    assert loss(fxq.convert(training_model)) < 0.2 * loss(
        rounded
    )  # .02 to .08 with weights that are frozen, .1 to .3 without


def test_a_network_on_kernels():
    training_model = prepared(build("residual"), batch("residual"), fxq.Recipe.qat())
    trained(training_model, [batch("residual", seed=seed) for seed in range(3)], rate=1e-3)
    x = batch("residual", seed=9)
    with torch.no_grad():
        wanted = training_model.eval()(x)
    quantized = fxq.convert(training_model)
    assert quantized.ledger.count("int8") > 5
    assert sqnr(wanted, quantized(x)) > 35  # kernels round sums in another order, a step here and there


def test_layers_that_the_recipe_leaves_in_float_are_trained_too():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    training_model = prepared(model, torch.randn(2, 3, 8, 8), QAT.override("3", fxq.FLOAT))
    trained(training_model, [torch.randn(4, 3, 8, 8) for _ in range(2)])
    assert not torch.equal(dict(training_model.named_parameters())["3.weight"], model[3].weight)
    x = torch.randn(2, 3, 8, 8)
    assert sqnr(training_model.eval()(x), fxq.convert(training_model)(x)) > 60


def test_a_leaf_is_trained_as_it_is():
    inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), inner, nn.Conv2d(4, 2, 1)).eval()
    training_model = prepared(model, torch.randn(2, 3, 8, 8), fxq.Recipe.qat(backend="reference", leaf_modules=["1"]))
    trained(training_model, [torch.randn(4, 3, 8, 8) for _ in range(2)])
    state = training_model.state_dict()
    assert not torch.equal(state["1.0.weight"], inner[0].weight)
    assert state["1.1.running_mean"].any()
    x = torch.randn(2, 3, 8, 8)
    assert sqnr(training_model.eval()(x), fxq.convert(training_model)(x)) > 60


def test_the_converted_model_does_not_change_with_further_training():
    training_model, x = prepared(build("residual"), batch("residual")), batch("residual", seed=9)
    trained(training_model, [batch("residual", seed=1)])
    quantized = fxq.convert(training_model)
    before = quantized(x)
    trained(training_model.train(), [batch("residual", seed=2)], rate=0.1)
    assert torch.equal(quantized(x), before)
    assert not torch.equal(fxq.convert(training_model)(x), before)


def test_a_model_in_train_mode_stays_so():
    model = build("residual").train()
    training_model = prepared(model, batch("residual"))
    assert training_model.training
    assert model.training


def test_what_is_refused():
    x = batch("residual")
    training_model = prepared(build("residual"), x)
    with pytest.raises(CalibrationError, match="the model has not been trained: it has run no forward in train mode"):
        fxq.convert(training_model)
    with pytest.raises(InputError, match="finds its ranges during training"):
        fxq.calibrate(training_model, [x])
    training_model(x)
    with pytest.raises(RecipeError, match="with the recipe that it was prepared with: call fxq"):
        fxq.convert(training_model, "static")
    with pytest.raises(InputError, match="is a TrainingModel already"):
        fxq.quantize(training_model, data=[x])
    with pytest.raises(RecipeError, match=r"the recipe 'qat' needs training, which fxq\.quantize does not do"):
        fxq.quantize(build("residual"), "qat", data=[x])
    with pytest.raises(InputError, match=r"model is a function, not an nn\.Module"):
        fxq.prepare(lambda x: x, "qat", example_inputs=x)
    with pytest.raises(InputError, match="example_inputs is missing"):
        fxq.prepare(build("residual"), "qat")
    locked = build("residual")
    locked.lock = threading.Lock()
    with pytest.raises(InputError, match="the model cannot be copied for training: cannot pickle"):
        fxq.prepare(locked, "qat", example_inputs=x)
    without = fxq.Recipe.qat().without_pass("choose-grids")
    with pytest.raises(RecipeError, match="a pipeline for training needs choose-grids after insert-observers"):
        fxq.prepare(build("residual"), without, example_inputs=x)


def test_a_model_without_integers_is_told_before_it_is_trained():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).double().eval()
    with pytest.warns(FxqWarning, match=r"nothing is quantized in the model to train; .* is float64, not float32"):
        prepared(model, torch.randn(2, 3, 8, 8).double())


def test_a_value_that_no_batch_has_reached():
    training_model = prepared(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval(), torch.randn(2, 4))
    training_model(torch.full((2, 4), torch.nan))
    with pytest.raises(CalibrationError, match="has no range: in 1 forwards in train mode it was empty, NaN"):
        fxq.convert(training_model)


def test_a_batch_that_is_not_finite_leaves_no_trace():
    training_model = prepared(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval(), torch.randn(2, 4))
    duplicate = copy.deepcopy(training_model)
    for x in (torch.full((2, 4), torch.nan), torch.ones(2, 4), torch.full((2, 4), torch.inf), -torch.ones(2, 4)):
        training_model(x)
    for x in (torch.ones(2, 4), -torch.ones(2, 4)):
        duplicate(x)
    x = torch.rand(5, 4)
    with warnings.catch_warnings(action="error", category=FxqWarning):
        assert torch.equal(fxq.convert(training_model)(x), fxq.convert(duplicate)(x))


def test_norms_that_training_has_ruined():
    training_model = prepared(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), torch.randn(2, 4))
    training_model(torch.full((2, 4), torch.nan))
    training_model(torch.randn(2, 4))
    with pytest.raises(InputError, match=r"1\.running_mean has NaN or Inf after training: a batch had NaN"):
        fxq.convert(training_model)


def test_weights_that_training_has_ruined():
    training_model = prepared(nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(2, 4))
    training_model(torch.randn(2, 4))
    with torch.no_grad():
        next(training_model.parameters()).fill_(torch.nan)
    with pytest.raises(InputError, match=r"0\.bias has NaN or Inf after training"):
        fxq.convert(training_model)


def test_an_integer_model_that_is_not_what_was_trained_is_told(monkeypatch):
    training_model = prepared(build("residual"), batch("residual"))
    trained(training_model, [batch("residual")])
    monkeypatch.setattr(fxq.workflow.train, "sqnr", lambda a, b: 5.0)
    with pytest.warns(FxqWarning, match="the quantized model is at 5.0 dB SQNR against the trained model"):
        fxq.convert(training_model)


# ---- weights that are shared, models that are averaged


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).relu())


def tied_and_trained(options, follow=lambda model: None):
    """A model whose two layers share one weight, after large training steps; its inputs."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 16), torch.randn(64, 16)
    model = fxq.prepare(Tied(), fxq.Recipe.qat(backend="reference", **options), example_inputs=x[:8])
    model(x)
    update = follow(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if update is not None:
            update(model)
    return model, x


def check_converted(model, x):
    with torch.no_grad():
        wanted = model.eval()(x)
    assert sqnr(wanted, fxq.convert(model)(x)) > 60  # float rounding, and no step of a grid


def test_layers_that_share_a_weight_have_learned_scales_of_their_own():
    check_converted(*tied_and_trained({"learned": True}))


@pytest.mark.parametrize("options", [{}, {"learned": True}], ids=["ranges", "learned"])
@pytest.mark.parametrize("how", [{}, {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)}])
def test_averages_of_models_with_their_buffers(how, options):
    results = []

    def follow(model):
        results.append(torch.optim.swa_utils.AveragedModel(model, use_buffers=True, **how))
        return results[0].update_parameters

    _, x = tied_and_trained({"freeze_weights_over": 30, **options}, follow)
    check_converted(results[0].module, x)
