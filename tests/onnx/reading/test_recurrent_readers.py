"""LSTM layers whose weights ONNX Runtime's quantizer has rounded: the model that is read has its integers."""

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.onnx_runs import onnx, ort

pytestmark = pytest.mark.any_cpu

INPUTS, SIZE = 12, 16


def gates(weight):
    """Gates of PyTorch (input, forget, cell, output) in ONNX's order (input, output, forget, cell)."""
    first, second, third, fourth = weight.detach().chunk(4, 0)
    return torch.cat([first, fourth, second, third], 0)


def float_file(path, directions):
    """ONNX file of an LSTM."""
    torch.manual_seed(0)
    lstm, helper = nn.LSTM(INPUTS, SIZE, bidirectional=directions == 2), onnx.helper

    def values(name):
        return torch.stack([gates(getattr(lstm, name + end)) for end in ("_l0", "_l0_reverse")[:directions]])

    constants = {"W": values("weight_ih"), "R": values("weight_hh")}
    constants["B"] = torch.cat([values("bias_ih"), values("bias_hh")], 1)
    direction = "bidirectional" if directions == 2 else "forward"
    node = helper.make_node("LSTM", ["x", "W", "R", "B"], ["y", "h", "c"], hidden_size=SIZE, direction=direction)
    graph = helper.make_graph(
        [node],
        "lstm",
        [helper.make_tensor_value_info("x", 1, ["T", "N", INPUTS])],
        [helper.make_tensor_value_info(name, 1, None) for name in ("y", "h")],
        [onnx.numpy_helper.from_array(value.numpy(), name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8), path)


def run(path, x):
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


@pytest.fixture(params=[(1, False, "QInt8"), (2, True, "QInt8"), (2, False, "QUInt8")], ids=str)
def files(request, tmp_path):
    """Paths of the float file and of the quantized one."""
    quantization = pytest.importorskip("onnxruntime.quantization")
    directions, per_channel, kind = request.param
    float_file(tmp_path / "float.onnx", directions)
    quantization.quantize_dynamic(
        tmp_path / "float.onnx", tmp_path / "int8.onnx", per_channel=per_channel,
        op_types_to_quantize=["LSTM"], weight_type=quantization.QuantType[kind],
    )  # fmt: skip
    return tmp_path / "float.onnx", tmp_path / "int8.onnx"


def test_the_integers_of_the_file(files):
    float_path, path = files
    with pytest.warns(fxq.FxqWarning, match=r"'y' is read as an LSTM with float inputs and states.*Recipe.dynamic\(\)"):
        model = fxq.read_onnx(path)
    x = torch.randn(9, 3, INPUTS)
    # ONNX Runtime rounds inputs and states to 8 bits, so the float LSTM is nearer to ONNX Runtime's float LSTM.
    assert sqnr(run(path, x), model(x)[0]) > 35
    assert sqnr(run(float_path, x), model(x)[0]) > sqnr(run(float_path, x), run(path, x))
    qmodel = fxq.quantize(model, fxq.Recipe.dynamic(backend="reference"), example_inputs=x)
    assert sqnr(run(path, x), qmodel(x)[0]) > 30
    stored = onnx.load(path).graph.initializer
    constants = {c.name: torch.from_numpy(onnx.numpy_helper.to_array(c).copy()) for c in stored}
    for i, layer in enumerate(qmodel.qparams().values()):
        for name, weight in (("W", layer.weights["weight_ih"]), ("R", layer.weights["weight_hh"])):
            zero = constants[f"{name}_zero_point"][i].int()
            wanted = gates_back((constants[f"{name}_quantized"][i].int() - zero).t())
            own = weight.stored.int() - weight.qparams.zero_point.reshape(-1, 1)
            assert torch.equal(own, wanted)


def gates_back(weight):
    """Gates of ONNX in PyTorch's order."""
    first, fourth, second, third = weight.chunk(4, 0)
    return torch.cat([first, second, third, fourth], 0)
