"""Recurrent layers, in ONNX Runtime and in OpenVINO, against torch."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxq.onnx.graph import write_onnx
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.ops import OPS
from tests.support.machine import needs_vnni
from tests.support.onnx_runs import call, in_both, normal, run_onnxruntime, same, single, weight

pytestmark = pytest.mark.any_cpu

N, H = 2, 4
X = normal(5, N, 3)


def weights(gates: int):
    return weight(gates * H, 3), weight(gates * H, H, seed=6), weight(gates * H, seed=7), weight(gates * H, seed=8)


STATE = normal(N, H, seed=3)
CELL = normal(N, H, seed=4)

CALLS = [
    *(call("lstm", X, *weights(4), reverse=reverse, cell=cell) for reverse in (False, True) for cell in (False, True)),
    call("lstm", X, *weights(4), STATE, CELL, cell=True),
    call("lstm", X, *weights(4)[:2]),
    call("lstm", X[:1], *weights(4)),
    *(call("gru", X, *weights(3), reverse=reverse) for reverse in (False, True)),
    call("gru", X, *weights(3), STATE),
    call("gru", X, *weights(3)[:2]),
    *(call("rnn", X, *weights(1), STATE, nonlinearity=kind, reverse=True) for kind in ("tanh", "relu")),
    call("rnn", X, *weights(1)[:2]),
]


@pytest.mark.one_in(3)
@in_both(CALLS)
def test_an_engine_gives_what_torch_gives(call, engine):
    call.check(engine, rtol=2e-6)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (call("gru", X, *weights(3), state_qmax=127), "its hidden state is on a grid"),
        (call("gru", X, normal(12, 3), normal(12, 4)), "its weights are computed"),
        (
            call("lstm", X, weight(16, 3), weight(16, 2), None, None, None, None, weight(2, 4)),
            "its hidden state is projected",
        ),
    ],
    ids=str,
)
def test_refusals(refused, reason):
    with pytest.raises(NotInOnnx, match=reason):
        write_onnx(single(refused.op, *refused.values, **refused.options), refused.inputs)


def integer_lstm(states=False, bias=True, axis=None, steps=255, **options):
    """An LSTM with dynamic ranges as in a qdq graph: inputs x (T, N, 3), and its states if there are any."""
    root, graph = torch.nn.Module(), fx.Graph()
    x = graph.placeholder("x")
    states_of_graph = [graph.placeholder("h"), graph.placeholder("c")] if states else []
    asked = {"steps": steps, "axis": axis, "symmetric": False}
    scale = graph.call_function(OPS["choose_scale"].target, (x,), asked)
    zero = graph.call_function(OPS["choose_zero_point"].target, (x,), {"scale": scale, "axis": axis})
    grid = {"scale": scale, "zero_point": zero}
    reads = graph.call_function(OPS["quantize"].target, (x,), grid)
    reads = [graph.call_function(OPS["dequantize"].target, (reads,), grid)]
    for i, columns in enumerate((3, H)):
        drawn = torch.Generator().manual_seed(i)
        root.register_buffer(f"q{i}", torch.randint(-127, 128, (4 * H, columns), generator=drawn).to(torch.int8))
        root.register_buffer(f"scale{i}", 0.002 + torch.rand(4 * H, generator=drawn) / 100)
        root.register_buffer(f"zero{i}", torch.zeros(4 * H))
        own = {"scale": graph.get_attr(f"scale{i}"), "zero_point": graph.get_attr(f"zero{i}"), "axis": 0}
        reads.append(graph.call_function(OPS["dequantize"].target, (graph.get_attr(f"q{i}"),), own))
    for i in range(2):
        root.register_buffer(f"bias{i}", normal(4 * H, seed=i))
        reads.append(graph.get_attr(f"bias{i}") if bias else None)
    grid = {"state_qmax": 255, "state_affine": True, **options}
    graph.output(graph.call_function(OPS["lstm"].target, (*reads, *states_of_graph), grid))
    return fx.GraphModule(root, graph)


@pytest.mark.one_in(3)
@needs_vnni
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"reverse": True}, {"cell": True}, {"states": True, "cell": True}, {"bias": False}],
    ids=str,
)
def test_an_lstm_that_measures_its_ranges(options, samples):
    """Dynamic ranges of all samples together; any other integers than torch's would differ by more than this."""
    gm = integer_lstm(**options)
    states = [normal(samples, H, seed=3), normal(samples, H, seed=4)] if options.get("states") else []
    inputs = [normal(6, samples, 3), *states]
    written = write_onnx(gm, inputs)
    assert [node.op_type for node in written.model.graph.node].count("DynamicQuantizeLSTM") == 1
    (got,) = run_onnxruntime(written.model, inputs)
    same(got, gm(*inputs), 1e-5)


def test_in_float_an_lstm_that_measures_its_ranges_is_an_lstm():
    gm, x = integer_lstm(), normal(6, 1, 3)
    written = write_onnx(gm, [x], floats=True)
    assert "LSTM" in [node.op_type for node in written.model.graph.node]
    (got,) = run_onnxruntime(written.model, [x])
    weights = [torch.ops.fxq.dequantize.tensor(q, s, torch.zeros(4 * H, dtype=torch.int32), 0, None)
               for q, s in ((gm.q0, gm.scale0), (gm.q1, gm.scale1))]  # fmt: skip
    same(got, OPS["lstm"].target(x, *weights, gm.bias0, gm.bias1), 2e-6)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"axis": -1, "steps": 254}, "its input is not on one grid of 0..255"),
        ({"state_qmax": 127}, "its hidden state is not on the grid 0..255"),
        ({"state_affine": False}, "its hidden state is on a grid"),
    ],
)
def test_an_lstm_that_measures_other_ranges_is_refused(options, reason):
    with pytest.raises(NotInOnnx, match=reason):
        write_onnx(integer_lstm(**options), [normal(6, 2, 3)])
