"""low-rank: what it writes and leaves alone, what it is worth, and that all that reads a model knows of it."""

import re

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.errors import ExportError, RecipeError
from fxq.passes import LowRank
from fxq.pipeline.float_form import FloatForm
from tests.passes.test_gptq import Tied, correlated
from tests.support.graphs import expected, program, run_pass
from tests.support.onnx_runs import onnx, run_onnxruntime, same

THREE_BITS = fxq.Recipe.weight_only(bits=3, per=16, backend="reference")


def corrected(recipe=THREE_BITS, after="gptq", **options):
    return recipe.insert_pass(LowRank(**options), after=after)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48, bias=False)).eval()


def samples(count=8):
    return [correlated(64, 64, seed) for seed in range(count)]


LAYER = """
    x: float32[64, 8] = input()
    w: float32[6, 8] = tensor('w')
    w_int8: int8[6, 8] = tensor('w_int8')
    w_dq: float32[6, 8] = dequantize(w_int8, scale=0.5, zero_point=0, qmin=-3, qmax=3)  # stands_for='w'
    y = linear(x, w_dq)  # 'fc'
    z = relu(y)
    return z
"""


def test_text_before_and_after():
    tensors = {"w": torch.randn(6, 8), "w_int8": torch.randint(-3, 4, (6, 8), dtype=torch.int8)}
    gm = run_pass(LowRank(rank=2), LAYER, tensors, recipe=THREE_BITS, data=(correlated(64, 8),))
    written = re.sub(r"scale=[.\de-]+, zero_point=0, qmin=-127", "scale=SCALE, zero_point=0, qmin=-127", program(gm))
    assert written == expected("""
        x: float32[64, 8] = input()
        w: float32[6, 8] = tensor('w')
        w_int8: int8[6, 8] = tensor('w_int8')
        w_dq: float32[6, 8] = dequantize(w_int8, scale=0.5, zero_point=0, qmin=-3, qmax=3)
        y: float32[64, 6] = linear(x, w_dq)
        w_down_int8: int8[2, 8] = tensor('fxq_data.w_down_int8')
        w_down_scale: float32[2] = tensor('fxq_data.w_down_scale')
        w_down_dq: float32[2, 8] = dequantize(w_down_int8, scale=w_down_scale, zero_point=0, qmin=-127, qmax=127, \
axis=0)
        w_up_int8: int8[6, 2] = tensor('fxq_data.w_up_int8')
        w_up_dq: float32[6, 2] = dequantize(w_up_int8, scale=SCALE, zero_point=0, qmin=-127, qmax=127)
        y_down: float32[64, 2] = linear(x, w_down_dq)
        y_up: float32[64, 6] = linear(y_down, w_up_dq)
        y_corrected: float32[64, 6] = add(y, y_up)
        z: float32[64, 6] = relu(y_corrected)
        return z
    """)


@pytest.mark.parametrize("has_data", [False, True])
@pytest.mark.parametrize("chooses", [False, True], ids=["rounded", "gptq"])
def test_layers_come_closer_on_other_samples_too(has_data, chooses):
    model, x = network(), correlated(256, 64, 50)
    recipe, after = (THREE_BITS, "gptq") if chooses else (THREE_BITS.without_pass("gptq"), "smooth")
    data = samples() if has_data else None
    plain, better = (
        fxq.quantize(model, r, data=data, example_inputs=x) for r in (recipe, corrected(recipe, after, rank=24))
    )
    with torch.no_grad():
        wanted = model(x)
        assert sqnr(wanted, better(x)) > sqnr(wanted, plain(x)) + 2  # dB
    assert [edit.rule for edit in better.history["low-rank"].edits] == ["low_rank", "low_rank"]


def test_data_say_which_errors_count():
    model, x = network(), correlated(256, 64, 50)
    recipe = corrected(THREE_BITS.without_pass("gptq"), "smooth", rank=8)
    with_data, without = (fxq.quantize(model, recipe, data=d, example_inputs=x) for d in (samples(), None))
    with torch.no_grad():
        assert sqnr(model(x), with_data(x)) > sqnr(model(x), without(x)) + 0.5  # dB


def test_the_ledger_counts_its_bits():
    model = network()
    qmodel = fxq.quantize(model, corrected(rank=8), data=samples())
    first, _, last = qmodel.ledger
    for entry, (outputs, inputs) in ((first, (96, 64)), (last, (48, 96))):
        # 3 bits, and in blocks of 16 a scale of 2 bytes and a zero point of 1; a scale for each row of `down`
        bits = 3 + 24 / 16 + 8 * (8 * (outputs + inputs) + 4 * 8) / (outputs * inputs)
        assert entry.weight_values == outputs * inputs and entry.weight_bits == pytest.approx(bits)
        assert (entry.precision, entry.reason) == ("weight-only", "corrected by a matrix of rank 8")
    plain = fxq.quantize(model, THREE_BITS, data=samples())
    assert first.own_sqnr > plain.ledger[0].own_sqnr + 0.5  # dB: it is that of the corrected output
    stored = [tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in qmodel.state_dict().values()]
    assert all(stored)


@pytest.mark.any_cpu
@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")  # ONNX Runtime rounds the inputs with default options
def test_backends_files_and_onnx(tmp_path):
    x = correlated(64, 64, 50)
    qmodel = fxq.quantize(network(), corrected(rank=8), data=samples())
    wanted = qmodel(x)
    for backend in ("jit", "x86"):
        same(fxq.quantize(network(), corrected(rank=8).with_backend(backend), data=samples())(x), wanted, 2e-6)
    loaded = fxq.load(qmodel.save(tmp_path / "m.fxq"))
    assert torch.equal(loaded(x), wanted) and loaded.ledger[0] == qmodel.ledger[0]
    (got,) = run_onnxruntime(onnx.load(loaded.export(tmp_path / "m.onnx")), [x])
    same(got, wanted, 2e-6)


def test_options_out_of_range():
    with pytest.raises(RecipeError, match=r"low-rank: rank is 0; it must be an integer from 1"):
        LowRank(rank=0)
    with pytest.raises(RecipeError, match=r'low-rank corrects .* gptq would choose anew: .* after="gptq"'):
        fxq.quantize(network(), corrected(after="smooth"), example_inputs=correlated(2, 64))
    with pytest.raises(RecipeError, match=r"low-rank: rank is 64, and no linear layer .* at most 4 bits has more"):
        fxq.quantize(network(), corrected(rank=64), example_inputs=correlated(2, 64))


class Several(nn.Module):
    """Layers of all kinds, of which one can be corrected."""

    def __init__(self):
        super().__init__()
        self.tied, self.conv, self.large, self.small = Tied(), nn.Conv1d(1, 2, 1), nn.Linear(40, 40), nn.Linear(40, 4)

    def forward(self, tokens, x):
        table, y = self.tied(tokens, x)
        return table, self.small(self.large(self.conv(y[:, None]).sum(1)))


def test_a_recipe_that_is_saved_has_it(tmp_path):
    recipe = corrected(rank=4, trust=2.0)
    recipe.save(tmp_path / "r.toml")
    assert fxq.Recipe.load(tmp_path / "r.toml") == recipe


def test_others_stay_as_they_are_with_a_note():
    torch.manual_seed(0)
    recipe = corrected(rank=8)
    config = recipe.config
    recipe = recipe.override(nn.Embedding, config).override("tied.head", config).override("conv", config)
    data = [(torch.arange(40), correlated(40, 32, seed)) for seed in range(2)]
    qmodel = fxq.quantize(Several().eval(), recipe, data=data)
    reasons = {entry.path: entry.reason for entry in qmodel.ledger if entry.weight_values}
    assert reasons == {
        "tied.table": "no low-rank correction: only linear layers have one",
        "tied.head": "no low-rank correction: its weight is shared with another layer",
        "conv": "no low-rank correction: only linear layers have one",
        "large": "corrected by a matrix of rank 8",
        "small": "no low-rank correction: its weight is 4 x 40, and rank is 8",
    }
    eight_bits = fxq.quantize(network(), corrected(fxq.Recipe.weight_only()), data=samples())
    assert not eight_bits.history["low-rank"].edits


def test_inputs_that_are_too_large():
    """Their squares overflow."""
    qmodel = fxq.quantize(
        network()[:1], corrected(THREE_BITS.without_pass("gptq"), "smooth"), data=[torch.full((64, 64), 1e25)]
    )
    assert qmodel.ledger[0].reason == "no low-rank correction: its inputs are too large, or not finite"


def test_the_float_form_of_the_graph_has_none():
    """correct-bias compares with it, in a model with layers of both kinds."""
    model, x = network(), correlated(64, 64)
    recipe = fxq.Recipe.static(backend="reference", optimize="coverage").override("0", THREE_BITS.config)
    gm = fxq.extend.run_passes(model, corrected(recipe, "smooth"), data=samples(2), until="low-rank", example_inputs=x)
    assert any(node.name.endswith("corrected") for node in gm.graph.nodes)
    with torch.no_grad():
        torch.testing.assert_close(FloatForm(gm, fxq.common.data.Batch((x,))).run(), model(x))


def test_checkpoints_of_other_tools_do_not_hold_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval()
    qmodel = fxq.quantize(model, corrected(fxq.Recipe.weight_only(bits=4, per=32), rank=4))
    with torch.no_grad():
        once = qmodel(torch.tensor([[1, 2, 3, 4]])).logits
        parts = qmodel(torch.tensor([[1, 2, 3]]))
        token = qmodel(torch.tensor([[4]]), past_key_values=parts.past_key_values).logits
    torch.testing.assert_close(token[:, 0], once[:, -1], rtol=1e-4, atol=1e-5)
    with pytest.raises(ExportError, match="its weight has a low-rank correction, which the format cannot hold"):
        qmodel.export(tmp_path, format="gptq")
