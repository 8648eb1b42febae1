"""keep-small-values: layers that would read mostly zeros stay in float; what that is worth in numbers comes last."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.errors import PassError
from fxq.graph.info import info
from fxq.passes import KeepSmallValues
from tests.support.graphs import node, run_pass
from tests.support.helpers import REFERENCE, module, plain

S = "TensorSpec(observer='minmax')"
ROWS = "TensorSpec(symmetric=True, per='row', range='dynamic')"
GRID = "QParams(scale=1.0, zero_point=0, qmin=0, qmax=255, dtype=torch.uint8)"
INT8 = f"plan=Plan(Decision('int8'), reads={S})"
LAYER = f"""
    x: float32[4, 256] = input()  # edges=(Edge({S}, 0, True, qparams={GRID}),)
    w: float32[2, 256] = tensor('w')
    y: float32[4, 2] = linear(x, w)  # {INT8}
    return y
"""


def values(small, large=100.0, zeros=0):
    """(4, 256): so many of each row's values are 0.5, which a step of 1 makes zero; the others are large."""
    row = torch.tensor([0.5] * small + [0.0] * zeros + [large] * (256 - small - zeros))
    return row.expand(4, 256).clone()


def weight(small, large):
    """(2, 256): what the values of a row that are not large are multiplied with, and those that are."""
    return torch.where(values(192)[:2] < 1, small, large)


def needs(x):
    """(2, 256): the weight of a layer that looks at small values alone."""
    return (x.abs() < 1).any(0).float().expand(2, 256).clone()


def plan_after(program, x, w=None, recipe=REFERENCE, step=None):
    w = needs(x) if w is None else w
    gm = run_pass(step or KeepSmallValues(), program, {"w": w}, recipe=recipe, data=(x,))
    return info(node(gm, "y")).plan


def test_a_layer_that_would_read_mostly_zeros_is_float():
    plan = plan_after(LAYER, values(192))
    assert (plan.precision, plan.decision.kind, plan.decision.decided_by) == (
        "float",
        "off the grid",
        "keep-small-values",
    )
    assert plan.decision.text == (
        "in 8 bits, 75 % of its nonzero inputs would become zero, which leaves its result at 0.0 dB"
    )
    assert plan.decision.fix == 'recipe.without_pass("keep-small-values")'
    assert plan.exact and plan.reads is None


@pytest.mark.parametrize(
    ("x", "precision"),
    [
        (values(128), "int8"),  # half
        (values(129), "float"),
        (values(40, zeros=200), "float"),  # 40 of 56 that are not zero
        (values(20, zeros=200), "int8"),
        (torch.zeros(4, 256), "int8"),
        (-values(192), "float"),
        (values(192) + 0.01, "int8"),  # these round to 1
    ],
)
def test_more_than_half_of_what_is_not_zero(x, precision):
    assert plan_after(LAYER, x).precision == precision


@pytest.mark.parametrize(("large", "precision"), [(0.1, "float"), (0.2, "int8")])
def test_a_layer_that_does_without_them_stays_on_integers(large, precision):
    """192 · 0.5 of small values are a fifteenth of 64 · 100 · 0.2, and a seventh of half of that."""
    assert plan_after(LAYER, values(192), weight(1.0, large)).precision == precision


def test_half_of_the_rows_decide():
    """Two rows of tiny values are lost on one grid; in the two others, nothing is small."""
    large = torch.full((2, 256), 100.0)
    for quiet, precision in ((3, "float"), (1, "int8")):
        x = torch.cat([torch.full((quiet, 256), 0.1), large])[:4]
        assert plan_after(LAYER, x, torch.ones(2, 256), step=KeepSmallValues(most=0.2)).precision == precision


def test_shares_and_decibels_are_options():
    assert plan_after(LAYER, values(192), step=KeepSmallValues(most=0.8)).precision == "int8"
    assert plan_after(LAYER, values(192), step=KeepSmallValues(least=-1.0)).precision == "int8"


def test_each_row_has_its_own_step():
    """In rows whose largest value is 1, 0.5 is far from zero; where it is 1000, it is not."""
    grid = f"Edge({ROWS}, 0, True, axis=-1, qparams=DynamicGrid(0, 255, torch.uint8, -1))"
    program = LAYER.replace(f"Edge({S}, 0, True, qparams={GRID})", grid).replace(f"reads={S}", f"reads={ROWS}")
    fine, coarse = values(192, large=1.0), values(192, large=1000.0)
    recipe = fxq.Recipe.dynamic(backend="reference")
    assert plan_after(program, fine, recipe=recipe).precision == "int8"
    assert plan_after(program, torch.cat([fine[:3], coarse[:1]]), recipe=recipe).precision == "int8"
    assert plan_after(program, torch.cat([fine[:1], coarse[:3]]), recipe=recipe).precision == "float"


def test_what_moves_the_values_moves_floats():
    """Also: another layer that reads them; and what else does, stays on integers."""
    program = f"""
        x: float32[4, 256] = input()  # edges=(Edge({S}, 0, True, qparams={GRID}),)
        w: float32[2, 256] = tensor('w')
        v: float32[4, 256] = hardtanh(x, min_val=-1000.0, max_val=1000.0)  # edges=(Edge({S}, 0, False, \
qparams={GRID}),), plan=Plan(Decision('moves'), reads={S})
        a: float32[4, 2] = linear(v, w)  # {INT8}
        b: float32[4, 2] = linear(v, w)  # {INT8}
        s: float32[4, 256] = sigmoid(v)  # {INT8}
        return (a, b, s)
    """
    gm = run_pass(KeepSmallValues(), program, {"w": needs(values(192))}, data=(values(192),))
    plans = {name: info(node(gm, name)).plan for name in ("v", "a", "b", "s")}
    assert {name: plan.precision for name, plan in plans.items()} == {
        "v": "float",
        "a": "float",
        "b": "float",
        "s": "int8",
    }
    assert plans["v"].exact
    assert plans["v"].decision.text == "%a reads values of it that would mostly become zero in 8 bits"


def test_what_computes_the_values_reads_floats_up_to_the_layer_before():
    """A sum on integers would have lost them before the layer reads it."""
    program = f"""
        x: float32[4, 256] = input()  # edges=(Edge({S}, 0, True, qparams={GRID}),)
        w: float32[2, 256] = tensor('w')
        square: float32[256, 256] = tensor('square')
        before: float32[4, 256] = linear(x, square)  # edges=(Edge({S}, 1, True, qparams={GRID}),), {INT8}
        v: float32[4, 256] = add(before, before)  # edges=(Edge({S}, 2, True, qparams={GRID}),), {INT8}
        y: float32[4, 2] = linear(v, w)  # {INT8}
        return y
    """
    tensors = {"w": needs(values(192)), "square": torch.eye(256) / 4}
    gm = run_pass(KeepSmallValues(), program, tensors, data=(values(192) + 0.5,))  # 1, then half of it after the sum
    plans = {name: info(node(gm, name)).plan for name in ("before", "v", "y")}
    assert {name: plan.precision for name, plan in plans.items()} == {"before": "int8", "v": "float", "y": "float"}
    assert plans["v"].exact


def test_only_layers_are_looked_at():
    """A sum of small and large values loses little to a step of the large ones."""
    program = LAYER.replace("float32[4, 2] = linear(x, w)", "float32[4, 256] = add(x, x)")
    assert plan_after(program, values(192)).precision == "int8"


def test_of_the_few_integers_of_a_coarse_grid_many_are_zero():
    coarse = LAYER.replace(S, "TensorSpec(bits=5, observer='minmax')").replace("255", "31")
    assert plan_after(coarse, values(192)).precision == "int8"
    assert plan_after(coarse.replace("bits=5", "bits=6"), values(192)).precision == "float"


def test_the_layer_of_a_unit_that_reads_its_residual_later():
    """A value that is added after the layer may be mostly zeros."""

    def forward(self, x, y):
        return F.relu(self.conv(x) + y)

    torch.manual_seed(0)
    model = module(forward, conv=nn.Conv2d(4, 4, 1, bias=False))
    x, small = torch.randn(1, 4, 8, 8), 1e-5 * torch.randn(1, 4, 8, 8)
    small[0, 0, 0, 0] = 1.0
    for inputs, precision in (((x, small), "int8"), ((small, small), "float")):
        ledger = fxq.quantize(model, QUIET, data=[inputs]).ledger
        assert ledger.where(op="conv2d")[0].precision == precision


# ---- whole networks

QUIET = REFERENCE.with_min_sqnr(None)


def powers(*shape, seed=0):
    """Like those of a spectrum: in each band of the last axis, others are a thousand times as large."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).exp()
    return drawn * torch.logspace(-4, 1, shape[-1]) ** 2


class OfPowers(nn.Module):
    """A network that looks at all bands of a spectrum, as one that was trained does: small values, large weights."""

    def __init__(self, recurrent):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.LSTM(40, 32, batch_first=True) if recurrent else nn.Linear(40, 32)
        self.last = nn.Linear(32, 8)
        weight = self.first.weight_ih_l0 if recurrent else self.first.weight
        with torch.no_grad():
            weight /= powers(1000, 40).mean(0)

    def forward(self, x):
        x = self.first(x)
        return self.last(torch.tanh(x[0] if isinstance(x, tuple) else x))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("backend", ["reference", "x86"])
@pytest.mark.parametrize("preset", ["static", "dynamic"])
@pytest.mark.parametrize("recurrent", [False, True])
def test_a_network_of_powers(recurrent, preset, backend):
    """The first layer reads floats, also after a transpose; without the pass, over half of the signal is lost."""
    model, data = OfPowers(recurrent).eval(), [powers(2, 20, 40, seed=i) for i in range(4)]
    recipe = plain(getattr(fxq.Recipe, preset)(backend=backend, optimize="coverage").with_min_sqnr(None))
    qmodel = fxq.quantize(model, recipe, data=data)
    without = fxq.quantize(model, recipe.without_pass("keep-small-values"), data=data)
    assert [e.precision for e in qmodel.ledger.where(op=("linear", "lstm"))] == ["float", "int8"]
    assert qmodel.output_sqnr > 30 and without.output_sqnr < 6


def test_nothing_runs_where_the_histograms_show_that_few_values_are_lost(monkeypatch):
    """A relu leaves many exact zeros, which do not count."""

    def run(self):
        raise AssertionError("the graph ran")

    monkeypatch.setattr("fxq.passes.keep_small_values._Trial.run", run)
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(40, 32), nn.ReLU(), nn.Linear(32, 8)).eval(), [torch.randn(64, 40)]
    assert fxq.quantize(model, QUIET, data=data).ledger.count("int8") == 3
    with pytest.raises(PassError, match="the graph ran"):
        fxq.quantize(OfPowers(False).eval(), QUIET, data=[powers(4, 20, 40)])
    with pytest.raises(PassError, match="the graph ran"):  # this observer counts nothing
        activation = fxq.TensorSpec(observer="minmax")
        fxq.quantize(model, fxq.Recipe.static(backend="reference", activation=activation), data=data)


def test_histograms_do_not_tell_of_constants_and_of_parts_of_values():
    """Masked rows hold a small constant; and what a smaller picture keeps may be the small values."""
    torch.manual_seed(0)
    mask = torch.arange(64)[:, None] % 4 > 0
    masked = module(lambda self, x: self.fc(x.masked_fill(mask, 0.05)), fc=nn.Linear(40, 8))
    x = 100 * torch.randn(64, 40)
    assert fxq.quantize(masked, QUIET, data=[x]).ledger.where(op="linear")[0].precision == "float"

    def forward(self, x):
        sizes = torch.tensor([0.001, 1.0, 1.0, 1.0]).view(4, 1, 1)
        shuffled = F.pixel_shuffle(self.first(x) * sizes, 2)
        return self.last(F.interpolate(shuffled, scale_factor=0.5))

    smaller = module(forward, first=nn.Conv2d(3, 4, 1), last=nn.Conv2d(1, 4, 1, bias=False))
    ledger = fxq.quantize(smaller, QUIET, data=[torch.randn(8, 3, 8, 8)]).ledger
    assert ledger.where(op="conv2d")[1].precision == "float"


def test_dynamic_looks_at_the_example():
    model = OfPowers(False).eval()
    recipe = fxq.Recipe.dynamic(backend="reference", optimize="coverage").with_min_sqnr(None)
    kept = fxq.quantize(model, recipe, example_inputs=powers(1, 20, 40)).ledger
    assert [(e.path, e.precision) for e in kept.where(op="linear")] == [("first", "float"), ("last", "int8")]
    normal = fxq.quantize(model, recipe, example_inputs=torch.randn(1, 20, 40)).ledger
    assert {e.precision for e in normal.where(op="linear")} == {"int8"}


def test_what_was_decided_holds_on_other_data():
    """A recipe of decisions gives the same graph, also where it sees nothing that is small."""
    model = OfPowers(False).eval()
    recipe = fxq.Recipe.dynamic(backend="reference").with_min_sqnr(None)
    first = fxq.quantize(model, recipe, example_inputs=powers(1, 20, 40))
    again = fxq.quantize(model, first.recipe_as_decided(), example_inputs=torch.randn(1, 20, 40))
    assert [(e.path, e.precision) for e in again.ledger] == [(e.path, e.precision) for e in first.ledger]


def test_a_gate_that_is_closed_lets_through_nothing_of_use():
    """Most of what it gives is far below a step, and nothing is lost with it."""

    def forward(self, x):
        return self.last(torch.sigmoid(20 * x - 25))

    torch.manual_seed(0)
    ledger = fxq.quantize(module(forward, last=nn.Linear(64, 8)), REFERENCE, data=[torch.randn(64, 64)]).ledger
    assert ledger.where(op="linear")[0].precision == "int8"


@pytest.mark.one_in(8)
@pytest.mark.parametrize("function", [F.relu, F.gelu, F.silu, F.mish, torch.sigmoid, F.elu, F.hardswish, torch.tanh])
@pytest.mark.parametrize("preset", ["static", "dynamic"])
def test_what_activation_functions_leave_is_not_small(preset, function):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)).eval()
    layers = module(lambda self, x: self.m[1](function(self.m[0](x))), m=model)
    recipe = getattr(fxq.Recipe, preset)(backend="reference", optimize="coverage")
    ledger = fxq.quantize(layers, recipe, data=[10 * torch.randn(8, 32)]).ledger
    assert {e.precision for e in ledger.where(op="linear")} == {"int8"}


def test_samples_that_the_model_does_not_run_on():
    """Recorded are the first samples; a graph that is made for the size of its batch runs on the example instead."""
    model = module(lambda self, x: self.fc(x.reshape(6, 40)), fc=OfPowers(False).first)
    ledger = fxq.quantize(model, QUIET, data=[powers(6, 40)]).ledger
    assert ledger.where(op="linear")[0].decided_by == "keep-small-values"
