"""The openvino backend alone."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

import fxq
from fxq.backends import cpu
from fxq.backends.engines.openvino import Openvino, OpenvinoKernel, compile_model, read_model
from fxq.backends.kernel import Kernel
from fxq.common.metrics import sqnr
from fxq.onnx.graph import write_onnx
from fxq.ops import OPS
from tests.support.machine import needs_vnni

pytestmark = pytest.mark.any_cpu


def test_the_profile_names_the_nodes_of_the_graph():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    x = torch.randn(1, 3, 16, 16)
    q = fxq.quantize(model, fxq.Recipe.static(backend="reference"), data=[x])
    written = write_onnx(q, [x], integer_bias=False)
    scopes = {name.partition("/")[0] for layer in OpenvinoKernel.profile(written.model, [x]) for name in layer.nodes}
    assert {"_0_relu", "_2"} <= scopes


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:with all possible ops on integers:fxq.FxqWarning")
@pytest.mark.parametrize("layer", [nn.Conv2d(64, 32, 3), nn.Conv2d(64, 64, 3, groups=64), nn.Linear(64, 32)])
def test_sums_of_the_largest_products_do_not_saturate(layer):
    """All inputs, and all weights, at the end of their grids."""
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.zero_()
    shape = (2, 64) if isinstance(layer, nn.Linear) else (2, 64, 8, 8)
    x = torch.ones(shape)
    q = fxq.quantize(layer.eval(), fxq.Recipe.static(backend="openvino", optimize="coverage"), data=[x])
    with torch.no_grad():
        assert torch.allclose(q(x), layer(x), rtol=1e-2)


@pytest.mark.filterwarnings("ignore:with all possible ops on integers:fxq.FxqWarning")
def test_one_role_has_7_bits_where_there_is_no_vnni(monkeypatch):
    monkeypatch.setattr(cpu, "has_vnni", lambda: False)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    q = fxq.quantize(model, fxq.Recipe.static(backend="openvino", optimize="coverage"), data=[torch.randn(8, 8)])
    assert q.ledger.reduced_range is not None


@pytest.mark.skipif(not cpu.has_vnni(), reason="int8 activations overflow without VNNI")
@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")
def test_a_transposed_convolution_after_negative_values_runs_on_integers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.PReLU(), nn.ConvTranspose2d(16, 8, 3)).eval()
    x = torch.randn(2, 3, 16, 16)
    q = fxq.quantize(model, fxq.Recipe.static(backend="openvino", optimize="coverage"), data=[x])
    with torch.no_grad():
        assert sqnr(model(x), q(x)) > 25
    kernel = next(module for module in q.modules() if isinstance(module, OpenvinoKernel))
    written = write_onnx(kernel.graph_inside(), [x], integer_bias=False)
    ops = compile_model(read_model(written.model), 1).get_runtime_model().get_ordered_ops()
    about = [op.get_rt_info() for op in ops]
    kinds = [a["primitiveType"].astype(str) for a in about if "ConvTranspose" in a["originalLayersNames"].astype(str)]
    assert any(kind.lower().endswith("i8") and not kind.startswith("reorder") for kind in kinds), kinds


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_it_is_not_there_where_onednn_may_not_use_all_instructions(monkeypatch, name):
    """Parts of OpenVINO ask the CPU itself, and read what oneDNN has not written."""
    monkeypatch.setenv(name, "AVX2")
    assert "limited to AVX2: unset" in Openvino().available()
    monkeypatch.setenv(name, "default")
    assert Openvino().available() is None


@pytest.mark.filterwarnings("ignore:with all possible ops on integers:fxq.FxqWarning")
def test_integers_of_64_bits_stay_outside():
    """It makes 32 of them, so that a sum of large ones is another. Floats are made of them as they are."""

    class Stamps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, stamps, zero):
            return self.linear((stamps - zero).float()), stamps + 1, (stamps + 1_294_967_296).bool()

    torch.manual_seed(0)
    zero = torch.tensor(3_000_000_000)
    inputs = zero + torch.randint(0, 10, (4, 8)), zero
    model = Stamps().eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*kernel is wrong", fxq.FxqWarning)
        q = fxq.quantize(model, fxq.Recipe.static(backend="openvino", optimize="coverage"), data=[inputs])
    assert any(isinstance(module, OpenvinoKernel) for module in q.modules())
    with torch.no_grad():
        (want, *exact), (got, *others) = model(*inputs), q(*inputs)
    assert all(map(torch.equal, others, exact)) and sqnr(want, got) > 25


@pytest.mark.filterwarnings("ignore:nothing runs on integers:fxq.FxqWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_floats_of_other_types_stay_outside(dtype):
    """It would compute them in float32, or refuse the region that they are in."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4)).eval().to(dtype)
    x = torch.randn(4, 8).to(dtype)
    q = fxq.quantize(model, fxq.Recipe.static(backend="openvino"), data=[x])
    assert not any(isinstance(module, OpenvinoKernel) for module in q.modules())
    assert torch.equal(q(x), model(x))


@pytest.mark.filterwarnings("ignore:nothing runs on integers:fxq.FxqWarning")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_both_directions_of_a_recurrent_layer_are_right(kind):
    """No kernel is replaced by its qdq form, of which a warning would tell."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(8, 12, 2, batch_first=True, bidirectional=True)

        def forward(self, x):
            return self.layer(x)[0]

    model, x = Layer().eval(), torch.randn(3, 7, 8)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*kernel is wrong", fxq.FxqWarning)
        q = fxq.quantize(model, fxq.Recipe.static(backend="openvino", optimize="coverage"), data=[x])
    assert any(isinstance(module, OpenvinoKernel) for module in q.modules())
    with torch.no_grad():
        torch.testing.assert_close(q(x), model(x), rtol=0, atol=1e-4)
        torch.testing.assert_close(q(x[:2]), model(x[:2]), rtol=0, atol=1e-4)


class Attention(nn.Module):
    """Attention under a mask, whose layers read tokens of widely different sizes."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x, mask):
        q, k, v = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        return self.out(attended)


@needs_vnni
@pytest.mark.parametrize(
    "spec",
    [
        fxq.TensorSpec(per="row", range="dynamic"),
        fxq.TensorSpec(per="row", range="dynamic", symmetric=True),
        fxq.TensorSpec(range="dynamic"),
        fxq.TensorSpec(bits=7, range="dynamic"),
    ],
    ids=["row", "symmetric row", "tensor", "7 bits"],
)
def test_linear_layers_with_dynamic_ranges(spec):
    """Against the qdq graph in torch; OpenVINO's own report says that the layers ran on integers."""
    torch.manual_seed(0)
    size = torch.tensor([[1.0], [9.0], [0.1], [3.0], [0.0]])
    model, inputs = Attention().eval(), (size * torch.randn(2, 5, 32), torch.rand(2, 1, 5, 5) > 0.3)
    results = {}
    for backend in ("openvino", "reference"):
        recipe = fxq.Recipe.dynamic(backend=backend, optimize="coverage", activation=spec)
        results[backend] = fxq.quantize(model, recipe, example_inputs=inputs)
    q, reference = results["openvino"], results["reference"]
    assert [entry.precision for entry in q.ledger.where(op="linear")] == ["int8"] * 4
    (kernel,) = (module for module in q.modules() if isinstance(module, OpenvinoKernel))
    products = [layer.dtype for layer in kernel.layers(*inputs) if layer.op.startswith("FullyConnected")]
    assert len(products) == 4 and set(products) <= {"uint8", "int8"}
    with torch.no_grad():
        assert sqnr(reference(*inputs), q(*inputs)) > 55
        assert abs(sqnr(model(*inputs), q(*inputs)) - sqnr(model(*inputs), reference(*inputs))) < 0.5


def test_attention_under_a_mask_is_one_layer():
    torch.manual_seed(0)
    values, mask = [torch.randn(2, 4, 16, 8) for _ in range(3)], torch.rand(2, 1, 16, 16) > 0.3
    graph = fx.Graph()
    read = [graph.placeholder(name) for name in ("q", "k", "v", "mask")]
    graph.output(graph.call_function(OPS["scaled_dot_product_attention"].target, tuple(read)))
    written = write_onnx(fx.GraphModule({}, graph), [*values, mask], for_openvino=True)
    ops = [layer.op for layer in OpenvinoKernel.profile(written.model, [*values, mask])]
    assert "Softmax" not in ops and "Subgraph" in ops


@pytest.mark.parametrize(
    ("layer", "shape", "changes", "reason"),
    [
        (nn.Conv2d(3, 8, 3), (1, 3, 8, 8), {}, "has no kernels with dynamic ranges for conv2d"),
        (nn.Linear(8, 8), (5, 8), {"weight": fxq.TensorSpec(signed=True, per="channel", observer="minmax")},
         "computes dynamic ranges beside symmetric weights only"),
    ],
)  # fmt: skip
def test_what_it_does_not_measure_stays_in_float(layer, shape, changes, reason):
    recipe = fxq.Recipe.dynamic(backend="openvino", optimize="coverage")
    recipe = replace(recipe, config=replace(recipe.config, **changes))
    with pytest.warns(fxq.FxqWarning, match="nothing runs on integers"):
        q = fxq.quantize(nn.Sequential(layer).eval(), recipe, example_inputs=torch.randn(shape))
    (entry,) = q.ledger
    assert entry.precision == "float" and reason in entry.reason


class Words(nn.Module):
    """Rows of a table with a padding row, and a layer that may share the table."""

    def __init__(self, tied=False):
        super().__init__()
        self.words, self.head = nn.Embedding(500, 64, padding_idx=3), nn.Linear(64, 500, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x):
        rows = self.words(x)
        return rows, self.head(rows)


def constant_types(compiled, shape):
    """Element types of the constants of a shape in a model that OpenVINO has compiled."""
    nodes = [node for node in compiled.get_runtime_model().get_ordered_ops() if not node.inputs()]
    outputs = [node.output(0) for node in nodes if node.output(0).get_partial_shape().is_static]
    return [out.get_element_type().to_string() for out in outputs if tuple(out.get_shape()) == shape]


@pytest.mark.parametrize(("tied", "share"), [(False, 0.3), (True, 0.6)])  # a tied table is stored by row and by block
def test_the_table_of_an_embedding_stays_in_integers(tied, share, tmp_path):
    openvino = pytest.importorskip("openvino")
    model, x = Words(tied).eval(), torch.randint(500, (2, 7)).index_fill(1, torch.tensor([2]), 3)
    q, reference = (
        fxq.quantize(model, fxq.Recipe.static(backend=backend, optimize="coverage"), data=[x])
        for backend in ("openvino", "reference")
    )
    assert {entry.op: entry.precision for entry in q.ledger} == {"embedding": "weight-only", "linear": "int8"}
    assert [module.name for module in q.modules() if isinstance(module, Kernel)] == ["openvino.region"]
    rows, head = q(x)
    torch.testing.assert_close(rows, reference(x)[0], rtol=1e-6, atol=0)  # the same integers, times a float32 scale
    assert sqnr(model(x)[1], head) > 30
    assert fxq.results.nbytes(q) < share * fxq.results.nbytes(model)
    q.export(tmp_path / "words.xml")
    compiled = compile_model(openvino.Core().read_model(tmp_path / "words.xml"), 1)
    types = constant_types(compiled, (500, 64))
    assert "i8" in types and "f32" not in types
    torch.testing.assert_close(torch.tensor(compiled(x.numpy())[0]), rows, rtol=1e-6, atol=0)
    q.export(tmp_path / "words.onnx")
    torch.testing.assert_close(fxq.read_onnx(tmp_path / "words.onnx")(x)[0], rows, rtol=1e-6, atol=0)


def test_a_table_of_few_bits_stays_in_float():
    model, x = Words().eval(), torch.randint(500, (2, 7))
    with pytest.warns(fxq.FxqWarning, match="nothing runs on integers"):
        q = fxq.quantize(model, fxq.Recipe.weight_only(bits=4, backend="openvino"), example_inputs=x)
    (entry,) = q.ledger.where(op="embedding")
    assert entry.precision == "float" and "takes no tables of 4 bits or fewer" in entry.reason
    torch.testing.assert_close(q(x), model(x), rtol=1e-4, atol=1e-5)  # float32 sums in another order
