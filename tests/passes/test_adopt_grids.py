"""adopt-grids: ops run on integers where the model itself quantizes and dequantizes."""

import pytest
import torch
from torch import nn

import fxq
from fxq.api import run_passes
from fxq.quant.qparams import QParams
from fxq.quant.stored_grids import store_grid
from tests.support.machine import WITH_8_BITS


class Quantized(nn.Module):
    """Linear layer on its own grids, with a weight on a stored grid, and an op between dequantize and quantize."""

    def __init__(self, between, signed=False):
        super().__init__()
        self.layer, self.between = nn.Linear(4, 4), between
        integers, scale = torch.randint(-127, 128, (4, 4)), torch.tensor([0.1, 0.2, 0.3, 0.4])
        grid = QParams(scale, torch.zeros(4, dtype=torch.int32), -127, 127, torch.int8, 0)
        self.layer.weight = nn.Parameter(integers * scale[:, None])
        store_grid(self.layer.weight, grid)
        self.low, self.high, self.dtype = (-128, 127, torch.int8) if signed else (0, 255, torch.uint8)

    def grid(self, x, scale, zero):
        zero += self.low
        q = torch.ops.fxq.quantize.default(x, scale, zero, self.low, self.high, self.dtype)
        return torch.ops.fxq.dequantize.default(q, scale, zero)

    def forward(self, x):
        x = self.between(self.grid(x, 0.05, 130))
        return self.grid(self.layer(x), 2.0, 110)


def quantized(between, signed=False, backend=WITH_8_BITS):
    torch.manual_seed(0)
    model = Quantized(between, signed).eval()
    x = torch.randn(3, 4) * 3
    return model, fxq.quantize(model, fxq.Recipe.stored(backend=backend), example_inputs=x), x


@pytest.mark.one_in(3)
@pytest.mark.parametrize("between", [lambda x: x, lambda x: x.flip(1), torch.relu])
@pytest.mark.parametrize("signed", [False, True])
def test_what_reads_dequantized_values_runs_on_integers(between, signed):
    model, qmodel, x = quantized(between, signed)
    assert not qmodel.ledger.count("float"), str(qmodel.ledger)
    reasons = [row.reason for row in qmodel.ledger if row.op in ("quantize", "dequantize")]
    assert reasons == ["converts between floats and integers"] * 4
    assert (qmodel(x) - model(x)).abs().max() <= 2.001  # one step, for a tie


def test_signed_activations_become_unsigned_ones():
    gm = run_passes(Quantized(nn.Identity(), signed=True).eval(), "stored", example_inputs=torch.randn(3, 4),
                    until="adopt-grids")  # fmt: skip
    conversions = [node for node in gm.graph.nodes if node.kwargs.get("scale") is not None]
    assert [(node.kwargs["zero_point"], node.kwargs["qmin"], node.kwargs["qmax"]) for node in conversions] == [
        (130, 0, 255), (130, 0, 255), (110, 0, 255), (110, 0, 255),
    ]  # fmt: skip


def test_a_layer_with_a_float_input_is_weight_only():
    model, qmodel, x = quantized(torch.sigmoid)
    (layer,) = qmodel.ledger.where(op="linear")
    assert layer.precision == "weight-only"
    (sigmoid,) = qmodel.ledger.where(op="sigmoid")
    assert sigmoid.precision == "float"
    assert (qmodel(x) - model(x)).abs().max() <= 2.001  # one step, for a tie


def test_float_ops_read_rounded_values():
    """Otherwise the result would be that of another model, by more than a step of the output."""
    model, qmodel, x = quantized(torch.erf, backend="reference")
    assert torch.equal(qmodel(x), model(x))
    coarse = Quantized(torch.erf).eval()
    coarse.grid = lambda x, scale, zero: Quantized.grid(coarse, x, 3.0, zero)
    rounded = fxq.quantize(coarse, fxq.Recipe.stored(backend="reference"), example_inputs=x)
    torch.testing.assert_close(rounded(x), coarse(x), rtol=0, atol=1e-6)


def test_an_override_keeps_a_layer_in_float():
    model = Quantized(nn.Identity()).eval()
    recipe = fxq.Recipe.stored(backend="reference").override("layer", fxq.FLOAT)
    qmodel = fxq.quantize(model, recipe, example_inputs=torch.randn(3, 4))
    (layer,) = qmodel.ledger.where(op="linear")
    assert (layer.precision, layer.kind) == ("float", "excluded by the recipe")


def test_a_weight_without_a_stored_grid_stays_float():
    model = Quantized(nn.Identity()).eval()
    model.layer.weight = nn.Parameter(torch.randn(4, 4))
    with pytest.warns(fxq.FxqWarning, match="nothing runs on integers"):
        qmodel = fxq.quantize(model, "stored", example_inputs=torch.randn(3, 4))
    (layer,) = qmodel.ledger.where(op="linear")
    assert "its weight is float" in layer.reason


def test_a_changed_weight_does_not_run_on_its_old_grid():
    model = Quantized(nn.Identity()).eval()
    with torch.no_grad():
        model.layer.weight.mul_(1.37)
    x = torch.randn(3, 4)
    with pytest.warns(fxq.FxqWarning, match=r"no longer on the grids of their file: layer\.weight\..*run in float"):
        qmodel = fxq.quantize(model, fxq.Recipe.stored(backend="reference"), example_inputs=x)
    assert torch.equal(qmodel(x), model(x))


@pytest.mark.parametrize("backend", sorted({"reference", WITH_8_BITS}))
def test_grids_of_fewer_integers_than_their_type_stay_narrow(backend):
    class Narrow(Quantized):
        def grid(self, x, scale, zero):
            return torch.ops.fxq.dequantize.default(
                torch.ops.fxq.quantize.default(x, scale, 0, -7, 7, torch.int8), scale, 0
            )

    torch.manual_seed(0)
    model, x = Narrow(nn.Identity()).eval(), torch.randn(3, 4) * 3  # most values are clipped
    qmodel = fxq.quantize(model, fxq.Recipe.stored(backend=backend), example_inputs=x)
    assert qmodel.ledger.count("int8") == 1
    assert (qmodel(x) - model(x)).abs().max() <= 2.001  # one step, for a tie


def test_other_integers_than_the_models_are_refused():
    weights = fxq.QuantConfig(weight=fxq.TensorSpec(bits=4, signed=True, symmetric=True))
    recipe = fxq.Recipe.stored(backend="reference").override("layer", weights)
    with pytest.raises(fxq.RecipeError, match=r"override\(.*keeps the grids of the model.*fxq.FLOAT"):
        fxq.quantize(Quantized(nn.Identity()).eval(), recipe, example_inputs=torch.randn(3, 4))


def test_a_float_model_is_refused():
    with pytest.raises(fxq.RecipeError, match=r"the model has no grids.*weight_only"):
        fxq.quantize(nn.Linear(4, 4).eval(), "stored", example_inputs=torch.randn(3, 4))
    model = Quantized(nn.Identity()).layer.eval()  # its weight has a grid
    qmodel = fxq.quantize(model, fxq.Recipe.stored(backend="reference"), example_inputs=torch.randn(3, 4))
    assert [row.precision for row in qmodel.ledger.where(op="linear")] == ["weight-only"]
