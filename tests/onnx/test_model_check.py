"""ModelCheck finds wrong values of an ONNX model, and none in a right one."""

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.qdq_graph import qdq_graph
from fxq.common.data import Batch
from fxq.graph.run import inputs_for
from fxq.onnx.model_check import ModelCheck
from fxq.onnx.whole_model import write_model
from tests.support.helpers import REFERENCE
from tests.support.models import batch, build, two_linears
from tests.support.onnx_runs import onnx

pytestmark = pytest.mark.any_cpu


@pytest.fixture
def residual():
    x = batch("residual")
    gm = qdq_graph(fxq.quantize(build("residual"), REFERENCE, data=[x]))
    inputs = Batch((x,))
    return gm, inputs, write_model(gm, inputs_for(gm.graph, inputs), True)


def test_a_right_model(residual):
    gm, inputs, written = residual
    differences = ModelCheck(written, gm, inputs).differences()
    assert len(differences) > 4 and differences[-1].name == "output 0" and all(d.is_rounding for d in differences)


def changed(written, kind, change):
    constants = {tensor.name: tensor for tensor in written.model.graph.initializer}
    node = next(node for node in written.model.graph.node if node.op_type == kind)
    change(node, constants)


def other_weight(node, constants):
    weight = next(n for n in constants.values() if n.data_type == onnx.TensorProto.INT8 and len(n.dims) == 4)
    values = torch.frombuffer(bytearray(weight.raw_data), dtype=torch.int8)
    weight.raw_data = (values // 2).numpy().tobytes()


def other_padding(node, constants):
    next(a for a in node.attribute if a.name == "pads").ints[:] = [0, 2, 0, 2]


def other_zero_point(node, constants):
    constants[node.input[2]].raw_data = bytes([constants[node.input[2]].raw_data[0] ^ 8])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "change"), [("Conv", other_weight), ("Conv", other_padding), ("QuantizeLinear", other_zero_point)]
)
def test_what_is_wrong_is_found_where_it_is(residual, kind, change):
    gm, inputs, written = residual
    changed(written, kind, change)
    wrong = [d for d in ModelCheck(written, gm, inputs).differences() if not d.is_rounding]
    assert wrong and len(wrong) <= 2  # later values are computed from the graph's integers
    assert "differs by" in str(wrong[0])


def test_a_dynamic_grid_that_is_wrong_is_named_and_what_is_computed_on_it_is_not():
    inputs = Batch((torch.randn(8, 4),))
    gm = qdq_graph(fxq.quantize(two_linears(), fxq.Recipe.dynamic(backend="reference"), example_inputs=inputs))
    written = write_model(gm, inputs_for(gm.graph, inputs), True)
    assert all(d.is_rounding for d in ModelCheck(written, gm, inputs).differences())
    next(node for node in written.model.graph.node if node.op_type == "Ceil").op_type = "Floor"
    (wrong,) = (d for d in ModelCheck(written, gm, inputs).differences() if not d.is_rounding)
    assert wrong.name.endswith("_zero_point") and wrong.steps == 1


def test_a_range_of_zeros_has_any_scale():
    model, inputs = nn.LSTM(4, 8, batch_first=True), Batch((torch.zeros(3, 2, 4),))
    recipe = fxq.Recipe.dynamic(backend="onnxruntime", optimize="coverage")
    gm = qdq_graph(fxq.quantize(model, recipe, example_inputs=inputs))
    differences = ModelCheck(write_model(gm, inputs_for(gm.graph, inputs), True), gm, inputs).differences()
    assert any(d.name.endswith("_scale") for d in differences) and all(d.is_rounding for d in differences)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", [(2, 1, 16), (3, 1, 1, 16), (1, 1, 16)])
@pytest.mark.parametrize("dynamic", [True, False])
def test_rows_along_one_axis_are_what_a_default_session_computes_too(shape, dynamic):
    """Its optimizations fuse scales along the first axis with the layer after them, as if there were one scale."""
    inputs = Batch((torch.randn(shape),))
    recipe = fxq.Recipe.dynamic(backend="reference", optimize="coverage")
    gm = qdq_graph(fxq.quantize(nn.Linear(16, 8), recipe, example_inputs=inputs))
    check = ModelCheck(write_model(gm, inputs_for(gm.graph, inputs), dynamic), gm, inputs)
    for optimized in (False, True):
        assert all(d.is_rounding for d in check.differences(optimized))


def test_rows_whose_length_varies():
    inputs = Batch((torch.randn(3, 1, 20),))
    recipe = fxq.Recipe.dynamic(backend="reference", optimize="coverage")
    gm = qdq_graph(fxq.quantize(nn.Conv1d(1, 4, 3), recipe, example_inputs=inputs))
    written = write_model(gm, inputs_for(gm.graph, inputs), {"input": {0: "batch", 2: "length"}})
    for optimized in (False, True):
        assert all(d.is_rounding for d in ModelCheck(written, gm, inputs).differences(optimized))


def test_the_scale_of_a_small_row_counts_as_that_of_a_large_one():
    x = torch.randn(4, 16) * torch.tensor([1.0, 1e-4, 1e-4, 1e-4])[:, None]
    gm = qdq_graph(
        fxq.quantize(nn.Linear(16, 8), fxq.Recipe.dynamic(backend="reference", optimize="coverage"), example_inputs=x)
    )
    written = write_model(gm, inputs_for(gm.graph, Batch((x,))), True)
    clip = next(node for node in written.model.graph.node if node.op_type == "Clip")
    minimum = next(tensor for tensor in written.model.graph.initializer if tensor.name == clip.input[1])
    minimum.raw_data = torch.tensor(9e-7 * 1e2).numpy().tobytes()  # above the scales of the small rows
    (wrong,) = (d for d in ModelCheck(written, gm, Batch((x,))).differences() if not d.is_rounding)
    assert wrong.name.endswith("_scale")
