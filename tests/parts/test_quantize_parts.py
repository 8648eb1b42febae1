"""Models whose forward cannot be traced as a whole: which parts are chosen, what they compute, and what is reported."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import fxq
from fxq.cost import cache
from fxq.errors import FileError, FxqWarning, InputError, RecipeError, TraceError
from tests.support.partly_traceable import MODELS, Block, Detector, LoopOnData, TiedDecoder, model_and_data

pytestmark = pytest.mark.any_cpu

COVERAGE = fxq.Recipe.static(optimize="coverage")
EXACT = fxq.Recipe.static(backend="reference", optimize="coverage")


def run(model, batch):
    torch.manual_seed(1)
    with torch.no_grad():
        result = model(**batch) if isinstance(batch, dict) else model(*batch)
    return [leaf if isinstance(leaf, torch.Tensor) else torch.tensor(leaf) for leaf in tree_leaves(result)]


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def quantized(name, recipe=EXACT):
    """The float model, the quantized model, its data and the warning; of `EXACT`, a copy of what is made once."""
    return copy.deepcopy(quantized_once(name)) if recipe is EXACT else quantized_with(name, recipe)


@functools.cache
def quantized_once(name):
    return quantized_with(name, EXACT)


def quantized_with(name, recipe):
    model, data = model_and_data(name, 3)
    with pytest.warns(FxqWarning, match="is quantized in") as heard:
        q = fxq.quantize(model, recipe, data=data)
    assert len([w for w in heard if issubclass(w.category, FxqWarning)]) == 1
    return model, q, data, str(heard[0].message)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recipe", [EXACT, pytest.param(COVERAGE, marks=pytest.mark.slow)], ids=["exact", "kernels"])
@pytest.mark.parametrize("name", MODELS)
def test_each_is_of_its_own_class_and_on_integers(name, recipe, tmp_path):
    model, q, data, _ = quantized(name, recipe)
    weights = copy.deepcopy(model.state_dict())
    assert isinstance(q, type(model)) and type(q).__name__ == type(model).__name__ and not q.training
    assert q.ledger.coverage >= 0.95
    want, got = run(model, data[1]), run(q, data[1])
    floats = [(w, g) for w, g in zip(want, got, strict=True) if w.is_floating_point()]
    for w, g in floats:
        assert w.shape == g.shape and 20 * torch.log10(w.norm() / (w - g).norm()) > 25
    path = q.save(tmp_path / "model.fxq")
    for again in (fxq.load(path, into=model), copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert equal(run(again, data[1]), got)
        assert again.ledger == q.ledger and list(again.parts) == list(q.parts)
    assert all(torch.equal(tensor, weights[key]) for key, tensor in model.state_dict().items())
    with pytest.raises(FileError, match="into=model"):
        fxq.load(path)


def test_the_warning_and_the_ledger_say_what_stays_in_python():
    _, q, _, message = quantized("detector")
    assert "Detector is quantized in 3 parts: backbone, boxes, scores. The code around them stays in Python" in message
    assert "int() of a value that depends on the data" in message and "100.0% of the multiply-accumulates" in message
    (row,) = q.ledger.where(op="python")
    assert row.precision == "float" and "int() of a value" in row.reason and row.name == "forward"
    assert {e.path for e in q.ledger.where(op="conv2d")} >= {"backbone.0", "backbone.2.conv1", "boxes", "scores"}
    assert list(q.history) == list(q.parts) == ["backbone", "boxes", "scores"]
    assert set(q.qparams()) >= {"backbone.0", "backbone.3.conv2", "scores"}
    q.verify()


def test_shares_count_all_calls_and_the_arithmetic_in_python():
    _, q, data, _ = quantized("custom loop")
    (python,) = q.ledger.where(op="python")
    tokens = data[0][0].shape[1]
    assert python.macs == 5 * 64 * 50  # the tied projection of the last token, five times
    linear1 = q.ledger.where(path="body.0.linear1", op="linear")[0]
    assert linear1.macs == pytest.approx(sum(range(tokens, tokens + 5)) * 64 * 256, rel=0.05)


def test_a_model_that_traces_as_a_whole_stays_one_graph():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    assert isinstance(fxq.quantize(model, EXACT, data=[torch.rand(1, 3, 8, 8)]), fxq.results.QuantizedModel)


class Wrapped(nn.Module):
    """Has nearly all of its arithmetic in a module that cannot be traced, and which would be a leaf of its graph."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = LoopOnData(), nn.Linear(10, 4)

    def forward(self, x):
        return self.head(self.inner(x))


def test_a_leaf_with_much_arithmetic_is_divided():
    with pytest.warns(FxqWarning, match='Wrapped is quantized in .* layer "inner", with 99%'):
        q = fxq.quantize(Wrapped().eval(), EXACT, data=[torch.rand(2, 3, 8, 8)])
    assert list(q.parts) == ["inner.stem", "inner.refine", "inner.head", "head"] and q.ledger.coverage > 0.99


def test_strict_trace_is_an_error():
    model, data = model_and_data("detector", 1)
    with pytest.raises(TraceError, match="a loop over the rows of a tensor"):
        fxq.quantize(model, fxq.Recipe.static(strict_trace=True), data=data)


def test_without_any_part_it_is_the_error_of_the_trace():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return x @ self.weight if x.sum() > 0 else x

    with pytest.raises(TraceError, match="a branch on a value that depends on the data"):
        fxq.quantize(Alone().eval(), data=[torch.rand(2, 4)])


# ---- the recipe


class Layers(nn.Module):
    def __init__(self, count=3, width=16):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width)) for _ in range(count)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


DATA = [torch.randn(4, 16) for _ in range(3)]


def test_the_recipe_names_parts():
    recipe = EXACT.parts("layers.*")
    assert fxq.Recipe.from_dict(recipe.to_dict()) == recipe
    with pytest.warns(FxqWarning, match="Layers is quantized in 3 parts.*the recipe names the parts"):
        q = fxq.quantize(Layers().eval(), recipe, data=DATA)
    assert list(q.parts) == ["layers.0", "layers.1", "layers.2"] and q.output_sqnr > 30
    with pytest.raises(RecipeError, match=r"'layer\.\*' matches no module; near: .*layers"):
        fxq.quantize(Layers().eval(), EXACT.parts("layer.*"), data=DATA)
    with pytest.raises(RecipeError, match="parts takes path globs"):
        EXACT.parts(nn.Linear)


def test_overrides_have_paths_of_the_whole_model():
    recipe = EXACT.parts("layers.*").override("layers.1.2", fxq.FLOAT)
    with pytest.warns(FxqWarning, match="parts"):
        q = fxq.quantize(Layers().eval(), recipe, data=DATA)
    assert [e.path for e in q.ledger.where(op="linear", precision="float")] == ["layers.1.2"]
    assert "recipe.override('layers.0.0', fxq.FLOAT)" in {e.fix for e in q.ledger}
    with pytest.raises(RecipeError, match=r"layers\.1\.7.* selects nothing in the parts"):
        fxq.quantize(Layers().eval(), EXACT.parts("layers.*").override("layers.1.7", fxq.FLOAT), data=DATA)


def test_leaves_stay_float():
    with pytest.warns(FxqWarning, match="parts"):
        q = fxq.quantize(Layers().eval(), EXACT.parts("layers.*").leaf("layers.1", "layers.2.2"), data=DATA)
    assert list(q.parts) == ["layers.0", "layers.2"]
    (row,) = q.ledger.where(op="python", path="layers.1")
    assert row.reason == "the recipe keeps this module as it is" and row.macs == 4 * 2 * 16 * 32
    assert [e.path for e in q.ledger.where(kind="leaf", op="Linear")] == ["layers.2.2"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("preset", ["dynamic", "weight_only"])
def test_recipes_that_need_no_data(preset):
    with pytest.warns(FxqWarning, match="parts"):
        q = fxq.quantize(Layers().eval(), getattr(fxq.Recipe, preset)(backend="reference").parts("layers.*"),
                         example_inputs=DATA[0])  # fmt: skip
    assert q.output_sqnr > 30 and q.ledger.coverage + q.ledger.weight_coverage == 1.0
    with pytest.raises(InputError, match="needs data to calibrate with"):
        fxq.quantize(Layers().eval(), EXACT.parts("layers.*"), example_inputs=DATA[0])


def test_calibration_runs_the_model_once_per_batch(capfd):
    model = Layers().eval()

    def note(module, args):
        print(f"size {len(args[0])},")  # a list would be restored after the calibration

    model.register_forward_pre_hook(note)
    with pytest.warns(FxqWarning, match="parts"):
        fxq.quantize(model, EXACT.parts("layers.*"), data=[torch.randn(n, 16) for n in (4, 5, 6, 7, 8, 9)])
    calls = capfd.readouterr().out
    assert [calls.count(f"size {n},") for n in (8, 9)] == [1, 1]  # the first four are also compared


def test_prices_are_measured_once_per_shape(monkeypatch):
    measured, original = [], cache.measure
    monkeypatch.setattr(cache, "measure", lambda *args: measured.append(1) or original(*args))
    recipe, data = fxq.Recipe.static(backend="x86").parts("layers.*"), [torch.randn(64, 72)]
    with pytest.warns(FxqWarning, match="1 part"):
        fxq.quantize(Layers(1, 72).eval(), recipe, data=data)
    if not measured:
        pytest.skip("all prices are those of the table")
    measured.clear()
    with pytest.warns(FxqWarning, match="4 parts"):
        fxq.quantize(Layers(4, 72).eval(), recipe, data=data)
    assert not measured


# ---- the module in place of a submodule


def test_a_part_answers_as_the_module_that_it_replaced():
    _, q, _, _ = quantized("loop on data")
    assert isinstance(q.refine, Block) and isinstance(q.stem, nn.Conv2d) and isinstance(q.head, nn.Linear)
    assert q.refine.conv1.stride == (1, 1) and q.refine.channels == 16 and q.head.in_features == 16
    assert q.stem.weight.shape == (16, 3, 3, 3) and q.stem.weight.dtype == torch.float32
    assert isinstance(q.stem.weight, nn.Parameter) and q.stem.weight.device == torch.device("cpu")
    with pytest.raises(InputError, match=r"stem\.weight is read, but it belongs to a part that is quantized"):
        q.stem.weight.sum()
    with pytest.raises(InputError, match=r"refine\.conv1\.weight is read"):
        q.refine.conv1(torch.rand(1, 16, 8, 8))
    with pytest.raises(AttributeError, match="no attribute 'stride'"):
        _ = q.refine.stride
    assert next(q.parameters()).device == torch.device("cpu")
    with pytest.raises(InputError, match="keep their dtypes"):
        q.half()


def test_a_sequential_part_keeps_its_items():
    _, q, _, _ = quantized("detector")
    assert len(q.backbone) == 4 and isinstance(q.backbone[0], nn.Conv2d) and q.backbone[0].stride == (2, 2)
    assert [type(layer).__name__ for layer in q.backbone] == ["Conv2d", "ReLU", "Block", "Block"]


def test_hooks_can_be_added_and_those_of_the_float_model_are_kept():
    model, data = model_and_data("loop on data", 2)
    model.refine.register_forward_hook(lambda module, args, result: result * 2)
    with pytest.warns(FxqWarning, match="parts"):
        q = fxq.quantize(model, EXACT, data=data)
    want, got = run(model, data[0]), run(q, data[0])
    assert 20 * torch.log10(want[0].norm() / (want[0] - got[0]).norm()) > 30
    seen = []
    handle = q.refine.register_forward_hook(lambda module, args, result: seen.append(result.shape))
    run(q, data[0])
    handle.remove()
    run(q, data[0])
    assert seen and set(seen) == {(2, 16, 16, 16)}


class Lora(nn.Module):
    """Linear layer with an unmerged adapter, that Python code switches."""

    def __init__(self, width):
        super().__init__()
        self.base_layer = nn.Linear(width, width)
        self.a, self.b = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)
        self.active = True

    def forward(self, x):
        y = self.base_layer(x)
        return y + self.b(self.a(x)) if self.active else y


def test_adapters_stay_float_beside_the_integer_layer():
    model = nn.Sequential(Lora(16), nn.ReLU(), Lora(16)).eval()
    with pytest.warns(FxqWarning, match="parts"):
        q = fxq.quantize(model, EXACT.parts("*.base_layer"), data=DATA)
    assert list(q.parts) == ["0.base_layer", "2.base_layer"]
    assert q[0].a.weight.equal(model[0].a.weight) and q[0].a.weight is not model[0].a.weight
    for lora in (q[0], model[0]):
        lora.active = False
    want, got = model(DATA[0]), q(DATA[0])
    assert 20 * torch.log10(want.norm() / (want - got).norm()) > 30
    with torch.no_grad():
        for lora in (q[2], model[2]):
            lora.b.weight.zero_()
    want, got = model(DATA[0]), q(DATA[0])
    assert 20 * torch.log10(want.norm() / (want - got).norm()) > 30


class Shared(nn.Module):
    """Reads a weight of a part, and a buffer outside of the parts."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("shift", torch.randn(16))

    def forward(self, x):
        for _ in range(int(x.shape[0] > 0 and x.sum() > -1e9)):
            x = self.layer(x) + x @ self.layer.weight.T + self.shift
        return x


def test_weights_that_python_code_reads_stay():
    model = Shared().eval()
    with pytest.warns(FxqWarning, match=r"50\.0% of the multiply-accumulates"):
        q = fxq.quantize(model, EXACT, data=DATA)
    assert q.layer.weight.equal(model.layer.weight) and q.output_sqnr > 30
    with pytest.raises(InputError, match=r"layer\.bias is read"):
        q.layer.bias.sum()


# ---- what else takes a model


def test_compare_and_reports(tmp_path):
    model, q, data, _ = quantized("detector")
    table = fxq.compare(model, q, data)
    assert table.output_sqnr == pytest.approx(q.output_sqnr, abs=1e-3) and table.batches == 3
    assert {row.path for row in table if row.op == "conv2d"} <= {e.path for e in q.ledger}
    assert all(row.sqnr > 25 for row in table)
    for path in (q.report(tmp_path / "q.html"), table.report(tmp_path / "c.html")):
        text = path.read_text(encoding="utf-8")
        assert '"kind":"parts"' in text and '"name":"backbone"' in text and "int() of a value" in text
    with pytest.raises(InputError, match="b was not made from a: its part 'backbone'"):
        fxq.compare(LoopOnData().eval(), q, data)


@pytest.mark.slow
def test_sensitivity_and_search():
    model, data = model_and_data("loop on data", 2)
    ranked = fxq.sensitivity(model, EXACT, data)
    assert {row.path for row in ranked} >= {"stem", "refine.conv1", "refine.conv2", "head"}
    result = fxq.search(model, EXACT, data, target=ranked.output_sqnr + 3)
    assert result.reached and result.floats
    with pytest.warns(FxqWarning, match="parts"):
        assert fxq.quantize(model, result.recipe, data=data).output_sqnr > ranked.output_sqnr


def test_a_file_does_not_go_into_another_model(tmp_path):
    model, q, data, _ = quantized("custom loop")
    path = q.save(tmp_path / "q.fxq")
    with pytest.raises(FileError, match="it has a part for the Sequential at 'body'"):
        fxq.load(path, into=Detector().eval())
    with pytest.raises(FileError, match=r"other weights or buffers .*'decoder\.embed\.weight'"):
        fxq.load(path, into=TiedDecoder().eval())
    bare = TiedDecoder().eval()
    bare.decoder.load_state_dict(model.decoder.state_dict())  # the weights of the parts are in the file
    assert equal(run(fxq.load(path, into=bare), data[0]), run(q, data[0]))
    whole = fxq.quantize(nn.Linear(4, 4).eval(), EXACT, data=[torch.rand(2, 4)]).save(tmp_path / "whole.fxq")
    with pytest.raises(FileError, match="leave out into"):
        fxq.load(whole, into=bare)


@pytest.mark.parametrize("name", ["layer.weight", "shift"])
def test_a_file_does_not_go_into_a_model_with_other_values_that_python_reads(name, tmp_path):
    model = Shared().eval()
    with pytest.warns(FxqWarning, match="parts"):
        q = fxq.quantize(model, EXACT, data=DATA)
    path, receiver = q.save(tmp_path / "q.fxq"), copy.deepcopy(model)
    with torch.no_grad():
        receiver.layer.bias.zero_()  # in the file, as part of the quantized layer
        assert torch.equal(fxq.load(path, into=receiver)(DATA[0]), q(DATA[0]))
        receiver.state_dict()[name].add_(1)
    with pytest.raises(FileError, match=f"other weights or buffers .* for instance '{name}'"):
        fxq.load(path, into=receiver)


def test_a_file_goes_into_a_model_with_tied_weights(tmp_path):
    class Tied(nn.Module):
        """Projects with the weight of a layer that is a part."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)
            self.tied = nn.ParameterList([self.layer.weight])

        def forward(self, x):
            return self.layer(x) @ self.tied[0] if float(x.sum()) > -1e9 else x

    model = Tied().eval()
    with pytest.warns(FxqWarning, match="parts"):
        q = fxq.quantize(model, EXACT, data=DATA)
    path = q.save(tmp_path / "q.fxq")
    assert torch.equal(fxq.load(path, into=model)(DATA[0]), q(DATA[0]))
    with torch.no_grad():
        model.tied[0].zero_()
    with pytest.raises(FileError, match=r"for instance 'tied\.0'"):
        fxq.load(path, into=model)


def test_a_quantized_model_is_not_quantized_again():
    _, q, data, _ = quantized("detector")
    with pytest.raises(InputError, match="quantized already"):
        fxq.quantize(q, data=data)


class Twice(nn.Module):
    """Two parts with a linear layer each, which share a weight, the layer, or are one module under two names."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        first, second = nn.Linear(64, 64), nn.Linear(64, 64)
        if kind == "weight":
            second.weight = first.weight
        self.a = nn.Sequential(first, nn.ReLU())
        self.b = self.a if kind == "part" else nn.Sequential(first if kind == "layer" else second, nn.ReLU())

    def forward(self, x):
        y = self.a(x)
        return self.b(y + 1 if float(y.sum()) > 0 else y)


def bytes_of(q):
    """Bytes of all graphs' tensors, storages that tensors share once."""
    graphs = (t for graph in q.parts.values() for t in graph.state_dict().values() if isinstance(t, torch.Tensor))
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in graphs}.values())


@pytest.mark.one_in(6)
@pytest.mark.parametrize("recipe", [EXACT, fxq.Recipe.weight_only(backend="reference")], ids=["static", "weight_only"])
@pytest.mark.parametrize("kind", ["weight", "layer", "part"])
def test_weights_that_parts_share_are_stored_once(kind, recipe, tmp_path):
    x, weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)), 64 * 64
    sizes = {}
    for own in ("apart", kind):
        with pytest.warns(FxqWarning, match="is quantized in"):
            q = fxq.quantize(Twice(own).eval(), recipe, data=[x])
        path = q.save(tmp_path / "q.fxq")
        again = [fxq.load(path, into=Twice(own).eval()), copy.deepcopy(q), pickle.loads(pickle.dumps(q))]
        got = run(q, (x,))
        assert fxq.compare(Twice(own).eval(), q, [x]).output_sqnr > 25
        assert all(equal(run(loaded, (x,)), got) for loaded in again)
        sizes[own] = [path.stat().st_size, *map(bytes_of, (q, *again))]
    assert all(apart > 2 * weight for apart in sizes["apart"])
    text = 64  # the state of a graph, as text, is a few bytes longer or shorter
    assert all(apart - tied >= weight - text for apart, tied in zip(sizes["apart"], sizes[kind], strict=True))
