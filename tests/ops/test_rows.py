"""Every op of the table in every spelling, through the whole pipeline, between layers that run on integers."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxq
from fxq.backends import cpu
from fxq.common.metrics import sqnr
from fxq.graph.query import op_of
from fxq.ops import OPS
from fxq.workflow.steps import manager_for
from tests.support.cases_activations import ACTIVATIONS, FLOATS
from tests.support.cases_arithmetic import ARITHMETIC
from tests.support.cases_layers import LAYERS
from tests.support.cases_movement import MOVEMENT, SELECTION
from tests.support.cases_pooling import POOLING
from tests.support.graphs import anonymous, graph
from tests.support.helpers import REFERENCE, module, ops_of_fxq
from tests.support.machine import BITS, decibels, portable
from tests.support.opcases import Case

CASES = [*LAYERS, *ACTIVATIONS, *FLOATS, *ARITHMETIC, *MOVEMENT, *SELECTION, *POOLING]

CONVERSION = "inserted by passes; a model that calls it is already quantized"
OTHERWISE = "torch.fx traces it as another spelling, which has a case"
EXPERTS = "it reads integers, too; see tests/backends/plain/test_experts.py"
ELSEWHERE = "a function of a package that the tests do not install; see tests/ops/test_table.py"
UNTESTED = {
    "torchvision.ops.stochastic_depth:stochastic_depth": ELSEWHERE,
    torch._grouped_mm: EXPERTS,
    torch.ops.aten._grouped_mm.default: EXPERTS,
    F.sigmoid: OTHERWISE,
    F.tanh: OTHERWISE,
    torch.ops.fxq.quantize.default: CONVERSION,
    torch.ops.fxq.quantize.tensor: CONVERSION,
    torch.ops.fxq.dequantize.default: CONVERSION,
    torch.ops.fxq.dequantize.tensor: CONVERSION,
}

FOLDED = {"batch_norm", "dropout", "identity"}
NO_KERNEL = {
    *("conv_transpose3d", "matmul", "prelu", "unfold", "avg_pool3d"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool3d"),
}
"""Ops without a kernel on x86."""


FUSED = {"relu", "relu6", "hardtanh"}
"""Moving ops that are fused into the layer before them."""


def precision_of(case: Case) -> str:
    """Expected precision of the op on x86."""
    kind = OPS[case.op].traits.kind
    if case.precision is not None:
        return case.precision
    if case.op in FOLDED:
        return "folded"
    if case.op in NO_KERNEL:
        return "float"
    if kind == "float":
        return "float" if OPS[case.op].traits.weight is None else "weight-only"
    return "moves" if kind == "moves" and case.op not in FUSED else "int8"


def test_every_spelling_has_a_case():
    tested = {case.spelled for case in CASES}
    missing = [
        f"{op.name}: {s.target}"
        for op in ops_of_fxq()
        for s in op.spellings
        if s.target not in tested | UNTESTED.keys()
    ]
    assert not missing, "add a case to tests/cases_*.py for each of these spellings"
    spellings = {s.target for op in OPS for s in op.spellings}
    assert not [case for case in CASES if case.spelled not in spellings]
    assert UNTESTED.keys() <= spellings


@cache
def canonical(case: Case) -> tuple[nn.Module, Tensor, fx.GraphModule]:
    """The model of a case, its data, and its canonical graph. Checks that the trace has the case's spelling."""
    model, x = case.build()
    manager = manager_for(model, REFERENCE, x)
    passes = manager.context.recipe.pipeline
    traced, end = (passes.position(name) + 1 for name in ("trace", "canonicalize"))
    gm = manager.run(passes[:traced])
    called = {type(gm.get_submodule(n.target)) if n.op == "call_module" else n.target for n in gm.graph.nodes}
    reshapes = case.spelled in ("squeeze_", "unsqueeze_")  # in place they are traced as the views that they make
    assert (case.spelled.rstrip("_") if reshapes else case.spelled) in called, f"{case} is not in the trace"
    return model, x, manager.run(passes[traced:end])


@cache
def reference(case: Case, bits: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The model of a case, its data, and the output of the reference backend."""
    model, x = case.build()
    quantized = fxq.quantize(model, portable(bits), data=[x])
    with torch.no_grad():
        return model, x, quantized(x)


def groups() -> dict[str, list[Case]]:
    cases: dict[str, list[Case]] = {}
    for case in CASES:
        cases.setdefault(case.group or case.op, []).append(case)
    return cases


@pytest.mark.parametrize("name", groups())
def test_spellings_are_traced_as_written_and_have_one_canonical_graph(name):
    """Each graph computes what its model computes."""
    texts = {}
    for case in groups()[name]:
        model, x, gm = canonical(case)
        texts[anonymous(gm)] = str(case)
        with torch.no_grad():
            torch.testing.assert_close(gm(x), model(x), rtol=1e-6, atol=1e-6, msg=lambda text, c=case: f"{c}: {text}")
    assert len(texts) == 1, "\n\n".join(f"{case}:\n{graph}" for graph, case in texts.items())
    if case.op not in FOLDED - {"batch_norm"}:
        assert f" = {case.op}(" in next(iter(texts))


FIRST = [same[0] for same in groups().values()]
"""The first case of each group; the others have the same canonical graph, so the same numbers."""


def one_of_each_op():
    """Of the groups of an op, all but the first are slow."""
    seen_ops = set()
    for case in FIRST:
        yield pytest.param(case, id=str(case), marks=pytest.mark.slow if case.op in seen_ops else [])
        seen_ops.add(case.op)


@pytest.mark.parametrize("case", one_of_each_op())
def test_reference_backend_is_close_to_float_and_x86_to_it(case):
    """Kernels of x86 give the results of their qdq graph and of the reference backend."""
    model, x, got = reference(case, 8)
    with torch.no_grad():
        assert sqnr(model(x), got) > 28
    if not cpu.has_onednn_int8():
        return
    portably = reference(case, BITS)[2]
    recipe = fxq.Recipe.static(backend="x86", reduce_range="activations")
    observed = fxq.calibrate(fxq.prepare(model, recipe, example_inputs=x), [x])
    quantized = fxq.convert(observed)
    qdq = fxq.convert(observed, recipe.without_pass("lower").without_pass("verify-lowering"))
    with torch.no_grad():
        got, exact = quantized(x), qdq(x)
        assert torch.equal(got, quantized(x))
        assert got.shape == model(x).shape
        # A tie moves one element by a step; the layer after it spreads it over a few outputs.
        assert sqnr(exact, got) > 50
        assert sqnr(portably, got) > decibels(30)
    entries = quantized.ledger.where(lambda e: e.op == case.op and "after" not in e.path and "before" not in e.path)
    precisions = [e.precision for e in entries]
    expected = precision_of(case)
    assert all(e.reason for e in entries if e.precision == "float")
    if case.op == "prelu":  # float alone, int8 in a layer's kernel: the cheaper of the two
        assert set(precisions) <= {"float", "int8"} and precisions
        expected = precisions[0]
    assert precisions == [expected] * len(precisions) and (precisions or expected == "folded")


@pytest.mark.parametrize("shape", [(4, 6), (4, 5, 6), (4, 3, 5, 6)])
def test_an_instance_norm_of_one_sample(shape):
    """Modules accept a sample without a batch axis."""
    norm = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d][len(shape) - 2](4, affine=True).eval()
    norm.bias.data.copy_(torch.arange(4.0))
    x = torch.randn(shape)
    gm = graph(nn.Sequential(norm), x, "canonicalize")
    assert [op.name for node in gm.graph.nodes if (op := op_of(node))] == ["instance_norm"]
    assert torch.equal(gm(x), norm(x))


def test_an_instance_norm_of_one_element_to_a_channel():
    """F.instance_norm refuses it, but torch.instance_norm, and therefore the row, accepts it."""

    class Normed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.instance_norm(x, None, torch.arange(4.0), None, None, True, 0.1, 1e-5, False)

    x = torch.randn(2, 4, 1)
    assert torch.equal(graph(Normed(), x, "canonicalize")(x), Normed()(x))


@pytest.mark.parametrize("limits", [{"max": 5}, {"min": 1}, {"min": 1, "max": 5}])
def test_integers_that_are_clamped_stay_integers(limits):
    """Indices of an embedding have to."""
    torch.manual_seed(0)
    table, out, x = nn.Embedding(9, 8), nn.Linear(8, 4), torch.arange(9)
    model = module(lambda self, x: (self.out(self.table(x.clamp(**limits))), x.clamp(**limits)), table=table, out=out)
    y, rows = fxq.quantize(model, REFERENCE, data=[x])(x)
    wanted, wanted_rows = model(x)
    assert rows.dtype == torch.int64 and torch.equal(rows, wanted_rows)
    assert sqnr(wanted, y) > 25  # dB
