"""Layers that engines report: the nodes of each, its dtype and its time."""

import pytest
import torch
from torch import nn

import fxq
from fxq.backends import cpu
from fxq.backends.by_name import backend_type
from fxq.backends.engine import EngineBackend, EngineKernel
from fxq.backends.engine_layers import kind_of, region_layer
from fxq.backends.engines.onnxruntime import session_of
from fxq.backends.engines.openvino import Openvino, compile_model, read_model
from fxq.common.metrics import sqnr
from fxq.graph.info import EngineLayer, info
from fxq.graph.query import submodule
from fxq.onnx.graph import write_onnx
from tests.support.machine import needs_vnni, quiet

pytestmark = pytest.mark.any_cpu

ENGINES = ("openvino", "onnxruntime")


@pytest.fixture(autouse=True)
def free(monkeypatch):
    """Set the price of integers to 0, so that no test depends on the speed of the machine."""
    monkeypatch.setattr(EngineBackend, "prices", lambda self, gm, example: fxq.extend.Prices({}, 0.0))


def quantized(model, name, x):
    with quiet():
        recipe = fxq.Recipe.static(backend=name, optimize="coverage").with_min_sqnr(None)
        return fxq.quantize(model.eval(), recipe, data=[x])


def regions(q):
    return [n for n in q.graph.nodes if isinstance(submodule(q, n), EngineKernel)]


class Parts(nn.Module):
    """Model of two regions, the first with two outputs, around an op that engines do not have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3), nn.Conv2d(32, 16, 3)

    def forward(self, x):
        y = torch.relu(self.a(x))
        z = self.b(y)
        return self.c(torch.special.bessel_j0(z) + 1), y


class Joined(nn.Module):
    """The relu shares its grid with negative values, so ONNX Runtime runs its layer in float."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Conv2d(16, 4, 3)

    def forward(self, x):
        return self.head(torch.cat([torch.relu(self.a(x)), self.b(x)], 1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ENGINES)
def test_layers_of_every_region(name):
    x = torch.randn(2, 3, 20, 20)
    q = quantized(Parts(), name, x)
    first, second = regions(q)
    for node, convs in ((first, {"a_relu", "b"}), (second, {"c"})):
        layers = info(node).lowered.layers
        assert {layer.nodes[0] for layer in layers if layer.kind == "int8"} == convs
        assert all(layer.dtype == "uint8" for layer in layers if layer.kind == "int8")
        assert all(layer.us >= 0 for layer in layers) and sum(layer.us for layer in layers) > 0
        inside = {n.name for n in submodule(q, node).graph_inside().graph.nodes}
        assert all(inside.issuperset(layer.nodes) for layer in layers)
    assert q.ledger.coverage == 1.0
    assert [q.history[-1].graph[n.name].text.rpartition(" {")[2] for n in (first, second)] == ["3 ops}", "2 ops}"]
    kernel = submodule(q, first)
    again = kernel.layers(torch.randn(5, 3, 40, 40))
    # kernels that were chosen for one size may join other conversions at another
    assert {layer.nodes[0] for layer in again if layer.kind == "int8"} == {"a_relu", "b"}
    before = info(first).lowered.layers
    assert sum(layer.us for layer in again) > sum(layer.us for layer in before)  # 13 times the pixels


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ENGINES)
def test_what_an_engine_does_not_say_is_not_known(name, monkeypatch):
    def fails(model, inputs, **options):
        raise RuntimeError("no profiler")

    monkeypatch.setattr(backend_type(name).kernel, "profile", fails)
    x = torch.randn(2, 3, 20, 20)
    q = quantized(Parts(), name, x)
    assert [info(node).lowered.layers for node in regions(q)] == [(), ()]
    assert q.ledger.coverage == 1.0
    with pytest.raises(RuntimeError, match="no profiler"):
        submodule(q, regions(q)[0]).layers(x)


def test_what_onnxruntime_runs_in_float_is_float_in_the_ledger(tmp_path, monkeypatch):
    model, x = Joined(), torch.randn(2, 3, 20, 20)
    q = quantized(model, "onnxruntime", x)
    (node,) = regions(q)
    (ran,) = [layer for layer in info(node).lowered.layers if layer.kind == "float"]
    assert (ran.nodes[0], ran.dtype) == ("a_relu", "float32")
    in_float = q.ledger.where(precision="float")
    assert [(e.name, e.kind, e.decided_by) for e in in_float] == [
        ("a", "unsupported", "verify-lowering"),
        ("relu", "unsupported", "verify-lowering"),
    ]
    assert in_float[0].reason == f"onnxruntime runs it in float32, as {ran.op}: its conversions gain nothing"
    assert in_float[0].fix == "recipe.override('a', fxq.FLOAT)"
    assert (q.history["lower"].count("float"), q.history[-1].count("float")) == (0, 2)
    macs = {e.name: e.macs for e in q.ledger}
    assert q.ledger.coverage == (macs["b"] + macs["head"]) / sum(macs.values()) < 1
    written = write_onnx(submodule(q, node).graph_inside(), [x])
    assert ran.op in optimized(written.model, tmp_path / "o.onnx", monkeypatch)["a_relu"]
    assert sqnr(model(x), q(x)) > 25  # of 8 bits


@needs_vnni
def test_a_layer_whose_input_alone_is_moved_as_integers_is_float_in_the_ledger():
    """ONNX Runtime reshapes 3-D integers; then it multiplies signed ones with a zero point in float."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(4, 7, 64)
    recipe = fxq.Recipe.static(backend="onnxruntime", optimize="coverage", activation=fxq.TensorSpec(signed=True))
    with quiet():
        q = fxq.quantize(model.eval(), recipe.with_min_sqnr(None), data=[x])
    (node,) = regions(q)
    ran = [layer.op for layer in info(node).lowered.layers if "_0_relu" in layer.nodes and layer.kind == "float"]
    assert ran == ["Gemm"]
    assert [e.path for e in q.ledger.where(precision="float")] == ["0", "1"]


def optimized(model, path, monkeypatch):
    """Op types of ONNX Runtime's optimized nodes, by node of the graph, from the file that it writes."""
    import onnx
    import onnxruntime

    real = onnxruntime.SessionOptions

    def with_file():
        options = real()
        options.optimized_model_filepath = str(path)
        return options

    monkeypatch.setattr(onnxruntime, "SessionOptions", with_file)
    session_of(model, 1)
    op_types = {}
    for node in onnx.load(path).graph.node:
        op_types.setdefault(node.name.partition("/")[0], []).append(node.op_type)
    return op_types


@pytest.mark.skipif(not cpu.has_vnni(), reason="int8 activations overflow without VNNI")
def test_what_openvino_runs_in_float_is_float_in_the_ledger(monkeypatch):
    """Transposed convolution whose grid has a zero point other than 0 and 128, which `config` otherwise avoids."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ConvTranspose2d(16, 8, 3), nn.Conv2d(8, 4, 3))
    x = torch.randn(2, 3, 16, 16)
    assert quantized(model, "openvino", x).ledger.coverage == 1.0
    monkeypatch.setattr(Openvino, "config", lambda self, gm, config, calls: config)
    q = quantized(model, "openvino", x)
    (entry,) = q.ledger.where(precision="float")
    assert (entry.path, entry.reason) == (
        "1",
        "openvino runs it in float32, as Deconvolution: its conversions gain nothing",
    )
    (node,) = regions(q)
    written = write_onnx(submodule(q, node).graph_inside(), [x], integer_bias=False)
    about = [
        op.get_rt_info() for op in compile_model(read_model(written.model), 1).get_runtime_model().get_ordered_ops()
    ]
    kinds = {a["layerType"].astype(str): a["primitiveType"].astype(str) for a in about}
    assert kinds["Deconvolution"].endswith("_f32")


# ---- of which nodes a layer is made


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "boolean", "undefined", ""])
def test_what_is_not_known_to_be_float_is_not_called_so(dtype):
    assert kind_of(dtype) == "int8"
    assert kind_of("float32") == kind_of("bfloat16") == "float"


def layer(*nodes, op="Convolution", kind="float", us=1.26):
    return EngineLayer(nodes, op, "float32", kind, us)


@pytest.fixture(scope="module")
def qdq():
    """Nodes of a qdq graph by name: input_1_q, input_1_dq, conv, conv_q, pool and more."""
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(3, 4, 3))
    model.add_module("pool", nn.MaxPool2d(2))
    model.add_module("head", nn.Conv2d(4, 2, 1))
    gm = fxq.quantize(model.eval(), fxq.Recipe.static(backend="reference"), data=[torch.randn(1, 3, 8, 8)])
    return {n.name: n for n in gm.graph.nodes}


@pytest.mark.parametrize(
    ("engine_layer", "nodes", "kind"),
    [
        (layer("conv/Conv", "Multiply_17", "conv_q/QuantizeLinear"), ("conv",), "float"),
        (layer("conv_q/QuantizeLinear", "conv/Conv", kind="int8"), ("conv",), "int8"),
        (layer("input_1_q/QuantizeLinear", "conv/Conv"), ("conv",), "int8"),  # it makes its integers itself
        (layer("input_1_q/QuantizeLinear", op="Subgraph"), ("input_1_q",), "convert"),
        (layer("conv/DequantizeLinear", kind="convert"), ("conv",), "convert"),
        (layer("pool/MaxPool", kind="int8"), ("pool",), "moves"),
        (layer("pool/MaxPool"), ("pool",), "float"),
        (layer("", op="Reorder"), (), "moves"),
        (layer("conv/Reshape", op="Reshape", kind="int8"), ("conv",), "moves"),  # for the layer, no part of its sums
        (layer("Constant_3", op="MVN"), (), "float"),
    ],
)
def test_the_nodes_and_the_kind_of_a_layer(qdq, engine_layer, nodes, kind):
    layer = region_layer(engine_layer, qdq)
    assert (layer.nodes, layer.kind) == (nodes, kind)
    assert (layer.op, layer.dtype, layer.us) == (engine_layer.op, "float32", 1.3)
