"""adaround: where weights may go, how close it comes to the best rounding there is, and what it is worth."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.paired.output_error import InputProducts, OutputError, WeightRows
from fxq.passes import AdaRound
from tests.support.graphs import expected, program, run_pass

WEIGHT = fxq.TensorSpec(bits=4, signed=True, symmetric=True, per="channel", observer="minmax")
FOUR_BITS = fxq.Recipe.static(weight=WEIGHT, backend="reference")
ROUNDED = FOUR_BITS.insert_pass(AdaRound(), after="insert-qdq")


def problem(groups, rows, inputs, qmin=-7, qmax=7, seed=0):
    """A layer that reads values with a few causes in common."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(groups, rows, inputs, generator=g)
    x = torch.randn(groups, 200, 3, generator=g) @ torch.randn(groups, 3, inputs, generator=g)
    x += 0.3 * torch.randn(x.shape, generator=g)
    inputs_seen = InputProducts()
    inputs_seen.add(x + 0.05 * torch.randn(x.shape, generator=g), x)
    scale = (weight.abs().amax(2, keepdim=True) / 7).expand_as(weight)
    return WeightRows(weight, scale, torch.zeros_like(weight), qmin, qmax), OutputError(inputs_seen, weight)


@given(
    groups=st.integers(1, 3),
    rows=st.integers(1, 4),
    inputs=st.integers(1, 9),
    ends=st.sampled_from([(-7, 7), (-2, 3), (0, 0)]),
    seed=st.integers(0, 99),
)
@settings(max_examples=8, deadline=None)
def test_each_weight_goes_to_one_of_its_neighbours(groups, rows, inputs, ends, seed):
    layer, error = problem(groups, rows, inputs, *ends, seed=seed)
    _, chosen = AdaRound(iterations=20).choose(layer, error)
    steps = layer.steps()
    below, above = (side.clamp(*ends) for side in (steps.floor(), steps.floor() + 1))
    assert ((chosen == below) | (chosen == above)).all()


@pytest.mark.parametrize("seed", range(4))
def test_it_comes_near_the_best_rounding_there_is(seed):
    """By trying all of them: of what rounding to the nearest loses against that, nearly half comes back, or more."""
    layer, error = problem(1, 3, 10, seed=seed)
    learned = error(layer.real(AdaRound().choose(layer, error)[1]))
    nearest = error(layer.real(layer.steps().round()))
    tried = torch.stack(
        [error(layer.real(layer.steps().floor() + torch.tensor(up))) for up in product((0.0, 1.0), repeat=10)]
    )
    best = tried.amin(0)
    assert (learned - best).sum() < 0.6 * (nearest - best).sum()


LAYER = """
    x: float32[64, 8] = input()
    w: float32[3, 8] = tensor('w')
    w_int8: int8[3, 8] = tensor('w_int8')
    w_dq: float32[3, 8] = dequantize(w_int8, scale=0.3, zero_point=0, qmin=-7, qmax=7)  # stands_for='w'
    y = linear(x, w_dq)  # 'fc'
    return y
"""


def test_text_before_and_after():
    layer, _ = problem(1, 3, 8)
    tensors = {"w": layer.weight[0], "w_int8": (layer.weight[0] / 0.3).round().clamp(-7, 7).to(torch.int8)}
    gm = run_pass(AdaRound(), LAYER, tensors, data=(torch.randn(64, 2) @ torch.randn(2, 8),))
    assert program(gm) == expected("""
        x: float32[64, 8] = input()
        w: float32[3, 8] = tensor('w')
        w_int8_chosen: int8[3, 8] = tensor('fxq_data.w_int8_chosen')
        w_dq: float32[3, 8] = dequantize(w_int8_chosen, scale=0.3, zero_point=0, qmin=-7, qmax=7)
        y: float32[64, 3] = linear(x, w_dq)
        return y
    """)


LAYERS = {
    "linear": (nn.Linear(12, 8), (12,)),
    "conv1d": (nn.Conv1d(6, 8, 3, padding=1), (6, 20)),
    "conv2d": (nn.Conv2d(6, 8, 3, stride=2), (6, 12, 12)),
    "depthwise": (nn.Conv2d(6, 6, 3, groups=6), (6, 12, 12)),
    "conv_transpose2d": (nn.ConvTranspose2d(6, 8, 3, stride=2, groups=2), (6, 8, 8)),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("correct_bias", [False, True])
@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=LAYERS)
def test_layers_come_closer_on_other_samples_too(layer, shape, correct_bias):
    torch.manual_seed(0)
    layer.reset_parameters()
    mixed = torch.randn(2, shape[0])
    data = [torch.einsum("nc...,cd->nd...", torch.randn(32, 2, *shape[1:]), mixed) for _ in range(5)]
    data = [x if x.dim() == 2 else x.cumsum(-1) / 4 for x in data]  # neighbours are alike
    model = nn.Sequential(layer, nn.ReLU()).eval()
    recipe = fxq.Recipe.static(weight=WEIGHT, backend="reference")
    recipe = recipe if correct_bias else recipe.without_pass("correct-bias")
    plain, better = (
        fxq.quantize(model, r, data=data[1:]) for r in (recipe, recipe.insert_pass(AdaRound(), after="insert-qdq"))
    )
    with torch.no_grad():
        wanted = model(data[0])
        assert sqnr(wanted, better(data[0])) > sqnr(wanted, plain(data[0])) + 1  # dB
    assert [edit.rule for edit in better.history["adaround"].edits] == ["adaround"]
    before, after = (q.qparams()["0"] for q in (plain, better))
    assert not torch.equal(before.weight, after.weight)


@pytest.mark.parametrize("inputs", [9, 150])  # less and more than a group
def test_no_other_side_of_one_weight_would_be_better(inputs):
    layer, error = problem(2, 3, inputs)
    _, chosen = AdaRound().choose(layer, error)
    least = error(layer.real(chosen))
    others = layer.steps().floor() * 2 + 1 - chosen
    for i in range(inputs):
        changed = chosen.clone()
        changed[:, :, i] = others[:, :, i].clamp(layer.qmin, layer.qmax)
        assert (error(layer.real(changed)) > least - 1e-5 * least.abs()).all()


def test_it_is_the_same_each_time_and_leaves_random_numbers_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    data = [torch.rand(4, 3, 8, 8) for _ in range(3)]
    weights = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        weights.append(fxq.quantize(model, ROUNDED, data=data))
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(*(q(data[0]) for q in weights))


def test_a_recipe_that_is_saved_has_it(tmp_path):
    recipe = FOUR_BITS.insert_pass(AdaRound(iterations=9, rate=0.01, samples=16), after="insert-qdq")
    recipe.save(tmp_path / "r.toml")
    assert fxq.Recipe.load(tmp_path / "r.toml") == recipe
