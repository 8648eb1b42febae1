"""The search within a budget of bits: what it chooses fits, and is better than the same spec for all weights."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import InputError
from fxq.recipe.selector import Selector
from fxq.tuning.bits import SPECS, _row, _Weight, _weights, _within, bits_of
from fxq.tuning.tools import calibrated_trials
from fxq.tuning.tunable_layer import TunableLayer

RECIPE = fxq.Recipe.weight_only(bits=4, backend="reference").with_min_sqnr(None)
DATA = [torch.randn(8, 64, 128, generator=torch.Generator().manual_seed(i)) for i in range(2)]


def network():
    """Layers of which the output depends to very different degrees."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128)).eval()
    with torch.no_grad():
        model[2].weight[:, :4] *= 40  # blocks with a few large values
        model[4].weight[:, 128:] *= 0.02  # scales of blocks stay normal in float16
    return model


def stored_bits(q):
    weights = [entry for entry in q.ledger if entry.weight_values]
    return sum(e.weight_bits * e.weight_values for e in weights) / sum(e.weight_values for e in weights)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("budget", [4.5, 5.0, 6.0])
def test_the_result_fits_and_is_better_than_one_spec_for_all(budget):
    result = fxq.search(network(), RECIPE, DATA, budget=budget)
    assert result.bits <= budget and len(result) == 3
    q = fxq.quantize(network(), result.recipe, example_inputs=DATA[0])
    assert stored_bits(q) == pytest.approx(result.bits, abs=1e-6)
    rounded = fxq.compare(network(), q, DATA)
    assert result.score >= result.uniform_score
    assert [e.sqnr for e in rounded if e.precision == "weight-only"]
    if budget == 6.0:
        assert result.score > result.uniform_score + 1  # dB
        assert len({weight.spec for weight in result}) > 1


@pytest.mark.slow
def test_scores_and_errors_are_those_of_the_integers_that_gptq_chooses():
    """The score against the quantized model, the error of a layer against a model of this layer alone."""

    def ratio(model, q):
        """Noise of the output relative to the output."""
        with torch.no_grad():
            wanted, actual = (torch.cat([m(x) for x in DATA]) for m in (model, q))
        return float((wanted - actual).square().sum() / wanted.square().sum())

    result = fxq.search(network(), RECIPE, DATA, budget=4.8)
    q = fxq.quantize(network(), result.recipe, data=DATA)
    assert result.score == pytest.approx(-10 * math.log10(ratio(network(), q)), abs=0.05)  # dB

    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(128, 256)).eval()
    rounded = RECIPE.without_pass("gptq")
    (weight,) = _weights(calibrated_trials(layer, RECIPE, DATA, None, False), RECIPE, rounded).values()
    plain, fitted = (fxq.quantize(layer, recipe, data=DATA) for recipe in (rounded, RECIPE))
    assert weight.errors["rounded to nearest"] == pytest.approx(ratio(layer, plain), rel=1e-3)
    assert weight.errors["4 bits, blocks of 64"] == pytest.approx(ratio(layer, fitted), rel=1e-3)
    assert weight.errors["4 bits, blocks of 64"] < 0.98 * weight.errors["rounded to nearest"]


def test_low_rank_corrections_count():
    """Their bits, and what they leave of the error of a layer."""
    with_correction = RECIPE.insert_pass(fxq.passes.LowRank(rank=8), after="gptq")
    result = fxq.search(network(), with_correction, DATA, budget=4.5)
    q = fxq.quantize(network(), result.recipe, data=DATA)
    assert any(entry.reason == "corrected by a matrix of rank 8" for entry in q.ledger)
    assert stored_bits(q) == pytest.approx(result.bits, abs=1e-6) and result.bits <= 4.5

    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(128, 256)).eval()
    trials = calibrated_trials(layer, with_correction, DATA, None, False)
    (weight,) = _weights(trials, with_correction, RECIPE.without_pass("gptq")).values()
    corrected = fxq.quantize(layer, with_correction, data=DATA)
    with torch.no_grad():
        wanted, actual = (torch.cat([m(x) for x in DATA]) for m in (layer, corrected))
    ratio = float((wanted - actual).square().sum() / wanted.square().sum())
    assert weight.errors["4 bits, blocks of 64"] == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize("name", SPECS)
def test_the_line_of_a_weight_gives_it_its_spec(name):
    layer = TunableLayer("_0", "0", "linear", (Selector(path="0"),), 0, None)
    row = _row(RECIPE, _Weight([layer], values=800), name, 100)
    recipe = eval(row.line, {"fxq": fxq, "torch": torch, "recipe": RECIPE})
    ((selector, config),) = recipe.overrides
    assert (selector, config.weight, config.activation) == (Selector(path="0"), SPECS[name], None)


def test_blocks_of_6_bits_have_less_error_with_zero_points():
    """Rounded to nearest, beyond what the bytes of the zero points would save with scales that are closer together."""
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(512, 512)).eval(), torch.randn(256, 512)

    def noise(spec):
        q = fxq.quantize(layer, fxq.Recipe.weight_only(weight=spec, backend="reference"), example_inputs=x)
        with torch.no_grad():
            return float((q(x) - layer(x)).square().sum()), stored_bits(q)

    spec = SPECS["6 bits, blocks of 64"]
    without, fewer_bits = noise(replace(spec, signed=True, symmetric=True))
    closer, bits = noise(replace(spec, signed=True, symmetric=True, per=32))
    with_zero_points, own_bits = noise(spec)
    assert fewer_bits < own_bits < bits and with_zero_points < min(without, closer)


def smallest_scale(q):
    """Smallest scale of a block of the last layer."""
    (scales,) = [b for name, b in q.named_buffers() if name.startswith("fxq_data.4_weight") and "scale" in name]
    return float(scales.min())


@pytest.mark.slow
@pytest.mark.parametrize("budget", [5.2, 6.0])
def test_bits_are_those_of_the_chosen_recipe(budget):
    """Whether float16 holds the scales of the last layer depends on the specs of the others: the bits are right."""
    result = fxq.search(network(), RECIPE, DATA, budget=budget)
    alike = replace(RECIPE, config=result.recipe.overrides[-1][1])
    scales = [smallest_scale(fxq.quantize(network(), r, data=DATA)) for r in (alike, result.recipe)]
    assert scales[1] != pytest.approx(scales[0], rel=0.005)  # the smallest number of float16 is between them
    model = network()
    with torch.no_grad():
        model[4].weight *= torch.finfo(torch.float16).tiny / math.prod(scales) ** 0.5
    result = fxq.search(model, RECIPE, DATA, budget=budget)
    q = fxq.quantize(model, result.recipe, data=DATA)
    assert stored_bits(q) == pytest.approx(result.bits, abs=1e-6) and result.bits <= budget


class Transposed(nn.Module):
    """Linear layer whose weight is stored as (in, out), as in GPT-2."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / 8), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], len(self.bias))


def test_transposed_weights_are_found():
    torch.manual_seed(0)
    model = nn.Sequential(Transposed(128, 192), nn.ReLU(), Transposed(192, 64)).eval()
    result = fxq.search(model, RECIPE, DATA, budget=5)
    assert [weight.values for weight in result] == [128 * 192, 192 * 64]


class Recurrent(nn.Module):
    """Recurrent layers, each with two weights, between linear ones."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(128, 64), nn.Linear(128, 64)
        self.lstm = nn.LSTM(64, 64, bidirectional=True, batch_first=True)

    def forward(self, x):
        return self.leave(self.lstm(self.enter(x))[0])


def test_weights_of_recurrent_layers_count():
    torch.manual_seed(0)
    model = Recurrent().eval()
    result = fxq.search(model, RECIPE, DATA, budget=4.6)
    one_way = 4 * 64 * (64 + 64)
    assert [weight.values for weight in result] == [128 * 64, one_way, one_way, 128 * 64]
    q = fxq.quantize(model, result.recipe, data=DATA)
    assert sum(entry.weight_values for entry in q.ledger) == sum(weight.values for weight in result)
    assert stored_bits(q) == pytest.approx(result.bits, abs=1e-6) and result.bits <= 4.6
    rounded = RECIPE.without_pass("gptq")
    weights = list(_weights(calibrated_trials(model, RECIPE, DATA, None, False), RECIPE, rounded).values())
    for weight in weights:
        assert 0 < weight.errors["8 bits"] < 0.1 * weight.errors["4 bits, blocks of 64"] < 0.01


def test_the_recipe_is_saved_and_the_table_shows_the_weights(tmp_path):
    result = fxq.search(network(), RECIPE, DATA, budget="6 bits")
    result.recipe.save(tmp_path / "r.toml")
    assert fxq.Recipe.load(tmp_path / "r.toml") == result.recipe
    assert "bits per weight of at most 6" in str(result) and "blocks of" in str(result)
    assert result[0].line.startswith("recipe.override(")


def test_the_metric_judges_it():
    model = network()
    judged = []

    def agreement(candidate):
        judged.append(candidate)
        return -float((candidate(DATA[0]) - model(DATA[0])).detach().square().mean())

    result = fxq.search(model, RECIPE, DATA, agreement, budget=6.0)
    assert judged and result.score >= result.uniform_score and result.score < 0


def weights(errors):
    """Weights of 1,000 values, whose noise with each spec is that of the bits, times a factor."""
    sizes = dict(zip(SPECS, (300, 420, 515, 540, 600, 750, 800, 1000, 2000), strict=True))
    group = []
    for factor in errors:
        noise = {name: factor * 4.0 ** (-size / 125) for name, size in sizes.items()}
        group.append(_Weight(values=1000, sizes=dict(sizes), noise=noise))
    return group


@pytest.mark.parametrize("most", [1200, 1400, 1600, 1800, 2000, 2200, 2300, 2600, 3000, 3200, 3400, 3700, 4000])
def test_bytes_go_where_they_save_the_most_noise(most):
    """Against trying all choices. For 3,200 bytes, all three weights would have to change at once."""
    group = weights([1.0, 0.01, 30.0])
    choice = _within(group, most)

    def noise_of(names):
        return sum(weight.noise[name] for weight, name in zip(group, names, strict=True))

    def size_of(names):
        return sum(weight.sizes[name] for weight, name in zip(group, names, strict=True))

    assert size_of(choice) <= most
    best = min(noise_of(c) for c in itertools.product(SPECS, repeat=3) if size_of(c) <= most)
    assert noise_of(choice) <= (1.4 if most == 3200 else 1.1) * best


def test_bad_budgets():
    for budget in ("4.5 bytes", "much", -1, True, float("nan")):
        with pytest.raises(InputError, match="mean number of bits per weight"):
            bits_of(budget)
    assert bits_of("4.5 bits") == bits_of(4.5) == bits_of("4.5") == 4.5
    with pytest.raises(InputError, match=r"smallest specs take .*raise the budget"):
        fxq.search(network(), RECIPE, DATA, budget=2)
    with pytest.raises(InputError, match="either a target or a budget"):
        fxq.search(network(), RECIPE, DATA)
    with pytest.raises(InputError, match="a budget of bits is for weights alone"):
        fxq.search(network(), "static", DATA, budget=5)
