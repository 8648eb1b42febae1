"""The public API: every way to give a model, a recipe and data, and what comes back."""

import collections
import doctest
import importlib
import io
import pkgutil
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxq
from fxq.rewriting.rewriter import Rewriter
from tests.support.graphs import equal
from tests.support.helpers import REFERENCE, module
from tests.support.models import NETWORKS, batch, build, call

X = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()


def two_inputs():
    torch.manual_seed(0)
    return module(lambda self, x, scale: self.conv(x) * scale, conv=nn.Conv2d(3, 3, 1))


# ---- quantize, and the same in steps


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("name", ["residual", "several_inputs", "dict_output"])
def test_the_steps_are_quantize(name, backend):
    model, recipe = build(name), fxq.Recipe.static(backend=backend)
    data = [batch(name, 4, seed) for seed in (1, 2)]
    at_once = fxq.quantize(model, recipe, data=data)
    calibrated = fxq.convert(fxq.calibrate(fxq.prepare(model, recipe, example_inputs=data[0]), data))
    observed = fxq.prepare(model, recipe, example_inputs=data[0])
    with torch.no_grad():
        for inputs in data:
            call(observed, inputs)
    by_hand = fxq.convert(observed)
    expected = call(at_once, data[1])
    assert equal(call(calibrated, data[1]), expected)
    assert equal(call(by_hand, data[1]), expected)
    assert by_hand.history.names == at_once.history.names == [p.name for p in recipe.pipeline]
    assert str(by_hand.ledger) == str(at_once.ledger)


def test_an_observed_model_computes_what_the_float_model_does():
    model = net()
    assert torch.equal(fxq.prepare(model, REFERENCE, example_inputs=X)(X), model(X))


def test_the_recipe_as_name_dict_file_and_object(tmp_path):
    model, path = net(), tmp_path / "recipe.toml"
    recipe = fxq.Recipe.static(backend="reference").override("2", fxq.FLOAT)
    recipe.save(path)
    expected = fxq.quantize(model, recipe, data=[X])
    for same in (recipe.to_dict(), path, str(path)):
        qmodel = fxq.quantize(model, same, data=[X])
        assert qmodel.recipe == recipe and torch.equal(qmodel(X), expected(X))
    assert fxq.quantize(model, "static", data=[X]).recipe == fxq.quantize(model, data=[X]).recipe == fxq.Recipe.static()


def test_run_passes_stops_after_the_pass():
    gm = fxq.extend.run_passes(net(), REFERENCE, example_inputs=X, until="canonicalize")
    assert [n.name for n in gm.graph.nodes if n.op == "call_function"] == ["_0", "_1", "_2"]
    gm = fxq.extend.run_passes(net(), REFERENCE, example_inputs=X, until="fuse")
    assert [n.op for n in gm.graph.nodes if n.op.startswith("call")] == ["call_module", "call_function"]
    assert torch.equal(gm(X), net()(X))


# ---- data


def pairs():
    return DataLoader(TensorDataset(X, torch.arange(4)), batch_size=2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "data",
    [
        [X[:2], X[2:]],
        ((X[:2],), [X[2:]]),
        [{"input": X[:2]}, {"input": X[2:]}],
        [(X[:2], torch.arange(2)), (X[2:], "a target of any type")],
        pairs(),
    ],
    ids=["tensors", "tuples", "dicts", "pairs", "loader"],
)
def test_the_spellings_of_data(data):
    expected = fxq.quantize(net(), REFERENCE, data=[X[:2], X[2:]])(X)
    assert torch.equal(fxq.quantize(net(), REFERENCE, data=data)(X), expected)


def test_data_may_be_a_generator_and_is_read_once():
    read = []

    def generate():
        for i in range(3):
            read.append(i)
            yield X + i

    expected = fxq.quantize(net(), REFERENCE, data=[X, X + 1, X + 2])(X)
    assert torch.equal(fxq.quantize(net(), REFERENCE, data=generate())(X), expected)
    assert read == [0, 1, 2]


def test_an_error_of_the_user_s_generator_comes_through():
    def generate():
        yield X
        raise ConnectionError("disk gone")

    with pytest.raises(ConnectionError, match="disk gone"):
        fxq.quantize(net(), REFERENCE, data=generate())


def test_data_of_a_model_with_two_inputs():
    model, scale = two_inputs(), torch.tensor(2.0)
    expected = fxq.quantize(model, REFERENCE, data=[(X, scale)])(X, scale)
    for same in ([X, scale], {"x": X, "scale": scale}, {"scale": scale, "x": X}):
        qmodel = fxq.quantize(model, REFERENCE, data=[same])
        assert torch.equal(qmodel(X, scale), expected)
        assert torch.equal(qmodel(scale=scale, x=X), expected)


def test_example_inputs_find_the_shapes_and_do_not_calibrate():
    model = net()
    expected = fxq.quantize(model, REFERENCE, data=[X])
    qmodel = fxq.quantize(model, REFERENCE, data=[X], example_inputs=100 * torch.rand(1, 3, 16, 16))
    assert torch.equal(qmodel(X), expected(X))
    (conv, *_) = [n for n in qmodel.history["canonicalize"].graph if n.label == "conv2d"]
    assert conv.shape == (1, 4, 16, 16)


# ---- the progress bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "progress", "shown"),
    [(Terminal, None, True), (Terminal, True, True), (Terminal, False, False), (io.StringIO, None, False)],
)
def test_the_progress_bar(stream, progress, shown, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream())
    fxq.quantize(net(), REFERENCE, data=pairs(), progress=progress)
    assert ("calibrating" in sys.stderr.getvalue()) == shown


def test_the_progress_bar_without_a_length(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    observed = fxq.prepare(net(), REFERENCE, example_inputs=X)
    assert fxq.calibrate(observed, (x for x in [X, X]), progress=True) is observed
    assert observed.batches_seen == 2 and "calibrating" in sys.stderr.getvalue()


# ---- what comes back

Pair = collections.namedtuple("Pair", "first second")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "pack",
    [
        lambda y: y,
        lambda y: (y, y + 1),
        lambda y: [y, (y, None)],
        lambda y: {"y": y, "more": {"z": [y, 3, "text"]}},
        lambda y: Pair(y, y),
        lambda y: (y, 1.5, None, "text", torch.float32),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_the_structure_of_the_output(pack, backend):
    model = module(lambda self, x: pack(self.conv(x)), conv=nn.Conv2d(3, 3, 1))
    got = fxq.quantize(model, fxq.Recipe.static(backend=backend), data=[X])(X)
    assert equal_structure(model(X), got)


def equal_structure(a, b):
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, atol=0.05)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(equal_structure(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal_structure, a, b))
    return a == b


def test_inputs_by_keyword_and_defaults():
    model = module(lambda self, x, y, scale=2.0: self.conv(x) * scale + y, conv=nn.Conv2d(3, 3, 1))
    qmodel = fxq.quantize(model, REFERENCE, data=[(X, X), {"y": X, "x": X}])
    for y in (X, -X):
        assert torch.allclose(qmodel(X, y), model(X, y), atol=0.05)
        assert torch.equal(qmodel(y=y, x=X), qmodel(X, y=y))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_result_is_in_eval_mode_and_needs_no_gradient_to_run(name):
    model = build(name)
    before = [p.requires_grad for p in model.parameters()]
    qmodel = fxq.quantize(model, REFERENCE, data=[batch(name, 2)])
    assert not any(m.training for m in qmodel.modules())
    assert [p.requires_grad for p in model.parameters()] == before
    assert qmodel.recipe == REFERENCE and qmodel.backend == "reference"


# ---- the documentation


def documented():
    names = (m.name for m in pkgutil.walk_packages(fxq.__path__, "fxq.") if not m.name.startswith("fxq.report.page."))
    for package in ("fxq.passes", "fxq.patterns"):
        folder = importlib.import_module(package).__path__
        yield from (package, *(f"{package}.{m.name}" for m in pkgutil.iter_modules(folder)))
    yield from ("fxq", *names)


@pytest.mark.parametrize("name", sorted(set(documented())))
def test_the_examples_of_docstrings_run(name):
    torch.manual_seed(0)
    target = importlib.import_module(name)
    globs = {"torch": torch, "nn": nn, "fxq": fxq, **vars(target)}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    # Not `testmod`: for each docstring, with examples or without, it asks the disk of every file that was read so far.
    for test in doctest.DocTestFinder().find(target, globs=globs):
        if test.examples:
            runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    assert any(test.examples for test in finder.find(importlib.import_module("fxq.api")))


def test_conversion_without_data_can_be_made_up_for():
    """The error comes before the first edit."""
    model, x = build("dense"), batch("dense")
    observed = fxq.prepare(model, REFERENCE, example_inputs=x)
    with pytest.raises(fxq.CalibrationError, match="has seen no data"):
        fxq.convert(observed)
    fxq.calibrate(observed, [x])
    assert equal(call(fxq.convert(observed), x), call(fxq.quantize(model, REFERENCE, data=[x]), x))


class WithoutObservers(fxq.Pass):
    """A bad pass: takes the observers out."""

    name = "no-observers"
    needs = gives = fxq.extend.Stage.FUSED

    def run(self, rewriter):
        for node in rewriter.nodes():
            if node.name.endswith("_observer"):
                rewriter.replace(node, node.args[0])


def test_what_a_bad_pass_left_out_is_named():
    observed = fxq.prepare(build("dense"), REFERENCE, example_inputs=batch("dense"))
    observed(batch("dense"))
    WithoutObservers().run(Rewriter(observed.manager.gm, observed.manager.context))
    with pytest.raises(fxq.PassError, match=r"%x \(placeholder.*no observer watches"):
        fxq.convert(observed)


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_shapes_are_those_of_the_first_batch_that_is_not_empty(empty):
    """Without samples, nothing would take time on integers or in float."""
    data = [torch.zeros(0, 3, 9, 9)] * empty + [torch.rand(4, 3, 9, 9), torch.rand(2, 3, 9, 9)]
    qmodel = fxq.quantize(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), REFERENCE, data=iter(data))
    assert {node.shape[0] for node in qmodel.history["trace"].graph if node.shape} == {4}
