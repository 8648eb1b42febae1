"""Quantize, dequantize and requantize in ONNX Runtime, without optimizations, against torch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import fxq
from fxq.backends.qdq_graph import qdq_graph
from fxq.onnx.conversion_nodes import _covers
from fxq.onnx.graph import write_onnx
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.ops import OPS
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.packing import Packing
from fxq.quant.spec import TensorSpec
from tests.support.onnx_runs import call, normal, onnx, run_onnxruntime, run_openvino, same, single

pytestmark = pytest.mark.any_cpu


@settings(max_examples=37, deadline=None)
@given(
    scale=st.floats(2**-10, 8, width=32),
    zero=st.integers(0, 255),
    ends=st.tuples(st.integers(0, 255), st.integers(0, 255)),
    low=st.one_of(st.just(-math.inf), st.integers(-520, 520)),
    width=st.one_of(st.just(math.inf), st.integers(0, 1040)),
)
def test_a_clamp_is_dropped_only_where_rounding_clamps_as_much(scale, zero, ends, low, width):
    """The bounds are multiples of half a step, so that they include ties; each integer and each tie is tested."""
    qmin, qmax = min(ends), max(ends)
    step, half = torch.tensor(scale), scale / 2
    bounds = low * half, (low + width) * half if math.isfinite(low) else width * half
    values = torch.cat([torch.arange(-600, 601) * half, torch.tensor([-1e30, 1e30])])

    def rounded(x):
        return OPS["quantize"].target(x, scale=scale, zero_point=zero, qmin=qmin, qmax=qmax)

    same_without = torch.equal(rounded(values.clamp(*bounds)), rounded(values))
    dropped = _covers(("x", *bounds), step, torch.tensor(zero), qmin, qmax)
    assert same_without or not dropped


@pytest.mark.parametrize(
    ("low", "high", "zero", "kept"),
    [
        (0.0, math.inf, 0, False),  # a relu, whose zero is the first integer
        (0.0, math.inf, 10, True),
        (0.0, 6.0, 0, True),  # 6.0 is 12 steps
        (0.0, 127.5, 0, False),
        (-1.25, math.inf, 3, True),  # a tie, which goes to the second integer
        (-0.75, math.inf, 2, False),  # a tie, which goes to the first one
    ],
)
def test_clamps_before_a_quantize(low, high, zero, kept):
    graph = fx.Graph()
    x = graph.placeholder("x")
    clamped = graph.call_function(OPS["hardtanh"].target, (x,), {"min_val": low, "max_val": high})
    grid = {"scale": 0.5, "zero_point": zero}
    graph.output(graph.call_function(OPS["quantize"].target, (clamped,), grid))
    gm = fx.GraphModule({}, graph)
    values = torch.arange(-600, 601) / 4
    written = write_onnx(gm, [values])
    kinds = [node.op_type for node in written.model.graph.node]
    assert any(kind in ("Clip", "Relu") for kind in kinds) == kept
    assert torch.equal(run_onnxruntime(written.model, [values])[0], gm(values))


BYTES = torch.randint(0, 256, (3, 4, 5), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
SIGNED = (BYTES.int() - 128).to(torch.int8)
VALUES = torch.cat([normal(3, 4, 5), torch.arange(-15.0, 15.0).reshape(-1, 3, 5)[:, :1].expand(-1, 4, 5) / 4])

CALLS = [
    call("quantize", VALUES, scale=0.5, zero_point=3),
    call("quantize", VALUES, scale=0.01, zero_point=128),
    call("quantize", VALUES, scale=0.5, zero_point=2, qmin=1, qmax=6),
    call("quantize", VALUES, scale=0.25, zero_point=0, qmin=-3, qmax=5, dtype=torch.int8),
    call("quantize", VALUES, scale=0.1, zero_point=-7, qmin=-128, qmax=127, dtype=torch.int8),
    call("dequantize", BYTES, scale=0.1, zero_point=7),
    call("dequantize", SIGNED, scale=0.1, zero_point=-7, qmin=-128, qmax=127),
    call("requantize", BYTES, from_scale=0.1, from_zero_point=7, scale=0.3, zero_point=100),
    call("requantize", BYTES, from_scale=0.1, from_zero_point=7, scale=0.3, zero_point=9, qmin=2, qmax=15),
    call(
        "requantize", SIGNED, from_scale=0.5, from_zero_point=-7, scale=0.3, zero_point=1, qmin=-100, qmax=100,
        dtype=torch.int8,
    ),
]  # fmt: skip


@pytest.mark.parametrize("conversion", CALLS, ids=str)
def test_numbers(conversion):
    conversion.check("onnxruntime", rtol=1e-6)


def with_grid(
    op: str, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | int, **options
) -> fx.GraphModule:
    """A conversion with several scales, of an input, or of a constant if x is a Parameter."""
    root, graph = torch.nn.Module(), fx.Graph()
    tensors = {"x": x, "scale": scale, "zero_point": zero_point}
    named = {}
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor) and (name != "x" or isinstance(value, torch.nn.Parameter)):
            root.register_buffer(name, value.detach())
            named[name] = graph.get_attr(name)
        else:
            named[name] = graph.placeholder("x") if name == "x" else value
    first = named.pop("x")
    graph.output(graph.call_function(OPS[op].target, (first,), {**named, **options}))
    return fx.GraphModule(root, graph)


def constant(low: int, high: int, *shape: int) -> torch.nn.Parameter:
    values = torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(3))
    return torch.nn.Parameter(values.to(torch.int8 if low < 0 else torch.uint8), requires_grad=False)


@pytest.mark.parametrize("zero", [0, torch.tensor([-3, 0, 2, 5])])
@pytest.mark.parametrize("floats", [False, True])
def test_a_weight_with_a_scale_for_each_channel(zero, floats):
    gm = with_grid("dequantize", constant(-127, 127, 3, 4, 2), normal(4).abs() + 0.1, zero, qmin=-127, qmax=127, axis=1)
    written = write_onnx(gm, [], floats=floats)
    onnx.checker.check_model(written.model, full_check=True)
    same(run_onnxruntime(written.model, [])[0], gm(), rtol=1e-6)


@pytest.mark.parametrize(("bits", "kind"), [(2, "INT4"), (3, "INT4"), (5, "INT8"), (6, "INT8")])
@pytest.mark.parametrize("signed", [True, False])
def test_packed_integers_of_other_widths_have_the_next_width_of_onnx(bits, kind, signed):
    low, packing = -(2 ** (bits - 1)) if signed else 0, Packing((70,), bits, signed)
    stored = torch.nn.Parameter(packing.pack(constant(low, low + 2**bits - 1, 6, 70).data), requires_grad=False)
    options = {"qmin": low, "qmax": low + 2**bits - 1, "axis": 1, "block": 32, "packed": (70,), "bits": bits}
    gm = with_grid("dequantize", stored, normal(6, 3).abs() + 0.1, 0 if signed else 2, **options)
    written = write_onnx(gm, [])
    onnx.checker.check_model(written.model, full_check=True)
    types = {tensor.data_type for tensor in written.model.graph.initializer}
    assert types == {onnx.TensorProto.FLOAT, onnx.TensorProto.DataType.Value(kind if signed else f"U{kind}")}
    same(run_onnxruntime(written.model, [])[0], gm(), rtol=1e-6)


@pytest.mark.parametrize("low", [-8, 0], ids=["int4", "uint4"])
@pytest.mark.parametrize(
    ("shape", "block"), [((6, 8), None), ((6, 7), None), ((5, 3, 3), None), ((6, 64), 32), ((6, 70), 32)]
)
@pytest.mark.parametrize("packed", [True, False])
def test_integers_of_four_bits_and_blocks(low, shape, block, packed):
    values = constant(low, low + 15, *shape)
    scales = shape[0] if block is None else (shape[0], -(-shape[1] // block))
    scale = normal(scales).abs() + 0.1 if block is None else normal(*scales).abs() + 0.1
    packing = Packing(shape[1:], 4, low < 0)
    stored = torch.nn.Parameter(packing.pack(values.data), requires_grad=False) if packed else values
    options = {"axis": 0 if block is None else 1, "block": block, "packed": shape[1:] if packed else None}
    gm = with_grid("dequantize", stored, scale, 0 if low else 7, qmin=low, qmax=low + 15, **options)
    written = write_onnx(gm, [])
    onnx.checker.check_model(written.model, full_check=True)
    types = {tensor.data_type for tensor in written.model.graph.initializer}
    assert types == ({onnx.TensorProto.FLOAT, onnx.TensorProto.INT4 if low else onnx.TensorProto.UINT4} if packed else {
        onnx.TensorProto.FLOAT, onnx.TensorProto.INT8 if low else onnx.TensorProto.UINT8})  # fmt: skip
    same(run_onnxruntime(written.model, [])[0], gm(), rtol=1e-6)


def test_a_block_takes_whole_channels_of_a_kernel():
    scale = normal(3, 2, 1, 1).abs() + 0.1
    gm = with_grid("dequantize", constant(-127, 127, 3, 6, 2, 2), scale, 0, qmin=-127, qmax=127, axis=1, block=4)
    same(run_onnxruntime(write_onnx(gm, []).model, [])[0], gm(), rtol=1e-6)


def test_a_weight_in_float16():
    gm = with_grid("dequantize", torch.nn.Parameter(normal(3, 4).half(), requires_grad=False), torch.tensor(1.0), 0)
    for run in (run_onnxruntime, run_openvino):
        same(run(write_onnx(gm, []).model, [])[0], gm(), rtol=0)


def test_one_scale_beside_two_zero_points():
    """Cached constants of a grid are not reused for a grid with another zero point."""
    root, graph = torch.nn.Module(), fx.Graph()
    root.register_buffer("scale", torch.tensor([0.5, 2.0]))
    x, scale = graph.placeholder("x"), graph.get_attr("scale")
    kinds = {"scale": scale, "axis": 0, "qmin": -127, "qmax": 127}
    graph.output(tuple(graph.call_function(OPS["dequantize"].target, (x,), {**kinds, "zero_point": z}) for z in (0, 3)))
    gm, q = fx.GraphModule(root, graph), SIGNED[:2, 0]
    for got, wanted in zip(run_onnxruntime(write_onnx(gm, [q]).model, [q]), gm(q), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("gm", "inputs", "reason"),
    [
        (single("quantize", VALUES, scale=0.1, zero_point=0, dtype=torch.int32), [VALUES], "integers of torch.int32"),
        (single("dequantize", BYTES, scale=0.1, zero_point=-1), [BYTES], "its zero point does not fit its dtype"),
        (with_grid("dequantize", BYTES, torch.ones(3, 4, 1), 0), [BYTES], "each of its rows has a separate scale"),
        (
            with_grid("quantize", VALUES, torch.ones(4), 0, axis=1, qmax=100), [VALUES],
            "several grids that do not use all integers of their dtype",
        ),
        (single("dequantize", BYTES[0], scale=0.1, zero_point=0, packed=(10,)), [BYTES[0]], "packed into bytes"),
    ],
)  # fmt: skip
def test_refusals(gm, inputs, reason):
    with pytest.raises(NotInOnnx, match=reason):
        write_onnx(gm, inputs)


DYNAMIC = {
    "whole": {}, "rows": {"axis": -1}, "7 bits": {"bits": 7}, "rows of 7 bits": {"bits": 7, "axis": -1},
    "signed": {"signed": True}, "signed rows": {"signed": True, "axis": -1},
    "symmetric": {"symmetric": True}, "symmetric rows": {"symmetric": True, "axis": -1},
}  # fmt: skip


def dynamic_graph(*, axis=None, **options):
    """A graph that returns the dynamic grid of x, its integers and their dequantized values."""
    graph, grid = fx.Graph(), DynamicGrid.of(TensorSpec(**options), axis)
    x, symmetric = graph.placeholder("x"), grid.symmetric
    asked = {"steps": grid.steps, "axis": axis, "symmetric": symmetric}
    scale = graph.call_function(OPS["choose_scale"].target, (x,), asked)
    zero = grid.middle
    if not symmetric:
        asked = {"scale": scale, "axis": axis, "qmin": grid.qmin}
        zero = graph.call_function(OPS["choose_zero_point"].target, (x,), asked)
    options = {"scale": scale, "zero_point": zero, "qmin": grid.qmin, "qmax": grid.qmax}
    q = graph.call_function(OPS["quantize"].target, (x,), {**options, "dtype": grid.dtype})
    dq = graph.call_function(OPS["dequantize"].target, (q,), options)
    graph.output((scale, *([] if symmetric else [zero]), q, dq))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("options", DYNAMIC.values(), ids=DYNAMIC)
def test_dynamic_grids(options, optimized):
    """For rows whose ranges differ widely, positive and negative rows, zeros, a single row, and one axis."""
    gm, rows = dynamic_graph(**options), torch.tensor([[1.0], [1e3], [1e-3], [0.0]]) * normal(4, 7)
    for x in (rows, rows.abs(), -rows.abs() - 1, rows.reshape(2, 2, 7), rows[:1], rows[0]):
        got = run_onnxruntime(write_onnx(gm, [x]).model, [x], optimized)
        *grid, q, dq = gm(x)
        assert (got[-2].int() - q.int()).abs().max() <= 1  # a tie may go either way
        step = grid[0].expand_as(x) if grid[0].dim() else grid[0]
        assert bool(((got[-1] - dq).abs() <= 1.001 * step * (got[-2] != q) + 1e-6 * dq.abs()).all())
        if bool((x != 0).any(-1).all()):  # any scale stands for zeros
            for value, wanted in zip(got[:-2], grid, strict=True):
                same(value, wanted, 2e-7)


def test_one_node_computes_the_range_of_a_whole_value():
    kinds = [node.op_type for node in write_onnx(dynamic_graph(), [normal(4, 7)]).model.graph.node]
    assert "ReduceMin" not in kinds and "QuantizeLinear" not in kinds and "DynamicQuantizeLinear" in kinds


def test_rows_of_several_axes_are_refused():
    with pytest.raises(NotInOnnx, match="each of its rows spans several axes"):
        write_onnx(dynamic_graph(axis=-3), [normal(2, 3, 4, 4)])


def test_the_blocks_of_a_single_row_are_no_channels():
    """All entries of a column of scales are equal, as there is one; each stands for a block nevertheless."""
    x = normal(3, 128)
    weight_only = fxq.Recipe.weight_only(bits=4, per=32, backend="reference", optimize="coverage")
    qmodel = fxq.quantize(nn.Linear(128, 1), weight_only, example_inputs=x)
    (got,) = run_onnxruntime(write_onnx(qdq_graph(qmodel), [x]).model, [x])
    same(got, qmodel(x), 2e-6)  # sums in another order
