"""Lowering: regions become kernels or stay in qdq form, and nodes of kernels have the metadata of their ops."""

import pickle
import warnings

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.cpu import has_onednn_int8
from fxq.backends.x86.x86 import X86
from fxq.graph.info import info
from fxq.graph.query import submodule
from fxq.passes import Lower
from tests.support import extensions as own
from tests.support.graphs import equal, expected, run_pass, text, until

ENGINE = fxq.Recipe.static(backend=own.Engine, optimize="coverage").with_min_sqnr(None)
pytestmark = pytest.mark.any_cpu


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
        self.body = nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), nn.Conv2d(4, 4, 1))

    def forward(self, x):
        return self.body(torch.erf(self.stem(x)))


def lowered(recipe=ENGINE):
    torch.manual_seed(0)
    return until(Blocks().eval(), torch.randn(2, 3, 4, 4), "lower", recipe)


def test_the_node_of_a_region_knows_its_ops():
    gm = lowered().gm
    stem, body = (n for n in gm.graph.nodes if n.op == "call_module")
    assert (stem.name, body.name) == ("stem_0_relu", "body_0_0_relu_to_body_1")
    assert (info(stem).path, info(stem).lowered.body, info(stem).lowered.plans) == ("stem.0", ("conv2d", "relu"), ())
    about = info(body)
    assert (about.path, about.fused.paths) == ("body", ("body.0.0", "body.0.1", "body.1"))
    assert about.lowered.body == ("conv2d", "relu", "conv2d")
    assert about.fused.parts == (("body_0_0",), ("body_0_1",), ("body_1",))
    assert [plan.precision for plan in about.lowered.plans] == ["int8"] * 3 and about.plan.precision == "int8"


def test_ops_of_a_region_without_a_kernel_say_why(monkeypatch):
    def lower(self, gm, region):
        if len(region.nodes) > 5:
            raise fxq.BackendError("the engine is out of memory")
        return own.WholeRegion.of(gm, region)

    monkeypatch.setattr(own.Engine, "lower", lower)
    torch.manual_seed(0)
    qmodel = fxq.quantize(Blocks().eval(), ENGINE, data=[torch.randn(2, 3, 4, 4)])
    told = [(e.name, e.precision, e.kind, e.reason, e.decided_by) for e in qmodel.ledger if e.op != "erf"]
    why = "float", "unsupported", "stays in qdq form: the engine is out of memory", "lower"
    assert told[:2] == [("stem_0", "int8", "", "", "annotate"), ("stem_1", "int8", "", "", "annotate")]
    assert told[2:] == [(name, *why) for name in ("body_0_0", "body_0_1", "body_1")]
    assert "body_1 = conv2d(" in text(qmodel.history[-1].graph)


def test_a_backend_may_leave_the_graph_as_it_stands(monkeypatch):
    monkeypatch.setattr(own.Engine, "lower", lambda self, gm, region: None)
    manager = lowered()
    before = [line for line in text(manager.history["fallback"].graph).splitlines()]
    assert sorted(text(manager.gm).splitlines()) == sorted(before)  # their order is that of the regions


def test_what_lower_returns_is_a_kernel(monkeypatch):
    monkeypatch.setattr(own.Engine, "lower", lambda self, gm, region: torch.relu)
    with pytest.raises(
        fxq.InputError,
        match=r"lower\(\) of the backend '\w+' must return a fxq.extend.Kernel or None; it returned <built-in",
    ):
        lowered()


@pytest.mark.parametrize(
    "lower", [lambda self, gm, region: None, lambda self, gm, region: own.WholeRegion.of(gm, region)]
)
def test_an_engine_that_builds_nothing_runs_nothing_on_integers(lower, monkeypatch):
    """Neither if the backend makes no kernel, nor if its kernels fail when they are made, conversions included."""

    def build(self, form):
        raise RuntimeError("unsupported")

    monkeypatch.setattr(own.Engine, "lower", lower)
    monkeypatch.setattr(own.WholeRegion, "build", build)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxq.FxqWarning)
        qmodel = fxq.quantize(Blocks().eval(), ENGINE, data=[torch.randn(2, 3, 4, 4)])
    assert {entry.precision for entry in qmodel.ledger} == {"float"}


def test_without_regions_of_its_own_a_backend_is_asked_for_every_unit_and_conversion(monkeypatch):
    monkeypatch.setattr(own.Engine, "regions", fxq.extend.Backend.regions)
    manager = lowered()
    x, qdq = torch.randn(3, 3, 4, 4), lowered(ENGINE.with_backend("reference")).gm
    assert text(manager.gm) == expected("""
        x = input
        x_q = module tests.region(x)
        stem_0_relu = tests.region(x_q)
        erf = erf(stem_0_relu)
        erf_q = module tests.region(erf)
        body_0_0_relu = tests.region(erf_q)
        body_1 = tests.region(body_0_0_relu)
        return body_1
    """)
    assert equal(manager.gm(x), qdq(x))


class PairedRun(nn.Module):
    """Unit whose value is read on integers and returned in float."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = torch.relu(self.a(x))
        return y, self.b(y.transpose(2, 3))


def test_a_unit_alone_may_hand_out_two_values():
    torch.manual_seed(0)
    qmodel = fxq.quantize(PairedRun().eval(), ENGINE, data=[torch.randn(2, 3, 4, 4)])
    assert text(qmodel.history["lower"].graph) == expected("""
        x = input
        a_relu = tests.region(x)
        a_relu_q = getitem(a_relu, 0)
        a_relu_dq = getitem(a_relu, 1)
        transpose = transpose(a_relu_q, dim0=2, dim1=3)
        b = tests.region(transpose)
        return (a_relu_dq, b)
    """)
    assert [(e.name, e.precision, e.into, e.sqnr is not None) for e in qmodel.ledger] == [
        ("a", "int8", "a_relu", False),
        ("relu", "int8", "a_relu_q", True),
        ("transpose", "moves", "transpose", True),
        ("b", "int8", "b", True),
    ]


def test_no_two_nodes_get_one_name():
    gm = run_pass(
        Lower(),
        """
        x: float32[4] = input()
        a = relu(x)
        q = quantize(a, scale=0.5, zero_point=0)
        return (a, q)
        """,
        recipe=ENGINE,
    )
    assert [n.name for n in gm.graph.nodes] == ["x", "a_region", "a", "q", "output"]
    assert equal(gm(torch.ones(4)), (torch.ones(4), torch.full((4,), 2, dtype=torch.uint8)))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        return self.b(y + y)


@pytest.mark.skipif(not has_onednn_int8(), reason="needs the oneDNN int8 kernels")
def test_a_kernel_that_reads_a_value_twice():
    x = torch.randn(4, 8)
    recipe = fxq.Recipe.static(backend="x86", optimize="coverage")
    qmodel = fxq.quantize(Twice().eval(), recipe, data=[x])
    add = next(n for n in qmodel.graph.nodes if n.name == "add")
    assert add.args[0] is add.args[1] and submodule(qmodel, add).reads == (0, 0)
    assert equal(pickle.loads(pickle.dumps(qmodel))(x), qmodel(x))
    assert not qmodel.history["verify-lowering"].edits


class Residual(nn.Module):
    """A view of a residual is read after the sum."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(3, 3, 1) for _ in range(3))
        self.d = nn.Linear(4, 4)

    def forward(self, x):
        y = torch.relu(self.a(x))
        view = y.transpose(2, 3)
        return self.c(torch.relu(self.b(x) + y)), self.d(view)


class ViewsAsRegions(X86):
    """Backend whose transposes are kernels of regions."""

    name = "tests.views_as_regions"

    def lower(self, gm, region):
        view = region.calls[0].op.name == "transpose"
        return own.WholeRegion.of(gm, region) if view else super().lower(gm, region)


@pytest.mark.skipif(not has_onednn_int8(), reason="needs the oneDNN int8 kernels")
def test_the_kernel_of_a_region_may_return_a_view_of_a_residual():
    torch.manual_seed(0)
    net, x = Residual().eval(), torch.randn(2, 3, 4, 4)
    recipe = ENGINE.with_backend(ViewsAsRegions)
    gm, right = until(net, x, "lower", recipe).gm, until(net, x, "lower", recipe.with_backend("x86")).gm
    assert "b_add_relu = x86.conv(x_q, a_relu)" in text(gm)
    assert gm.get_submodule("fxq_kernels.b_add_relu").inplace is False
    assert all(equal(a, b) for a, b in zip(gm(x), right(x), strict=True))
