"""smooth: what is large in a few channels of a linear layer's input moves into its weight."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.backends.by_name import unavailable
from fxq.backends.engines.openvino import Openvino
from fxq.common.metrics import sqnr
from fxq.graph.info import info
from fxq.graph.query import is_op, plan_of
from fxq.passes import Smooth
from tests.support.graphs import expected, node, program, run_pass
from tests.support.helpers import REFERENCE, module

PLAIN = REFERENCE.without_pass("smooth")


def outliers(*shape, channels=2, size=60.0):
    """Values of which a few channels, the last axis, are far larger than the others."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    x[..., :channels] *= size
    return x


LAYER = """
    x: float32[64, 4] = input()
    w: float32[3, 4] = tensor('w')
    w_int8: int8[3, 4] = tensor('w_int8')
    scale: float32[3] = tensor('scale')
    b: float32[3] = tensor('b')
    x_q = quantize(x, scale=1.0, zero_point=128)
    x_dq = dequantize(x_q, scale=1.0, zero_point=128)
    w_dq = dequantize(w_int8, scale=scale, zero_point=0, qmin=-127, qmax=127, axis=0)  # 'fc', stands_for='w'
    y = linear(x_dq, w_dq, b)  # 'fc', plan=Plan(Decision('int8'), reads=TensorSpec(), \
weight=TensorSpec(signed=True, symmetric=True, per='channel', observer='minmax'))
    return y
"""
X = outliers(64, 4, channels=1, size=100.0)
W = torch.tensor([[0.01, 0.5, -1.0, 0.8], [-0.02, 1.0, 0.3, 0.4], [0.015, -0.2, 0.7, -1.0]])
GIVEN = {"w": W, "scale": torch.full((3,), 1 / 127), "w_int8": (W * 127).round().to(torch.int8), "b": torch.zeros(3)}


def test_text_before_and_after():
    gm = run_pass(Smooth(least=64), LAYER, GIVEN, data=(X,))
    options = next(n for n in gm.graph.nodes if is_op(n, "quantize")).kwargs
    grid = f"scale={options['scale']!r}, zero_point={options['zero_point']}"
    assert program(gm) == expected(f"""
        x: float32[64, 4] = input()
        b: float32[3] = tensor('b')
        x_smoothing: float32[4] = tensor('fxq_data.x_smoothing')
        x_smooth: float32[64, 4] = mul(x, x_smoothing)
        x_smooth_q: uint8[64, 4] = quantize(x_smooth, {grid})
        x_smooth_dq: float32[64, 4] = dequantize(x_smooth_q, {grid})
        w_smoothed_int8: int8[3, 4] = tensor('fxq_data.w_smoothed_int8')
        w_smoothed_scale: float32[3] = tensor('fxq_data.w_smoothed_scale')
        w_dq: float32[3, 4] = dequantize(w_smoothed_int8, scale=w_smoothed_scale, zero_point=0, \
qmin=-127, qmax=127, axis=0)
        y: float32[64, 3] = linear(x_smooth_dq, w_dq, b)
        return y
    """)


def test_the_factors_are_those_of_the_paper():
    """max|x| ** alpha / max|w| ** (1 - alpha), and the weight's integers are those of the weight times the factors."""
    gm = run_pass(Smooth(least=64), LAYER, GIVEN, data=(X,))
    written_factors = 1 / gm.fxq_data.x_smoothing
    wanted = [X.abs().amax(0) ** a / W.abs().amax(0) ** (1 - a) for a in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)]
    assert min(float((written_factors / factors - 1).abs().max()) for factors in wanted) < 1e-5
    real = W * written_factors
    scale = real.abs().amax(1, keepdim=True) / 127
    torch.testing.assert_close(gm.fxq_data.w_smoothed_int8, (real / scale).round().to(torch.int8))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("step", "written"),
    [
        (Smooth(gain=60.0, measure_gain=60.0, least=64), LAYER),
        (Smooth(enough=-10.0, least=64), LAYER),
        (Smooth(least=65), LAYER),
        (Smooth(least=64), LAYER.replace("Decision('int8')", "Decision('float')")),
        (Smooth(least=64), LAYER.replace(", stands_for='w'", "")),
    ],
    ids=["little gain", "good enough", "few tokens", "float", "no float weight"],
)
def test_what_it_leaves_alone(step, written):
    gm = run_pass(step, written, GIVEN, data=(X,))
    assert program(gm) == program(fxq.extend.read_graph(written, fxq.extend.graph_tensors(gm)))


def test_text_before_and_after_where_tokens_differ():
    """Every eighth token is far larger: factors for channels do not help, a scale for each token does."""
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    x[::8] *= 100
    written = LAYER.replace("scale=1.0", "scale=3.0")
    gm = run_pass(Smooth(least=64), written, GIVEN, data=(x,))
    grid = "scale=x_rows_scale, zero_point=x_rows_zero_point"
    assert program(gm) == expected(f"""
        x: float32[64, 4] = input()
        x_rows_scale: float32[64, 1] = choose_scale(x, steps=254, axis=-1, symmetric=False)
        x_rows_zero_point: float32[64, 1] = choose_zero_point(x, scale=x_rows_scale, axis=-1)
        x_rows_q: uint8[64, 4] = quantize(x, {grid})
        x_rows_dq: float32[64, 4] = dequantize(x_rows_q, {grid})
        w_int8: int8[3, 4] = tensor('w_int8')
        scale: float32[3] = tensor('scale')
        b: float32[3] = tensor('b')
        w_dq: float32[3, 4] = dequantize(w_int8, scale=scale, zero_point=0, qmin=-127, qmax=127, axis=0)
        y: float32[64, 3] = linear(x_rows_dq, w_dq, b)
        return y
    """)
    plan = plan_of(node(gm, "y"))
    assert (plan.reads.range, plan.reads.per) == ("dynamic", "row")
    assert "one grid for all tokens gives" in info(node(gm, "y")).note
    assert program(run_pass(Smooth(measure_gain=math.inf, least=64), written, GIVEN, data=(x,))) != program(gm)


def tokens(n, size=20.0):
    """Batches of sequences, the first token of each far larger than the others along one direction."""
    x = torch.randn(n, 4, 16, 32, generator=torch.Generator().manual_seed(1))
    x[:, :, 0] = size * nn.functional.normalize(torch.ones(32), dim=0) + 0.1 * x[:, :, 0]
    return list(x)


def peaks():
    """A block whose GELU returns large values for the first token."""
    torch.manual_seed(0)
    model = module(
        lambda self, x: x + self.down(nn.functional.gelu(self.up(x))), up=nn.Linear(32, 64), down=nn.Linear(64, 32)
    )
    with torch.no_grad():
        model.up.weight[:4] += nn.functional.normalize(torch.ones(32), dim=0)
        model.up.weight[:4] *= 4
    return model


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["reference", "auto", "openvino"])
def test_a_layer_that_measures_its_tokens(backend):
    if why := unavailable(backend):
        pytest.skip(why)
    model, data, fresh = peaks(), tokens(16), tokens(17)[16][:, 1:]
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage").without_pass("correct-bias")
    static, per_row = (fxq.quantize(model, r, data=data) for r in (recipe.without_pass("smooth"), recipe))
    with torch.no_grad():
        wanted = model.down(nn.functional.gelu(model.up(fresh)))
        assert sqnr(wanted, per_row(fresh) - fresh) > sqnr(wanted, static(fresh) - fresh) + 5  # dB
    (entry,) = per_row.ledger.where(path="down")
    assert entry.precision == "int8" and entry.reason.startswith("one grid for all tokens gives ")
    assert per_row.qparams()["down"].weight.dtype == torch.int8


class WithoutDynamicRanges(Openvino):
    """An engine whose kernels have static ranges only."""

    name = "without_dynamic_ranges"
    dynamic_layers = frozenset()


@pytest.mark.slow
def test_a_backend_that_measures_nothing_leaves_the_layer_in_float():
    if why := unavailable("openvino"):
        pytest.skip(why)
    recipe = fxq.Recipe.static(backend=WithoutDynamicRanges, optimize="coverage")
    qmodel = fxq.quantize(peaks(), recipe, data=tokens(16))
    (entry,) = qmodel.ledger.where(path="down")
    assert (entry.precision, entry.kind) == ("float", "unsupported")
    assert "one grid for all tokens gives" in entry.reason
    assert "without_dynamic_ranges has no kernels with dynamic" in entry.reason
    assert [entry.precision for entry in qmodel.ledger.where(path="up")] == ["int8"]
    assert "choose_scale" not in str(qmodel.history["fallback"])  # nothing is measured for floats


def block():
    """A residual block of a transformer: a layer and the sum after it read the norm's value."""
    torch.manual_seed(0)
    children = {"norm": nn.LayerNorm(32), "up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}
    model = module(lambda self, x: (y := self.norm(x)) + self.down(torch.nn.functional.gelu(self.up(y))), **children)
    with torch.no_grad():
        model.norm.weight[:2] *= 40
        model.up.weight[:, :2] /= 40
    return model


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_block_of_a_transformer(backend):
    model, data = block(), [torch.randn(4, 16, 32) for _ in range(8)]
    fresh = torch.randn(4, 16, 32)
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage")
    plain, smooth = (fxq.quantize(model, r, data=data) for r in (recipe.without_pass("smooth"), recipe))
    with torch.no_grad():
        assert sqnr(model(fresh), smooth(fresh)) > sqnr(model(fresh), plain(fresh)) + 1  # dB; of the sum, one term
    assert len(smooth.history["smooth"].edits) > 0
    weight = smooth.qparams()["up"].weight
    assert weight.dtype == torch.int8 and weight.shape == (64, 32)


def test_the_gain_of_a_layer():
    model = nn.Sequential(nn.Linear(16, 24)).eval()
    with torch.no_grad():
        model[0].weight[:, :2] /= 20
    data, fresh = [outliers(64, 9, 16, size=20.0)], outliers(100, 16, size=20.0)
    plain, smooth = (fxq.quantize(model, recipe, data=data) for recipe in (PLAIN, REFERENCE))
    assert sqnr(model(fresh), smooth(fresh)) > sqnr(model(fresh), plain(fresh)) + 10  # dB


@settings(max_examples=5, deadline=None)
@given(
    shape=st.lists(st.integers(1, 3), min_size=0, max_size=2),
    inputs=st.integers(2, 12),
    outputs=st.integers(1, 9),
    zeros=st.integers(0, 2),
)
def test_it_is_never_worse(shape, inputs, outputs, zeros):
    """Of any shape, and with channels that hold nothing but zeros."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs)).eval()
    x = outliers(64, 8, *shape, inputs, channels=1)
    x[..., inputs - zeros :] = 0
    plain, smooth = (fxq.quantize(model, r.without_pass("correct-bias"), data=[x]) for r in (PLAIN, REFERENCE))
    with torch.no_grad():
        assert sqnr(model(x), smooth(x)) >= sqnr(model(x), plain(x)) - 1.0  # dB; tokens count alike, here they do not


@pytest.mark.slow
def test_what_is_large_in_one_half_of_the_samples_alone_decides_nothing():
    """Ranges of one half do not hold the values of the other: what fits the first alone is not done."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24)).eval()
    x = torch.randn(64, 16, 16)
    x[:32, :, 0] *= 1e-3
    x[32:, :, 0] *= 30
    step = Smooth(measure_gain=math.inf)
    qmodel = fxq.quantize(model, PLAIN.insert_pass(step, after="insert-qdq"), data=list(x.split(4)))
    assert qmodel.history["smooth"].edits == ()


def test_recipes_without_data_are_left_alone():
    model, x = block(), torch.randn(32, 16, 32)
    qmodel = fxq.quantize(model, fxq.Recipe.dynamic(backend="reference"), example_inputs=x)
    assert qmodel.history["smooth"].edits == ()


DYNAMIC = LAYER.replace(
    "    x_q = quantize(x, scale=1.0, zero_point=128)",
    """    x_scale: float32[64, 1] = choose_scale(x, steps=127, axis=-1)
    x_q = quantize(x, scale=x_scale, zero_point=128)""",
).replace("dequantize(x_q, scale=1.0", "dequantize(x_q, scale=x_scale")
DYNAMIC = DYNAMIC.replace("TensorSpec()", "TensorSpec(symmetric=True, per='row', range='dynamic')")


def test_text_before_and_after_where_the_input_is_dynamic():
    """The dynamic range is computed after the division."""
    gm = run_pass(Smooth(least=64), DYNAMIC, GIVEN, data=(X,))
    grid = "scale=x_smooth_scale, zero_point=128"
    assert program(gm) == expected(f"""
        x: float32[64, 4] = input()
        b: float32[3] = tensor('b')
        x_smoothing: float32[4] = tensor('fxq_data.x_smoothing')
        x_smooth: float32[64, 4] = mul(x, x_smoothing)
        x_smooth_scale: float32[64, 1] = choose_scale(x_smooth, steps=127, axis=-1)
        x_smooth_q: uint8[64, 4] = quantize(x_smooth, {grid})
        x_smooth_dq: float32[64, 4] = dequantize(x_smooth_q, {grid})
        w_smoothed_int8: int8[3, 4] = tensor('fxq_data.w_smoothed_int8')
        w_smoothed_scale: float32[3] = tensor('fxq_data.w_smoothed_scale')
        w_dq: float32[3, 4] = dequantize(w_smoothed_int8, scale=w_smoothed_scale, zero_point=0, \
qmin=-127, qmax=127, axis=0)
        y: float32[64, 3] = linear(x_smooth_dq, w_dq, b)
        return y
    """)


@pytest.mark.parametrize("step", [Smooth(dynamic_gain=60.0, least=64), Smooth(dynamic_enough=-10.0, least=64)])
def test_dynamic_inputs_that_it_leaves_alone(step):
    gm = run_pass(step, DYNAMIC, GIVEN, data=(X,))
    assert program(gm) == program(fxq.extend.read_graph(DYNAMIC, fxq.extend.graph_tensors(gm)))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("per", ["row", "tensor"])
def test_a_block_with_a_dynamic_recipe(backend, per):
    model, data, fresh = block(), [torch.randn(4, 16, 32) for _ in range(8)], torch.randn(4, 16, 32)
    measured = fxq.TensorSpec(per=per, range="dynamic")
    recipe = fxq.Recipe.dynamic(backend=backend, optimize="coverage", activation=measured)
    plain, smooth = (fxq.quantize(model, r, data=data) for r in (recipe.without_pass("smooth"), recipe))
    with torch.no_grad():
        assert sqnr(model(fresh), smooth(fresh)) > sqnr(model(fresh), plain(fresh)) + 1  # dB; of the sum, one term
    assert smooth.history["smooth"].edits and not smooth.history["correct-bias"].edits
    assert {entry.precision for entry in smooth.ledger.where(op="linear")} == {"int8"}
    assert smooth.qparams()["up"].weight.dtype == torch.int8


def test_a_layer_that_goes_back_to_float_has_its_weight_and_input_again():
    """The recipe puts one of two readers into float: it reads the value as it was."""
    model, x = block(), torch.randn(32, 16, 32)
    half = fxq.quantize(model, REFERENCE.override("down", fxq.FLOAT), data=[x])
    assert sqnr(model(x), half(x)) > 30


@pytest.mark.one_in(3)
@pytest.mark.parametrize("empty", [None, 0, 1])
def test_channels_that_nothing_reads_and_batches_without_samples(empty):
    """A channel with weights of zero is free to become as small as it likes."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 8)
    with torch.no_grad():
        layer.weight[:, 0] = 0
    data = [outliers(4, 256, 32, channels=1), outliers(4, 256, 32, channels=1)]
    if empty is not None:
        data.insert(empty + 1, torch.zeros(0, 256, 32))
    recipe = REFERENCE.without_pass("keep-small-values")
    smooth, plain = (
        fxq.quantize(nn.Sequential(layer).eval(), r, data=data) for r in (recipe, recipe.without_pass("smooth"))
    )
    assert smooth.output_sqnr > plain.output_sqnr + 10  # dB


def test_a_unit_of_which_a_layer_that_measures_runs_the_first_op_alone():
    """SiLU after it has no kernel for dynamic layers on x86: it runs in float, so that no unit is left in qdq form."""
    if why := unavailable("x86"):
        pytest.skip(why)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.SiLU()).eval(), torch.randn(64, 16, 32)
    x[:, 0] *= 20
    qmodel = fxq.quantize(model, fxq.Recipe.static(backend="x86", optimize="coverage"), data=list(x.split(8)))
    assert "choose_scale" in str(qmodel.history["smooth"])
    assert [entry.precision for entry in qmodel.ledger] == ["int8", "float"]
    assert "dequantize" not in str(qmodel.history["cleanup"])
    assert sqnr(model(x[:, 1:]), qmodel(x[:, 1:])) > 30  # dB


@pytest.mark.one_in(2)
@pytest.mark.parametrize("signed", [True, False])
def test_affine_weights_get_their_new_zero_points(signed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24)).eval()
    with torch.no_grad():
        model[0].weight[:, :2] /= 20
        model[0].weight += 0.05
    weight = fxq.TensorSpec(per="channel", observer="minmax", signed=signed)
    data, fresh = [outliers(64, 9, 16, size=20.0)], outliers(100, 16, size=20.0)
    recipe = fxq.Recipe.static(backend="reference", weight=weight).without_pass("correct-bias")
    plain, smooth = (fxq.quantize(model, r, data=data) for r in (recipe.without_pass("smooth"), recipe))
    assert smooth.history["smooth"].edits
    assert sqnr(model(fresh), smooth(fresh)) > sqnr(model(fresh), plain(fresh)) + 3  # dB


@pytest.mark.one_in(6)
@pytest.mark.parametrize("preset", ["static", "dynamic"])
@pytest.mark.parametrize("size", [1e-5, 1.0, 1e5])
def test_a_channel_that_no_sample_had_is_divided_like_the_others(preset, size):
    """By 1, it would be far too large or too small beside them, when it has a value at last."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)

    def drawn_tokens(unseen):
        x = outliers(32, 32, 64)
        x[..., 48:] *= unseen
        return size * x

    recipe = getattr(fxq.Recipe, preset)(backend="reference", optimize="coverage").without_pass("keep-small-values")
    model, data, fresh = nn.Sequential(layer).eval(), list(drawn_tokens(0).split(4)), drawn_tokens(0.02)
    plain, smooth = (fxq.quantize(model, r, data=data) for r in (recipe.without_pass("smooth"), recipe))
    assert sqnr(model(fresh), smooth(fresh)) > sqnr(model(fresh), plain(fresh)) + 4  # dB


@pytest.mark.one_in(6)
@pytest.mark.parametrize("preset", ["static", "dynamic"])
@pytest.mark.parametrize("first", [torch.zeros(0, 32, 16), torch.randn(1, 2, 16), torch.randn(1, 99, 16)], ids=len)
def test_the_first_batch_does_not_decide_how_many_tokens_there_are(preset, first):
    """Other batches are longer, or shorter: those that are shown are counted."""
    torch.manual_seed(0)
    recipe = getattr(fxq.Recipe, preset)(backend="reference", optimize="coverage").without_pass("keep-small-values")
    model = nn.Sequential(nn.Linear(16, 24)).eval()
    with torch.no_grad():
        model[0].weight[:, :2] /= 20
    for count, smoothed in ((16, True), (2, False)):
        data = [first, *(outliers(4, 16, 16) for _ in range(count))]  # 1024 and 128 of them
        assert bool(fxq.quantize(model, recipe, data=data).history["smooth"].edits) is smoothed
