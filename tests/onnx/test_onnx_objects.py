"""ONNX's types, and constants and nodes in files."""

import pytest
import torch
from torch import Tensor

from fxq.onnx.onnx_objects import INT4, UINT4, NotInOnnx, OnnxNode, graph_proto, model_proto, onnx_type
from tests.support.onnx_runs import onnx, run_onnxruntime

pytestmark = pytest.mark.any_cpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool])
def test_types_are_those_that_onnx_says(dtype):
    name = {"bool": "BOOL", "float32": "FLOAT", "bfloat16": "BFLOAT16"}
    short = str(dtype).removeprefix("torch.")
    assert onnx_type(dtype) == getattr(onnx.TensorProto, name.get(short, short.upper()))


def test_types_that_onnx_has_not():
    with pytest.raises(NotInOnnx, match=r"ONNX has no type for values of torch\.complex64"):
        onnx_type(torch.complex64)


def test_a_model_of_one_node():
    """Its file passes onnx's checker and runs, also with another number of samples."""
    add = OnnxNode("Add", ("x", "bias"), ("y",), {})
    declared = [("x", torch.float32, ["n", 3])], [("y", torch.float32, ["n", 3])]
    bias = torch.tensor([1.0, -2.0, 0.5])
    model = model_proto(graph_proto([add], *declared, {"bias": (bias, onnx_type(bias.dtype))}))
    onnx.checker.check_model(model, full_check=True)
    for samples in (1, 4):
        x = torch.randn(samples, 3)
        (y,) = run_onnxruntime(model, [x])
        assert torch.equal(y, x + bias)


@pytest.mark.parametrize(("kind", "values"), [(INT4, [-8, 7, -1]), (UINT4, [0, 15, 9])])
def test_two_integers_of_four_bits_are_a_byte(kind, values):
    """The first integer is the low half of a byte; the last half of an odd number is zero."""
    dtype = torch.int8 if kind == INT4 else torch.uint8
    tensor: Tensor = torch.tensor(values, dtype=dtype)
    proto = graph_proto([], [], [], {"w": (tensor, kind)}).initializer[0]
    assert list(proto.raw_data) == [values[0] & 15 | (values[1] & 15) << 4, values[2] & 15]
    assert onnx.numpy_helper.to_array(proto).astype(int).tolist() == values


def test_nodes_of_onnx_runtime_have_its_domain():
    node = OnnxNode("MatMulIntegerToFloat", ("a", "b", "c", "d"), ("y",), {})
    model = model_proto(graph_proto([node], [], [("y", torch.float32, [2])], {}))
    assert model.graph.node[0].domain == "com.microsoft"
    assert {opset.domain: opset.version for opset in model.opset_import} == {"": 21, "com.microsoft": 1}
