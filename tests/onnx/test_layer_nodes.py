"""Layers, products and embeddings, in ONNX Runtime and in OpenVINO, against torch."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import fxq
from fxq.common.metrics import sqnr
from fxq.onnx.graph import write_onnx
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.ops import OPS
from fxq.quant.dynamic_grid import dynamic_range
from tests.support.machine import needs_vnni
from tests.support.onnx_runs import ENGINES, call, in_both, normal, run_onnxruntime, run_openvino, same, single, weight

pytestmark = pytest.mark.any_cpu

IDS = torch.tensor([[1, 0, 4], [2, 2, 3]])

CALLS = [
    call("conv1d", normal(2, 4, 9), weight(6, 2, 3), weight(6), stride=(2,), padding=(1,), dilation=(1,), groups=2),
    call("conv2d", normal(2, 4, 8, 7), weight(6, 4, 3, 2), padding=(1, 0), stride=(2, 1)),
    call("conv2d", normal(2, 4, 8, 7), weight(4, 1, 3, 3), weight(4), padding=(2, 1), dilation=(2, 1), groups=4),
    call("conv2d", normal(2, 4, 8, 7), weight(6, 4, 2, 3), weight(6), padding="same"),
    call("conv2d", normal(2, 4, 8, 7), weight(6, 4, 3, 3), padding=(1, 2), padding_mode="circular"),
    call("conv2d", normal(2, 4, 8, 7), weight(6, 4, 3, 3), padding=(1, 2), padding_mode="reflect"),
    call("conv2d", normal(2, 4, 8, 7), weight(6, 4, 3, 3), padding=(1, 2), padding_mode="replicate"),
    call("conv2d", normal(2, 4, 8, 7), normal(6, 4, 3, 3), normal(6)),
    call("conv3d", normal(1, 2, 5, 6, 7), weight(3, 2, 3, 2, 1), weight(3), padding=(1, 0, 1)),
    call("conv_transpose1d", normal(2, 4, 9), weight(4, 3, 4), weight(3), stride=(2,), padding=(1,)),
    call(
        "conv_transpose2d", normal(2, 4, 5, 6), weight(4, 3, 3, 3), weight(6), stride=(2, 3), padding=(1, 0),
        output_padding=(1, 2), groups=2,
    ),
    call("conv_transpose2d", normal(2, 4, 5, 6), weight(4, 3, 3, 2), dilation=(2, 1)),
    call("conv_transpose3d", normal(1, 2, 3, 4, 5), weight(2, 3, 2, 2, 2), stride=(2, 1, 2)),
    *(call("linear", normal(*shape, 5), weight(4, 5), weight(4)) for shape in ((), (3,), (2, 3), (2, 3, 4))),
    call("linear", normal(3, 5), weight(4, 5)),
    call("linear", normal(3, 5), normal(4, 5), normal(4)),
    call("matmul", normal(2, 3, 5), normal(5, 4)),
    call("matmul", normal(5), normal(2, 5, 4)),
    call("addmm", normal(4), normal(3, 5), normal(5, 4), beta=0.5, alpha=2.0),
    call("baddbmm", normal(2, 3, 4), normal(2, 3, 5), normal(2, 5, 4), alpha=0.5),
    call("einsum", [normal(2, 3, 5), normal(2, 5, 4)], equation="bij,bjk->bik"),
    call("einsum", [normal(2, 3, 5), normal(4, 5)], equation="...i,ji->...j"),
    call("einsum", [normal(2, 3, 5)], equation="abc->ca"),
    call("einsum", [normal(2, 3), normal(4, 3)], equation="nC,mC"),
    call("embedding", IDS, weight(5, 3)),
    *(call("embedding_bag", IDS, weight(5, 3), mode=mode) for mode in ("sum", "mean", "max")),
    call("embedding_bag", IDS, weight(5, 3), None, normal(2, 3), mode="sum"),
]  # fmt: skip


@in_both(CALLS)
def test_an_engine_gives_what_torch_gives(call, engine):
    call.check(engine)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (call("conv2d", normal(4, 8, 8), weight(3, 4, 3, 3)), "no batch axis"),
        (call("conv_transpose1d", normal(4, 8), weight(4, 3, 3)), "no batch axis"),
        (call("embedding_bag", IDS, weight(5, 3), padding_idx=2), "it has a padding_idx"),
        (call("embedding_bag", IDS.flatten(), weight(5, 3), torch.tensor([0, 2])), "its bags have different sizes"),
    ],
    ids=str,
)
def test_refusals(refused, reason):
    with pytest.raises(NotInOnnx, match=reason):
        write_onnx(single(refused.op, *refused.values, **refused.options), refused.inputs)


def dynamic_layer(axis, symmetric, bias=True, zero=0):
    """A linear layer with a dynamic range, as in a qdq graph; its weight has one scale per channel."""
    root, graph = torch.nn.Module(), fx.Graph()
    steps, middle = (127, 128) if symmetric else (254 if axis is not None else 255, 0)
    tensors = {
        "q": torch.randint(-127, 128, (6, 32), generator=torch.Generator().manual_seed(0)).to(torch.int8),
        "steps": 0.01 + torch.rand(6, generator=torch.Generator().manual_seed(1)) / 50, "zero": torch.full((6,), zero),
        "bias": 3 * normal(6),
    }  # fmt: skip
    for name, tensor in tensors.items():
        root.register_buffer(name, tensor)
    x = graph.placeholder("x")
    asked = {"steps": steps, "axis": axis, "symmetric": symmetric}
    grid = {"scale": graph.call_function(OPS["choose_scale"].target, (x,), asked), "zero_point": middle}
    if not symmetric:
        options = {"scale": grid["scale"], "axis": axis}
        grid["zero_point"] = graph.call_function(OPS["choose_zero_point"].target, (x,), options)
    read = graph.call_function(OPS["quantize"].target, (x,), grid)
    read = graph.call_function(OPS["dequantize"].target, (read,), grid)
    options = {"scale": graph.get_attr("steps"), "zero_point": graph.get_attr("zero"), "axis": 0}
    weight = graph.call_function(OPS["dequantize"].target, (graph.get_attr("q"),), options)
    added = [graph.get_attr("bias")] if bias else []
    graph.output(graph.call_function(OPS["linear"].target, (read, weight, *added)))
    return fx.GraphModule(root, graph)


RUNS = {
    "onnxruntime": lambda gm, x: run_onnxruntime(write_onnx(gm, [x]).model, [x]),
    "onnxruntime, optimized": lambda gm, x: run_onnxruntime(write_onnx(gm, [x]).model, [x], optimized=True),
    "openvino": lambda gm, x: run_openvino(write_onnx(gm, [x], integer_bias=False, for_openvino=True).model, [x]),
}


@needs_vnni
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("axis", [None, -1])
def test_a_linear_layer_on_a_dynamic_range(axis, symmetric, bias, run):
    """Against a float64 product of the quantized rows, whose ranges differ widely."""
    gm, rows = dynamic_layer(axis, symmetric, bias), torch.tensor([[1.0], [0.0], [30.0], [0.03]]) * normal(4, 32)
    for x in (rows, rows.abs(), -rows.abs(), rows.reshape(2, 2, 32), rows[2:3], rows[2]):
        low, high = (end.double() for end in dynamic_range(x, axis))
        size = torch.maximum(high, -low) if symmetric else high - low
        scale = (size / (127 if symmetric else 254 if axis is not None else 255)).clamp(min=1e-30)
        left = (x.double() / scale).round() * scale
        wanted = left @ (gm.q.double() * gm.steps.double()[:, None]).T + (gm.bias.double() if bias else 0)
        (got,) = run(gm, x)
        same(got, wanted.float(), 1e-6)


@needs_vnni
def test_a_bias_that_is_computed_after_dynamic_rows():
    gm, x = dynamic_layer(-1, symmetric=False), normal(4, 32)
    (layer,) = (node for node in gm.graph.nodes if node.target is OPS["linear"].target)
    with gm.graph.inserting_before(layer):
        layer.args = *layer.args[:2], gm.graph.call_function(OPS["relu"].target, (layer.args[2],))
    before, bias = write_onnx(dynamic_layer(-1, symmetric=False, bias=False), [x]), gm.bias.relu()
    (product,) = run_onnxruntime(before.model, [x])
    (got,) = run_onnxruntime(write_onnx(gm, [x]).model, [x])
    same(got, product + bias, 1e-6)


@needs_vnni
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_dynamic_row_with_a_range_beyond_float32(run):
    gm = dynamic_layer(-1, symmetric=False, bias=False)
    gm.steps.mul_(1e-3)
    x = normal(4, 32)
    x = x / x.abs().amax(1, keepdim=True) * 3.3e38
    (got,) = run(gm, x)
    assert sqnr(x.double() @ (gm.q.double() * gm.steps.double()[:, None]).T, got.double()) > 35


def test_layers_on_a_dynamic_range_are_refused_for_other_weights():
    with pytest.raises(NotInOnnx, match="its weight has a zero point, or is per block, or is not quantized"):
        write_onnx(dynamic_layer(-1, symmetric=False, zero=3), [normal(4, 32)])


@needs_vnni
def test_openvino_computes_with_weights_that_have_zero_points_beside_a_dynamic_range():
    """In float, but right."""
    plain, shifted = (dynamic_layer(-1, symmetric=False, bias=False, zero=zero) for zero in (0, 3))
    x = normal(4, 32)
    (got,), (without,) = (RUNS["openvino"](gm, x) for gm in (shifted, plain))
    same(without - got, 3 * x.double().sum(1, keepdim=True).float() * plain.steps, 1e-2)


@pytest.mark.parametrize(("axis", "block", "scales"), [(1, 4, (9, 3)), (0, None, (9,))])
def test_rows_of_a_table_of_integers(axis, block, scales):
    """The whole table is never dequantized."""
    graph, root = fx.Graph(), torch.nn.Module()
    drawn = torch.Generator().manual_seed(0)
    root.register_buffer("q", torch.randint(-127, 128, (9, 10), generator=drawn).to(torch.int8))
    root.register_buffer("scale", torch.rand(scales, generator=drawn))
    root.register_buffer("zero", torch.randint(-3, 4, scales, generator=drawn).to(torch.int8))
    x = graph.placeholder("x")
    options = {"scale": graph.get_attr("scale"), "zero_point": graph.get_attr("zero"), "axis": axis, "block": block}
    table = graph.call_function(OPS["dequantize"].target, (graph.get_attr("q"),), options)
    graph.output(graph.call_function(OPS["embedding"].target, (x, table)))
    gm = fx.GraphModule(root, graph)
    real = [part.repeat_interleave(4, 1)[:, :10] if block else part[:, None] for part in (gm.scale, gm.zero)]
    for ids in (IDS, IDS[0, 2]):
        written = write_onnx(gm, [ids])
        wanted = ((gm.q.float() - real[1]) * real[0])[ids]
        same(run_onnxruntime(written.model, [ids], optimized=True)[0], wanted, 1e-6)
        assert "DequantizeLinear" not in {node.op_type for node in written.model.graph.node}


@pytest.mark.parametrize("op", ["matmul", "addmm"])
@pytest.mark.parametrize("engine", ENGINES)
def test_products_of_integers_stay_within_int32(engine, op):
    """Products are split so that an engine's int32 sums of integers cannot overflow."""
    program = """
        x: uint8[2, 40000] = input()
        y: uint8[40000, 3] = input()
        b: float32[3] = input()
        x_dq: float32[2, 40000] = dequantize(x, scale=0.5, zero_point=0, qmax=255)
        y_dq: float32[40000, 3] = dequantize(y, scale=0.5, zero_point=0, qmax=255)
        z = addmm(b, x_dq, y_dq)
        return z
    """
    inputs = [torch.full((2, 40000), 255, dtype=torch.uint8), torch.full((40000, 3), 255, dtype=torch.uint8)]
    if op == "matmul":
        program = program.replace("        b: float32[3] = input()\n", "").replace("addmm(b, ", "matmul(")
    else:
        inputs.append(torch.zeros(3))
    written = write_onnx(fxq.extend.read_graph(program, {}), inputs)
    options = {"optimized": True} if engine == "onnxruntime" else {}
    (got,) = ENGINES[engine](written.model, [inputs[i] for i in written.input_indices], **options)
    same(got, torch.full((2, 3), 40000 * 127.5**2), 3e-5)  # of sums in float
