"""The ledger: every op once, with a precision that is true and a recipe line that changes it."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxq
from fxq.cost import cache as costs
from fxq.ledger.ledger import Entry, Ledger
from tests.support.helpers import REFERENCE, steps

# ---- what became of every op
# ---- the lines that change it
from tests.support.ledgers import QUICK, RECIPES, SOME, X, net, pasted
from tests.support.machine import X86, needs_x86
from tests.support.models import NETWORKS, batch, build


def changed(model, recipe, data, entry):
    """The entry of the same op once the line is in the recipe."""
    ledger = fxq.quantize(model, pasted(entry.fix, recipe), data=[data]).ledger
    return next(e for e in ledger if e.name == entry.name)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_line_changes_its_op(name, recipe):
    model, data = build(name), batch(name)
    ledger = fxq.quantize(model, recipe, data=[data]).ledger
    assert all(e.fix for e in ledger.where(precision=("int8", "moves")))
    lines = {e.fix: e for e in ledger if e.fix}
    for entry in lines.values():
        now = changed(model, recipe, data, entry)
        assert (
            now.precision == "float" if entry.precision in ("int8", "moves") else now.precision in ("int8", "moves")
        ), entry


@pytest.mark.one_in(12)
@pytest.mark.parametrize("selector", ["stem", "block", "block.*", "*", fxq.by_op("relu"), nn.Linear])
@pytest.mark.parametrize("recipe", RECIPES)
def test_lines_that_undo_an_override(recipe, selector):
    recipe = recipe.override(selector, fxq.FLOAT)
    excluded = [e for e in fxq.quantize(net(), recipe, data=[X]).ledger if e.kind == "excluded by the recipe"]
    assert any(e.fix for e in excluded)
    for entry in excluded:
        if entry.fix:
            assert changed(net(), recipe, X, entry).precision in ("int8", "moves"), entry


@needs_x86
def test_the_line_for_what_only_another_backend_runs():
    recipe = fxq.Recipe.static(backend="x86", activation=fxq.TensorSpec(signed=True, symmetric=True))
    with pytest.warns(fxq.FxqWarning, match="nothing runs on integers"):
        entry = fxq.quantize(net(), recipe, data=[X]).ledger[0]
    assert entry.precision == "float" and "x86 kernels take unsigned" in entry.reason
    assert entry.fix == 'recipe.with_backend("reference")'
    assert changed(net(), recipe, X, entry).precision == "int8"


def test_a_line_for_a_function_takes_nothing_else_along():
    entry = fxq.quantize(net(), REFERENCE, data=[X]).ledger.where(op="add")[0]
    assert entry.fix == "recipe.override(fxq.by_op('add', 'block'), fxq.FLOAT)"
    ledger = fxq.quantize(net(), pasted(entry.fix, REFERENCE), data=[X]).ledger
    assert {e.op for e in ledger.where(precision="float")} == {
        "add",
        "relu",
        "mean",
        "erf",
    }  # relu and mean read float now


# ---- numbers


@needs_x86
def test_the_cost_of_a_unit_stands_in_the_row_of_its_first_op():
    ledger = fxq.quantize(net(), X86, data=[X]).ledger
    measured = [e for e in ledger if e.float_us is not None]
    assert [e.op for e in measured] == ["conv2d", "conv2d", "conv2d", "mean", "linear", "erf"]
    assert {(e.float_us, e.int8_us) for e in measured[:-1]} == {(1e6, 0.0)}  # the prices of the tests, see conftest.py
    assert (measured[-1].float_us, measured[-1].int8_us) == (1e6, None)
    assert all(e.int8_us is None for e in fxq.quantize(net(), REFERENCE, data=[X]).ledger)


@needs_x86
def test_what_is_not_worth_it_says_so(monkeypatch):
    """Where kernels cost more than float, coverage takes them all the same."""

    class Dear(costs.Costs):
        def __contains__(self, key):
            return True

        def seconds(self, key, prepare, cold=False):
            return 0.0 if key.startswith("float") else 1.0

    monkeypatch.setattr(costs, "machine_costs", Dear)
    with pytest.warns(fxq.FxqWarning, match="nothing runs on integers"):
        ledger = fxq.quantize(net(), X86, data=[X]).ledger
    assert ledger.coverage == 0.0
    layers = ledger.where(fix='recipe.with_optimize("coverage")')
    assert {"conv2d", "linear"} <= {e.op for e in layers}
    assert all(e.reason.startswith("float is faster") for e in layers)
    for entry in layers:
        assert changed(net(), X86, X, entry).precision == "int8"


@pytest.mark.one_in(2)
def test_a_copy_keeps_the_numbers(ledger):
    qmodel = fxq.quantize(net(), REFERENCE, data=[X])
    for duplicate in (copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel))):
        assert duplicate.ledger == qmodel.ledger and duplicate.ledger[0].sqnr is not None
    assert pickle.loads(pickle.dumps(ledger)) == ledger


@pytest.mark.slow
def test_the_float_model_is_let_go():
    import gc
    import weakref

    model = net()
    gone = [weakref.ref(model.stem.weight), weakref.ref(model)]
    qmodel = fxq.quantize(model, REFERENCE, data=[X])
    del model
    gc.collect()
    assert qmodel.ledger[0].sqnr and [ref() for ref in gone] == [None, None]


# ---- asking


def test_coverage():
    assert SOME.coverage == 0.9
    assert SOME.where(precision="float").coverage == 0.0
    assert Ledger(()).coverage == 0.0


def test_the_main_reason_weighs_by_the_arithmetic():
    small = [Entry(n, n, "linear", "float", reason="float is faster", macs=1) for n in "ab"]
    large = Entry("l", "l", "lstm", "float", reason="lstm has no integer form", macs=9998)
    assert Ledger((*small, large)).main_reason() == (
        "1 of 3 ops, with 99.98% of the multiply-accumulates, stay in float because: lstm has no integer form"
    )
    most = Ledger((*small, Entry("c", "c", "conv2d", "int8", macs=2))).main_reason()
    assert most == "2 of 3 ops, with 50.00% of the multiply-accumulates, stay in float because: float is faster"
    none = [Entry(n, n, "erf", "float", reason="erf has no integer form") for n in "ab"]
    assert Ledger(tuple(none)).main_reason() == "2 of 2 ops stay in float because: erf has no integer form"
    assert Ledger(()).main_reason() == "no op of the model has an integer form"


def test_a_recurrent_layer_is_the_main_reason():
    model = nn.Sequential(nn.LSTM(16, 256, batch_first=True)).eval()
    with pytest.warns(fxq.FxqWarning, match="8 of 8 ops, with 100% of the multiply-accumulates.*says float for LSTM"):
        fxq.quantize(model, REFERENCE.override(nn.LSTM, fxq.FLOAT), data=[torch.randn(2, 5, 16)])


def test_text_says_what_conversions_cost():
    slow = Entry("a", "a", "linear", "float", "a", "its conversions", float_us=1010, int8_us=163, conversions_us=900)
    assert "its conversions (kernel 163 µs, conversions 900 µs; float 1010 µs)" in str(Ledger((slow,)))
    for changes in ({"int8_us": 2000}, {"conversions_us": 0.5}, {"conversions_us": None}, {"precision": "int8"}):
        assert "(kernel" not in str(Ledger((replace(slow, **changes),)))


def test_text():
    assert str(SOME) == (
        "layer        op       runs as      SQNR dB    own dB    MACs    float µs    int8 µs  why\n"
        "-----------  -------  ---------  ---------  --------  ------  ----------  ---------"
        "  --------------------------------------------------\n"
        "layer1.conv  conv2d   int8                               900\n"
        "layer1.relu  relu     int8            30.5      41.2                12.0        4.2\n"
        "layer2.silu  silu     float          exact                                           "
        "silu has no integer form\n"
        "drop         dropout  folded                                                         "
        "has no effect on the output\n"
        "head         linear   float            9.0               100                         "
        "the recipe says float [recipe.override('head', 8)]\n"
        "2 int8, 0 moves, 2 float, 1 folded; 90.0% of the multiply-accumulates in int8"
    )


def test_a_remedy_that_ops_share_is_a_note():
    fix = 'recipe.with_optimize("coverage")'
    slow = [Entry(n, n, "conv2d", "float", n, "float is faster", fix) for n in "ab"]
    lines = str(Ledger((*slow, Entry("c", "c", "linear", "float", "c", "the recipe says so", "recipe.x")))).splitlines()
    assert [line.partition("float      ")[2] for line in lines[2:5]] == [
        "float is faster [1]",
        "float is faster [1]",
        "the recipe says so [recipe.x]",
    ]
    assert lines[-2:] == [f"[1] {fix}", "0 int8, 0 moves, 3 float, 0 folded"]


def test_text_of_little():
    assert str(Ledger(())).endswith("0 int8, 0 moves, 0 float, 0 folded")
    plain = Ledger((Entry("a", "a", "relu", "int8"),))
    assert str(plain).splitlines()[0].split() == ["layer", "op", "runs", "as"]


def test_text_stays_aligned_and_fits_the_terminal():
    deep = ".".join(f"module{i}" for i in range(20))
    long = Ledger(tuple(Entry(f"n{i}", f"{deep}.{i}", "x" * 12, "float", reason="because " * 40) for i in range(50)))
    lines = str(long).splitlines()
    assert max(map(len, lines)) <= 150
    assert f"{deep[-30:]}.7 " in str(long)
    assert {line.index("because") for line in lines if "because" in line} == {lines[0].index("why")}


@pytest.mark.slow
def test_linear_in_the_number_of_ops():
    def work(count):
        model = nn.Sequential(*(m for _ in range(count) for m in (nn.Linear(2, 2), nn.ReLU()))).eval()
        observed = fxq.prepare(model, REFERENCE, example_inputs=torch.randn(1, 2))
        observed(torch.randn(1, 2))
        manager = observed.manager
        manager.run(manager.context.recipe.pipeline[7:])
        from fxq.ledger.build import ledger_of

        return steps(lambda: str(ledger_of(manager.history, manager.gm, manager.context)[0]))

    assert work(400) < 2.3 * work(200)
