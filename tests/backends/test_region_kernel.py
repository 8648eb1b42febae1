"""Engines that run whole regions: every use of a model, with the engine of `tests/support/extensions.py`."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.qdq_form import FallbackKernel
from fxq.common.metrics import sqnr
from fxq.graph.grid import grid_of
from fxq.graph.info import info
from fxq.graph.query import submodule
from tests.support import extensions as own
from tests.support.graphs import equal, expected, kinds, text, until
from tests.support.helpers import plain
from tests.support.machine import quiet, told
from tests.support.models import NETWORKS, batch, build, call

ENGINE = fxq.Recipe.static(backend=own.Engine, optimize="coverage").with_min_sqnr(None)
REFERENCE = ENGINE.with_backend("reference")
pytestmark = pytest.mark.any_cpu


class Net(nn.Module):
    """Model of two regions around an erf. They exchange floats and, through a transpose, integers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.d = nn.Conv2d(8, 8, 1), nn.Linear(8, 4)

    def forward(self, x):
        y = torch.relu(self.a(x))
        z = torch.erf(self.b(y))
        return self.d((self.c(y.transpose(2, 3)) + z).mean((2, 3))), y


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval(), torch.randn(4, 3, 8, 8)


def quantized(net, recipe=ENGINE):
    model, x = net
    with quiet():
        return fxq.quantize(model, recipe, data=[x])


def engine_kernels(gm):
    return [n for n in gm.graph.nodes if isinstance(submodule(gm, n), own.WholeRegion)]


def test_text_of_regions_of_several_inputs_and_outputs(net):
    manager = until(*net, "lower", ENGINE)
    assert text(manager.gm) == expected("""
        x = input
        a_relu_to_b = tests.region(x) {3 ops}
        a_relu_q = getitem(a_relu_to_b, 0)
        a_relu_dq = getitem(a_relu_to_b, 1)
        b = getitem(a_relu_to_b, 2)
        erf = erf(b)
        transpose = transpose(a_relu_q, dim0=2, dim1=3)
        c_add_to_d = tests.region(erf, transpose) {4 ops}
        return (c_add_to_d, a_relu_dq)
    """)
    types = {n.name: info(n).dtype for n in manager.gm.graph.nodes}
    assert (types["a_relu_q"], types["transpose"], types["b"]) == (torch.uint8, torch.uint8, torch.float32)
    before = until(*net, "fallback", ENGINE).gm
    grids = [next(grid_of(gm, n) for n in gm.graph.nodes if n.name == "transpose") for gm in (before, manager.gm)]
    assert grids[0].same_as(grids[1])


def test_an_engine_computes_what_the_qdq_graph_does(net):
    qmodel, x = quantized(net), net[1]
    assert kinds(qmodel).count("tests.region") == 2 and not qmodel.history["verify-lowering"].edits
    right = quantized(net, REFERENCE)(x)
    for _ in range(3):  # as it stands, then bound to the kind of its inputs
        assert equal(qmodel(x), right)
    assert equal(qmodel(x[:1]), quantized(net, REFERENCE)(x[:1]))
    for copied in (copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel))):
        assert equal(copied(x), right) and equal(copied(x), right)


@pytest.mark.one_in(15)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_run_in_regions(name):
    model, x = build(name), batch(name)
    with quiet():
        qmodel, right = (fxq.quantize(model, recipe, data=[x]) for recipe in (ENGINE, REFERENCE))
    assert len(engine_kernels(qmodel)) == {"sequence": 2}.get(name, 1)
    assert not qmodel.history["verify-lowering"].edits
    assert sqnr(call(right, x), call(qmodel, x)) > 100  # the same ops in another order of memory
    assert [(e.name, e.precision) for e in qmodel.ledger] == [(e.name, e.precision) for e in right.ledger]


def test_the_ledger_has_every_op_of_a_region_with_its_own_decision(net):
    qmodel = quantized(net)
    assert [(e.name, e.precision, e.into) for e in qmodel.ledger] == [
        ("a", "int8", "a_relu_to_b"),
        ("relu", "int8", "a_relu_q"),
        ("b", "int8", "b"),
        ("erf", "float", "erf"),
        ("transpose", "moves", "transpose"),
        ("c", "int8", "c_add_to_d"),
        ("add", "int8", "c_add_to_d"),
        ("mean", "int8", "c_add_to_d"),
        ("d", "int8", "c_add_to_d"),
    ]
    assert qmodel.ledger.where(precision="float").entries[0].reason == "erf has no integer form"
    reference = {e.name: e.sqnr for e in quantized(net, REFERENCE).ledger}
    seen = {e.name: e.sqnr for e in qmodel.ledger if e.sqnr is not None}
    assert seen == pytest.approx({name: reference[name] for name in ("relu", "b", "erf", "transpose", "d")})
    assert {path: (q.node, tuple(q.weight.shape)) for path, q in qmodel.qparams().items()} == {
        "a": ("a_relu_to_b", (8, 3, 3, 3)),
        "b": ("a_relu_to_b", (8, 8, 3, 3)),
        "c": ("c_add_to_d", (8, 8, 1, 1)),
        "d": ("c_add_to_d", (4, 8)),
    }


@pytest.mark.slow
def test_reports_pictures_and_comparisons(net, tmp_path):
    qmodel, (model, x) = quantized(net), net
    page = qmodel.report(tmp_path / "r.html").read_text(encoding="utf-8")
    assert "tests.region" in page and "a_relu_to_b" in page
    drawn = qmodel.history["lower"].render(tmp_path / "g.dot").read_text(encoding="utf-8")
    assert "tests.region" in drawn and "a_relu_to_b" in drawn
    changes = fxq.diff(qmodel.history["fallback"], qmodel.history["lower"])
    assert "tests.region" in changes.render(tmp_path / "d.dot").read_text(encoding="utf-8")
    rows = {row.name: row.sqnr for row in fxq.compare(model, qmodel, [x])}
    assert rows.keys() == {"relu", "b", "erf", "transpose", "d"} and min(rows.values()) > 25


def test_what_is_built_of_a_region_is_built_again_and_never_copied(net, monkeypatch):
    built = []
    build = own.WholeRegion.build
    monkeypatch.setattr(own.WholeRegion, "build", lambda self, form: built.append(self) or build(self, form))
    qmodel, x = quantized(net), net[1]
    kernel = submodule(qmodel, engine_kernels(qmodel)[0])
    before, _ = qmodel(x), built.clear()
    assert equal(qmodel(x), before) and not built
    unpickled = pickle.loads(pickle.dumps(qmodel))
    assert equal(unpickled(x), before) and len(built) == 2
    with torch.no_grad():
        kernel.flat_int8.zero_()
    assert not equal(qmodel(x), before) and built[2:] == [kernel]
    qmodel.load_state_dict(unpickled.state_dict())
    assert equal(qmodel(x), before)


@pytest.mark.slow
def test_on_another_machine_a_region_runs_in_qdq_form_where_it_is_wrong(net, monkeypatch):
    qmodel, x = quantized(net), net[1]
    right, data = qmodel(x), pickle.dumps(qmodel)
    monkeypatch.setattr("fxq.backends.cpu.machine", lambda: {"cpu": "another"})
    assert not any(isinstance(m, FallbackKernel) for m in pickle.loads(data).modules())
    monkeypatch.setattr(own.WholeRegion, "build", lambda self, form: lambda *xs: wrong(form(*xs)))
    with pytest.warns(fxq.FxqWarning, match="2 of its 2 kernels are wrong on this machine"):
        there = pickle.loads(data)
    assert sum(isinstance(m, FallbackKernel) for m in there.modules()) == 2 and equal(there(x), right)


class InPlace(nn.Module):
    """A value is changed in place after one layer has read it and before another layer reads it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(3, 3, 1) for _ in range(3))

    def forward(self, x):
        y = torch.relu(self.a(x))
        z = self.b(y)
        y.index_fill_(1, torch.tensor([0]), 0.5)
        return self.c(torch.relu(y)) + z


@pytest.mark.filterwarnings("ignore:nothing runs on integers:fxq.FxqWarning")
def test_constants_in_bfloat16():
    """bfloat16 is also the name of a method of modules."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval().bfloat16()
    x = torch.randn(4, 8).bfloat16()
    q = fxq.quantize(model, ENGINE, data=[x])
    assert engine_kernels(q) and torch.equal(q(x), model(x))


def test_what_is_changed_in_place_stays_outside():
    torch.manual_seed(0)
    net = InPlace().eval(), torch.randn(2, 3, 4, 4)
    qmodel, right = quantized(net), quantized(net, REFERENCE)
    assert equal(qmodel(net[1]), right(net[1]))
    assert qmodel.output_sqnr > 30 and engine_kernels(qmodel)


def test_the_text_of_a_graph_says_what_its_regions_compute(net):
    gm = until(*net, "lower", plain(ENGINE)).gm
    written = fxq.extend.write_graph(gm)
    again = fxq.extend.read_graph(written, fxq.extend.graph_tensors(gm))
    assert fxq.extend.write_graph(again) == written and equal(again(net[1]), gm(net[1]))
    assert fxq.extend.write_graph(
        fxq.extend.read_graph(fxq.extend.write_graph(gm, facts=False), fxq.extend.graph_tensors(gm)), facts=False
    )
    lines = [line.partition("  # ")[0] for line in written.splitlines()]
    first = lines.index("def c_add_to_d():")
    shown = [re.sub(r"=[-\d.]+", "=.", line) for line in lines[first : lines.index("", first)]]
    grid = "scale=., zero_point=."
    assert [line for line in shown if not line.lstrip().startswith(("c_weight", "d_weight"))] == [
        "def c_add_to_d():",
        "    erf: float32[4, 8, 8, 8] = input()",
        "    transpose: uint8[4, 8, 8, 8] = input()",
        f"    erf_q: uint8[4, 8, 8, 8] = quantize(erf, {grid})",
        f"    erf_dq: float32[4, 8, 8, 8] = dequantize(erf_q, {grid})",
        f"    transpose_dq: float32[4, 8, 8, 8] = dequantize(transpose, {grid})",
        "    c_bias: float32[8] = tensor('fxq_kernels.c_add_to_d.bias')",
        "    c_add: float32[4, 8, 8, 8] = conv2d_add(transpose_dq, c_weight_dq, c_bias, erf_dq)",
        f"    c_add_q: uint8[4, 8, 8, 8] = quantize(c_add, {grid})",
        f"    c_add_dq: float32[4, 8, 8, 8] = dequantize(c_add_q, {grid})",
        "    mean: float32[4, 8] = mean(c_add_dq, dim=(2, 3))",
        f"    mean_q: uint8[4, 8] = quantize(mean, {grid})",
        f"    mean_dq: float32[4, 8] = dequantize(mean_q, {grid})",
        "    d_bias: float32[4] = tensor('fxq_kernels.c_add_to_d.bias_7')",
        "    d: float32[4, 4] = linear(mean_dq, d_weight_dq, d_bias)",
        "    return d",
    ]


def test_the_kernel_of_a_region_without_one_says_so():
    with pytest.raises(fxq.BackendError, match=r"tests\.region: the kernel has no q/dq form"):
        own.WholeRegion()(torch.ones(1))


# ---- prices


def test_an_engine_says_itself_what_its_ops_cost(net, monkeypatch):
    """Nothing is timed. Ops that are slower on integers run in float; each op of a region has its own price."""
    monkeypatch.setattr("fxq.cost.cache.measure", None)
    monkeypatch.setattr("fxq.passes.fallback.quickest", lambda gm, context, changes: 1)
    qmodel = quantized(net, ENGINE.with_backend(own.PricedEngine).with_optimize("speed"))
    assert {e.name: (e.precision, e.float_us, e.int8_us) for e in qmodel.ledger if e.float_us} == {
        "a": ("int8", 10.0, pytest.approx(1.0)),
        "b": ("int8", 10.0, pytest.approx(1.0)),
        "c": ("int8", 10.0, pytest.approx(1.0)),
        "erf": ("float", 10.0, None),
        "transpose": ("float", 10.0, pytest.approx(30.0)),
        "mean": ("float", 10.0, pytest.approx(30.0)),
        "d": ("float", 10.0, pytest.approx(30.0)),
    }


def test_what_prices_say_is_tried_against_all_and_against_nothing_on_integers(net, monkeypatch):
    """A region that is faster on integers as a whole stays there, whatever the prices of its ops."""
    asked = []

    def quickest(gm, context, changes):
        asked.append(len(changes))
        return 0

    monkeypatch.setattr("fxq.passes.fallback.quickest", quickest)
    qmodel = quantized(net, ENGINE.with_backend(own.PricedEngine).with_optimize("speed"))
    assert asked == [3] and qmodel.ledger.where(name="d")[0].precision == "int8"


class EvenEngine(own.PricedEngine):
    """Engine whose ops all cost 1 s on integers, and `float_us` in float."""

    name = "even_engine"
    float_us = 10.0

    def prices(self, gm, example):
        prices = super().prices(gm, example)
        return fxq.extend.Prices({node: fxq.extend.Cost(self.float_us, 1.0) for node in prices.ops}, 0.0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("float_us", "timed"), [(10.0, []), (1.5, [2])])
def test_equal_and_clearly_slower_choices_are_not_timed(net, monkeypatch, float_us, timed):
    """The choice by prices is all on integers. All in float is timed against it only if it is not twice as slow."""
    asked = []

    def quickest(gm, context, changes):
        asked.append(len(changes))
        return 0

    monkeypatch.setattr("fxq.passes.fallback.quickest", quickest)
    monkeypatch.setattr(EvenEngine, "float_us", float_us)
    qmodel = quantized(net, ENGINE.with_backend(EvenEngine).with_optimize("speed"))
    assert asked == timed and qmodel.ledger.where(name="d")[0].precision == "int8"


class SplitEngine(own.PricedEngine):
    """Engine that runs a unit with an activation function whole or only its layer, and has priced the whole."""

    name = "split_engine"
    fewer = 1

    def supports(self, gm, node, calls, config):
        return fxq.extend.Support(len(calls), "either way", self.fewer) if len(calls) > 1 else fxq.extend.Support(1)


def test_an_engine_s_prices_are_asked_before_its_units_are_opened(net, monkeypatch):
    """Nothing is timed to choose between two kernels."""
    monkeypatch.setattr("fxq.cost.cache.measure", None)
    monkeypatch.setattr("fxq.passes.fallback.quickest", lambda gm, context, changes: 1)
    qmodel = quantized(net, ENGINE.with_backend(SplitEngine).with_optimize("speed"))
    entries = {e.name: (e.precision, e.float_us, e.int8_us) for e in qmodel.ledger}
    assert entries["a"] == ("int8", 10.0, pytest.approx(1.0)) and entries["relu"] == ("int8", None, None)
    assert entries["d"] == ("float", 10.0, pytest.approx(30.0))


class Sum(nn.Module):
    """No op reads integers of the sum: its unit with a layer is opened."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x):
        y = self.a(x)
        return self.b(y) + y


@pytest.mark.one_in(2)
@pytest.mark.parametrize("optimize", ["speed", "coverage"])
def test_an_engine_prices_what_is_left_of_opened_units(monkeypatch, optimize):
    monkeypatch.setattr("fxq.cost.cache.measure", None)
    monkeypatch.setattr("fxq.passes.fallback.quickest", lambda gm, context, changes: 0)  # whole graphs are not timed
    net = Sum().eval(), torch.randn(2, 3, 4, 4)
    qmodel = quantized(net, ENGINE.with_backend(own.PricedEngine).with_optimize(optimize))
    real, int8 = (10.0, pytest.approx(1.0)) if optimize == "speed" else (None, None)  # coverage asks for no prices
    assert [(e.name, e.precision, e.float_us, e.int8_us) for e in qmodel.ledger] == [
        ("a", "int8", real, int8),
        ("b", "int8", real, int8),
        ("add", "float", real, None),
    ]


def test_coverage_asks_an_engine_for_no_prices(net, monkeypatch):
    """Run everything on integers that can, whatever its price."""
    monkeypatch.setattr(own.PricedEngine, "prices", None)
    qmodel = quantized(net, ENGINE.with_backend(own.PricedEngine))
    assert all(e.float_us is None for e in qmodel.ledger) and any(e.precision == "int8" for e in qmodel.ledger)


# ---- wrong ones


def wrong(results):
    """Return the outputs with every fourth element of the first one wrong."""
    first, *rest = results if isinstance(results, tuple) else (results,)
    first = first.clone(memory_format=torch.contiguous_format)
    first.view(-1)[::4] += 30 if first.dtype == torch.uint8 else 1.0
    return (first, *rest) if rest else first


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (wrong, r"%a_relu_q, its output 0: off by up to [\d.]+ steps"),
        (lambda y: (*y[:2], y[2] * 1.05) if isinstance(y, tuple) else y, "%b, its output 2: off by"),
        (lambda y: y[0] if isinstance(y, tuple) else y, "it returns Tensor instead of a tuple of 3"),
        (lambda y: (y[1], *y[1:]) if isinstance(y, tuple) else y, "it returns torch.float32"),
        (lambda y: y / 0 if isinstance(y, tuple) else y, "it raised TypeError"),
    ],
)
def test_a_wrong_region_is_put_back(net, monkeypatch, change, why):
    build = own.WholeRegion.build
    monkeypatch.setattr(own.WholeRegion, "build", lambda self, form: lambda *xs: change(build(self, form)(*xs)))
    model, x = net
    with pytest.warns(fxq.FxqWarning, match=f"the tests.region kernel is wrong on this machine: .*{why}") as caught:
        qmodel = fxq.quantize(model, ENGINE, data=[x])
    both = change is wrong
    assert len([said for said in told(caught) if "kernel is wrong" in said]) == 1 + both
    assert [n.name for n in engine_kernels(qmodel)] == ([] if both else ["c_add_to_d"])
    assert equal(qmodel(x), quantized(net, REFERENCE)(x))
    unverified = {e.name for e in qmodel.ledger.where(kind="unverified")}
    assert unverified == {"a", "relu", "b"} | ({"c", "add", "mean", "d"} if both else set())
    before = [line for line in text(qmodel.history["fallback"].graph).splitlines() if line.startswith(("a_", "b ="))]
    after = text(qmodel.history["verify-lowering"].graph).splitlines()
    assert [line for line in before if not line.startswith("a_relu_dq")] and set(before) <= set(after)


def inside(change):
    """`build` method of a region that changes options of its inner quantizes."""

    def build(self, form):
        *_, last = form.graph.nodes
        for node in form.graph.nodes:
            if getattr(node.target, "__name__", "") == "quantize" and last not in node.users:
                node.kwargs = {**node.kwargs, **change(node.kwargs)}
        form.recompile()
        return form

    return build


@pytest.mark.slow
def test_rounding_on_the_way_is_no_error(net, monkeypatch):
    """Some values inside of the region are rounded to the other side of a tie, and later values differ by it."""
    monkeypatch.setattr(own.WholeRegion, "build", inside(lambda grid: {"scale": grid["scale"] * (1 - 3e-5)}))
    qmodel = quantized(net)
    assert not qmodel.history["verify-lowering"].edits
    assert not equal(qmodel(net[1]), quantized(net, REFERENCE)(net[1]))


def test_verify_tells_rounding_on_the_way_from_a_step_too_much(net, monkeypatch):
    data = pickle.dumps(quantized(net))
    monkeypatch.setattr(own.WholeRegion, "build", inside(lambda grid: {"scale": grid["scale"] * (1 - 3e-5)}))
    pickle.loads(data).verify()
    monkeypatch.setattr(own.WholeRegion, "build", inside(lambda grid: {"zero_point": grid["zero_point"] + 1}))
    with pytest.raises(fxq.FxqError, match=r"kernels are wrong on this machine: .*it is off by"):
        pickle.loads(data).verify()


def test_verify_has_the_tolerances_of_the_recipe(net, monkeypatch):
    monkeypatch.setattr(own.WholeRegion, "build", lambda self, form: lambda *xs: wrong(form(*xs)))
    tolerant = fxq.passes.VerifyLowering(tolerance=300.0, float_tolerance=1e3)
    fxq.quantize(
        net[0], ENGINE.without_pass("verify-lowering").insert_pass(tolerant, after="lower"), data=[net[1]]
    ).verify()
    with pytest.raises(fxq.FxqError, match="kernels are wrong on this machine"):
        monkeypatch.undo()
        kept = pickle.dumps(quantized(net))
        monkeypatch.setattr(own.WholeRegion, "build", lambda self, form: lambda *xs: wrong(form(*xs)))
        pickle.loads(kept).verify()


def test_a_step_too_much_on_the_way_is_an_error(net, monkeypatch):
    monkeypatch.setattr(own.WholeRegion, "build", inside(lambda grid: {"zero_point": grid["zero_point"] + 1}))
    with pytest.warns(fxq.FxqWarning, match="the tests.region kernel is wrong on this machine: .*off by"):
        qmodel = fxq.quantize(net[0], ENGINE, data=[net[1]])
    assert not engine_kernels(qmodel)
