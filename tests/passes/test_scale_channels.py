"""scale-channels: the float model stays what it is, and rounding costs less where channels differ in size."""

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.errors import InputError
from fxq.passes import ScaleChannels
from fxq.rewriting.rewriter import Rewriter
from tests.support.helpers import context

FOUR_BITS = fxq.Recipe.weight_only(bits=4, per=16, backend="reference")
SCALED = FOUR_BITS.insert_pass(ScaleChannels(), after="insert-observers")


class Gated(nn.Module):
    """Two layers that read a norm, and a third that reads their product: (N, L, 64) to (N, L, 64)."""

    def __init__(self, norm=nn.RMSNorm):
        super().__init__()
        self.norm, self.gate, self.up = norm(64), nn.Linear(64, 48, bias=False), nn.Linear(64, 48)
        self.down = nn.Linear(48, 64)

    def forward(self, x):
        x = self.norm(x)
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def planted(model):
    """Model with a few channels that are 30 times as large as the others, as in language models."""
    with torch.no_grad():
        model.norm.weight[::16] *= 30
        model.gate.weight /= 3
        model.up.weight /= 3
        model.up.weight[::16] *= 30
    return model.eval()


def batches(count=4, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 40, 64, generator=g) for _ in range(count)]


def float_graph(model, recipe=FOUR_BITS, **options):
    """The graph with observers after the pass, and the edits of the pass."""
    (x,) = batches(1)
    gm = fxq.extend.run_passes(model, recipe, example_inputs=x, until="insert-observers")
    pass_context = context(gm, x, recipe=recipe)
    pass_context.samples.append(pass_context.example)
    rewriter = Rewriter(gm, pass_context, ScaleChannels.name)
    ScaleChannels(**options).run(rewriter)
    gm.recompile()
    return gm, [edit for edit in rewriter.edits if edit.rule == "scale_channels"]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize(("rounding", "gain"), [("gptq", 1), ("nearest", 3)])
def test_the_output_error_becomes_smaller(norm, rounding, gain):
    torch.manual_seed(0)
    model, data, (x,) = planted(Gated(norm)), batches(), batches(1, 2)
    recipes = (FOUR_BITS, SCALED) if rounding == "gptq" else (r.without_pass("gptq") for r in (FOUR_BITS, SCALED))
    before, after = (fxq.quantize(model, recipe, data=data) for recipe in recipes)
    with torch.no_grad():
        wanted = model(x)
        assert sqnr(wanted, after(x)) > sqnr(wanted, before(x)) + gain  # dB
    assert after.ledger.count("weight-only") == before.ledger.count("weight-only") == 3
    for reference in (model, before):  # what is divided has no value there to be compared with
        assert {row.name for row in fxq.compare(reference, after, data)} == {"gate", "silu", "down"}
    assert min(entry.sqnr for entry in after.ledger) > 20  # dB; scaled values are compared with scaled ones


@pytest.mark.one_in(2)
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_the_float_graph_stays_and_its_weights_hold_the_factors(norm):
    torch.manual_seed(0)
    model, (x,) = planted(Gated(norm)), batches(1, 2)
    gm, _ = float_graph(model)
    with torch.no_grad():
        torch.testing.assert_close(gm(x), model(x), rtol=1e-4, atol=1e-4 * float(model(x).abs().max()))
    tensors = {name.removeprefix("fxq_data."): t for name, t in fxq.extend.graph_tensors(gm).items()}
    inner = model.norm.weight / tensors["norm_weight_scaled"]
    assert inner.max() / inner.min() > 2  # 30 ** 0.25
    torch.testing.assert_close(tensors["gate_weight_scaled"], model.gate.weight * inner, rtol=1e-5, atol=0)
    outer = model.up.bias / tensors["up_bias_scaled"]
    assert outer.max() / outer.min() > 2
    up = model.up.weight * inner / outer[:, None]
    torch.testing.assert_close(tensors["up_weight_scaled_1"], up, rtol=1e-5, atol=0)
    torch.testing.assert_close(tensors["down_weight_scaled"], model.down.weight * outer, rtol=1e-5, atol=0)
    if norm is nn.LayerNorm:
        torch.testing.assert_close(tensors["norm_bias_scaled"], model.norm.bias / inner, rtol=1e-5, atol=0)


class Residual(Gated):
    """Reads the norm and the product once more."""

    def forward(self, x):
        x = self.norm(x)
        product = nn.functional.silu(self.gate(x)) * self.up(x)
        return self.down(product) + x + product.sum()


class SharedNorm(Gated):
    """Its norm and its layer `up` run twice."""

    def forward(self, x):
        return super().forward(x) + super().forward(-x)


class TiedWeights(Gated):
    """Has another layer with the weight of `up`."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(64, 48)
        self.other.weight = self.up.weight

    def forward(self, x):
        return super().forward(x), self.other(x)


@pytest.mark.parametrize("kind", [Residual, SharedNorm, TiedWeights])
def test_values_with_other_readers_and_shared_weights_stay(kind):
    torch.manual_seed(0)
    assert float_graph(planted(kind()))[1] == []


def test_layers_with_more_bits_stay():
    torch.manual_seed(0)
    recipe = FOUR_BITS.override("up", fxq.Recipe.weight_only(bits=8).config)
    gm, edits = float_graph(planted(Gated()), recipe=recipe)
    scaled = {name for name in fxq.extend.graph_tensors(gm) if "scaled" in name}
    assert edits and not any("gate" in name or "norm" in name for name in scaled)  # they share their input with `up`


def test_channels_of_one_size_stay():
    torch.manual_seed(0)
    assert float_graph(Gated().eval(), gain=0.1)[1] == []


def test_a_reshape_of_tokens_may_be_between():
    class Flattened(Gated):
        def forward(self, x):
            rows = self.norm(x).view(-1, x.shape[-1])
            return self.down(nn.functional.silu(self.gate(rows)) * self.up(rows))

    torch.manual_seed(0)
    model, (x,) = planted(Flattened()), batches(1, 2)
    gm, edits = float_graph(model)
    assert "norm_weight_scaled" in str(fxq.extend.graph_tensors(gm).keys()) and edits
    with torch.no_grad():
        torch.testing.assert_close(gm(x), model(x), rtol=1e-4, atol=1e-4 * float(model(x).abs().max()))


def test_without_data_and_in_a_file(tmp_path):
    SCALED.save(tmp_path / "r.toml")
    assert fxq.Recipe.load(tmp_path / "r.toml") == SCALED
    with pytest.raises(InputError, match=r"scale-channels needs the inputs of layers, and no samples are recorded"):
        fxq.quantize(Gated().eval(), SCALED, example_inputs=batches(1)[0])
