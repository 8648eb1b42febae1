"""User-defined ops, from `tests/support/extensions.py`."""

import pickle

import pytest
import torch
from torch import nn

import fxq
from fxq.graph.info import info
from fxq.graph.query import called_name
from fxq.ops import OPS
from tests.support import extensions as own
from tests.support.helpers import REFERENCE
from tests.support.machine import needs_x86
from tests.support.models import settled

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Network with every spelling of a `torch.library` op, and a module that is an op."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.swap = nn.Linear(8, 8), nn.Linear(8, 8), own.Swap(1)

    def forward(self, x):
        x = own.bump(self.first(x), width=2.0)
        x = self.first(own.bump_op(x, 3.0))
        x = self.first(torch.ops.fxq_tests.bump(x, width=0.5))
        return self.second(self.swap(torch.ops.fxq_tests.bump.default(self.first(x))))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_an_op_of_the_user_s_library_runs_on_integers_under_its_name(backend):
    model = settled(Net)
    qmodel = fxq.quantize(model, fxq.Recipe.static(backend=backend).with_min_sqnr(None), data=[X])
    rows = {e.op: e.precision for e in qmodel.ledger}
    assert rows == {"linear": "int8", "bump": "int8", "own_swap": "moves"}
    assert [e.op for e in qmodel.ledger].count("bump") == 4
    gm = fxq.extend.run_passes(model, REFERENCE, example_inputs=X, until="canonicalize")
    calls = gm.graph.find_nodes(op="call_function", target=own.bump)
    assert [call.kwargs.get("width", 1.0) for call in calls] == [2.0, 3.0, 0.5, 1.0]
    assert torch.equal(pickle.loads(pickle.dumps(qmodel))(X), qmodel(X))


def test_an_op_of_a_list_is_one_call():
    class Joined(nn.Module):
        def forward(self, x):
            return own.join([x, own.join(xs=(x, x), dim=1)], dim=1)

    gm = fxq.extend.run_passes(Joined(), REFERENCE, example_inputs=X, until="canonicalize")
    assert len(gm.graph.find_nodes(op="call_function", target=own.join)) == 2
    assert torch.equal(gm(X), torch.cat([X, X, X], 1))


def test_an_op_is_selected_fused_and_called_as_ever():
    assert torch.equal(own.bump(X, width=2.0), own.bump_op(X, 2.0))
    qmodel = fxq.quantize(settled(Net), REFERENCE.override(fxq.by_op("bump"), fxq.FLOAT).with_min_sqnr(None), data=[X])
    assert {e.precision for e in qmodel.ledger if e.op == "bump"} == {"float"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: fxq.extend.register_op(traits="computes"),
            r'traits is a fxq.extend.OpTraits, such as fxq.extend.OpTraits\("computes"',
        ),
        (
            lambda: fxq.extend.register_op(traits=fxq.extend.OpTraits("compute")),
            "unknown kind of a fxq.extend.OpTraits 'compute'; did you mean",
        ),
        (
            lambda: fxq.extend.register_op(traits=fxq.extend.OpTraits("computes", weight="w")),
            "also needs axis and channels",
        ),
        (
            lambda: fxq.extend.register_op(3, traits=fxq.extend.OpTraits("float")),
            "a spelling of an op is a function, .* not 3",
        ),
        (
            lambda: fxq.extend.register_op("fxq_tests::bump", traits=fxq.extend.OpTraits("float")),
            "not 'fxq_tests::bump'",
        ),
        (lambda: fxq.extend.register_op(nn.ReLU(), traits=fxq.extend.OpTraits("float")), "not ReLU()"),
        (
            lambda: fxq.extend.register_op(traits=fxq.extend.OpTraits("float"))(torch.relu),
            "decorates a plain function, not <built-in",
        ),
        (
            lambda: fxq.extend.register_op(traits=fxq.extend.OpTraits("float", ("y",)))(lambda x: x),
            "not a positional parameter: .*'y'",
        ),
        (
            lambda: fxq.extend.register_op(traits=fxq.extend.OpTraits("float"), name="relu")(lambda x: x),
            "the name 'relu' is taken",
        ),
        (
            lambda: fxq.extend.register_op(torch.ops.fxq_tests.bump, traits=fxq.extend.OpTraits("float"), name="z")(
                lambda x: x
            ),
            "claimed by both 'bump' and 'z'",
        ),
    ],
)
def test_an_op_that_cannot_be(make, message):
    before = [op.name for op in OPS]
    with pytest.raises(fxq.FxqError, match=message):
        make()
    assert [op.name for op in OPS] == before


def test_a_function_defined_anew_replaces_its_op():
    def define():
        @fxq.extend.register_op(nn.PairwiseDistance, traits=fxq.extend.OpTraits("float"))
        def anew(x):
            return x

        return anew

    first, second = define(), define()
    assert OPS["anew"].target is second and OPS.of_target(first) is None
    OPS.discard("anew")
    assert "anew" not in OPS and OPS.of_call(nn.PairwiseDistance) is None


@torch.library.custom_op("fxq_tests::unregistered", mutates_args=())
def unregistered(x: torch.Tensor) -> torch.Tensor:
    return x.flip(1)


def about(node):
    """Reason why a node is float."""
    plan = info(node).plan
    return plan.decision.text if plan is not None else ""


@needs_x86
def test_what_an_op_lacks_is_said():
    @fxq.extend.register_op(traits=fxq.extend.OpTraits("moves"))
    def moved_without_layout(x):
        return x.flip(1)

    @fxq.extend.register_op(traits=fxq.extend.OpTraits("computes"))
    def without_kernel(x):
        return x.flip(1)

    class Lacking(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = without_kernel(moved_without_layout(self.a(x)))
            return self.b(torch.sinc(torch.ops.fxq_tests.unregistered(x)))

    try:
        recipe = fxq.Recipe.static(backend="x86", optimize="coverage").with_min_sqnr(None)
        gm = fxq.extend.run_passes(settled(Lacking), recipe, example_inputs=X, until="annotate")
    finally:
        OPS.discard("moved_without_layout")
        OPS.discard("without_kernel")
    kernel = "add one with fxq.extend.register_kernel"
    assert {called_name(node): text for node in gm.graph.nodes if (text := about(node))} == {
        "moved_without_layout": f"x86 has no int8 kernel for moved_without_layout: {kernel}; or set "
        'traits=fxq.extend.OpTraits("moves", layout=True), if it only moves values',
        "without_kernel": f"x86 has no int8 kernel for without_kernel: {kernel}",
        "unregistered": "unregistered is not in the op table; fxq.extend.register_op adds it",
        "sinc": "sinc is not in the op table",
    }
