"""The ledger: every op once, with a fate that is true and a recipe line that changes it."""

import copy
import csv
import io
import json
import math
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.backends.cpu import has_onednn_int8
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.common.metrics import sqnr
from fxq.cost import cache as costs
from fxq.ledger.ledger import Entry, Ledger
from fxq.ledger.remedies import IntegerEdges, Mending
from tests.helpers import REFERENCE, module, steps
from tests.models import NETWORKS, batch, build

X86 = fxq.Recipe.static(backend="x86")
needs_x86 = pytest.mark.skipif(not has_onednn_int8(), reason="needs the oneDNN int8 kernels")
RECIPES = [REFERENCE, pytest.param(X86, marks=needs_x86)]
X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.drop = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5)

    def forward(self, x):
        return F.relu(self.drop(self.bn(self.conv(x))) + x)


class Net(nn.Module):
    """A stem, one block called twice, a head, and a float function."""

    def __init__(self):
        super().__init__()
        self.stem, self.block, self.same = nn.Conv2d(3, 4, 1), Block(), nn.Identity()
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = self.block(self.block(self.same(self.stem(x))))
        return torch.erf(self.head(x.mean((2, 3))))


def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module", params=RECIPES)
def ledger(request):
    return fxq.quantize(net(), request.param, data=[X]).ledger


# ---- what became of every op


def test_one_entry_per_op(ledger):
    assert [(e.path, e.op, e.fate) for e in ledger] == [
        ("stem", "conv2d", "int8"),
        ("same", "identity", "folded"),
        ("block.conv", "conv2d", "int8"),
        ("block.bn", "batch_norm", "folded"),
        ("block.drop", "dropout", "folded"),
        ("block", "add", "int8"),
        ("block", "relu", "int8"),
        ("block.conv", "conv2d", "int8"),
        ("block.bn", "batch_norm", "folded"),
        ("block.drop", "dropout", "folded"),
        ("block", "add", "int8"),
        ("block", "relu", "int8"),
        ("", "mean", "int8"),
        ("head", "linear", "int8"),
        ("", "erf", "float"),
    ]
    assert len({e.name for e in ledger}) == len(ledger)


def test_where_everything_went(ledger):
    by_name = {e.name: e for e in ledger}
    assert by_name["same"].reason == by_name["block_drop"].reason == "has no effect on the output"
    assert by_name["block_bn"].reason == "into block_conv_add_relu"
    assert {by_name[n].into for n in ("block_conv", "block_bn", "add", "relu")} == {"block_conv_add_relu"}
    assert "has no integer form" in by_name["erf"].reason
    assert by_name["erf"].source.startswith("ledger/test_ledger.py:")


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_entry_is_consistent(name, recipe):
    qmodel = fxq.quantize(build(name), recipe, data=[batch(name)])
    names = {n.name for n in qmodel.graph.nodes}
    traced = {
        n.name for n in qmodel.history["trace"].graph if n.origins and n.shape is not None and n.label != "getitem"
    }
    assert len(qmodel.ledger) >= len(traced)
    for entry in qmodel.ledger:
        assert entry.fate in ("int8", "moves", "float", "folded")
        assert bool(entry.reason) == (entry.fate in ("float", "folded"))
        assert entry.into in names or (entry.into == "" and entry.fate == "folded")
        assert entry.fix == "" or entry.fate != "folded"
    assert any(e.sqnr is not None for e in qmodel.ledger)


@needs_x86
def test_int8_means_a_kernel():
    """On a backend with kernels, an op that computes between a dequantize and a quantize runs in float."""
    for name in NETWORKS:
        qmodel = fxq.quantize(build(name), X86, data=[batch(name)])
        nodes = {n.name: n for n in qmodel.graph.nodes}
        for entry in qmodel.ledger.where(fate=("int8", "moves")):
            node = nodes[entry.into]
            kernel = node.op == "call_module" and "fxq_kernels" in node.target
            assert kernel or not node.meta["fxq"].dtype.is_floating_point, (name, entry)


@needs_x86
def test_what_failed_verification_is_float_and_keeps_its_name(monkeypatch):
    forward = OnednnConv.forward
    monkeypatch.setattr(OnednnConv, "forward", lambda self, *args: forward(self, *args) + 2)
    with pytest.warns(fxq.FxqWarning, match="wrong on this machine"):
        qmodel = fxq.quantize(net(), X86, data=[X])
    wrong = qmodel.ledger.where(path="block**", fate="float")
    assert [e.op for e in wrong] == ["conv2d", "add", "relu"] * 2
    assert all("failed verification" in e.reason for e in wrong)
    assert [e.into for e in wrong] == ["block_conv_add_relu"] * 3 + ["block_conv_1_add_relu"] * 3
    assert {e.into for e in wrong} <= {n.name for n in qmodel.graph.nodes}
    assert qmodel.ledger.where(op="batch_norm").count("folded") == 2


def test_a_padding_of_its_own_has_an_entry_of_its_own():
    model = module(lambda self, x: self.conv(x), conv=nn.Conv2d(3, 4, 2, padding="same"))
    ledger = fxq.quantize(model, REFERENCE, data=[X]).ledger
    assert [(e.path, e.op, e.fate) for e in ledger] == [("conv", "pad", "moves"), ("conv", "conv2d", "int8")]
    assert ledger[0].fix == 'recipe.override(fxq.op("pad", "conv"), fxq.FLOAT)'.replace('"', "'")


def test_a_module_with_several_outputs_is_one_op():
    def forward(self, x):
        y, _ = self.rnn(self.a(x))
        return self.b(y)

    model = module(
        forward, a=nn.Linear(4, 6), rnn=nn.LSTM(6, 7, batch_first=True, bidirectional=True), b=nn.Linear(14, 2)
    )
    ledger = fxq.quantize(model, REFERENCE, data=[torch.randn(3, 5, 4)]).ledger
    assert [(e.op, e.fate) for e in ledger] == [("linear", "int8"), ("lstm", "float"), ("linear", "int8")]
    lstm = 3 * 5 * 2 * (28 * 6 + 28 * 7)
    linear = 3 * 5 * (4 * 6 + 14 * 2)
    assert [e.macs for e in ledger] == [3 * 5 * 24, lstm, 3 * 5 * 28]
    assert ledger.coverage == pytest.approx(linear / (linear + lstm))


# ---- the lines that change it


def pasted(line, recipe):
    return eval(line, {"recipe": recipe, "fxq": fxq})


def changed(model, recipe, data, entry):
    """The entry of the same op once the line is in the recipe."""
    ledger = fxq.quantize(model, pasted(entry.fix, recipe), data=[data]).ledger
    return next(e for e in ledger if e.name == entry.name)


QUICK = ("called_twice", "shapes", "upscaler", "squeeze_excite")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_line_changes_its_op(name, recipe):
    model, data = build(name), batch(name)
    ledger = fxq.quantize(model, recipe, data=[data]).ledger
    assert all(e.fix for e in ledger.where(fate=("int8", "moves")))
    lines = {e.fix: e for e in ledger if e.fix}
    for entry in lines.values():
        now = changed(model, recipe, data, entry)
        assert now.fate == "float" if entry.fate in ("int8", "moves") else now.fate in ("int8", "moves"), entry


@pytest.mark.parametrize("selector", ["stem", "block", "block.*", "*", fxq.op("relu"), nn.Linear])
@pytest.mark.parametrize("recipe", RECIPES)
def test_lines_that_undo_an_override(recipe, selector):
    recipe = recipe.override(selector, fxq.FLOAT)
    excluded = [e for e in fxq.quantize(net(), recipe, data=[X]).ledger if "the recipe says" in e.reason]
    assert any(e.fix for e in excluded)
    for entry in excluded:
        if entry.fix:
            assert changed(net(), recipe, X, entry).fate in ("int8", "moves"), entry


@needs_x86
def test_the_line_for_what_only_another_backend_runs():
    recipe = fxq.Recipe.static(backend="x86", activation=fxq.TensorSpec(signed=True, symmetric=True))
    with pytest.warns(fxq.FxqWarning, match="nothing runs on integers"):
        entry = fxq.quantize(net(), recipe, data=[X]).ledger[0]
    assert entry.fate == "float" and "x86 kernels take unsigned" in entry.reason
    assert entry.fix == 'recipe.with_backend("reference")'
    assert changed(net(), recipe, X, entry).fate == "int8"


def test_a_line_for_a_function_takes_nothing_else_along():
    entry = fxq.quantize(net(), REFERENCE, data=[X]).ledger.where(op="add")[0]
    assert entry.fix == "recipe.override(fxq.op('add', 'block'), fxq.FLOAT)"
    ledger = fxq.quantize(net(), pasted(entry.fix, REFERENCE), data=[X]).ledger
    assert {e.op for e in ledger.where(fate="float")} == {"add", "relu", "mean", "erf"}  # relu and mean read float now


# ---- numbers


def test_sqnr_is_that_of_the_value(ledger):
    """The last op of a unit has the SQNR; recomputed here from the float model alone."""
    recipe = REFERENCE
    model, qmodel = net(), fxq.quantize(net(), recipe, data=[X])
    want = model.stem(X)
    qp = qmodel.qparams()["stem"]
    grid = torch.clamp(torch.round(want / qp.output_scale) + qp.output_zero_point, 0, 255) - qp.output_zero_point
    rounding = sqnr(want, grid * qp.output_scale)
    by_name = {e.name: e for e in qmodel.ledger}
    assert rounding - 6 < by_name["stem"].sqnr < rounding  # the rounding of input and weight comes on top
    assert by_name["erf"].sqnr == pytest.approx(sqnr(model(X), qmodel(X)), abs=1e-6)
    inner = [e for e in qmodel.ledger if e.op in ("add", "batch_norm", "dropout")] + [by_name["block_conv"]]
    assert {e.sqnr for e in inner} == {None}
    assert [e.name for e in ledger if e.sqnr is not None] == ["stem", "relu", "relu_1", "mean", "head", "erf"]


def test_own_sqnr_is_that_of_the_op_on_float_values():
    """Recomputed here: the head on the float model's mean, quantized to its grids, in float64."""
    model, qmodel = net(), fxq.quantize(net(), REFERENCE, data=[X])
    inputs = {}
    model.head.register_forward_pre_hook(lambda layer, args: inputs.update(head=args[0]))
    with torch.no_grad():
        model(X)
        want = model.head(inputs["head"]).double()
    layer = qmodel.qparams()["head"]
    grid = torch.clamp(torch.round(inputs["head"] / layer.input_scale) + layer.input_zero_point, 0, 255)
    x = (grid - layer.input_zero_point).double() * float(layer.input_scale)
    weight = layer.weight.double() * layer.weight_scale.double().reshape(-1, 1)
    got = F.linear(x, weight, model.head.bias.detach().double())
    by_name = {e.name: e for e in qmodel.ledger}
    assert by_name["head"].own_sqnr == pytest.approx(sqnr(want, got), abs=1e-3)
    assert by_name["head"].own_sqnr > by_name["head"].sqnr
    assert by_name["stem"].own_sqnr == by_name["stem"].sqnr  # nothing is before it
    assert by_name["erf"].own_sqnr == math.inf  # float, on float values
    assert [e.name for e in qmodel.ledger if e.own_sqnr is not None] == [
        e.name for e in qmodel.ledger if e.sqnr is not None
    ]


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
        assert changed(net(), X86, X, entry).fate == "int8"


def test_sqnr_names_the_layer_that_is_at_fault():
    """A layer whose weights need more than 8 bits per tensor: the drop stands in its row."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)).eval()
    with torch.no_grad():
        model[1].weight[0] *= 1000
        model[2].weight[:, 0] /= 1000
    weight = fxq.TensorSpec(signed=True, symmetric=True, per="tensor", observer="minmax")
    ledger = fxq.quantize(model, fxq.Recipe.static(backend="reference", weight=weight), data=[X]).ledger
    first, _, third, last = (e.sqnr for e in ledger)
    assert first > 35 and third < first - 15 and last < first - 15  # the last one inherits it
    assert ledger.sort("own_sqnr")[0].path == "2"
    assert ledger[3].own_sqnr > 35


class Outlier(nn.Module):
    """A function whose values a layer reads on a grid that one large channel makes coarse."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        with torch.no_grad():
            self.first.weight[0] *= 200
            self.second.weight[:, 0] /= 200

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_layer_is_blamed_that_reads_a_coarse_grid(recipe):
    torch.manual_seed(0)
    model, x = Outlier().eval(), torch.randn(64, 8)
    qmodel = fxq.quantize(model, recipe, data=[x])
    gelu = qmodel.ledger.where(op="gelu")[0]
    worst = qmodel.ledger.worst(1)[0]
    assert worst.name == "second" and worst.mend == "recipe.override('second', fxq.FLOAT)"
    assert gelu.fault_sqnr > gelu.own_sqnr  # the rounding to the grid of the layer behind is that one's
    before = sqnr(model(x), qmodel(x))
    of_gelu, of_layer = (
        sqnr(model(x), fxq.quantize(model, pasted(line, recipe), data=[x])(x)) for line in (gelu.fix, worst.mend)
    )
    assert of_layer > before + 5 > of_gelu


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_lines_of_the_worst_layers_take_their_noise_away(name, recipe):
    model, data = build(name), batch(name)
    ledger = fxq.quantize(model, recipe, data=[data]).ledger
    worst = ledger.worst(3)
    faults = [e.fault_sqnr for e in ledger if e.mend and e.fault_sqnr < math.inf]
    assert [e.fault_sqnr for e in worst] == sorted(faults)[:3]
    for entry in worst:
        others = fxq.quantize(model, pasted(entry.mend, recipe), data=[data]).ledger
        assert next(e for e in others if e.name == entry.name).fault_sqnr > 80, entry  # dB: float32 alone


def test_a_line_frees_the_integers_that_others_read_too():
    """The layer alone in float would read the values that its neighbour's grid has rounded."""
    torch.manual_seed(0)
    parts = {"a": nn.Linear(6, 6), "b": nn.Linear(6, 4), "c": nn.Linear(6, 4)}
    model = module(lambda self, x: (self.b(y := torch.relu(self.a(x)).reshape(-1, 6)), self.c(y)), **parts)
    entry = fxq.quantize(model, REFERENCE, data=[X.reshape(-1, 6)]).ledger.where(path="b")[0]
    assert entry.mend == (
        "recipe.override('b', fxq.FLOAT).override(fxq.op('reshape'), fxq.FLOAT)"  # the layer in front has one reader
    )
    now = fxq.quantize(model, pasted(entry.mend, REFERENCE), data=[X.reshape(-1, 6)]).ledger
    assert now.where(path="b")[0].own_sqnr == math.inf
    assert now.where(path="c")[0].fate == "int8"


def test_what_moves_integers_is_not_to_blame():
    ledger = fxq.quantize(build("dense"), REFERENCE, data=[batch("dense")]).ledger
    assert {e.fault_sqnr for e in ledger.where(fate="moves")} == {math.inf}
    assert not ledger.worst(100).where(fate="moves") and len(ledger.worst(0)) == 0


def test_finding_the_lines_takes_time_linear_in_the_readers():
    def ledger(count):
        forward = lambda self, x: sum(self.b(y * 1.0) for y in [torch.relu(self.a(x))] for _ in range(count))  # noqa: E731
        model = module(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
        qmodel = fxq.quantize(model, REFERENCE, data=[torch.randn(2, 4)])

        def find():
            mending = Mending(IntegerEdges(qmodel), qmodel.ledger)
            return [mending.line(node) for node in qmodel.graph.nodes]

        return steps(find)

    assert ledger(160) < 5 * ledger(40)


def test_a_copy_keeps_the_numbers(ledger):
    qmodel = fxq.quantize(net(), REFERENCE, data=[X])
    for other in (copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel))):
        assert other.ledger == qmodel.ledger and other.ledger[0].sqnr is not None
    assert pickle.loads(pickle.dumps(ledger)) == ledger


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

SOME = Ledger(
    (
        Entry(
            "a", "layer1.conv", "conv2d", "int8", "a_relu", fix="recipe.override('layer1.conv', fxq.FLOAT)", macs=900
        ),
        Entry("r", "layer1.relu", "relu", "int8", "a_relu", sqnr=30.5, own_sqnr=41.25, float_us=12.0, int8_us=4.25),
        Entry("s", "layer2.silu", "silu", "float", "s", "silu has no integer form", sqnr=math.inf),
        Entry("d", "drop", "dropout", "folded", reason="has no effect on the output"),
        Entry(
            "h", "head", "linear", "float", "h", "the recipe says float", "recipe.override('head', 8)", macs=100, sqnr=9
        ),
    )
)


def names(ledger):
    return [e.name for e in ledger]


def test_where():
    assert names(SOME.where(fate="float")) == ["s", "h"]
    assert names(SOME.where(fate="float", op="linear")) == ["h"]
    with pytest.raises(fxq.InputError, match=r"function of an entry, .* not 'float': ledger.where\(fate=\"float\"\)"):
        SOME.where("float")
    assert names(SOME.where(path="layer1.*")) == ["a", "r"]
    deeper = replace(SOME, entries=tuple(replace(e, path=f"body.{e.path}") for e in SOME.entries))
    assert not deeper.where(path="body.*.*.*") and names(deeper.where(path="**.layer1.**")) == ["a", "r"]
    assert names(SOME.where(op=("relu", "silu"))) == ["r", "s"]
    assert names(SOME.where(lambda e: e.macs > 0, fate="int8")) == ["a"]
    assert names(SOME.where(sqnr=None)) == ["a", "d"]
    assert SOME.where().entries == SOME.entries


def test_sort_puts_the_worst_first_and_the_unknown_last():
    assert names(SOME.sort("sqnr")) == ["h", "r", "s", "a", "d"]
    assert names(SOME.sort("sqnr", reverse=True)) == ["s", "r", "h", "a", "d"]
    assert names(SOME.sort("own_sqnr"))[0] == "r" == names(SOME.where(lambda e: e.own_sqnr is not None))[0]
    assert names(SOME.sort("macs", reverse=True))[:2] == ["a", "h"]
    assert names(SOME.sort("op")) == ["a", "d", "h", "r", "s"]


@pytest.mark.parametrize("ask", [lambda: SOME.sort("sqrn"), lambda: SOME.where(sqrn=3)])
def test_unknown_fields(ask):
    with pytest.raises(fxq.FxqError, match="unknown field of the ledger 'sqrn'; did you mean 'sqnr'"):
        ask()


@pytest.mark.parametrize(
    "ask", [lambda x: x.where(fate="flaot"), lambda x: x.where(fate=["int8", "flaot"]), lambda x: x.count("flaot")]
)
def test_unknown_fates(ask):
    with pytest.raises(fxq.InputError, match="unknown fate 'flaot'; did you mean 'float'"):
        ask(SOME)


def test_coverage():
    assert SOME.coverage == 0.9
    assert SOME.where(fate="float").coverage == 0.0
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
    assert Ledger(()).main_reason() == "the model has no op that could"


def test_a_recurrent_layer_is_the_main_reason():
    model = nn.Sequential(nn.LSTM(16, 256, batch_first=True)).eval()
    with pytest.warns(fxq.FxqWarning, match="1 of 1 ops, with 100% of the multiply-accumulates.*lstm has no integer"):
        fxq.quantize(model, REFERENCE, data=[torch.randn(2, 5, 16)])


def test_text_says_what_conversions_cost():
    slow = Entry("a", "a", "linear", "float", "a", "its conversions", float_us=1010, int8_us=163, conversions_us=900)
    assert "its conversions (kernel 163 µs, conversions 900 µs; float 1010 µs)" in str(Ledger((slow,)))
    for other in ({"int8_us": 2000}, {"conversions_us": 0.5}, {"conversions_us": None}, {"fate": "int8"}):
        assert "(kernel" not in str(Ledger((replace(slow, **other),)))


def test_json(tmp_path):
    text = SOME.to_json(tmp_path / "ledger.json")
    assert (tmp_path / "ledger.json").read_text(encoding="utf-8") == text
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert data["coverage"] == 0.9
    assert [row["name"] for row in data["ops"]] == ["a", "r", "s", "d", "h"]
    assert list(data["ops"][0]) == list(SOME.fields)
    assert [row["sqnr"] for row in data["ops"]] == [None, 30.5, "inf", None, 9]
    assert data["ops"][1]["own_sqnr"] == 41.25


def test_csv(tmp_path):
    text = SOME.to_csv(tmp_path / "new" / "ledger.csv")
    assert (tmp_path / "new" / "ledger.csv").read_text(encoding="utf-8") == text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert list(rows[0]) == list(SOME.fields)
    assert [row["sqnr"] for row in rows] == ["", "30.5", "inf", "", "9"]
    assert [row["own_sqnr"] for row in rows] == ["", "41.25", "", "", ""]
    assert rows[0]["fix"] == "recipe.override('layer1.conv', fxq.FLOAT)"


def test_a_file_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(fxq.RenderError, match="cannot write"):
        SOME.to_json(tmp_path / "file" / "ledger.json")
    with pytest.raises(fxq.InputError, match="named by a str or a path, not by 3"):
        SOME.to_csv(3)


def test_dicts():
    assert [Entry(**row) for row in SOME.to_dicts()] == list(SOME)


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


def test_a_way_out_that_ops_share_is_a_note():
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


def test_text_stays_aligned_and_narrow():
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
        observed = fxq.prepare(model, REFERENCE, torch.randn(1, 2))
        observed(torch.randn(1, 2))
        manager = observed.manager
        manager.run(manager.context.recipe.pipeline[7:])
        from fxq.ledger.build import ledger_of

        return steps(lambda: str(ledger_of(manager.history, manager.gm, manager.context)[0]))

    assert work(400) < 2.3 * work(200)
