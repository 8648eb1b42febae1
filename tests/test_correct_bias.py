import torch
from torch import nn

import fxq
from fxq.numeric import sqnr
from fxq.passes import CorrectBias
from tests.helpers import REFERENCE

CORRECTED = fxq.Recipe.static(backend="reference", correct_bias=True)


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


X = [torch.rand(4, 3, 16, 16) for _ in range(4)]


def test_the_mean_and_the_gain_of_every_channel_come_back():
    model, fresh = network(), torch.rand(8, 3, 16, 16)
    plain, corrected = (fxq.quantize(model, recipe, data=X) for recipe in (REFERENCE, CORRECTED))
    with torch.no_grad():
        wanted = model(fresh)
        assert sqnr(wanted, corrected(fresh)) > sqnr(wanted, plain(fresh)) + 6  # dB
        shift = (corrected(fresh) - wanted).mean((0, 2, 3))
        assert shift.abs().max() < 1e-3 < (plain(fresh) - wanted).mean((0, 2, 3)).abs().max()


def test_the_integers_stay_and_the_model_too():
    model = network()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    plain, corrected = (fxq.quantize(model, recipe, data=X).qparams() for recipe in (REFERENCE, CORRECTED))
    for path in ("0", "2"):
        assert torch.equal(plain[path].weight, corrected[path].weight)
        factor = corrected[path].weight_scale / plain[path].weight_scale
        assert ((factor - 1).abs() < 0.1).all() and (factor != 1).any()  # _MOST
        assert not torch.equal(plain[path].bias, corrected[path].bias)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_the_factor_is_the_least_squares_slope():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)).eval()
    model[0].weight = skewed(4, 3, 3, 3)
    x = torch.rand(4, 3, 16, 16)
    plain = fxq.quantize(model, REFERENCE, data=[x]).qparams()["0"]
    fitted = fxq.quantize(model, CORRECTED, data=[x]).qparams()["0"]
    grid = (torch.round(x / plain.input_scale) + plain.input_zero_point).clamp(0, 255)
    real = (grid - plain.input_zero_point).double() * plain.input_scale
    weight = plain.weight.double() * plain.weight_scale.double().view(-1, 1, 1, 1)
    got = nn.functional.conv2d(real, weight, padding=1).movedim(1, 0).flatten(1)
    wanted = nn.functional.conv2d(x.double(), model[0].weight.double(), padding=1).movedim(1, 0).flatten(1)
    for channel in range(4):
        line = torch.stack([got[channel], torch.ones_like(got[channel])], 1)
        slope = float(torch.linalg.lstsq(line, wanted[channel, :, None].detach()).solution[0])
        assert abs(float(fitted.weight_scale[channel] / plain.weight_scale[channel]) - slope) < 1e-5


def test_without_scale_only_the_bias_moves():
    recipe = REFERENCE.insert_pass(CorrectBias(scale=False), after="insert-qdq")
    plain, corrected = (fxq.quantize(network(), r, data=X).qparams() for r in (REFERENCE, recipe))
    assert torch.equal(plain["0"].weight_scale, corrected["0"].weight_scale)
    assert not torch.equal(plain["0"].bias, corrected["0"].bias)


def test_what_it_leaves_alone():
    few = fxq.quantize(nn.Sequential(nn.Linear(4, 4)).eval(), CORRECTED, data=[torch.rand(8, 4)])  # 8 values a channel
    assert few.history["correct-bias"].edits == ()
    without_bias = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False)).eval()
    assert fxq.quantize(without_bias, CORRECTED, data=X).history["correct-bias"].edits == ()
