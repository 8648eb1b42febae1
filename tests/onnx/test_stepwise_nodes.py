"""Recurrent layers that round or project their state in each step, as a Scan, against torch."""

import pytest
import torch

from fxq.common.metrics import sqnr
from fxq.onnx.graph import write_onnx
from tests.onnx.test_recurrent_nodes import CELL, STATE, H, X, weights
from tests.support.onnx_runs import call, normal, onnx, run_onnxruntime, run_openvino, single, weight

pytestmark = pytest.mark.any_cpu

GRIDS = [{"state_qmax": 127}, {"state_qmax": 127, "state_scale": 1 / 127}, {"state_qmax": 31, "state_scale": 0.02}]
PROJECTED = (weight(4 * H, 3), weight(4 * H, 3, seed=6), weight(4 * H, seed=7), weight(4 * H, seed=8))
CALLS = [
    *(call("lstm", X, *weights(4), cell=cell, reverse=cell, **grid) for grid in GRIDS for cell in (False, True)),
    call("lstm", X, *weights(4), STATE, CELL, cell=True, **GRIDS[0]),
    call("lstm", X, *weights(4), state_qmax=255, state_affine=True),
    call("lstm", X, *weights(4)[:2], **GRIDS[1]),
    *(call("lstm", X, *PROJECTED, None, None, weight(3, H, seed=9), cell=True, **grid) for grid in ({}, *GRIDS[:2])),
    *(call("gru", X, *weights(3), reverse=reverse, **grid) for grid in GRIDS for reverse in (False, True)),
    call("gru", X, *weights(3), STATE, **GRIDS[0]),
    *(call("rnn", X, *weights(1), STATE, nonlinearity=kind, **GRIDS[0]) for kind in ("tanh", "relu")),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CALLS, ids=str)
def test_it_gives_what_torch_gives(case):
    """A state near a tie may be rounded the other way: a step of 1/31 at most of values below 1."""
    gm = single(case.op, *case.values, **case.options)
    model = write_onnx(gm, case.inputs, portable=True).model
    onnx.checker.check_model(model, full_check=True)
    assert {node.op_type for node in model.graph.node} & {"Scan"} and len(model.opset_import) == 1
    assert sqnr(gm(*case.inputs), run_onnxruntime(model, case.inputs)[0]) > 60


@pytest.mark.parametrize("kind", ["tanh", "relu"])
def test_all_steps_of_an_rnn_of_fixed_sizes_are_right_in_openvino(kind):
    """Wrong from the second step on if the gates are the first term of the sum."""
    case = call("rnn", normal(7, 3, 3), *weights(1), nonlinearity=kind, state_qmax=127, state_scale=1 / 127)
    gm = single(case.op, *case.values, **case.options)
    model = write_onnx(gm, case.inputs, portable=True).model
    assert sqnr(gm(*case.inputs), run_openvino(model, case.inputs)[0]) > 60


def test_the_number_of_steps_is_not_written_down():
    gm = single("gru", X, *weights(3), state_qmax=127)
    model = write_onnx(gm, [X], portable=True).model
    assert [node.op_type for node in model.graph.node].count("Scan") == 1
    assert len(model.graph.node) < 12
    assert torch.isfinite(run_onnxruntime(model, [X])[0]).all()


ONE_STEP = [
    *(call("lstm", X[:1], *weights(4), STATE, CELL, cell=cell, reverse=cell) for cell in (False, True)),
    call("lstm", X[:1], *weights(4)[:2]),
    call("gru", X[:1], *weights(3), STATE),
    call("rnn", X[:1], *weights(1), STATE, nonlinearity="relu"),
]


@pytest.mark.parametrize("case", ONE_STEP, ids=str)
def test_a_single_step_is_products_for_openvino(case):
    gm = single(case.op, *case.values, **case.options)
    model = write_onnx(gm, case.inputs, for_openvino=True).model
    assert not {node.op_type for node in model.graph.node} & {"Scan", "LSTM", "GRU", "RNN"}
    torch.testing.assert_close(run_openvino(model, case.inputs)[0], gm(*case.inputs), rtol=2e-6, atol=1e-6)


def test_a_single_step_on_a_grid_has_no_loop():
    case = call("lstm", X[:1], *weights(4), STATE, CELL, cell=True, **GRIDS[1])
    gm = single(case.op, *case.values, **case.options)
    model = write_onnx(gm, case.inputs, portable=True).model
    assert "Scan" not in {node.op_type for node in model.graph.node}
    assert sqnr(gm(*case.inputs), run_onnxruntime(model, case.inputs)[0]) > 60


def test_several_steps_stay_a_recurrent_node_for_openvino():
    model = write_onnx(single("gru", X, *weights(3)), [X], for_openvino=True).model
    assert "GRU" in {node.op_type for node in model.graph.node}
