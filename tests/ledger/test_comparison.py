"""fxq.compare: numbers per layer on any amount of data, beside a float model or another quantized one."""

import copy
import csv
import gc
import io
import json
import math
import pickle
import threading
import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.ledger.comparison import LayerRow, PairRow
from tests.support.helpers import REFERENCE, module
from tests.support.machine import needs_x86, portable, told
from tests.support.models import NETWORKS, batch, build

X86 = fxq.Recipe.static(backend="x86", reduce_range="activations")
RECIPES = [REFERENCE, pytest.param(X86, marks=needs_x86)]


class Net(nn.Module):
    """Two linear layers with a function between them, and one after them."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.second = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)

    def forward(self, x):
        return self.second(self.act(self.first(x)))


def net():
    torch.manual_seed(0)
    return Net().eval()


def batches(count=4, size=7):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size + i, 6, generator=generator) for i in range(count)]


@pytest.fixture(scope="module")
def qmodel():
    return fxq.quantize(net(), REFERENCE, data=batches())


# ---- numbers


def grid(x, scale, zero_point):
    """The floats that x is rounded to, in float64."""
    q = torch.clamp(torch.round(x.float() / scale) + zero_point, 0, 255)
    return (q - zero_point).double() * float(scale)


def int8(layer, bias, x):
    """A layer on integers by definition, as its values before the output is rounded."""
    weight = layer.weight.double() * layer.weight_scale.double().reshape(-1, 1)
    return F.linear(grid(x, layer.input_scale, layer.input_zero_point), weight, bias.detach().double())


def distances(want, got):
    want, got = want.double().flatten(), got.double().flatten()
    noise = want - got
    return (
        10 * math.log10(float((want @ want) / (noise @ noise))),
        float(want @ got / (want.norm() * got.norm())),
        float(noise.abs().max()),
    )


def test_integers_beside_the_output_do_not_hide_it():
    model, data = module(lambda self, x: (self.fc(x), self.fc(x).argmax(1)), fc=nn.Linear(6, 5)), batches()
    qmodel = fxq.quantize(model, REFERENCE, data=data)
    with torch.no_grad():
        want, got = [model(x)[0] for x in data], [qmodel(x)[0] for x in data]
    assert fxq.compare(model, qmodel, data).output_sqnr == pytest.approx(sqnr(want, got), abs=1e-3)


def test_rows_are_what_hooks_on_the_float_model_see(qmodel):
    """The int8 model recomputed from its qparams alone, and all batches taken as one."""
    model, data = net(), torch.cat(batches())
    seen = {}
    for name, layer in model.named_children():
        layer.register_forward_hook(lambda m, args, out, name=name: seen.update({name: out}))
    with torch.no_grad():
        model(data)
    layers = qmodel.qparams()
    first, second = layers["first"], layers["second"]
    hidden = int8(first, model.first.bias, data).relu()
    hidden = grid(hidden, second.input_scale, second.input_zero_point)
    values = {"act": hidden, "second": int8(second, model.second.bias, hidden)}
    own = {"act": hidden, "second": int8(second, model.second.bias, seen["act"])}
    comparison = fxq.compare(net(), qmodel, batches())
    assert [(r.name, r.path, r.op, r.precision) for r in comparison] == [
        ("act", "act", "relu", "int8"),
        ("second", "second", "linear", "int8"),
    ]
    for row in comparison:
        ratio, cosine, largest = distances(seen[row.name], values[row.name])
        assert row.sqnr == pytest.approx(ratio, abs=1e-4)  # float32 in the graph, float64 here
        assert row.own_sqnr == pytest.approx(distances(seen[row.name], own[row.name])[0], abs=1e-4)
        assert row.cosine == pytest.approx(cosine, abs=1e-8)
        assert row.max_error == pytest.approx(largest, rel=1e-4)
    assert comparison.output_sqnr == comparison[-1].sqnr
    assert comparison.batches == 4


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_batches_one_by_one_and_all_at_once_are_the_same(recipe):
    model = net()
    qmodel = fxq.quantize(model, recipe, data=batches())
    apart, together = fxq.compare(model, qmodel, batches()), fxq.compare(model, qmodel, [torch.cat(batches())])
    assert len(apart) == len(together) == 2
    for a, b in zip(apart, together, strict=True):
        # float32 sums depend on the size of a batch, and with them which values are rounded up
        assert (a.sqnr, a.own_sqnr) == pytest.approx((b.sqnr, b.own_sqnr), abs=1e-4)
        assert (a.cosine, a.max_error) == pytest.approx((b.cosine, b.max_error), rel=1e-5)
    assert apart.output_sqnr == pytest.approx(together.output_sqnr, abs=1e-4)


@pytest.mark.one_in(30)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_network_beside_its_float_model(name, recipe):
    """On the batch that the ledger was measured with, the numbers are those of the ledger."""
    observed = fxq.prepare(build(name), recipe, example_inputs=batch(name))
    fxq.calibrate(observed, [batch(name)])
    recorded = observed.manager.context.samples[0]
    qmodel = fxq.convert(observed)
    comparison = fxq.compare(build(name), qmodel, [recorded])
    measured = [e for e in qmodel.ledger if e.sqnr is not None]
    assert [r.name for r in comparison] == [e.name for e in measured]
    for row, entry in zip(comparison, measured, strict=True):
        assert (row.path, row.op, row.precision) == (entry.path, entry.op, entry.precision)
        assert (row.sqnr, row.own_sqnr) == pytest.approx((entry.sqnr, entry.own_sqnr), abs=1e-6)


def test_a_convolution_is_compared_after_its_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).eval()
    x = torch.randn(4, 3, 8, 8)
    (row, _) = fxq.compare(model, fxq.quantize(model, REFERENCE, data=[x]), [x])
    assert row.path == "0" and row.op == "conv2d" and row.sqnr > 30


def test_the_modules_that_were_taken_apart_have_rows():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(3, 5, 16)
    comparison = fxq.compare(model, fxq.quantize(model, REFERENCE, data=[x]), [x, x[:2]])
    assert {"layers.0.linear2", "layers.1.self_attn.out_proj"} <= {r.path for r in comparison}
    assert min(r.sqnr for r in comparison) > 15 and comparison.output_sqnr > 25


# ---- two quantized models


def test_two_recipes(qmodel):
    coarse = fxq.TensorSpec(bits=5, observer="minmax")
    coarse_qmodel = fxq.quantize(
        net(),
        REFERENCE.override("first", fxq.QuantConfig(activation=coarse)).override("second", fxq.FLOAT),
        data=batches(),
    )
    comparison = fxq.compare(qmodel, coarse_qmodel, batches())
    assert all(isinstance(row, PairRow) for row in comparison)
    assert [(r.name, r.precision_a, r.precision_b) for r in comparison][-1] == ("second", "int8", "float")
    for row in comparison:
        mine, theirs = (next(e for e in m.ledger if e.name == row.name) for m in (qmodel, coarse_qmodel))
        assert (row.sqnr_a, row.sqnr_b) == (mine.sqnr, theirs.sqnr)
    data = torch.cat(batches())
    with torch.no_grad():
        ratio, cosine, largest = distances(qmodel(data), coarse_qmodel(data))
    assert comparison.output_sqnr == pytest.approx(ratio, abs=1e-5)
    assert (comparison[-1].sqnr, comparison[-1].cosine, comparison[-1].max_error) == pytest.approx(
        (ratio, cosine, largest), rel=1e-5
    )
    assert comparison.models == (qmodel, coarse_qmodel)


@pytest.mark.slow
@needs_x86
def test_two_backends_agree_to_the_last_step():
    data = batches()
    a, b = (fxq.quantize(net(), recipe, data=data) for recipe in (portable(), X86))
    comparison = fxq.compare(a, b, data)
    assert len(comparison) == 2 and min(row.sqnr for row in comparison) > 60


def test_a_model_agrees_with_itself_and_with_its_copies(qmodel):
    for duplicate in (qmodel, copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel))):
        comparison = fxq.compare(qmodel, duplicate, batches())
        assert len(comparison) == 2
        assert {(r.sqnr, r.cosine, r.max_error) for r in comparison} == {(math.inf, 1.0, 0.0)}
        assert comparison.output_sqnr == math.inf


@pytest.mark.slow
def test_models_that_were_made_on_different_lines():
    """It is one model wherever it was quantized."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)).eval()
    a = fxq.quantize(model, REFERENCE, data=batches())
    b = fxq.quantize(model, REFERENCE, data=batches())
    assert {(r.path, r.sqnr) for r in fxq.compare(a, b, batches())} == {("1", math.inf), ("2", math.inf)}


def test_models_without_a_layer(tmp_path):
    """Nothing to compare is no other model."""
    qmodel = fxq.quantize(module(lambda self, x: x), REFERENCE, data=batches())
    comparison = fxq.compare(qmodel, qmodel, batches())
    assert len(comparison) == 0 and comparison.output_sqnr == math.inf
    assert comparison.report(tmp_path / "report.html").exists()


class Counting(nn.Module):
    """Adds the number of its calls: it has state, and no graph."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen = []

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        return x + self.calls


class Locked(Counting):
    """Module with state that cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def test_a_module_with_state_that_cannot_be_copied_is_refused():
    model = nn.Sequential(nn.Linear(6, 8), Locked(), nn.Linear(8, 5)).eval()
    with pytest.raises(fxq.TraceError, match=r"the module cannot be copied .*lock.* Make the module copyable"):
        fxq.quantize(model, REFERENCE.leaf("1"), data=batches())


@pytest.mark.slow
def test_a_module_with_state_is_left_as_it_is_on_both_sides():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Counting(), nn.Linear(8, 5)).eval()
    qmodel = fxq.quantize(model, REFERENCE.leaf("1"), data=batches())
    modules = model[1], qmodel.get_submodule("1")
    before = [(float(m.calls), list(m.seen)) for m in modules]
    fxq.compare(model, qmodel, batches())
    fxq.compare(qmodel, qmodel, batches())
    assert [(float(m.calls), list(m.seen)) for m in modules] == before


def test_state_goes_on_from_batch_to_batch_on_each_side_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Counting(), nn.Linear(8, 5)).eval()
    data = batches()
    qmodel = fxq.quantize(model, REFERENCE.leaf("1"), data=data)
    comparison, a, b = fxq.compare(model, qmodel, data), copy.deepcopy(model), copy.deepcopy(qmodel)
    with torch.no_grad():
        want, got = (torch.cat([m(x) for x in data]) for m in (a, b))
    assert comparison.output_sqnr == pytest.approx(sqnr([want], [got]), abs=1e-3)
    assert fxq.compare(qmodel, qmodel, data).worst.sqnr == math.inf


@pytest.mark.slow
def test_a_loaded_model_beside_the_float_model(qmodel):
    want = fxq.compare(net(), qmodel, batches())
    assert fxq.compare(net(), pickle.loads(pickle.dumps(qmodel)), batches()).entries == want.entries


# ---- data


def test_keyword_inputs_and_targets(qmodel):
    want = fxq.compare(net(), qmodel, batches())
    for data in ([{"x": x} for x in batches()], [(x, torch.zeros(len(x))) for x in batches()], iter(batches())):
        assert fxq.compare(net(), qmodel, data).entries == want.entries


def test_no_batch_is_kept(qmodel):
    """Of a long stream, what is alive at any time is the batch at hand, and the first one: shapes are found with it."""
    alive, most = [], 0

    def stream():
        nonlocal most
        for x in (torch.randn(5, 6) for _ in range(12)):
            alive.append(weakref.ref(x))
            yield x
            del x
            gc.collect()
            most = max(most, sum(ref() is not None for ref in alive))

    gc.freeze()  # what other tests have left is not looked through again for every batch
    try:
        assert fxq.compare(net(), qmodel, stream()).batches == 12
    finally:
        gc.unfreeze()
    assert most <= 2


@pytest.mark.slow
def test_an_exported_program():
    x = batches(1)[0]
    program = torch.export.export(net(), (x,))
    qmodel = fxq.quantize(program, REFERENCE, data=[x])
    comparison = fxq.compare(program, qmodel, [x, x + 0.1])
    want = fxq.compare(net(), fxq.quantize(net(), REFERENCE, data=[x]), [x, x + 0.1])
    assert [r.sqnr for r in comparison] == pytest.approx([r.sqnr for r in want], abs=1e-4)
    assert [r.path for r in comparison] == [r.path for r in want]


def test_the_float_model_is_left_as_it_is(qmodel):
    class Counts(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.last = x
            return super().forward(x)

    torch.manual_seed(0)
    model = Counts().eval()
    second_qmodel = fxq.quantize(model, REFERENCE, data=batches())
    before, state = set(vars(model)), torch.random.get_rng_state()
    fxq.compare(model, second_qmodel, batches())
    assert set(vars(model)) == before and torch.equal(torch.random.get_rng_state(), state)
    assert all(p.requires_grad for p in model.parameters())


def test_wrappers_are_taken_off(qmodel):
    want = fxq.compare(net(), qmodel, batches())
    assert fxq.compare(nn.DataParallel(net()), qmodel, batches()).entries == want.entries


def test_the_progress_bar(qmodel, monkeypatch):
    bars = []

    @contextmanager
    def bar(title, total, show=None):
        bars.append([title, total, show, 0])

        def advance():
            bars[-1][-1] += 1

        yield advance

    monkeypatch.setattr(fxq.dispatch, "progress_bar", bar)
    fxq.compare(net(), qmodel, batches(), progress=False)
    fxq.compare(qmodel, qmodel, iter(batches()))
    assert bars == [["comparing", 4, False, 4], ["comparing", None, None, 4]]


# ---- what does not fit


def refused(a, b, data):
    with pytest.raises(fxq.InputError) as caught:
        fxq.compare(a, b, data)
    return str(caught.value)


def test_things_that_are_no_models(qmodel):
    assert refused(qmodel, net(), batches()) == (
        "b is a Net, not a quantized model (a is: fxq.compare(float_model, quantized_model, data))."
    )
    assert refused(net(), net(), batches()) == "b is a Net, not a quantized model."
    assert "model is a str" in refused("resnet", qmodel, batches())
    observed = fxq.prepare(net(), REFERENCE, example_inputs=batches()[0])
    assert "ObservedModel" in refused(observed, qmodel, batches())
    assert "model.eval()" in refused(nn.Sequential(net(), nn.Dropout()).train(), qmodel, batches())


def test_data_that_does_not_fit(qmodel):
    assert "data is empty" in refused(net(), qmodel, [])
    assert "give an iterable of batches" in refused(net(), qmodel, batches()[0])
    assert refused(net(), qmodel, [batches()[0], torch.randn(3, 9)]).startswith(
        "data, batch 1 (float32[3, 9]): the model"
    )
    assert "data, batch 1: str is not a batch" in refused(net(), qmodel, [batches()[0], "x"])
    with pytest.raises(fxq.CalibrationError, match=r"data, batch 1: input 0 .* holds NaN"):
        fxq.compare(net(), qmodel, [batches()[0], torch.full((2, 6), math.nan)])


def test_a_model_of_other_layers(qmodel):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).eval()
    assert refused(model, qmodel, batches()) == (
        "a is not the model that b was made from, or traces to other ops on inputs of this size: "
        "op 0 is linear '_0' of '0', where the ledger of b has linear 'first' of 'first'."
    )
    shorter = module(lambda self, x: self.act(self.first(x)), **dict(net().named_children()))
    assert "op 2 is nothing, where the ledger of b has linear 'second'" in refused(shorter, qmodel, batches())
    second_qmodel = fxq.quantize(model, REFERENCE, data=batches())
    assert refused(second_qmodel, qmodel, batches()) == (
        "a and b are not made from the same model: they have no layer in common."
    )


def test_a_model_of_other_sizes(qmodel):
    model = net()
    model.second = nn.Linear(8, 3).eval()
    said = refused(model, qmodel, batches())
    assert said.startswith(
        "data, batch 0: a and b compute different values: at 'second', the shape is (7, 3) in a and (7, 5) in b."
    )


# ---- the table


@pytest.fixture
def comparison(qmodel):
    return fxq.compare(net(), qmodel, batches())


def test_asking(comparison):
    assert [r.name for r in comparison.sort("sqnr")] == [r.name for r in sorted(comparison, key=lambda r: r.sqnr)]
    assert [r.name for r in comparison.where(op="relu")] == ["act"]
    assert comparison.where(path="second").batches == 4
    assert (
        comparison.where(precision="float").entries == ()
        and comparison.where(precision="float").fields == comparison.fields
    )
    assert isinstance(comparison[0], LayerRow) and comparison.worst == comparison.sort()[0]
    with pytest.raises(fxq.InputError, match="unknown field of the comparison 'sqrn'; did you mean 'sqnr'"):
        comparison.sort("sqrn")
    with pytest.raises(fxq.InputError, match="unknown precision 'flaot'; did you mean 'float'"):
        comparison.where(precision="flaot")
    with pytest.raises(fxq.InputError, match=r"comparison.where\(precision=\"int8\"\)"):
        comparison.where(3)
    pair = fxq.compare(*comparison.models, *comparison.models, batches()[:1])
    with pytest.raises(fxq.InputError, match=r"comparison.where\(precision_a=\"float\"\)"):
        pair.where("float")
    with pytest.raises(fxq.InputError, match="unknown precision 'flaot'"):
        pair.where(precision_b="flaot")


def test_files(comparison, tmp_path):
    data = json.loads(comparison.to_json(tmp_path / "c.json"))
    assert (tmp_path / "c.json").read_text(encoding="utf-8") == comparison.to_json()
    assert (data["output_sqnr"], data["batches"]) == (comparison.output_sqnr, 4)
    assert [LayerRow(**row) for row in data["layers"]] == list(comparison)
    rows = list(csv.DictReader(io.StringIO(comparison.to_csv(tmp_path / "c.csv"))))
    assert list(rows[0]) == list(comparison.fields) == [
        "name", "path", "op", "precision", "sqnr", "own_sqnr", "cosine", "max_error",
    ]  # fmt: skip
    assert [float(row["sqnr"]) for row in rows] == [r.sqnr for r in comparison]
    assert [LayerRow(**row) for row in comparison.to_dicts()] == list(comparison)


def test_text():
    rows = (
        LayerRow("a_relu", "a.relu", "relu", "int8", 40.123, 45.5, 0.99991, 0.0123),
        LayerRow("f", "f", "erf", "float", 31.0, math.inf, 0.9991, 12.5),
    )
    qmodel = fxq.quantize(net(), REFERENCE, data=batches())
    comparison = fxq.results.Comparison(rows, 31.0, 8, (qmodel,), None)
    assert comparison.to_text() == (
        "layer    op    runs as      SQNR dB    own dB    cosine    max error\n"
        "-------  ----  ---------  ---------  --------  --------  -----------\n"
        "a.relu   relu  int8            40.1      45.5   0.99991       0.0123\n"
        "f        erf   float           31.0     exact   0.99910         12.5\n"
        "the output agrees to 31.0 dB; least f, 31.0 dB; 8 batches"
    )
    row = PairRow("f", "f", "erf", "float", "int8", 30.0, None, 35.5, 1.0, 0.0)
    assert fxq.results.Comparison((row,), None, 1, (qmodel, qmodel), None).to_text() == (
        "layer    op    a runs as    b runs as      b to a    a to float    b to float    cosine    max error\n"
        "-------  ----  -----------  -----------  --------  ------------  ------------  --------  -----------\n"
        "f        erf   float        int8             30.0                        35.5   1.00000            0\n"
        "least f, 30.0 dB; 1 batch"
    )


def test_the_worst_is_what_is_no_number():
    rows = [LayerRow(n, n, "relu", "int8", value, 1.0, 1.0, 0.0) for n, value in (("a", 3.0), ("b", math.nan))]
    comparison = fxq.results.Comparison(tuple(rows), None, 1, (fxq.quantize(net(), REFERENCE, data=batches()),), None)
    assert comparison.worst.name == "b"
    assert comparison.where(name="z").worst is None and comparison.where(name="z").to_text().endswith(
        "no layers; 1 batch"
    )


def test_other_weights_than_at_quantization_are_said():
    model = net()
    qmodel = fxq.quantize(model, REFERENCE, data=[torch.rand(4, 6)])
    with torch.no_grad():
        model.second.weight.mul_(2)
    with pytest.warns(fxq.FxqWarning, match=r"for instance 'second.weight' \(1 of 4 parameters\)"):
        fxq.compare(model, qmodel, [torch.rand(4, 6)])


def test_the_same_weights_say_nothing(recwarn):
    model = net()
    qmodel = fxq.quantize(model, REFERENCE, data=[torch.rand(4, 6)])
    fxq.compare(copy.deepcopy(model), pickle.loads(pickle.dumps(qmodel)), [torch.rand(4, 6)])
    assert not told(recwarn)
