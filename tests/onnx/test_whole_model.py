"""Whole models: names, dynamic sizes, every preset, against torch in ONNX Runtime without optimizations."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.backends.qdq_graph import qdq_graph
from fxq.common.data import as_batch
from fxq.common.metrics import sqnr, tensors
from fxq.errors import InputError
from fxq.graph.run import inputs_for
from fxq.onnx.model_check import ModelCheck
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.onnx.whole_model import write_model
from tests.onnx.test_graph import Attention
from tests.support.helpers import REFERENCE, module
from tests.support.models import batch, build, settled
from tests.support.onnx_runs import normal, onnx, run_onnxruntime

pytestmark = pytest.mark.any_cpu


class Recurrent(nn.Module):
    """A bidirectional recurrent layer and a layer that reads its outputs."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(6, 8, batch_first=True, bidirectional=True, **options)
        self.head = nn.Linear(2 * (options.get("proj_size") or 8), 3)

    def forward(self, x):
        y, last = self.layer(x)
        return self.head(y), last


MODELS = {
    **{name: (build(name), batch(name)) for name in ("residual", "squeeze_excite", "upscaler", "several_inputs")},
    "attention": (settled(Attention), normal(4, 5, 8)),
    "lstm": (settled(lambda: Recurrent(nn.LSTM)), normal(3, 5, 6)),
    "projected": (settled(lambda: Recurrent(nn.LSTM, proj_size=4)), normal(3, 5, 6)),
    "gru": (settled(lambda: Recurrent(nn.GRU)), normal(3, 5, 6)),
    "text": (
        settled(lambda: nn.Sequential(nn.Embedding(9, 64), nn.Linear(64, 70), nn.GELU(), nn.Linear(70, 5))),
        torch.arange(6).reshape(2, 3),
    ),
}
PRESETS = {
    "static": REFERENCE,
    "dynamic": fxq.Recipe.dynamic(backend="reference"),
    "weights": fxq.Recipe.weight_only(backend="reference"),
    "four bits": fxq.Recipe.weight_only(bits=4, backend="reference"),
    "float16": fxq.Recipe.weight_only(dtype=torch.float16, backend="reference"),
}


def written(qmodel, x, dynamic=True, **options):
    gm, inputs = qdq_graph(qmodel), as_batch(x, qmodel)
    return gm, inputs, write_model(gm, inputs_for(gm.graph, inputs), dynamic, **options)


@pytest.mark.one_in(30)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", MODELS)
def test_presets(name, preset):
    """Each quantized value is within a rounding step, for the example's number of samples and for another."""
    model, x = MODELS[name]
    qmodel = fxq.quantize(model, PRESETS[preset], data=[x])
    gm, inputs, exported = written(qmodel, x)
    onnx.checker.check_model(exported.model, full_check=True)
    assert {opset.domain for opset in exported.model.opset_import} == {""}
    differences = ModelCheck(exported, gm, inputs).differences()
    assert differences and all(d.is_rounding for d in differences), [str(d) for d in differences if not d.is_rounding]
    if name == "several_inputs":
        return
    (more,) = (torch.cat([part, part, part[:1]]) for part in inputs.args)
    for got, wanted in zip(run_onnxruntime(exported.model, [more]), tensors(gm(more)), strict=True):
        assert got.shape == wanted.shape and sqnr(wanted, got) > 35


def initializers(model):
    types = onnx.TensorProto.DataType
    return {types.Name(tensor.data_type): tensor for tensor in model.graph.initializer}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("preset", "kind"), [("weights", "INT8"), ("four bits", "UINT4"), ("float16", "FLOAT16")])
def test_weights_stay_as_small_as_they_are(preset, kind):
    model, x = MODELS["text"]
    _, _, exported = written(fxq.quantize(model, PRESETS[preset], data=[x]), x)
    assert kind in initializers(exported.model)
    floats = sum(4 * len(t.raw_data) // 4 for t in exported.model.graph.initializer if t.data_type == 1)
    assert floats < exported.model.ByteSize() / 2


def test_what_stands_in_a_qdq_model():
    model, x = MODELS["residual"]
    _, _, exported = written(fxq.quantize(model, REFERENCE, data=[x]), x)
    nodes = {name: node for node in exported.model.graph.node for name in node.output}
    constants = {tensor.name: tensor for tensor in exported.model.graph.initializer}
    convs = [node for node in exported.model.graph.node if node.op_type == "Conv"]
    assert convs
    for conv in convs:
        _, weight, bias = (nodes[name] for name in conv.input)
        assert weight.op_type == bias.op_type == "DequantizeLinear"
        assert constants[weight.input[0]].data_type == onnx.TensorProto.INT8
        assert len(constants[weight.input[1]].dims) == 1  # a scale for each channel
        assert constants[bias.input[0]].data_type == onnx.TensorProto.INT32


def test_names_and_shapes():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, pixels, *, extra=None, pair=None):
            y = self.layer(pixels)
            return {"logits": y + extra, "more": [y, pair[0] + pair[1]]}

    x = {"pixels": normal(2, 4), "extra": normal(2, 3), "pair": (normal(2, 4), normal(1, 4))}
    _, _, exported = written(fxq.quantize(Named().eval(), REFERENCE, data=[x]), x)
    shapes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in exported.model.graph.input
    }
    assert shapes == {"pixels": ["batch", 4], "extra": ["batch", 3], "pair_0": ["batch", 4], "pair_1": [1, 4]}
    assert [out.name for out in exported.model.graph.output] == ["logits", "more_0", "more_1"]
    assert exported.model.producer_name == "fxq"


def test_an_input_that_is_not_read_stays():
    model = module(lambda self, x, unread: F.relu(x))
    x = (normal(2, 4), normal(2, 4))
    _, _, exported = written(fxq.quantize(model, REFERENCE, data=[x]), x)
    assert [v.name for v in exported.model.graph.input] == ["x", "unread"]


@pytest.mark.slow
def test_sizes_of_images_may_vary():
    model, x = MODELS["upscaler"]
    gm, _, exported = written(fxq.quantize(model, REFERENCE, data=[x]), x, {"x": {2: "height", 3: "width"}})
    x_larger = normal(x.shape[0], x.shape[1], x.shape[2] + 3, x.shape[3] + 5)
    (got,) = run_onnxruntime(exported.model, [x_larger])
    wanted = gm(x_larger)
    assert got.shape == wanted.shape and sqnr(wanted, got) > 35


@pytest.mark.slow
def test_sizes_may_vary_where_layers_take_all_that_are_large_enough():
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 5, stride=2), nn.AdaptiveAvgPool2d(1)
    x, x_other = normal(2, 3, 24, 24), normal(3, 3, 31, 19)
    qmodel = fxq.quantize(nn.Sequential(*layers).eval(), REFERENCE, data=[x])
    gm, _, exported = written(qmodel, x, {"input": {0: "batch", 2: "height", 3: "width"}})
    (got,) = run_onnxruntime(exported.model, [x_other])
    assert got.shape == (3, 8, 1, 1) and sqnr(gm(x_other), got) > 35


@pytest.mark.one_in(2)
@pytest.mark.parametrize("symmetric", [True, False])
def test_sizes_of_rows_with_dynamic_ranges_may_vary(symmetric):
    spec = fxq.TensorSpec(per="row", range="dynamic", symmetric=symmetric)
    x, x_other = normal(2, 5, 16), 30 * normal(3, 1, 16)
    recipe = fxq.Recipe.dynamic(activation=spec, backend="reference")
    qmodel = fxq.quantize(nn.Sequential(nn.Linear(16, 8)).eval(), recipe, data=[x])
    gm, _, exported = written(qmodel, x, {"input": {0: "n", 1: "t"}})
    (got,) = run_onnxruntime(exported.model, [x_other])
    assert sqnr(gm(x_other), got) > 60  # dB


def test_fixed_sizes():
    model, x = MODELS["residual"]
    _, _, exported = written(fxq.quantize(model, REFERENCE, data=[x]), x, False)
    assert [d.dim_value for d in exported.model.graph.input[0].type.tensor_type.shape.dim] == list(x.shape)


def test_a_size_that_the_model_needs_is_no_size_that_varies():
    model = module(lambda self, x: x.reshape(3, -1).relu())
    qmodel = fxq.quantize(model, REFERENCE, data=[normal(3, 4)])
    with pytest.raises(
        NotInOnnx, match=r"reshape.* needs a fixed size of 'batch' or 'width' \(.*batch.*\)\. Export it"
    ):
        written(qmodel, normal(3, 4), {"x": {0: "batch", 1: "width"}})
    written(qmodel, normal(3, 4), False)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("dynamic", "reason"),
    [
        ({"y": {0: "batch"}}, "dynamic: unknown input 'y'"),
        ({"x": {9: "batch"}}, "dynamic: 9: 'batch' is not an axis of 'x'"),
        ({"x": {0: 3}}, "dynamic: 0: 3 is not an axis"),
    ],
)
def test_dynamic_names_what_is_there(dynamic, reason):
    model, x = MODELS["residual"]
    with pytest.raises(InputError, match=reason):
        written(fxq.quantize(model, REFERENCE, data=[x]), x, dynamic)


def test_a_leaf_is_refused_by_name():
    class Leaf(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    model = nn.Sequential(nn.Linear(4, 4), Leaf(), nn.Linear(4, 2)).eval()
    qmodel = fxq.quantize(model, REFERENCE.leaf("1"), data=[normal(2, 4)])
    with pytest.raises(NotInOnnx, match=r"layer '1'\): the module '1' \(Leaf\) is a leaf"):
        written(qmodel, normal(2, 4))
