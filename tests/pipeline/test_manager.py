import logging
import math
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import FxqWarning, InputError, PassError, RecipeError
from fxq.graph.query import constant
from fxq.ops import OPS
from fxq.passes import Annotate, Canonicalize, Fuse, InsertQdq, Trace
from fxq.recipe.pass_base import Pass, Stage
from fxq.workflow.steps import manager_for
from tests.support.graphs import graph
from tests.support.helpers import REFERENCE, managed, module
from tests.support.machine import quiet, told
from tests.support.models import two_linears

X = torch.linspace(-1, 1, 32).reshape(8, 4)
CHECKED = REFERENCE.with_check("numeric")


# ---- stages


def test_a_pass_that_needs_a_later_stage():
    with pytest.raises(PassError, match="fuse needs the stage canonical, but the graph is none"):
        managed(two_linears(), X).run([Fuse()])
    manager = managed(two_linears(), X)
    manager.run([Trace(), Canonicalize()])
    with pytest.raises(PassError, match="insert-qdq needs the stage observed, but the graph is canonical"):
        manager.run([InsertQdq()])
    assert manager.history.names == ["trace", "canonicalize"]


def test_a_pass_after_the_last_stage_that_it_works_on():
    with pytest.raises(
        PassError, match="equalize works on graphs up to the stage canonical, and the graph is fused al"
    ):
        fxq.prepare(two_linears(), REFERENCE.insert_pass(fxq.passes.Equalize(), after="fuse"), example_inputs=X)
    with pytest.raises(
        PassError, match="equalize works on graphs up to the stage canonical, and the graph is observed"
    ):
        fxq.quantize(two_linears(), REFERENCE.insert_pass(fxq.passes.Equalize(), after="insert-observers"), data=[X])
    fxq.prepare(two_linears(), REFERENCE.insert_pass(fxq.passes.Equalize(), after="canonicalize"), example_inputs=X)


def test_the_stage_moves_forward_only():
    manager = managed(two_linears(), X)
    seen = []
    for step in (Trace(), Canonicalize(), Fuse(), Annotate(), Canonicalize()):
        manager.run([step])
        seen.append(manager.stage)
    assert seen == [Stage.TRACED, Stage.CANONICAL, Stage.FUSED, Stage.FUSED, Stage.FUSED]
    assert [s.stage for s in manager.history] == seen


def test_a_removed_pass_that_others_need_is_told():
    with pytest.raises(PassError, match="annotate needs the stage fused, but the graph is canonical"):
        fxq.prepare(two_linears(), REFERENCE.without_pass("fuse"), example_inputs=X)
    with pytest.raises(RecipeError, match="no pass that inserts observers: insert-observers was removed"):
        fxq.prepare(two_linears(), REFERENCE.without_pass("insert-observers"), example_inputs=X)


def test_a_pass_that_needs_observers_and_stands_before_them_is_named():
    with pytest.raises(RecipeError, match="inserts observers: looks-at-observers needs observers and comes before it"):
        fxq.prepare(two_linears(), REFERENCE.insert_pass(LooksAtObservers(), after="fuse"), example_inputs=X)


# ---- passes that go wrong


@dataclass(frozen=True)
class LooksAtObservers(Pass):
    """Does nothing."""

    name = "looks-at-observers"
    needs = gives = Stage.OBSERVED

    def run(self, rewriter):
        pass


@dataclass(frozen=True)
class Misplace(Pass):
    """Moves the first op after its readers."""

    name = "misplace"

    def run(self, rewriter):
        linear, relu, *_ = rewriter.nodes("linear", "relu")
        relu.append(linear)


@dataclass(frozen=True)
class Respell(Pass):
    """Adds an op in a spelling that is not canonical."""

    name = "respell"

    def run(self, rewriter):
        (relu,) = rewriter.nodes("relu")
        relu.target = torch.relu


@dataclass(frozen=True)
class Raise(Pass):
    """Divides by zero."""

    name = "raise"

    def run(self, rewriter):
        1 / 0  # noqa: B018


@dataclass(frozen=True)
class Complain(Pass):
    """Raises an error of fxq."""

    name = "complain"

    def run(self, rewriter):
        raise InputError("what, where, why, what to do")


@dataclass(frozen=True)
class Turn(Pass):
    """Gives a layer what it cannot take."""

    name = "turn"

    def run(self, rewriter):
        linear = rewriter.nodes("linear")[-1]
        turned = rewriter.call("transpose", linear.args[0], before=linear, dim0=0, dim1=1)
        rewriter.update(linear, args=(turned, *linear.args[1:]))


@dataclass(frozen=True)
class AddMethod(Pass):
    """Calls a method: nothing knows that its value is a tensor before it runs."""

    name = "add-method"

    def run(self, rewriter):
        linear = rewriter.nodes("linear")[-1]
        sigmoid = rewriter.node("call_method", "sigmoid", (linear.args[0],), before=linear)
        rewriter.update(linear, args=(sigmoid, *linear.args[1:]))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (Misplace(), PassError, "after misplace: the graph is invalid: .*_0"),
        (Respell(), PassError, r"after respell: %_1 \(call_function, layer \"1\".*\): is a spelling of relu"),
        (AddMethod(), PassError, r"after add-method: %sigmoid .*: is a spelling of sigmoid; a pass"),
        (Raise(), PassError, "raise failed: ZeroDivisionError: division by zero"),
        (Complain(), InputError, "^complain failed: what, where, why, what to do$"),
        (
            Turn(),
            PassError,
            r"^after turn: the graph does not run on the example: %_2 \(linear, layer \"2\"",
        ),
    ],
)
def test_a_pass_that_goes_wrong_is_named_with_the_node(step, error, message):
    with pytest.raises(error, match=message):
        fxq.prepare(two_linears(), REFERENCE.insert_pass(step, after="canonicalize"), example_inputs=X[:5])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("after", ["canonicalize", "fuse", "insert-observers", "insert-qdq"])
def test_a_graph_that_does_not_run_is_told_at_once(after):
    """The first batch, or a later pass, raised an error that did not name the wrong pass."""
    with pytest.raises(PassError, match=r"^after turn: .* mat1 and mat2 shapes cannot be multiplied"):
        fxq.quantize(two_linears(), REFERENCE.insert_pass(Turn(), after=after), data=[X[:5]])


def test_trying_out_is_no_calibration():
    @dataclass(frozen=True)
    class Idle(Pass):
        """Does nothing."""

        name = "idle"

        def run(self, rewriter):
            pass

    with pytest.raises(fxq.CalibrationError, match="has seen no data"):
        fxq.convert(
            fxq.prepare(two_linears(), REFERENCE.insert_pass(Idle(), after="insert-observers"), example_inputs=X)
        )


def test_the_cause_is_kept():
    with pytest.raises(PassError) as caught:
        fxq.prepare(two_linears(), REFERENCE.insert_pass(Raise(), after="canonicalize"), example_inputs=X)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


# ---- history


def test_passes_are_logged(caplog):
    with caplog.at_level(logging.INFO, logger="fxq"):
        managed(two_linears(), X).run([Trace(), Canonicalize()])
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == ["trace", "canonicalize"]


# ---- the numeric check


@dataclass(frozen=True)
class ScaleWeight(Pass):
    """Multiplies the weight of the last linear layer, as a pass with a fault might."""

    factor: float = 0.5
    name = "scale-weight"

    def run(self, rewriter):
        last = rewriter.nodes("linear")[-1]
        weight = constant(rewriter.gm, last.args[1])
        new = rewriter.constant(weight * self.factor, "scaled", before=last)
        rewriter.update(last, args=(last.args[0], new, *last.args[2:]))


def single():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3, bias=False)).eval()


def test_the_first_pass_that_loses_is_named():
    recipe = CHECKED.insert_pass(ScaleWeight(), after="fold-batch-norm")
    with pytest.warns(FxqWarning, match=r"^scale-weight lost 44\.0 dB: the output is at 6\.0 dB SQNR"):
        history = fxq.quantize(single(), recipe, data=[X]).history
    assert history.first_loss == "scale-weight"
    assert str(history).endswith("scale-weight is the first pass that lost more than the recipe allows")
    assert history["fold-batch-norm"].sqnr == math.inf
    assert history["scale-weight"].sqnr == pytest.approx(20 * math.log10(2), abs=1e-5)  # half of the output is noise
    assert history["insert-qdq"].sqnr == pytest.approx(6.02, abs=0.1)  # rounding adds nothing to that


def test_no_pass_loses_more_than_is_allowed():
    recipe = REFERENCE.with_min_sqnr(None).with_check("numeric", max_loss=45)
    recipe = recipe.insert_pass(ScaleWeight(), after="fold-batch-norm")
    with quiet():
        assert fxq.quantize(single(), recipe, data=[X]).history.first_loss is None
        assert fxq.quantize(two_linears(), CHECKED, data=[X]).history.first_loss is None


def test_only_the_first_loss_is_named():
    class Again(ScaleWeight):
        name = "scale-again"

    recipe = REFERENCE.with_check("numeric", max_loss=0.5).with_min_sqnr(None)
    recipe = recipe.insert_pass(ScaleWeight(), after="canonicalize").insert_pass(Again(), after="scale-weight")
    with pytest.warns(FxqWarning) as warned:
        assert fxq.quantize(single(), recipe, data=[X]).history.first_loss == "scale-weight"
    assert len(told(warned)) == 1


def test_results_that_are_not_finite_are_a_loss():
    recipe = CHECKED.insert_pass(ScaleWeight(math.inf), after="fold-batch-norm")
    with pytest.warns(FxqWarning, match="scale-weight lost inf dB"):
        manager = manager_for(single(), recipe, X)
        manager.run(recipe.pipeline[: recipe.pipeline.position("scale-weight") + 1])
    assert manager.history.first_loss == "scale-weight"


def test_measuring_is_no_calibration():
    """Scales do not depend on the check, though the example is far outside of the data."""
    data = [X, X / 2]
    plain = fxq.quantize(two_linears(), REFERENCE, data=data, example_inputs=X * 100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxqWarning)
        checked = fxq.quantize(two_linears(), CHECKED, data=data, example_inputs=X * 100)
    assert str(checked.history["insert-qdq"].graph) == str(plain.history["insert-qdq"].graph)


# ---- the user's model


def test_the_float_model_is_not_changed():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(), nn.Flatten(), nn.Linear(64, 5)
    ).eval()
    model[5].weight.requires_grad_(False)
    image = torch.rand(2, 3, 6, 6)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    tensors = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    grads = {name: p.requires_grad for name, p in model.named_parameters()}
    modules = [(name, type(m), m.training, dict(m.__dict__)) for name, m in model.named_modules()]
    want = model(image)
    for recipe in (REFERENCE, CHECKED, fxq.Recipe.static()):
        fxq.quantize(model, recipe, data=[image])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == tensors
    assert {name: p.requires_grad for name, p in model.named_parameters()} == grads
    for (name, kind, training, attributes), (now, m) in zip(modules, model.named_modules(), strict=True):
        assert (now, type(m), m.training) == (name, kind, training)
        assert m.__dict__.keys() == attributes.keys()
    assert torch.equal(model(image), want)


def test_the_traced_graph_shares_the_models_parameters():
    model = two_linears()
    gm = graph(model, X)
    assert {id(p) for p in gm.parameters()} == {id(p) for p in model.parameters()}


# ---- before anything is rounded


class Doubled(nn.Module):
    """Wrong function of the row below."""

    def forward(self, x):
        return 2 * x


@pytest.fixture
def wrong_row():
    """A row of the op table that computes something else than the modules that it stands for."""

    @fxq.extend.register_op(Doubled, traits=fxq.extend.OpTraits("computes", pointwise=True))
    def doubled(x):
        return 2.01 * x

    yield
    OPS.discard("doubled")


def test_a_row_that_is_wrong_is_told_before_anything_is_rounded(wrong_row):
    """46 dB: as good as rounding to 7 bits, so that the output of the finished model would not show it."""
    model = nn.Sequential(nn.Linear(4, 4), Doubled()).eval()
    with pytest.warns(FxqWarning, match=r"computes something else than the model: 46\.0 dB SQNR on the example"):
        fxq.prepare(model, REFERENCE, example_inputs=X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxqWarning)
        fxq.prepare(model, REFERENCE.leaf("1"), example_inputs=X)
        fxq.prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), REFERENCE, example_inputs=X)


def test_a_weight_that_is_returned_is_compared_without_a_warning():
    model = module(lambda self, x: (self.fc(x), self.fc.weight), fc=nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxq.prepare(model, REFERENCE, example_inputs=X)


def test_what_rounding_leaves_of_zero_is_no_error():
    class Zero(nn.Module):
        """The mean of what a layer norm gives; batch norm is folded, so that the layer rounds otherwise."""

        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4)
            self.norm.running_var.fill_(3.0)

        def forward(self, x):
            return self.last(self.norm(self.first(x))).mean(1)

    with warnings.catch_warnings():
        warnings.simplefilter("error", FxqWarning)
        fxq.prepare(Zero().eval(), REFERENCE, example_inputs=X)


# ---- passes without edits


class Idle(Pass):
    """A pass as one of fxq's own that finds nothing to do."""

    __module__ = "fxq.passes.idle"
    name = "idle"
    needs = gives = Stage.CANONICAL

    def run(self, rewriter):
        pass


def test_a_pass_that_edits_nothing_has_the_view_of_the_one_before(monkeypatch):
    manager, checked = managed(two_linears(), X), []
    manager.run([Trace(), Canonicalize()])
    monkeypatch.setattr("fxq.pipeline.manager.check", lambda gm, stage, after: checked.append(after))
    manager.run([Idle(), Fuse()])
    before, idle = manager.history[-3], manager.history["idle"]
    assert all(a is b for a, b in zip(before.graph, idle.graph, strict=True)) and idle.graph.name == "idle"
    assert checked == ["fuse"]  # which reaches another stage
