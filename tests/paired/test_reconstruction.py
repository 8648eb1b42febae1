"""The frame of passes that choose integers layer by layer: what they are handed, what is written and left alone."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import InputError
from fxq.paired.output_error import InputProducts, OutputError
from fxq.paired.reconstruction import Reconstruction
from tests.support.graphs import expected, program, run_pass
from tests.support.helpers import PLAIN, REFERENCE, plain

SEEN = []


@dataclass(frozen=True)
class Chosen(Reconstruction):
    """Takes integers that are `off` from the nearest, in every other channel, and notes what it is handed."""

    off: float = 1.0
    trust: float = 0.0
    scales: bool = False

    name = "chosen"
    needs = gives = fxq.extend.Stage.QDQ

    def choose(self, layer, error):
        SEEN.append((layer, error))
        nearest = layer.steps().round()
        nearest[:, ::2] += self.off
        return layer, nearest.clamp(layer.qmin, layer.qmax)


@pytest.fixture(autouse=True)
def _nothing_seen():
    SEEN.clear()


TWO = """
    x: float32[20, 6] = input()
    v: float32[5, 6] = tensor('v')
    v_int8: int8[5, 6] = tensor('v_int8')
    w: float32[4, 5] = tensor('w')
    w_int8: int8[4, 5] = tensor('w_int8')
    scale: float32[4] = tensor('scale')
    zero: int32[4] = tensor('zero')
    x_q = quantize(x, scale=0.1, zero_point=0)
    x_dq = dequantize(x_q, scale=0.1, zero_point=0)
    v_dq = dequantize(v_int8, scale=0.25, zero_point=0, qmin=-7, qmax=7)  # stands_for='v'
    y = linear(x_dq, v_dq)
    w_dq = dequantize(w_int8, scale=scale, zero_point=zero, qmin=-7, qmax=7, axis=0)  # stands_for='w'
    z = linear(y, w_dq)
    return z
"""


def given(off):
    """Weights, and integers that are `off` from the nearest in every other channel."""
    torch.manual_seed(0)
    v, w, scale = torch.randn(5, 6) / 2, torch.randn(4, 5) / 2, torch.tensor([0.2, 0.25, 0.3, 0.35])
    ints = (v / 0.25).round(), (w / scale[:, None]).round()
    for integers in ints:
        integers[::2] += off
    v_int8, w_int8 = (integers.clamp(-7, 7).to(torch.int8) for integers in ints)
    zero = torch.zeros(4, dtype=torch.int32)
    return {"v": v, "w": w, "v_int8": v_int8, "w_int8": w_int8, "scale": scale, "zero": zero}


X = torch.rand(20, 6)


def test_what_layers_read_and_should_make():
    """The first layer's new integers count for the second; the float graph has neither integers nor grids."""
    tensors = given(off=3)
    gm = run_pass(Chosen(off=0), TWO, tensors, data=(X,))
    (first, first_error), (second, second_error) = SEEN[:2]  # of the first run
    assert torch.equal(first.weight[0], tensors["v"]) and torch.equal(second.weight[0], tensors["w"])
    assert torch.equal(second.scale[0], tensors["scale"][:, None].expand(4, 5)) and not second.zero_point.any()
    x = (X / 0.1).round() * 0.1
    y = x @ (first.real(first.steps().round())[0]).T
    for error, read, real, float_weight in (
        (first_error, x, X, tensors["v"]),
        (second_error, y, X @ tensors["v"].T, tensors["w"]),
    ):
        weight = torch.randn(float_weight.shape)
        ours, least = ((read @ w.T - real @ float_weight.T).double().square().mean(0) for w in (weight, float_weight))
        torch.testing.assert_close(error(weight[None])[0].double(), ours - least, rtol=1e-4, atol=1e-5)
        assert error.inputs.count == 20
    torch.testing.assert_close(gm(X), y @ second.real(second.steps().round())[0].T, rtol=1e-5, atol=1e-5)


def test_text_before_and_after():
    """New integers take the place of the old ones; grids stay."""
    gm = run_pass(Chosen(off=0), TWO, given(off=3), data=(X,))
    assert program(gm) == expected("""
        x: float32[20, 6] = input()
        v: float32[5, 6] = tensor('v')
        w: float32[4, 5] = tensor('w')
        scale: float32[4] = tensor('scale')
        zero: int32[4] = tensor('zero')
        x_q: uint8[20, 6] = quantize(x, scale=0.1, zero_point=0)
        x_dq: float32[20, 6] = dequantize(x_q, scale=0.1, zero_point=0)
        v_int8_chosen: int8[5, 6] = tensor('fxq_data.v_int8_chosen')
        v_dq: float32[5, 6] = dequantize(v_int8_chosen, scale=0.25, zero_point=0, qmin=-7, qmax=7)
        y: float32[20, 5] = linear(x_dq, v_dq)
        w_int8_chosen: int8[4, 5] = tensor('fxq_data.w_int8_chosen')
        w_dq: float32[4, 5] = dequantize(w_int8_chosen, scale=scale, zero_point=zero, qmin=-7, qmax=7, axis=0)
        z: float32[20, 4] = linear(y, w_dq)
        return z
    """)


def test_channels_that_come_out_worse_keep_their_integers():
    tensors = given(off=0)
    gm = run_pass(Chosen(off=3), TWO, tensors, data=(X,))
    assert (
        program(gm) == program(fxq.extend.read_graph(TWO, fxq.extend.graph_tensors(gm))) and len(SEEN) == 4
    )  # in two runs
    tensors["w_int8"] = (tensors["w_int8"] - 6).clamp(-7, 7)  # now the even ones come out better, and the others too
    tensors["w_int8"][0] = (tensors["w"] / tensors["scale"][:, None]).round()[0]
    gm = run_pass(Chosen(off=3), TWO, tensors, data=(X,))
    assert torch.equal(gm.fxq_data.w_int8_chosen[0], tensors["w_int8"][0])
    assert torch.equal(gm.fxq_data.w_int8_chosen[1], (tensors["w"] / tensors["scale"][:, None]).round()[1].char())


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("of_outputs", [False, True])
def test_the_error_of_patches_that_come_in_parts(centred, of_outputs):
    """It is that over all of them together; where it is centred, without the mean of each channel."""
    x, real = torch.rand(2, 50, 6) + 1, torch.rand(2, 50, 6)
    weight, float_weight = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    inputs, second_weight = InputProducts(float_weight if of_outputs else None), torch.randn(2, 3, 6)
    for part in (slice(0, 7), slice(7, 7), slice(7, 50)):
        inputs.add(x[:, part], real[:, part])
    error = OutputError(inputs, float_weight, centred)

    def plainly(w):
        apart = (x @ w.mT - real @ float_weight.mT).double()
        return (apart - centred * apart.mean(1, keepdim=True)).square().mean(1)

    for got, wished in ((error(weight), float_weight), (error(weight, second_weight), second_weight)):
        torch.testing.assert_close(got.double(), plainly(weight) - plainly(wished), rtol=1e-4, atol=1e-5)
    slope = torch.func.jacrev(lambda w: error(w).sum())(weight)  # from gram and cross of the error
    torch.testing.assert_close(slope, 2 * (weight @ error.gram - error.cross.mT), rtol=1e-4, atol=1e-4)
    shift = (real @ float_weight.mT - x @ weight.mT).mean(1)
    torch.testing.assert_close(error.shift(weight), shift, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("correct_bias", "rows"), [(False, 64), (True, 64), (True, 8)])
def test_mean_errors_count_where_no_pass_takes_them_away(correct_bias, rows):
    """It leaves layers alone that have few values."""
    recipe = REFERENCE if correct_bias else REFERENCE.without_pass("correct-bias")
    recipe = recipe.insert_pass(Chosen(), after="insert-qdq")
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2, bias=False)).eval()
    fxq.quantize(model, recipe, data=[torch.rand(rows, 4)])
    assert [error.centred for _, error in SEEN] == [correct_bias and rows == 64, False]


@pytest.mark.parametrize("preset", ["dynamic", "weight_only"])
def test_mean_errors_count_in_presets_whose_biases_stay_as_they_are(preset):
    recipe = getattr(fxq.Recipe, preset)(backend="reference").insert_pass(Chosen(), after="insert-qdq")
    fxq.quantize(nn.Sequential(nn.Linear(4, 4)).eval(), recipe, data=[torch.rand(8, 4)])
    assert [error.centred for _, error in SEEN] == [False]


@pytest.mark.parametrize("correct_bias", [False, True])
def test_what_follows_is_run_with_the_bias_corrected(correct_bias):
    """The next layer reads, in the mean, what it reads in float; so nothing drifts away from layer to layer."""
    weight = fxq.TensorSpec(bits=3, signed=True, symmetric=True, per="channel", observer="minmax")
    recipe = fxq.Recipe.static(weight=weight, backend="reference").insert_pass(Chosen(off=0), after="insert-qdq")
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 2)
    x = torch.rand(64, 8)
    fxq.quantize(
        nn.Sequential(first, second).eval(), recipe if correct_bias else recipe.without_pass("correct-bias"), data=[x]
    )
    missing = SEEN[1][1].shift(second.weight.detach()[None]).abs().max()
    assert missing < 1e-3 if correct_bias else missing > 1e-2


def test_scales_of_channels_that_suit_the_integers():
    """A grid that is wider than necessary is reduced."""
    torch.manual_seed(0)
    weight = fxq.TensorSpec(bits=4, signed=True, symmetric=True, per="channel", observer="minmax")
    recipe = replace(fxq.Recipe.static(weight=weight, backend="reference"), min_sqnr=None)
    recipe = recipe.without_pass("correct-bias")
    layer, x = nn.Linear(40, 6, bias=False), torch.rand(200, 40)
    layer.weight.data[:, 0] = 0.5  # an outlier in each channel
    x[:, 0] = 0  # an input without weight
    model, scales, errors = nn.Sequential(layer).eval(), [], []
    for free in (False, True):
        qmodel = fxq.quantize(model, recipe.insert_pass(Chosen(off=0, scales=free), after="insert-qdq"), data=[x])
        scales.append(qmodel.qparams()["0"].weight_scale)
        with torch.no_grad():
            errors.append((qmodel(x) - model(x)).square().mean(0))
    assert (scales[1] < 0.8 * scales[0]).all() and (errors[1] < 0.5 * errors[0]).all()


def test_trust_in_the_float_weight():
    """It counts as patches whose inputs do not depend on each other, and are as large as usual."""
    x, real, weight, float_weight = torch.randn(2, 50, 6), torch.randn(2, 50, 6), *torch.randn(2, 2, 3, 6)
    inputs = InputProducts()
    inputs.add(x, real)
    alone, trusting = (OutputError(products, float_weight) for products in (inputs, inputs.trusting(5)))
    size = alone.gram.diagonal(dim1=1, dim2=2).mean(1)
    pulled = 5 * 6 / 50 * size[:, None] * (weight - float_weight).square().sum(2)
    torch.testing.assert_close(trusting(weight), alone(weight) + pulled, rtol=1e-4, atol=1e-4)
    slope = torch.func.jacrev(lambda w: trusting(w).sum())(weight)
    torch.testing.assert_close(slope, 2 * (weight @ trusting.gram - trusting.cross.mT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "written",
    [
        TWO.replace("  # stands_for='v'", "").replace("  # stands_for='w'", ""),
        TWO.replace("linear(x_dq, v_dq)", "linear(x_dq, v)").replace("return z", "return z, w_dq"),
    ],
    ids=["no float weight", "read twice"],
)
def test_what_is_left_alone(written):
    run_pass(Chosen(off=0), written, given(off=3), data=(X,))
    assert not SEEN


def test_without_data():
    recipe = fxq.Recipe.weight_only(backend="reference").insert_pass(Chosen(), after="insert-qdq")
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    with pytest.raises(InputError, match=r"chosen needs the inputs of layers, and no samples.*data=loader"):
        fxq.quantize(model, recipe, example_inputs=torch.rand(2, 4))


@pytest.mark.one_in(9)
@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("preset", ["static", "dynamic", "weight_only"])
def test_of_presets(preset, bits):
    """Whatever way the integers are kept; a pass that takes the nearest changes none of them."""
    torch.manual_seed(0)
    weight = fxq.TensorSpec(bits=bits, signed=True, symmetric=True, per="channel", observer="minmax")
    weight = fxq.TensorSpec(bits=bits, per=3, observer="minmax") if preset == "weight_only" else weight
    recipe = getattr(fxq.Recipe, preset)(weight=weight, backend="reference")
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5)).eval()
    data = [torch.rand(4, 3, 4, 4) for _ in range(3)]
    with_pass = recipe.insert_pass(Chosen(off=0), after="insert-qdq")
    plain, same = (fxq.quantize(model, r, data=data) for r in (recipe, with_pass))
    assert len(SEEN) == 2 and not same.history["chosen"].edits
    assert torch.equal(plain(data[0]), same(data[0]))


def test_as_many_samples_are_recorded_as_it_wants():
    """Also with a recipe that calibrates nothing, and then no more."""
    model, seen = nn.Sequential(nn.Linear(4, 4)).eval(), []
    for preset in (PLAIN, plain(fxq.Recipe.weight_only(backend="reference").without_pass("gptq"))):
        recipe = preset.insert_pass(Chosen(samples=50), after="insert-qdq")

        def batches():
            for i in range(40):
                seen.append(i)
                yield torch.rand(2, 4)

        fxq.quantize(model, recipe, data=batches())
    assert [error.inputs.count for _, error in SEEN] == [50, 50]
    assert len(seen) == 40 + 26  # the last one is looked at and not used


@pytest.mark.one_in(4)
@pytest.mark.parametrize("step", [fxq.passes.AdaRound(), fxq.passes.Gptq()])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_layer_whose_input_is_the_same_for_all_samples(step, value):
    """Nothing is known of its weight but the float one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    data = [torch.full((64, 16), value)]
    recipes = (REFERENCE, REFERENCE.insert_pass(step, after="smooth"))
    plain, chosen = (fxq.quantize(model, recipe, data=data) for recipe in recipes)
    assert chosen.output_sqnr > min(plain.output_sqnr, 40) - 1  # dB
