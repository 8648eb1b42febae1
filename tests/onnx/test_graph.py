"""Whole graphs as ONNX: every case of the op table in float, and qdq graphs, against torch in both engines."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxq
from fxq.backends.cpu import has_vnni
from fxq.common.metrics import sqnr
from fxq.graph.guards import check_fixed
from fxq.onnx.graph import refusal, write_onnx
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.onnx.writer import OP_WRITERS
from fxq.ops import OPS
from tests.ops.test_rows import FIRST, canonical
from tests.support.graphs import graph, node
from tests.support.helpers import REFERENCE, module, ops_of_fxq
from tests.support.models import NETWORKS, batch, build, settled
from tests.support.onnx_runs import ENGINES, normal, onnx, run_onnxruntime, run_openvino, same, single

pytestmark = pytest.mark.any_cpu

SUMS_ARE_RIGHT = has_vnni()
"""Whether OpenVINO's sums of 8-bit products are right on this machine; otherwise its backend uses reduce_range."""

COMPARES = "compares, which is no op of the table; test_pointwise_nodes.py and test_layer_nodes.py have the op alone"
REFUSED = {
    "embedding": COMPARES, "embedding_module": COMPARES, "embedding_bag": COMPARES, "embedding_bag_module": COMPARES,
    "embedding_bag_function": COMPARES, "where": COMPARES, "masked_fill": COMPARES, "masked_fill_tensor": COMPARES,
}  # fmt: skip
"""Cases of the op table that are not written, by group, and why."""


NOT_WRITTEN = {"grouped_mm", "expert_linear"}
"""Ops that no file holds: ONNX has no product of which each row reads the weight of one expert."""


def test_every_op_is_written():
    assert {op.name for op in ops_of_fxq()} - NOT_WRITTEN <= OP_WRITERS.keys()
    assert OP_WRITERS.keys() <= {op.name for op in OPS}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_canonical_graph_in_float(case):
    model, x, gm = canonical(case)
    if (case.group or case.op) in REFUSED:
        with pytest.raises(NotInOnnx, match="fxq has no ONNX form of this call"):
            write_onnx(gm, [x])
        return
    written = write_onnx(gm, [x])
    onnx.checker.check_model(written.model, full_check=True)
    for run in ENGINES.values():
        same(run(written.model, [x])[0], model(x).detach(), rtol=2e-6)


class Attention(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = x + self.attention(*[self.norm(x)] * 3, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))


def layers(*parts):
    return settled(lambda: nn.Sequential(*(part() for part in parts)))


QDQ = {
    **{name: (build(name), batch(name)) for name in NETWORKS if isinstance(batch(name), torch.Tensor)},
    "batch_norm": (
        layers(lambda: nn.Conv2d(3, 4, 3), lambda: nn.BatchNorm2d(4), nn.ReLU, lambda: nn.Conv2d(4, 3, 1)),
        normal(4, 3, 6, 6),
    ),
    "transposed_in_groups": (
        layers(lambda: nn.Conv2d(3, 4, 1), lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2)), normal(4, 3, 5, 5),
    ),
    "linear_of_sequences": (layers(lambda: nn.Linear(4, 8), nn.GELU, lambda: nn.Linear(8, 3)), normal(4, 5, 4)),
    "max_pool": (
        layers(lambda: nn.Conv2d(3, 4, 3), lambda: nn.MaxPool2d(3, 2, 1), lambda: nn.Conv2d(4, 2, 1)),
        normal(4, 3, 8, 8),
    ),
    "attention": (settled(Attention), normal(4, 5, 8)),
}  # fmt: skip


def quantized(name: str, recipe: fxq.Recipe = REFERENCE):
    model, x = QDQ[name]
    gm = fxq.quantize(model, recipe, data=[x])
    for check in gm.graph.find_nodes(op="call_function", target=check_fixed):
        gm.graph.erase_node(check)  # PyTorch runs it beside the regions of an engine
    gm.recompile()
    return gm, x


@pytest.mark.one_in(18)
@pytest.mark.parametrize("name", QDQ)
def test_a_qdq_graph(name):
    """With a bias in float, ONNX Runtime gives each value that torch gives; one in int32 moves a few by a step."""
    gm, x = quantized(name)
    wanted = gm(x).detach()
    written = write_onnx(gm, [x], integer_bias=False)
    onnx.checker.check_model(written.model, full_check=True)
    (exact,) = run_onnxruntime(written.model, [x])
    same(exact, wanted, rtol=1e-5)
    assert not SUMS_ARE_RIGHT or sqnr(wanted, run_openvino(written.model, [x])[0]) > 25
    rounded = write_onnx(gm, [x]).model
    onnx.checker.check_model(rounded, full_check=True)
    assert sqnr(wanted, run_onnxruntime(rounded, [x])[0]) > 35
    assert sqnr(wanted, run_onnxruntime(rounded, [x], optimized=True)[0]) > 35


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in FIRST if (case.group or case.op) not in REFUSED], ids=str)
def test_every_op_in_a_qdq_graph(case):
    model, x = case.build()
    gm = fxq.quantize(model, REFERENCE, data=[x])
    wanted = gm(x).detach()
    written = write_onnx(gm, [x], integer_bias=False)
    same(run_onnxruntime(written.model, [x])[0], wanted, rtol=1e-5)
    assert not SUMS_ARE_RIGHT or sqnr(wanted, run_openvino(written.model, [x])[0]) > 30


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "activation",
    [
        *(fxq.TensorSpec(bits=bits) for bits in (5, 7)),
        fxq.TensorSpec(signed=True, symmetric=True),
        fxq.TensorSpec(bits=6, signed=True),
    ],
    ids=lambda spec: f"{spec.bits}{'s' * spec.signed}",
)  # fmt: skip
@pytest.mark.parametrize("name", ["residual", "convolutions", "prelu_chain"])
def test_other_grids(name, activation):
    gm, x = quantized(name, fxq.Recipe.static(backend="reference", activation=activation))
    written = write_onnx(gm, [x], integer_bias=False)
    onnx.checker.check_model(written.model, full_check=True)
    same(run_onnxruntime(written.model, [x])[0], gm(x).detach(), rtol=1e-5)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["residual", "squeeze_excite", "upscaler", "attention"])
def test_floats_leaves_out_the_conversions_of_activations(name):
    gm, x = quantized(name)
    written = write_onnx(gm, [x], floats=True)
    assert {node.op_type for node in written.model.graph.node} & {"QuantizeLinear", "DequantizeLinear"} == set()
    for conversion in list(gm.graph.nodes):  # the same in torch: only weights stay on their grids
        if conversion.target is OPS["quantize"].target:
            conversion.replace_all_uses_with(conversion.args[0])
    for conversion in list(gm.graph.nodes):
        if conversion.target is OPS["dequantize"].target and conversion.args[0].op != "get_attr":
            conversion.replace_all_uses_with(conversion.args[0])
    gm.recompile()
    same(run_onnxruntime(written.model, [x])[0], gm(x).detach(), rtol=5e-6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["residual", "prelu_chain", "max_pool"])
def test_images_may_be_taken_with_their_channels_last(name):
    gm, x = quantized(name)
    plain, turned = write_onnx(gm, [x]), write_onnx(gm, [x], channels_last=[True])
    (wanted,) = run_onnxruntime(plain.model, [x])
    (got,) = run_onnxruntime(turned.model, [x.permute(0, 2, 3, 1).contiguous()])
    assert turned.channels_last == (wanted.dim() == 4,) and plain.channels_last == (False,)
    assert torch.equal(got.permute(0, 3, 1, 2) if turned.channels_last[0] else got, wanted)


def test_several_values_and_numbers():
    gm = graph(build("several_inputs"), batch("several_inputs"))
    x, y = batch("several_inputs")
    written = write_onnx(gm, [x, y, 2.0])
    assert written.returns_sequence
    for got, wanted in zip(run_onnxruntime(written.model, [x, y]), gm(x, y, 2.0), strict=True):
        same(got, wanted.detach(), rtol=2e-6)


def test_an_input_may_be_handed_out_and_twice():
    fx_graph = fx.Graph()
    x = fx_graph.placeholder("output_0")
    fx_graph.output((x, x))
    written = write_onnx(fx.GraphModule({}, fx_graph), [normal(3)])
    onnx.checker.check_model(written.model, full_check=True)
    assert all(torch.equal(y, normal(3)) for y in run_onnxruntime(written.model, [normal(3)]))


def test_refusals_name_the_op():
    compares = module(lambda self, x: torch.where(x > 0, x, 0.5))
    gm = graph(compares, normal(3))
    assert refusal(gm, node(gm, "gt")) == "fxq has no ONNX form of this call of gt"
    assert refusal(gm, node(gm, "where")) is None
    with pytest.raises(NotInOnnx, match="no ONNX form of this call of gt"):
        write_onnx(gm, [normal(3)])
    dropped = single("dropout", normal(3), training=True)
    with pytest.raises(NotInOnnx, match=r"^dropout: it drops values at random"):
        write_onnx(dropped, [normal(3)])


def test_a_node_of_unknown_shape_is_refused():
    fx_graph = fx.Graph()
    fx_graph.output(fx_graph.call_function(OPS["relu"].target, (fx_graph.placeholder("x"),)))
    gm = fx.GraphModule({}, fx_graph)
    (relu,) = (n for n in gm.graph.nodes if n.op == "call_function")
    assert refusal(gm, relu) == "one of its sizes is known only at run time"


def test_sizes_are_numbers():
    fx_graph = fx.Graph()
    x = fx_graph.placeholder("x")
    size = fx_graph.call_method("size", (x,))
    first = fx_graph.call_function(operator.getitem, (size, 0))
    fx_graph.output(fx_graph.call_function(OPS["reshape"].target, (x,), {"shape": (first, -1)}))
    written = write_onnx(fx.GraphModule({}, fx_graph), [normal(2, 3, 4)])
    assert run_onnxruntime(written.model, [normal(2, 3, 4)])[0].shape == (2, 12)


def test_results_that_are_cached_tell_numbers_of_other_types_apart():
    """1 and 1.0 are equal, and give results of other dtypes."""
    x = torch.ones(2, dtype=torch.int64)
    integer, real = (graph(module(add), x) for add in (lambda self, x: x + 1, lambda self, x: x + 1.0))
    dtypes = [write_onnx(gm, [x]).outputs[0].dtype for gm in (integer, real, integer)]
    assert dtypes == [torch.int64, torch.float32, torch.int64]


@pytest.mark.parametrize("function", [lambda self, x: x / 3, lambda self, x: torch.sqrt(x)])
def test_results_of_integers_have_the_default_dtype_of_the_moment(function):
    x = torch.arange(1, 9)
    for dtype in (torch.float32, torch.float64, torch.float32):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            written = write_onnx(graph(module(function), x), [x])
            expected, (result,) = function(None, x), run_onnxruntime(written.model, [x])
        finally:
            torch.set_default_dtype(before)
        assert result.dtype == dtype
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)
