"""backend="fastest": every backend is tried, the quickest right one stays, and a table says what each did."""

import copy
import json
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxq
from fxq.backends import engine
from fxq.backends.base import Prices
from fxq.backends.by_name import fastest_order
from fxq.backends.packed.quantized_tensors import has_engine
from fxq.common.metrics import sqnr
from fxq.cost import whole
from fxq.cost.probe import Prober
from fxq.graph.info import Cost, info, precision_of
from fxq.graph.text.text_writer import write_graph
from fxq.pipeline.manager import PassManager
from fxq.quant.observers import MinMax
from fxq.workflow import fastest, steps
from fxq.workflow.steps import Trial, all_on_integers, converted
from tests.support.graphs import equal
from tests.support.machine import BITS

pytestmark = [pytest.mark.any_cpu, pytest.mark.filterwarnings("ignore::fxq.FxqWarning")]
FASTEST = fxq.Recipe.static(backend="fastest", optimize="coverage")
TRIED = len(fastest_order())
needs_fbgemm = pytest.mark.skipif(not has_engine("fbgemm"), reason="PyTorch is built without fbgemm")


class Net(nn.Module):
    """A sum, which some backends join with the convolution before it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(288, 5)

    def forward(self, x):
        y = torch.relu(self.a(x))
        return self.c(torch.relu(self.b(y) + y).flatten(1))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval(), torch.randn(4, 3, 8, 8)


def planted(monkeypatch, times):
    """Let the calls of each backend take so many microseconds."""

    def interleaved(calls, wait, shortest):
        return {key: times[i] for i, key in enumerate(calls)}

    monkeypatch.setattr(fastest, "interleaved", interleaved)


def planted_trials(monkeypatch, times, share=0.95):
    """Let the trial of each backend take so many microseconds, and prices leave a share of it; models take one."""
    monkeypatch.setattr(
        fastest, "times_in_turns", lambda calls, *_: {i: [times[fastest_order()[int(i)]]] for i in calls}
    )
    monkeypatch.setattr(Trial, "least_share", lambda trial: share)
    planted(monkeypatch, [1.0] * TRIED)


@pytest.mark.one_in(5)
@needs_fbgemm
@pytest.mark.parametrize("first", range(TRIED))
def test_the_quickest_is_chosen(net, monkeypatch, first):
    model, x = net
    planted(monkeypatch, [1.0 if i == first else 2.0 for i in range(TRIED)])
    q = fxq.quantize(model, FASTEST, data=[x])
    assert [a.backend for a in q.attempts] == list(fastest_order())
    assert q.backend == q.recipe.backend == fastest_order()[first]
    assert [a.chosen for a in q.attempts] == [i == first for i in range(TRIED)]
    assert sqnr(model(x), q(x)) > 20


@pytest.mark.slow
@needs_fbgemm
@pytest.mark.parametrize("far", [3.0, float("nan")])
def test_what_is_far_from_float_loses(net, monkeypatch, far):
    model, x = net
    planted(monkeypatch, [1.0, 2.0, 3.0, 4.0, 5.0])
    convert = fxq.convert

    def spoiled(observed):
        q = convert(observed)
        if q.backend == "x86":
            q.ledger = replace(q.ledger, output_sqnr=far)
        return q

    observed = fxq.prepare(model, FASTEST, example_inputs=x)
    observed(x)
    q = fastest.convert_all(observed, spoiled)
    assert q.attempts[0].us == 1.0 and q.attempts[0].sqnr == pytest.approx(far, nan_ok=True)
    assert q.backend == fastest_order()[1]


def test_engines_that_are_not_installed_are_named(net, monkeypatch):
    model, x = net
    monkeypatch.setattr(engine, "find_spec", lambda package: None)
    q = fxq.quantize(model, FASTEST, data=[x])
    missing = q.attempts.where(backend="openvino")[0]
    assert missing.us is None and missing.why.startswith("openvino is not installed: pip install fxq[openvino].")
    assert "pip install fxq[onnxruntime]" in q.attempts.to_text() and q.backend in ("x86", "fbgemm")


def test_a_backend_that_fails_is_named(net, monkeypatch):
    model, x = net
    convert = fxq.convert

    def fails(observed):
        if observed.manager.context.recipe.backend == "openvino":
            raise fxq.BackendError("it does not feel like it")
        return convert(observed)

    observed = fxq.prepare(model, FASTEST, example_inputs=x)
    observed(x)
    q = fastest.convert_all(observed, fails)
    assert q.attempts.where(backend="openvino")[0].why == "it does not feel like it"

    observed = fxq.prepare(model, FASTEST, example_inputs=x)
    observed(x)

    def never(observed):
        raise fxq.BackendError(observed.manager.context.recipe.backend)

    with pytest.raises(fxq.BackendError, match=fastest_order()[0]):
        fastest.convert_all(observed, never)


@needs_fbgemm
def test_a_backend_that_does_not_prepare_is_named(net):
    model, x = net

    def prepare(recipe, first):
        if recipe.backend != "fbgemm":
            raise fxq.InputError(f"{recipe.backend} does not like it")
        return fxq.prepare(model, recipe, example_inputs=x)

    observed = fastest.prepare_all(FASTEST, "cpu", prepare)
    observed(x)
    q = fxq.convert(observed)
    assert q.backend == "fbgemm" and q.attempts.where(backend="x86")[0].why == "x86 does not like it"
    with pytest.raises(fxq.InputError, match="x86 does not like it"):
        fastest.prepare_all(FASTEST, "cpu", lambda recipe, first: prepare(recipe.with_backend("x86"), first))


@needs_fbgemm
def test_what_does_not_depend_on_the_backend_is_prepared_once(net, monkeypatch):
    """Passes before fusion run once, and graphs that are equal are compared with the model once."""
    model, x = net
    checked, check = [], PassManager.check_float
    monkeypatch.setattr(PassManager, "check_float", lambda manager: [checked.append(manager), check(manager)])
    observed = fxq.prepare(model, FASTEST, example_inputs=x)
    models, names = (observed, *observed.others), [shot.name for shot in observed.history]
    before = names[: names.index("fuse")]
    assert {"canonicalize", "fold-batch-norm"} <= set(before)
    for sibling in models[1:]:
        assert [shot.name for shot in sibling.history] == names
        assert all(sibling.history[name] is observed.history[name] for name in before)
        assert all(sibling.history[name] is not observed.history[name] for name in names[len(before) :])
    assert len(checked) == len({write_graph(own, facts=False) for own in models}) < len(models)
    for own in models:
        alone = fxq.prepare(model, own.manager.context.recipe, example_inputs=x)
        assert write_graph(alone) == write_graph(own)
        assert torch.equal(alone(x), own(x))


class Counts(fxq.extend.Pass):
    """Pass of a user before fusion that counts its runs."""

    name, needs, gives = "counts", fxq.extend.Stage.CANONICAL, fxq.extend.Stage.CANONICAL
    runs = 0

    def run(self, rewriter):
        type(self).runs += 1


def test_passes_of_a_user_run_for_each_backend(net):
    model, x = net
    observed = fxq.prepare(model, FASTEST.insert_pass(Counts(), after="fold-batch-norm"), example_inputs=x)
    assert Counts.runs == 1 + len(observed.others)


@needs_fbgemm
def test_the_data_is_read_once(net):
    model, _ = net
    seen = []

    def data():
        for i in range(3):
            seen.append(i)
            yield torch.randn(2, 3, 8, 8)

    q = fxq.quantize(model, FASTEST, data=data())
    assert seen == [0, 1, 2] and len(q.attempts.where(lambda a: a.us is not None)) == TRIED


@pytest.mark.slow
@needs_fbgemm
@pytest.mark.parametrize("copies", [False, True])
def test_backends_with_the_same_graph_share_what_it_has_seen(net, monkeypatch, copies):
    model, x = net
    observed = fxq.prepare(model, FASTEST, example_inputs=x)
    observed(x[:2])
    observed = copy.deepcopy(observed) if copies else observed
    observed(x[2:])
    everyone = (observed, *observed.others)
    alike = [i for i, observed_model in enumerate(everyone) if observed_model.same_as is not None]
    assert alike and all(everyone[i].batches_seen == 0 and everyone[i].same_as < i for i in alike)
    planted(monkeypatch, [0.0 if i == alike[-1] else 1.0 for i in range(TRIED)])
    with torch.no_grad():
        got = fxq.convert(observed)(x)
        alone = fxq.quantize(model, FASTEST.with_backend(fastest_order()[alike[-1]]), data=[x[:2], x[2:]])(x)
    assert equal(got, alone)


class Pooled(nn.Module):
    """ONNX Runtime's global pooling emits nothing but integers, others' emits floats, too."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Linear(8, 5)
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x):
        y = torch.relu(self.a(x))
        return self.c(self.pool(torch.relu(self.b(y) + y)).flatten(1))


@pytest.mark.one_in(2)
@needs_fbgemm
@pytest.mark.parametrize("edits", [(), ("one",)], ids=["smooth did nothing", "smooth has asked"])
def test_what_a_kernel_emits_makes_no_other_graph(edits):
    torch.manual_seed(0)
    model, x = Pooled().eval(), torch.randn(4, 3, 8, 8)
    recipe = replace(FASTEST, config=replace(FASTEST.config, activation=fxq.TensorSpec(bits=BITS)))  # right in both
    observed = fxq.prepare(model, recipe, example_inputs=x)
    observed(x)
    everyone, seen_kinds = {m.manager.context.recipe.backend: m for m in (observed, *observed.others)}, []
    emits = {name: {n.name for n in m.graph.nodes if (p := info(n).plan) and p.emits} for name, m in everyone.items()}
    assert emits["onnxruntime"] - emits["fbgemm"] == {"pool"}
    converted(everyone["fbgemm"], None, seen_kinds)
    for shot in seen_kinds[0][1].history.snapshots:
        object.__setattr__(shot, "edits", edits if shot.name == "smooth" else shot.edits)
    everyone["onnxruntime"].take_calibration(everyone["fbgemm"])
    shared = converted(everyone["onnxruntime"], None, seen_kinds)
    assert len(seen_kinds) == 1 + len(edits)
    alone = fxq.quantize(model, recipe.with_backend("onnxruntime"), data=[x])
    assert equal(shared(x), alone(x)) and shared.history["correct-bias"].graph == alone.history["correct-bias"].graph


def test_the_table(net):
    model, x = net
    q = fxq.quantize(model, FASTEST, data=[x])
    assert q.attempts.to_text().split()[:6] == ["backend", "ms", "int8", "ops", "SQNR", "dB"]
    assert "1 thread" in q.attempts.to_text()
    assert len(json.loads(q.attempts.to_json())["attempts"]) == TRIED
    assert "was the quickest" in repr(q.attempts)
    for duplicate in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert duplicate.attempts == q.attempts and equal(duplicate(x), q(x))
    assert fxq.quantize(model, FASTEST.with_backend("x86"), data=[x]).attempts is None


@pytest.mark.slow
def test_an_observed_model_copies_all_of_it(net):
    model, x = net
    observed = copy.deepcopy(fxq.prepare(model, FASTEST, example_inputs=x))
    observed(x)
    assert [observed_model.batches_seen for observed_model in observed.others if observed_model.same_as is None] == [1]
    assert len(fxq.convert(observed).attempts) == TRIED


@pytest.mark.slow
def test_a_preset_without_data(net):
    model, x = net
    q = fxq.quantize(model, fxq.Recipe.dynamic(backend="fastest"), example_inputs=x)
    assert len(q.attempts) == TRIED and sqnr(model(x), q(x)) > 20


def test_backends_that_keep_weights_in_float_do_not_win_a_recipe_for_size(net):
    model, x = net
    q = fxq.quantize(model, fxq.Recipe.weight_only(backend="fastest"), example_inputs=x)
    assert q.ledger.count("weight-only") == 3 and len(q.attempts) == TRIED
    left_out = {a.backend for a in q.attempts if "stores the weights of 0 layers as integers, where other" in a.why}
    assert "openvino" in left_out and "jit" not in left_out


def test_recipes_with_it_are_saved(tmp_path):
    FASTEST.save(tmp_path / "r.toml")
    assert fxq.Recipe.load(tmp_path / "r.toml") == FASTEST


@pytest.mark.slow
def test_of_equals_the_first_is_taken(net, monkeypatch):
    model, x = net
    planted(monkeypatch, [1.05, 1.0, 2.0, 2.0, 2.0])
    assert fxq.quantize(model, FASTEST, data=[x]).backend == fastest_order()[0]


@pytest.mark.slow
@pytest.mark.parametrize(("cpus", "busy", "threads"), [(4, False, 4), (1.5, False, 1), (4, True, 1)])
def test_threads_without_a_cpu_each_time_nothing(net, monkeypatch, cpus, busy, threads):
    """One thread is timed then, in CPU time; `attempts` says so."""
    model, x = net
    monkeypatch.setattr(fastest, "usable_cpus", lambda: cpus)
    monkeypatch.setattr(fastest, "is_contended", lambda: busy)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        q = fxq.quantize(model, FASTEST, data=[x])
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert q.attempts.threads == threads


@pytest.mark.one_in(4)
@needs_fbgemm
@pytest.mark.parametrize(("share", "far", "count"), [(0.5, None, 2), (0.85, None, 1), (0.5, 3.0, 2), (0.85, 3.0, 2)])
def test_backends_that_cannot_win_are_not_converted(net, monkeypatch, share, far, count):
    """With prices, backends are timed before they are calibrated, and the quickest is converted first.

    Others are converted if they would be faster with the share of their time that prices leave: 0.85 of 1.3 is too much
    beside 1.0. Later ones must be 1.1 times as fast. A leader that is inaccurate rules nothing out.
    """
    model, x = net
    trial = dict(zip(fastest_order(), [9.0, 2.3, 1.0, 1.3, 2.4], strict=True))
    planted_trials(monkeypatch, trial, share)
    seen = []

    def convert(model, *_):
        q = converted(model)
        seen.append(q.backend)
        if q.backend == fastest_order()[2]:
            q.ledger = replace(q.ledger, output_sqnr=far or q.ledger.output_sqnr)
        return q

    monkeypatch.setattr(fastest, "converted", convert)
    q = fxq.quantize(model, FASTEST.with_optimize("speed"), data=[x])
    order = sorted(fastest_order(), key=trial.__getitem__)
    assert seen == order[:count]
    dropped = [attempt for attempt in q.attempts if attempt.why]
    assert {attempt.backend for attempt in dropped} == set(fastest_order()) - set(seen)
    assert all("not converted: with all possible ops on integers it takes" in attempt.why for attempt in dropped)
    assert all((attempt.us is None) == bool(attempt.why) for attempt in q.attempts)
    assert q.backend == next(name for name in fastest_order() if name in seen and (far is None or name != order[0]))


def batches_seen(observed):
    models = observed, *(observed.others or ()), *observed.left_out
    return {model.manager.context.recipe.backend: model.batches_seen for model in models}


@pytest.mark.slow
@needs_fbgemm
def test_backends_that_cannot_win_see_no_data(net, monkeypatch):
    """The others see what they would see alone: the example, which was run for the trials, is no calibration data."""
    model, x = net
    planted_trials(monkeypatch, dict(zip(fastest_order(), [9.0, 2.3, 2.1, 1.0, 1.05], strict=True)))
    monkeypatch.setattr(fastest, "_graph_key", lambda observed: observed)  # each graph is one of its own
    monkeypatch.setattr("fxq.dispatch.converted_for_recipe", lambda observed, **_: observed)
    recipe, data = FASTEST.with_optimize("speed"), [x[:2], x[2:], x[:2]]
    observed = fxq.quantize(model, recipe, data=data, example_inputs=9 * x)
    assert batches_seen(observed) == {"openvino": 3, "onnxruntime": 3, "x86": 0, "fbgemm": 0, "jit": 0}
    alone = fxq.quantize(model, recipe.with_backend("openvino"), data=data)
    ranges, ranges_alone = (dict(o.named_buffers()) for o in (observed, alone))
    assert ranges.keys() == ranges_alone.keys() and all(equal(ranges[name], ranges_alone[name]) for name in ranges)
    samples, samples_alone = ([batch.args[0] for batch in o.manager.context.samples] for o in (observed, alone))
    assert all(map(equal, samples, samples_alone)) and len(samples) == len(samples_alone)


@pytest.mark.slow
@needs_fbgemm
def test_an_example_that_calibrates_nothing_leaves_no_backend_out(net, monkeypatch):
    """Its values are finite, but not their sums."""
    model, x = net
    seen = []
    convert = fastest.converted_for_recipe
    monkeypatch.setattr("fxq.dispatch.converted_for_recipe", lambda o, **_: seen.append(o.left_out) or convert(o))
    monkeypatch.setattr(fastest, "_quick", lambda observer: Refusing(observer.spec))
    q = fxq.quantize(model, FASTEST.with_optimize("speed"), data=[x])
    assert seen == [()] and sqnr(model(x), q(x)) > 20


class Refusing(MinMax):
    """Observer that takes no value."""

    def observe(self, x):
        raise fxq.CalibrationError("it is infinite")


@pytest.mark.slow
@needs_fbgemm
def test_with_a_checkpoint_every_backend_sees_the_data(net, monkeypatch, tmp_path):
    """Another run, which resumes it, may take other backends for slow."""
    model, x = net
    planted_trials(monkeypatch, dict(zip(fastest_order(), [9.0, 2.3, 2.1, 1.0, 1.05], strict=True)))
    seen = []
    convert = fastest.converted_for_recipe
    monkeypatch.setattr("fxq.dispatch.converted_for_recipe", lambda o, **_: seen.append(o.left_out) or convert(o))
    fxq.quantize(model, FASTEST.with_optimize("speed"), data=[x], checkpoint=tmp_path / "c.safetensors")
    assert seen == [()]


@pytest.mark.slow
@needs_fbgemm
def test_a_backend_left_out_of_the_calibration_wins_if_the_others_are_slower_than_promised(net, monkeypatch):
    model, x = net
    times = dict(zip(fastest_order(), [9.0, 2.9, 2.1, 1.0, 9.0], strict=True))
    planted_trials(monkeypatch, times)
    monkeypatch.setattr(fastest, "_graph_key", lambda observed: observed)

    def slower(model, *_):
        times["openvino"] = 5.0  # as when verification moves ops to float
        return converted(model)

    monkeypatch.setattr(fastest, "converted", slower)
    planted(monkeypatch, [2.1, 5.0])
    with pytest.warns(fxq.FxqWarning, match=r"jit was taken for slow, and is calibrated on 4 samples alone"):
        q = fxq.quantize(model, FASTEST.with_optimize("speed"), data=[x])
    assert q.backend == "jit" and sqnr(model(x), q(x)) > 20
    assert [attempt.backend for attempt in q.attempts if not attempt.why] == ["jit", "openvino"]


def test_a_trial_fits_nothing_and_bounds_what_float_ops_gain(net, monkeypatch):
    model, x = net
    observed = fxq.prepare(model, fxq.Recipe.static(backend="x86"), example_inputs=x)
    observed(x)
    trial = all_on_integers(observed)
    assert {"choose-grids", "insert-qdq"} <= {shot.name for shot in trial.manager.history}
    assert not {"keep-small-values", "correct-bias"} & {shot.name for shot in trial.manager.history}
    assert sqnr(model(x), trial.lowered(x)) > 20
    backend = trial.manager.context.backend
    assert backend.prices(trial.manager.gm, trial.manager.context.example) is None
    assert 0.0 <= trial.least_share() <= 1.0  # by the price table; 0 for CPUs without one
    monkeypatch.setattr(Prober, "_estimate", lambda prober, conversion, elements: 0.0)
    monkeypatch.setattr(Prober, "estimate", lambda prober, gm, region: (4.0, 1.0))
    assert trial.least_share() == 0.25
    monkeypatch.setattr(Prober, "_estimate", lambda prober, conversion, elements: 9.0)
    second = [node for node in trial.manager.gm.graph.nodes if precision_of(node) == "int8"][1]
    monkeypatch.setattr(
        Prober, "estimate", lambda prober, gm, region: (4.0, 1.0) if region.node is second else (1.0, 99.0)
    )
    assert trial.least_share() == 1.0  # conversions around it would take longer than float saves
    monkeypatch.setattr(Prober, "estimate", lambda prober, gm, region: None)
    assert trial.least_share() == 0.0


def test_the_mix_that_an_engine_prices_best_is_timed_in_a_trial(net, monkeypatch):
    model, x = net
    observed = fxq.prepare(model, fxq.Recipe.static(backend="x86"), example_inputs=x)
    observed(x)
    trial = all_on_integers(observed)
    nodes = [node for node in trial.manager.gm.graph.nodes if precision_of(node) == "int8"]
    costs = {node: Cost(1.0 if i else 9.0, 2.0) for i, node in enumerate(nodes)}  # all but the first in float
    monkeypatch.setattr(type(trial.manager.context.backend), "prices", lambda *_: Prices(costs, 0.0))
    mixes = []

    def timed(calls, *_, **__):
        mixes.extend(calls.values())
        return {"0": 2.0, "1": 1.5}

    monkeypatch.setattr(whole, "interleaved", timed)
    assert trial.least_share() == 0.75
    every, mix = (call() for call in mixes)
    assert sqnr(every, trial.lowered(x)) > 60 and not torch.equal(every, mix) and sqnr(model(x), mix) > 20
    slow_floats = Prices(dict.fromkeys(nodes, Cost(9.0, 2.0)), 0.0)
    monkeypatch.setattr(type(trial.manager.context.backend), "prices", lambda *_: slow_floats)
    assert trial.least_share() == 1.0 and len(mixes) == 2  # all on integers is the best mix
    monkeypatch.setattr(steps, "least_share", lambda *_: (0.0, []))
    assert trial.least_share() == 0.0 and len(mixes) == 2  # nothing has a price


@pytest.mark.slow
@needs_fbgemm
def test_backends_without_a_trial_are_converted(net, monkeypatch):
    """An engine that fails in its trial is converted last, and reported as before."""
    model, x = net

    def fails(*_):
        raise ValueError("it does not feel like it")

    monkeypatch.setattr(fastest, "all_on_integers", fails)
    q = fxq.quantize(model, FASTEST.with_optimize("speed"), data=[x])
    assert [attempt.why for attempt in q.attempts if attempt.us is None] == []


@pytest.mark.slow
def test_layers_return_to_float_on_backends_with_the_same_graph():
    """These layers are so small that float is faster on each backend of PyTorch's kernels."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(8, 8)
    q = fxq.quantize(model, FASTEST.with_optimize("speed"), data=[x])
    assert [attempt.why for attempt in q.attempts if "failed" in attempt.why] == []
