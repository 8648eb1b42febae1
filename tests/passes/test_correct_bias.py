"""correct-bias: every int8 layer is fitted to its float form, by its bias and the scale of its weight."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.paired import paired_run
from fxq.passes import CorrectBias
from tests.support.estimates import average, trusted
from tests.support.graphs import drawn, expected, program, run_pass
from tests.support.helpers import REFERENCE

PLAIN = REFERENCE.without_pass("correct-bias")


def skewed(*shape):
    """Weights that int8 rounds badly: one large entry per channel, many small ones of one sign."""
    weight = torch.full(shape, 0.0017) + 0.0003 * torch.rand(shape)
    weight[(slice(None), *(0 for _ in shape[1:]))] = 1.0
    return nn.Parameter(weight)


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)).eval()
    model[0].weight, model[2].weight = skewed(4, 3, 3, 3), skewed(4, 4, 3, 3)
    return model


X = list(torch.rand(4, 4, 3, 16, 16, generator=torch.Generator().manual_seed(0)))


def test_the_mean_and_the_gain_of_every_channel_come_back():
    model, fresh = network(), torch.rand(8, 3, 16, 16)
    plain, corrected = (fxq.quantize(model, recipe, data=X) for recipe in (PLAIN, REFERENCE))
    with torch.no_grad():
        wanted = model(fresh)
        assert sqnr(wanted, corrected(fresh)) > sqnr(wanted, plain(fresh)) + 6  # dB
        shift = (corrected(fresh) - wanted).mean((0, 2, 3))
        assert shift.abs().max() < 1e-3 < (plain(fresh) - wanted).mean((0, 2, 3)).abs().max()


LAYER = """
    x: float32[4, 3, 16, 16] = input()
    w: float32[4, 3, 3, 3] = tensor('w')
    w_int8: int8[4, 3, 3, 3] = tensor('w_int8')
    scale: float32[4] = tensor('scale')
    zero: int32[4] = tensor('zero')
    b: float32[4] = tensor('b')
    x_q = quantize(x, scale=0.01, zero_point=0)
    x_dq = dequantize(x_q, scale=0.01, zero_point=0)
    w_dq = dequantize(w_int8, scale=scale, zero_point=zero, qmin=-127, qmax=127, axis=0)  # stands_for='w'
    y = conv2d(x_dq, w_dq, b)  # 'conv', plan=Plan(Decision('int8'), reads=TensorSpec())
    return y
"""
SKEWED = skewed(4, 3, 3, 3).detach()
GIVEN = {"w": SKEWED, "scale": torch.full((4,), 1 / 127), "w_int8": (SKEWED * 127).round().to(torch.int8)}


def test_text_before_and_after():
    """The integers of the weight stay."""
    gm = run_pass(CorrectBias(), LAYER, GIVEN, data=(X[0],))
    assert program(gm) == expected("""
        x: float32[4, 3, 16, 16] = input()
        w_int8: int8[4, 3, 3, 3] = tensor('w_int8')
        zero: int32[4] = tensor('zero')
        x_q: uint8[4, 3, 16, 16] = quantize(x, scale=0.01, zero_point=0)
        x_dq: float32[4, 3, 16, 16] = dequantize(x_q, scale=0.01, zero_point=0)
        w_scale_corrected: float32[4] = tensor('fxq_data.w_scale_corrected')
        w_dq: float32[4, 3, 3, 3] = dequantize(w_int8, scale=w_scale_corrected, zero_point=zero, \
qmin=-127, qmax=127, axis=0)
        conv_bias_corrected: float32[4] = tensor('fxq_data.conv_bias_corrected')
        y: float32[4, 4, 14, 14] = conv2d(x_dq, w_dq, conv_bias_corrected)
        return y
    """)


def in_parts(y, axis=1):
    """Means and deviations of parts of the values of each channel, (parts, C): 32, or fewer of 16 values."""
    rows = y.movedim(axis, 0).flatten(1)
    parts = rows.tensor_split(min(32, rows.shape[1] // 16), 1)
    return torch.stack([part.mean(1) for part in parts]), torch.stack([part.var(1, False) for part in parts])


@pytest.mark.parametrize("samples", [4, 32])
def test_mean_and_deviation_become_those_of_the_float_layer(samples):
    """Each part of the values says something, of a sample or a whole one; also: `scale=False` moves the bias alone."""
    written = LAYER.replace("float32[4, 3, 16, 16]", f"float32[{samples}, 3, 16, 16]")
    x = torch.cat([X[0], torch.rand(28, 3, 16, 16)])[:samples]
    before, gm = (
        fxq.extend.read_graph(written, {**drawn(LAYER), **GIVEN}),
        run_pass(CorrectBias(), written, GIVEN, data=(x,)),
    )
    gm_bias = run_pass(CorrectBias(scale=False), written, GIVEN, data=(x,))
    got, spread = in_parts((before(x) - before.b.view(-1, 1, 1)).double())
    wanted, wanted_spread = in_parts(F.conv2d(x.double(), SKEWED.double()))
    shift, factor = trusted(wanted - got), trusted((wanted_spread / spread).log() / 2).exp()
    torch.testing.assert_close(gm.fxq_data.w_scale_corrected.double() * 127, factor, atol=1e-5, rtol=0)
    with_bias = average(got) + gm.b
    wanted_shift = shift + (1 - factor) * with_bias + (factor - 1) * gm.b  # the factor scales the bias, too
    torch.testing.assert_close(gm.fxq_data.conv_bias_corrected - gm.b, wanted_shift.float(), atol=1e-4, rtol=0)
    torch.testing.assert_close(gm_bias.fxq_data.conv_bias_corrected - gm_bias.b, shift.float(), atol=1e-5, rtol=0)
    assert "scale_corrected" not in program(gm_bias)


@pytest.mark.parametrize(
    ("step", "written"),
    [
        (CorrectBias(), LAYER.replace("w_dq, b)", "w_dq)")),
        (CorrectBias(), LAYER.replace("'int8'", "'float'")),
    ],
    ids=["no bias", "float"],
)
def test_what_it_leaves_alone(step, written):
    gm = run_pass(step, written, GIVEN, data=(X[0],))
    assert program(gm) == program(fxq.extend.read_graph(written, fxq.extend.graph_tensors(gm)))


def test_too_few_values_change_no_number_and_give_the_same_graph():
    least, enough = (run_pass(CorrectBias(least=n), LAYER, GIVEN, data=(X[0],)) for n in (393, 392))  # a half has 392
    assert program(least) == program(enough)
    assert torch.equal(least.fxq_data.conv_bias_corrected, least.b)
    assert torch.equal(least.fxq_data.w_scale_corrected, GIVEN["scale"])
    assert not torch.equal(enough.fxq_data.conv_bias_corrected, enough.b)


def test_what_is_chance_is_not_corrected():
    """Rounding that is fine enough leaves no error that samples agree on: then there is little to correct."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64)).eval()
    data = [torch.randn(16, 8) for _ in range(4)]
    weight = fxq.TensorSpec(signed=True, symmetric=True, per="channel", observer="minmax")
    recipe = REFERENCE.override("*", fxq.QuantConfig(weight=weight))
    got = [fxq.quantize(model, r, data=data).qparams()["0"] for r in (recipe.without_pass("correct-bias"), recipe)]
    moved = [(qp.bias * qp.bias_scale.double()).float() for qp in got]
    errors = (moved[1] - moved[0]).abs().max() / model(torch.cat(data)).std()
    assert errors < 0.004


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("samples", "corrected"), [(1, False), (2, False), (15, False), (16, True)])
def test_few_samples_are_asked_whether_it_holds_for_others(samples, corrected):
    """Weights and inputs of mean 0 leave no mean error: what is fitted is chance."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    observed = fxq.prepare(model, REFERENCE, example_inputs=torch.randn(1, 3, 16, 16))
    fxq.calibrate(observed, [torch.randn(samples, 3, 16, 16)])
    got, plain = fxq.convert(observed), fxq.convert(observed, PLAIN)
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(got(x), plain(x)) is not corrected


def test_a_state_dict_fits_whatever_was_learnt_of_the_data():
    """A model quantized with one made-up sample takes the state of one that was calibrated."""
    model, fresh = network(), torch.rand(8, 3, 16, 16)
    calibrated, made_up = (fxq.quantize(model, REFERENCE, data=data) for data in (X, [torch.rand(1, 3, 16, 16)]))
    made_up.load_state_dict(calibrated.state_dict())
    assert torch.equal(made_up(fresh), calibrated(fresh))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("batches", [1, 4])
def test_few_samples_are_enough_where_the_error_is_the_same_in_all(batches):
    model, fresh = network(), torch.rand(8, 3, 16, 16)
    data = [torch.rand(4 // batches, 3, 16, 16) for _ in range(batches)]
    plain, corrected = (fxq.quantize(model, recipe, data=data) for recipe in (PLAIN, REFERENCE))
    assert sqnr(model(fresh), corrected(fresh)) > sqnr(model(fresh), plain(fresh)) + 6  # dB


@pytest.mark.one_in(9)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_transposed_convolutions_with_groups(dims, groups):
    """Groups share scales: the factor of a scale fits all channels that have it."""
    torch.manual_seed(0)
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    layer = kind(4, 8, 3, groups=groups)
    layer.weight = nn.Parameter(skewed(8 // groups, 4, *[3] * dims).transpose(0, 1).contiguous())
    model = nn.Sequential(layer).eval()
    x = torch.rand(4, 4, *[{1: 40, 2: 9, 3: 5}[dims]] * dims)
    plain, fitted = (fxq.quantize(model, recipe, data=[x]).qparams()["0"] for recipe in (PLAIN, REFERENCE))
    grid = (torch.round(x / plain.input_scale) + plain.input_zero_point).clamp(0, 255)
    real = (grid - plain.input_zero_point).double() * plain.input_scale
    scales = plain.weight_scale.double()
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
    got = function(real, plain.weight.double() * scales.view(1, -1, *[1] * dims), groups=groups)
    wanted = function(x.double(), layer.weight.detach().double(), groups=groups)
    both = [in_parts(y)[1].view(-1, groups, len(scales)).sum(1) for y in (got, wanted)]
    ratio = torch.where(both[0] > 0, both[1] / both[0], 1.0)  # integers of some parts are all zero
    factor = trusted(ratio.log() / 2).exp()
    torch.testing.assert_close(fitted.weight_scale / plain.weight_scale, factor.float(), atol=1e-5, rtol=0)
    quantized = fxq.quantize(model, REFERENCE, data=[x])
    assert sqnr(model(x), quantized(x)) > sqnr(model(x), fxq.quantize(model, PLAIN, data=[x])(x))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), (8, 16, 16)),
        (nn.Sequential(nn.Conv1d(6, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3)), (6, 100)),
        (nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), (16,)),
        (nn.Sequential(nn.ConvTranspose2d(6, 4, 3, groups=2), nn.ReLU()), (6, 12, 12)),
    ],
    ids=["conv2d", "conv1d", "linear", "conv_transpose2d"],
)
def test_inputs_without_a_batch_axis(model, shape):
    """Their first axis is none of samples, of which one could take a few."""
    data = [torch.randn(shape) for _ in range(8)]
    observed = fxq.calibrate(fxq.prepare(model.eval(), REFERENCE, example_inputs=data[0]), data)
    assert not observed.manager.context.divisible
    quantized = fxq.convert(observed)
    assert len(quantized.history["correct-bias"].edits) > 0 or shape == (16,)
    assert quantized.output_sqnr > 30


@pytest.mark.slow
def test_of_values_one_batch_is_held_at_a_time(monkeypatch):
    """A deep network, and many batches, take no more memory than a shallow one and a few; no weight is kept."""
    alive, most = weakref.WeakValueDictionary(), []
    compute = paired_run._CorrectedRun.compute

    def counted(run, node):
        value = compute(run, node)
        if node.op != "get_attr":
            alive[id(value)] = value
        most.append(len(alive))
        return value

    monkeypatch.setattr(paired_run._CorrectedRun, "compute", counted)
    layers = [module for _ in range(12) for module in (nn.Linear(16, 16), nn.ReLU())]
    fxq.quantize(nn.Sequential(*layers).eval(), REFERENCE, data=[torch.randn(4, 16) for _ in range(16)])
    assert 0 < max(most) <= 4  # a value, its integers, their floats, the next value


def test_a_change_in_place_is_made_once_in_each():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return self.conv(x.add_(1.0))

    model = Shifted().eval()
    data = [torch.rand(4, 3, 16, 16) for _ in range(4)]
    quantized = fxq.quantize(model, REFERENCE, data=[x.clone() for x in data])
    assert sqnr(model(data[0].clone()), quantized(data[0].clone())) > 35


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(4))
def test_layers_of_few_values_are_not_made_worse(seed):
    """Rows of samples without another axis: a part has enough of them to say how far they deviate."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)).eval()
    data, fresh = [torch.randn(64, 16) for _ in range(4)], torch.randn(512, 16)
    plain, corrected = (fxq.quantize(model, recipe, data=data) for recipe in (PLAIN, REFERENCE))
    assert sqnr(model(fresh), corrected(fresh)) > sqnr(model(fresh), plain(fresh)) - 0.5  # dB


def test_both_forms_draw_the_same_random_numbers():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.b(torch.dropout(self.a(x), 0.5, True))

    torch.manual_seed(0)
    model, data = Dropping().eval(), [torch.randn(64, 16) for _ in range(4)]
    observed = fxq.calibrate(fxq.prepare(model, REFERENCE, example_inputs=data[0]), data)
    first, again = (fxq.convert(observed).qparams()["b"] for _ in range(2))
    assert torch.equal(first.bias, again.bias) and torch.equal(first.weight_scale, again.weight_scale)
    alone = fxq.convert(observed, REFERENCE.without_pass("correct-bias")).qparams()["b"]
    assert ((first.weight_scale / alone.weight_scale).log().abs() < 0.01).all()


def test_a_token_that_is_far_larger_does_not_decide_what_the_others_are_corrected_by():
    """One token in 16 is cut at the end of its grid, by the same in each sample; the others have no error to mend."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    data = [torch.randn(8, 16, 8) for _ in range(8)]
    for x in data:
        x[:, 0] = 20.0
    spec = fxq.TensorSpec(observer="percentile:90")
    recipe = fxq.Recipe.static(backend="reference", activation=spec).without_pass("smooth")
    plain, fitted = (fxq.quantize(model, r, data=data) for r in (recipe.without_pass("correct-bias"), recipe))
    others = torch.cat(data)[:, 1:]
    with torch.no_grad():
        before, after = ((q(others) - model(others)).mean((0, 1)).abs().max() for q in (plain, fitted))
    assert after < before + 0.05  # the mean of all tokens would move each by a sixteenth of what is cut, about 1
