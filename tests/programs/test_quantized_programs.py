"""Models that are called with containers and in several forms: one graph for each form, with shared weights."""

import copy
import itertools
import pickle
from collections import OrderedDict
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import fxq
from fxq.common.container_types import register_container
from fxq.common.metrics import sqnr
from fxq.programs.quantized_programs import QuantizedPrograms
from tests.support.machine import no_warnings

pytestmark = no_warnings

ALL_FLOAT = fxq.Recipe.weight_only(backend="reference").override("*", fxq.FLOAT)
INT8 = fxq.Recipe.weight_only(backend="reference")


def quantized(model, recipe, **options):
    """Quantized model; with a recipe that leaves all ops in float, that is warned of."""
    expected = pytest.warns(fxq.FxqWarning, match="nothing runs") if recipe is ALL_FLOAT else nullcontext()
    with expected:
        return fxq.quantize(model, recipe, **options)


class KeyCache:
    """Keys of all tokens so far, as users write such caches."""

    def __init__(self, keys=None):
        self.keys = keys

    def append(self, new):
        self.keys = new if self.keys is None else torch.cat([self.keys, new], 1)
        return self.keys


register_container(KeyCache, lambda c: ({"keys": c.keys}, None), lambda parts, _: KeyCache(parts["keys"]))


class Decoder(nn.Module):
    """One attention layer over a cache that it changes in place."""

    def __init__(self):
        super().__init__()
        self.embed, self.q, self.k = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 20)

    def forward(self, ids, cache: KeyCache, scale: float = 0.25, with_cache: bool = False):
        x = self.embed(ids)
        keys = cache.append(self.k(x))
        scores = self.q(x) @ keys.transpose(1, 2) * scale
        logits = self.head(F.softmax(scores, -1) @ keys)
        return (logits, cache) if with_cache else logits


def decoder():
    torch.manual_seed(0)
    return Decoder().eval()


def tokens(batch, length):
    return torch.randint(0, 20, (batch, length), generator=torch.Generator().manual_seed(batch + length))


EXAMPLE = {"ids": tokens(2, 3), "cache": KeyCache(torch.randn(2, 5, 16))}


def stream(model, lengths=(4, 1, 1, 3), batch=2, **options):
    """Logits of a model that is called with a cache that grows, and the cache."""
    cache = KeyCache(torch.zeros(batch, 0, 16))
    with torch.no_grad():
        return torch.cat([model(tokens(batch, n), cache, **options) for n in lengths], 1), cache


@pytest.mark.parametrize(("recipe", "least"), [(ALL_FLOAT, 100), (INT8, 30)], ids=["float", "int8"])
def test_a_cache_grows_as_in_the_float_model(recipe, least):
    model = decoder()
    qmodel = quantized(model, recipe, example_inputs=EXAMPLE)
    for lengths, batch in (((4, 1, 1, 3), 2), ((1, 1), 1), ((7,), 3)):
        want, want_cache = stream(model, lengths, batch)
        got, cache = stream(qmodel, lengths, batch)
        assert sqnr(want, got) > least and sqnr(want_cache.keys, cache.keys) > least
    assert EXAMPLE["cache"].keys.shape == (2, 5, 16)


def test_the_graph_carries_the_tensors_of_the_cache():
    qmodel = fxq.quantize(decoder(), INT8, example_inputs=EXAMPLE)
    assert isinstance(qmodel, QuantizedPrograms) and list(qmodel.programs) == ["program_0"]
    graph = qmodel.programs["program_0"].graph
    inputs = [node.target for node in graph.find_nodes(op="placeholder")]
    assert inputs == ["ids", "cache_keys"]
    (result,) = graph.output_node().args
    assert list(result) == ["new_cache_keys", "output"]
    assert "int8" in str(qmodel.ledger) and "lower" in str(qmodel.history)


def test_the_returned_cache_is_that_of_the_caller():
    qmodel = fxq.quantize(decoder(), INT8, example_inputs={**EXAMPLE, "with_cache": True})
    cache = KeyCache(torch.zeros(1, 0, 16))
    _, returned = qmodel(tokens(1, 2), cache, with_cache=True)
    assert returned is cache and cache.keys.shape == (1, 2, 16)


def test_an_unknown_form_is_refused():
    qmodel = fxq.quantize(decoder(), INT8, example_inputs=EXAMPLE)
    with pytest.raises(fxq.InputError, match=r"with_cache is True, not left out.*example_inputs"):
        qmodel(tokens(1, 2), KeyCache(torch.zeros(1, 0, 16)), with_cache=True)
    with pytest.raises(fxq.InputError, match="do not fit"):
        qmodel(tokens(1, 2), KeyCache(torch.zeros(1, 0, 16)), nothing=1)


class Branching(nn.Module):
    """Takes another way for a single token, as decoders do."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, mask=None):
        y = self.a(x) if x.shape[1] == 1 else self.a(x).cumsum(1)
        return self.b(y if mask is None else y * mask[..., None])


def branching():
    torch.manual_seed(0)
    return Branching().eval()


X, TOKEN, MASK = torch.randn(2, 5, 8), torch.randn(2, 1, 8), torch.tensor([[1.0, 1, 1, 0, 0]] * 2)
CALLS = {"prefill": {"x": X}, "decode": {"x": TOKEN}, "masked": {"x": X, "mask": MASK}}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "recipe", [INT8, fxq.Recipe.static(), fxq.Recipe.dynamic()], ids=["weights", "static", "dynamic"]
)
def test_each_kind_of_call_has_a_program(recipe):
    model = branching()
    qmodel = fxq.quantize(model, recipe, example_inputs=CALLS, data=[call for call in CALLS.values() for _ in range(3)])
    assert list(qmodel.programs) == list(CALLS)
    for _ in range(2):  # calls in turn
        for call in (*CALLS.values(), {"x": X[:1, :4]}, {"x": TOKEN[:1]}):
            with torch.no_grad():
                assert sqnr(model(**call), qmodel(**call)) > 25


def test_programs_share_their_weights():
    qmodel = fxq.quantize(branching(), INT8, example_inputs=list(CALLS.values()))
    assert list(qmodel.programs) == ["program_0", "program_1", "program_2"]
    first, *rest = (
        {id(tensor) for tensor in (*model.buffers(), *model.parameters()) if tensor.numel() >= 64}
        for model in qmodel.programs.values()
    )
    assert first and all(tensors == first for tensors in rest)


class TwoNorms(nn.Module):
    """Two norms that are equal at first, and a call with either one or both of two inputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.layer = nn.LayerNorm(64), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x, y=None):
        x = self.b(self.layer(self.a(x)))
        return x if y is None else x + y


def test_equal_tensors_of_one_program_stay_apart():
    """A state dict of a model whose norms differ loads into one whose norms are equal."""
    calls = [{"x": torch.randn(2, 64)}, {"x": torch.randn(2, 64), "y": torch.randn(2, 64)}]
    equal = TwoNorms().eval()
    scaled = copy.deepcopy(equal)
    with torch.no_grad():
        scaled.b.weight.mul_(3)
    qmodel, source = (fxq.quantize(model, INT8, example_inputs=calls) for model in (equal, scaled))
    weights = [[t for t in program.parameters() if t.numel() == 64] for program in qmodel.programs.values()]
    assert weights[0] and all(first is second for first, second in zip(*weights, strict=True))
    qmodel.load_state_dict(source.state_dict())
    assert all(torch.equal(qmodel(**call), source(**call)) for call in calls)


def test_an_example_that_a_program_serves_gets_no_other():
    calls = {"long": {"x": X}, "longer": {"x": torch.randn(1, 9, 8)}}
    assert list(fxq.quantize(branching(), INT8, example_inputs=calls).programs) == ["long"]


def test_data_of_every_form_is_needed_and_nothing_else():
    with pytest.raises(fxq.InputError, match=r"decode\(x=a tensor\)"):
        fxq.quantize(
            branching(), "static", example_inputs={"prefill": {"x": X}, "decode": {"x": TOKEN}}, data=[{"x": X}]
        )
    with pytest.raises(fxq.InputError, match="batch 0: no example"):
        fxq.quantize(
            branching(), "static", example_inputs={"prefill": {"x": X}, "decode": {"x": TOKEN}}, data=[CALLS["masked"]]
        )


def test_no_more_data_is_read_than_the_programs_need():
    def endless():
        while True:
            yield from CALLS.values()

    qmodel = fxq.quantize(branching(), INT8, example_inputs=CALLS, data=endless())
    assert list(qmodel.programs) == list(CALLS)


@pytest.mark.parametrize(("recipe", "rows"), [(INT8, 1), (fxq.Recipe.static(backend="reference"), 6)])
def test_a_graph_without_ranges_runs_on_one_sample_of_a_batch(recipe, rows):
    """Passes that need the recorded samples run them."""
    observed = fxq.prepare(nn.Sequential(nn.Linear(4, 4)).eval(), recipe, example_inputs=torch.rand(6, 4))
    seen = []
    observed.__dict__["forward"] = lambda input: seen.append(len(input))
    observed.calibrate_on({"input": torch.rand(6, 4)})
    assert seen == [rows] and observed.batches_seen == 1
    (recorded,) = observed.manager.context.samples
    assert len(recorded.kwargs["input"]) == 6


def test_endless_data_that_leaves_a_program_out_ends_with_a_warning():
    examples = {name: CALLS[name] for name in ("prefill", "masked")}
    text = r"too few calls of the form masked\(.*: 2[0-9]{2} batches were read, the last 256"
    with pytest.warns(fxq.FxqWarning, match=text):
        qmodel = fxq.quantize(branching(), INT8, example_inputs=examples, data=itertools.cycle([CALLS["prefill"]]))
    assert qmodel(**CALLS["masked"]).shape == qmodel(**CALLS["prefill"]).shape


def test_calibration_names_a_program_that_gets_no_batch(monkeypatch):
    monkeypatch.setattr("fxq.workflow.programs.MAX_IDLE", 4)
    examples = {name: CALLS[name] for name in ("prefill", "masked")}
    data = [*[CALLS["prefill"]] * 5, CALLS["masked"]]
    with pytest.warns(fxq.FxqWarning, match=r"masked\(.*: none of the first 4 batches is such a call"):
        fxq.quantize(branching(), fxq.Recipe.static(backend="reference"), example_inputs=examples, data=data)


def test_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(fxq.InputError, match="no checkpoint"):
        fxq.quantize(branching(), "static", example_inputs=CALLS, data=list(CALLS.values()), checkpoint=tmp_path / "c")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", ["copy", "pickle", "file"])
def test_copies_and_files_compute_the_same(way, tmp_path):
    qmodel = fxq.quantize(decoder(), INT8, example_inputs={"with": {**EXAMPLE, "with_cache": True}, "without": EXAMPLE})
    ways = {
        "copy": copy.deepcopy,
        "pickle": lambda model: pickle.loads(pickle.dumps(model)),
        "file": lambda model: fxq.load(model.save(tmp_path / "m.fxq")),
    }
    again = ways[way](qmodel)
    assert list(again.programs) == ["with", "without"] and str(again.ledger) == str(qmodel.ledger)
    (want, want_cache), (got, cache) = stream(qmodel), stream(again)
    assert torch.equal(want, got) and torch.equal(want_cache.keys, cache.keys)
    assert again(tokens(1, 2), KeyCache(torch.zeros(1, 0, 16)), with_cache=True)[1].keys.shape == (1, 2, 16)


@pytest.mark.slow
def test_a_file_holds_shared_weights_once(tmp_path):
    wide = nn.Sequential(nn.Linear(8, 32768), nn.Linear(32768, 8))
    model = branching()
    model.a = wide.eval()
    single = fxq.quantize(model, INT8, example_inputs={"x": X}).save(tmp_path / "one.fxq")
    three = fxq.quantize(model, INT8, example_inputs=CALLS).save(tmp_path / "three.fxq")
    assert three.stat().st_size < 1.2 * single.stat().st_size  # further graphs and histories, no further tensors


@pytest.mark.slow
def test_reports_and_exports_are_named_after_programs(tmp_path):
    qmodel = fxq.quantize(branching(), INT8, example_inputs={"prefill": {"x": X}, "decode": {"x": TOKEN}})
    pages = qmodel.report(tmp_path / "report.html")
    assert {name: path.name for name, path in pages.items()} == {
        "prefill": "report.prefill.html",
        "decode": "report.decode.html",
    }
    assert all(path.exists() for path in pages.values())


class Streaming(nn.Module):
    """Takes a list and an OrderedDict of states, and returns new ones."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.Linear(12, 8), nn.Linear(8, 4)

    def forward(self, x, states: list, named: OrderedDict):
        h = torch.tanh(self.cell(torch.cat([x, states[0]], -1))) + named["bias"]
        states[0] = h
        named["bias"] = h * 0.5
        return self.out(h)


def test_lists_and_dicts_that_a_model_changes_beside_a_cache_are_changed():
    class Both(Streaming):
        def forward(self, x, states, named, cache: KeyCache):
            y = super().forward(x, states, named)
            cache.append(y[:, None])
            return y

    torch.manual_seed(0)
    model = Both().eval()

    def state():
        return [torch.zeros(2, 8)], OrderedDict(bias=torch.ones(2, 8)), KeyCache(torch.zeros(2, 1, 4))

    qmodel = quantized(model, ALL_FLOAT, example_inputs=(torch.randn(2, 4), *state()))
    own, others = state(), state()
    for step in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            assert sqnr(model(x, *own), qmodel(x, *others)) > 100
    assert sqnr(own[0][0], others[0][0]) > 100 and sqnr(own[1]["bias"], others[1]["bias"]) > 100
    assert others[2].keys.shape == (2, 4, 4)


@pytest.mark.slow
def test_programs_are_compared_with_the_float_model(tmp_path):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x, mask=None):
            h = self.first(x).relu()
            return self.second(h if mask is None else h * mask)

    torch.manual_seed(0)
    model, x = Masked().eval(), torch.randn(8, 16)
    data = [{"x": x}, {"x": x, "mask": torch.rand(8, 16)}]
    recipe = fxq.Recipe.static(backend="reference", optimize="coverage")
    qmodel = fxq.quantize(model, recipe, data=data, example_inputs={"plain": data[0], "masked": data[1]})
    table = fxq.compare(model, qmodel, data)
    with torch.no_grad():
        wants, gots = [model(**batch) for batch in data], [qmodel(**batch) for batch in data]
    lowest = min(float(20 * torch.log10(w.norm() / (w - g).norm())) for w, g in zip(wants, gots, strict=True))
    assert table.output_sqnr == pytest.approx(lowest, abs=0.01) and table.batches == 2
    assert {row.name.split(":")[0] for row in table} == {"plain", "masked"}
    assert {row.path for row in table} >= {"second"}
    page = table.report(tmp_path / "c.html").read_text(encoding="utf-8")
    assert "Masked, static on reference, program plain" in page
    with pytest.warns(fxq.FxqWarning, match=r"a has other weights .*first\.weight"):
        fxq.compare(Masked().eval(), qmodel, data)


class Labeled:
    """A container with a list as its constant, registered below as a pytree."""

    def __init__(self, value, labels):
        self.value, self.labels = value, labels


pytree.register_pytree_node(Labeled, lambda n: ([n.value], n.labels), lambda values, labels: Labeled(values[0], labels))


class Keyed(nn.Module):
    """Branches on sizes, and returns a dict with a tuple as a key."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x, state):
        y = self.l(x) + state.value
        return {(state.labels[0], 1): y.cumsum(1) if x.shape[1] > 1 else y}


def test_constants_that_are_lists_and_keys_that_are_tuples(tmp_path):
    torch.manual_seed(0)
    model = Keyed().eval()
    calls = [{"x": x, "state": Labeled(x, ["a"])} for x in (X, TOKEN)]
    qmodel = fxq.quantize(model, INT8, example_inputs=calls)
    assert len(qmodel.programs) == 2
    for every in (qmodel, fxq.load(qmodel.save(tmp_path / "model.fxq"))):
        for call in [*calls, *calls]:
            (want,), (got,) = model(**call).items(), every(**call).items()
            assert got[0] == ("a", 1) and sqnr(want[1], got[1]) > 30
        with pytest.raises(fxq.InputError, match=r"state is .*, not "):
            every(X, Labeled(X, ["b"]))
