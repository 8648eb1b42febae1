"""The onnxruntime backend alone."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxq
from fxq.backends import cpu
from fxq.backends.engine import EngineBackend, EngineKernel
from fxq.backends.engines import onnxruntime
from fxq.backends.engines.onnxruntime import OnnxruntimeKernel, _has_even_rows, session_of
from fxq.backends.qdq_graph import qdq_graph
from fxq.common.metrics import sqnr
from fxq.onnx.graph import write_onnx
from tests.support.machine import quiet

pytestmark = pytest.mark.any_cpu


@pytest.fixture
def free(monkeypatch):
    """Integers cost nothing."""
    monkeypatch.setattr(EngineBackend, "prices", lambda self, gm, example: fxq.extend.Prices({}, 0.0))


@pytest.fixture(params=[False, True], ids=["as it is", "without VNNI"])
def machine(request, monkeypatch):
    """ONNX Runtime, also as it is told to compute on a CPU without VNNI."""
    monkeypatch.setattr(cpu, "has_vnni", lambda: cpu_has_vnni and not request.param)


cpu_has_vnni = cpu.has_vnni()


def dynamic(model, x, **options):
    with quiet():
        recipe = fxq.Recipe.dynamic(backend="onnxruntime", optimize="coverage", **options)
        return fxq.quantize(model, recipe, example_inputs=x)


def nodes(q, inputs, tmp_path):
    """How many nodes of each type ONNX Runtime runs for the only kernel of a model."""
    import onnx

    (kernel,) = (module for module in q.modules() if isinstance(module, EngineKernel))
    form, path = kernel.form.module(kernel), tmp_path / "optimized.onnx"
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path)
    model = write_onnx(form, inputs).model.SerializeToString()
    ort.InferenceSession(
        model, options, providers=["CPUExecutionProvider"], disabled_optimizers=onnxruntime.SLOW_FUSIONS
    )
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def test_the_profile_names_the_nodes_of_the_graph():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    x = torch.randn(1, 3, 16, 16)
    q = fxq.quantize(model, fxq.Recipe.static(backend="reference"), data=[x])
    written = write_onnx(q, [x])
    scopes = {name.partition("/")[0] for layer in OnnxruntimeKernel.profile(written.model, [x]) for name in layer.nodes}
    assert {"_0_relu", "_2"} <= scopes


def test_only_clamps_join_a_layer():
    """Another function after a convolution would make it run in float."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.slope = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.PReLU(8)

        def forward(self, x):
            return self.slope(self.b(torch.relu(self.a(x))))

    recipe = fxq.Recipe.static(backend="onnxruntime", optimize="coverage")
    q = fxq.quantize(Net().eval(), recipe, data=[torch.randn(2, 3, 8, 8)])
    graph = fxq.extend.run_passes(Net().eval(), recipe, example_inputs=torch.randn(2, 3, 8, 8), until="fuse")
    assert [n.name for n in graph.graph.nodes if n.op == "call_module"] == ["a_relu"]
    assert [entry.precision for entry in q.ledger.where(op="conv2d")] == ["int8", "int8"]


class Attention(nn.Module):
    """Three layers read one value; one reads another."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.norm(x + torch.relu(self.out(attended)))


FORMS = {
    "row": fxq.TensorSpec(per="row", range="dynamic"),
    "symmetric row": fxq.TensorSpec(per="row", range="dynamic", symmetric=True),
    "tensor": fxq.TensorSpec(range="dynamic"),
    "symmetric tensor": fxq.TensorSpec(range="dynamic", symmetric=True),
    "7 bits": fxq.TensorSpec(bits=7, range="dynamic"),
}


@pytest.mark.one_in(10)
@pytest.mark.parametrize("spec", FORMS.values(), ids=FORMS)
def test_linear_layers_measure_what_they_read(spec, machine, free):
    """Against the qdq graph in torch; a value near a tie may go the other way there."""
    model, x = Attention().eval(), torch.tensor([[1.0], [9.0], [0.1], [3.0], [0.0]]) * torch.randn(2, 5, 32)
    q = dynamic(model, x, activation=spec)
    linear = q.ledger.where(op="linear")
    assert [entry.precision for entry in linear] == ["int8"] * 4
    assert len([module for module in q.modules() if isinstance(module, EngineKernel)]) == 1
    recipe = fxq.Recipe.dynamic(backend="reference", optimize="coverage", activation=spec)
    with quiet():
        reference = fxq.quantize(model, recipe, example_inputs=x)
    assert sqnr(reference(x), q(x)) > 55
    assert abs(sqnr(model(x), q(x)) - sqnr(model(x), reference(x))) < 0.5


def test_layers_that_read_one_value_share_its_integers(free, tmp_path):
    model, x = Attention().eval(), torch.randn(1, 5, 32)
    whole = nodes(dynamic(model, x, activation=FORMS["tensor"]), [x], tmp_path)
    assert (whole["DynamicQuantizeLinear"], whole["MatMulIntegerToFloat"], whole["DynamicQuantizeMatMul"]) == (1, 3, 1)
    assert whole["MatMul"] + whole["FusedMatMul"] == 2 and not whole["DequantizeLinear"]  # those of the attention
    rows = nodes(dynamic(model, x), [x], tmp_path)
    assert (rows["QuantizeLinear"], rows["ReduceMin"], rows["MatMulIntegerToFloat"]) == (2, 2, 4)
    assert not rows["DequantizeLinear"] and not rows["SkipLayerNormalization"]


@pytest.mark.one_in(2)
def test_a_layer_that_is_called_twice(machine, free):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.LSTM(16, 16)

        def forward(self, x):
            return self.b(self.b(self.a(torch.relu(self.a(x))))[0])[0]

    model, x = Twice().eval(), torch.randn(5, 1, 16)
    q = dynamic(model, x)
    assert q.ledger.count("int8") >= 4 and sqnr(model(x), q(x)) > 35


def test_the_table_of_an_embedding_stays_in_integers(free):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(500, 64), nn.Linear(64, 8)

        def forward(self, x):
            return self.head(self.words(x))

    model, x = Words().eval(), torch.randint(500, (2, 7))
    q = dynamic(model, x)
    assert {entry.op: entry.precision for entry in q.ledger} == {"embedding": "weight-only", "linear": "int8"}
    assert len([module for module in q.modules() if isinstance(module, EngineKernel)]) == 1
    assert fxq.results.nbytes(q) < 0.3 * fxq.results.nbytes(model) and sqnr(model(x), q(x)) > 35
    recipe = fxq.Recipe.weight_only(bits=4, backend="onnxruntime")
    with pytest.warns(fxq.FxqWarning, match="nothing runs on integers"):
        q = fxq.quantize(model, recipe, example_inputs=x)
    (entry,) = q.ledger.where(op="embedding")
    assert entry.precision == "float" and "takes no tables of 4 bits or fewer" in entry.reason
    recipe = fxq.Recipe.weight_only(per=24, backend="onnxruntime", optimize="coverage")
    with pytest.warns(fxq.FxqWarning, match="only embeddings have integer weights; 1 of 2 ops.*float activations"):
        q = fxq.quantize(model, recipe, example_inputs=x)
    assert [entry.precision for entry in q.ledger] == ["weight-only", "float"]
    torch.testing.assert_close(q(x), model(x), rtol=0, atol=0.02)  # rounding of 500 rows to 8 bits


class Recurrent(nn.Module):
    """Layers that begin with states, and give the last ones."""

    def __init__(self, **options):
        super().__init__()
        self.layers = nn.LSTM(24, 32, 2, **options)

    def forward(self, x, h, c):
        y, (h, c) = self.layers(x, (h, c))
        return y, h, c


@pytest.mark.one_in(16)
@pytest.mark.parametrize("samples", [1, 5])
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"bidirectional": True}, {"bias": False}], ids=str)
def test_lstms_measure_their_ranges(options, samples, machine, free):
    """Beside the reference backend, where each token, and each sample's state, has a symmetric range."""
    count = 4 if options.get("bidirectional") else 2
    x = torch.randn(samples, 12, 24) if options.get("batch_first") else torch.randn(12, samples, 24)
    states, model = [torch.randn(count, samples, 32) for _ in range(2)], Recurrent(**options).eval()
    inputs = (x, states[0] / 2, states[1])
    q = dynamic(model, inputs)
    layers = q.ledger.where(op="lstm")
    assert [entry.precision for entry in layers] == ["int8"] * count
    assert all("for onnxruntime, its activation is uint8 affine (dynamic)" in entry.reason for entry in layers)
    with quiet():
        recipe = fxq.Recipe.dynamic(backend="reference", optimize="coverage")
        reference = fxq.quantize(model, recipe, example_inputs=inputs)
    wanted, got, by_reference = (torch.cat([y.flatten() for y in f(*inputs)]) for f in (model, q, reference))
    assert sqnr(wanted, got) > max(33, sqnr(wanted, by_reference) - 4)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("uneven", [False, True])
def test_one_scale_is_for_all_rows_of_an_lstm_that_have_the_same_range(uneven, machine, free):
    model, inputs = Recurrent().eval(), (torch.randn(12, 1, 24), torch.zeros(2, 1, 32), torch.zeros(2, 1, 32))
    if uneven:
        with torch.no_grad():
            model.layers.weight_hh_l0[:32] *= 3
    q = dynamic(model, inputs)
    scales = [v.numel() for layer in q.qparams().values() for k, v in layer.to_dict().items() if k.endswith("h_scale")]
    assert scales == ([128, 128, 1, 1] if uneven else [1, 1, 1, 1])
    assert ["its weight is" in entry.reason for entry in q.ledger.where(op="lstm")] == [not uneven, True]
    assert sqnr(model(*inputs)[0], q(*inputs)[0]) > 33


@pytest.mark.parametrize(("largest", "even"), [(1.0, True), (1.05, True), (1.07, False), (3.0, False)])
def test_rows_have_much_the_same_range_while_half_a_decibel_is_lost_at_most(largest, even):
    """One of 128 rows is larger: the grid of all is so many times as coarse as their own."""
    torch.manual_seed(0)
    weight = torch.rand(128, 512) * 2 - 1
    weight /= weight.abs().amax(1, keepdim=True)
    weight[0] *= largest
    rounded = [(weight / scale).round() * scale for scale in (weight.abs().amax(1, keepdim=True) / 127, largest / 127)]
    lost = sqnr(weight, rounded[0]) - sqnr(weight, rounded[1])
    assert _has_even_rows(weight) is even is (lost < 0.55)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("samples", "threads"), [(1, 4), (8, 1)])
def test_samples_of_an_lstm_share_a_range_on_any_number_of_threads(samples, threads, free):
    x = torch.randn(12, samples, 24)
    x[:, 1:] *= 0.05  # apart from the first, each sample's states would have a smaller range
    q = fxq.quantize(nn.LSTM(24, 32), fxq.Recipe.dynamic(backend="onnxruntime", optimize="coverage"), example_inputs=x)
    want, (kernel,) = qdq_graph(q)(x)[0], [m for m in q.modules() if isinstance(m, OnnxruntimeKernel)]
    model, _ = kernel.model_for(kernel.form.module(kernel), [x])
    assert session_of(model, 4).get_session_options().intra_op_num_threads == threads
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert float((q(x)[0] - want).abs().max()) <= 0.01 * float(want.abs().max()) / 255
    finally:
        torch.set_num_threads(before)


def test_an_lstm_of_a_static_recipe_measures_its_ranges_too(free):
    model, data = Recurrent().eval(), [(torch.randn(9, 1, 24), torch.zeros(2, 1, 32), torch.zeros(2, 1, 32))] * 3
    recipe = fxq.Recipe.static(backend="onnxruntime", optimize="coverage")
    with quiet():
        q = fxq.quantize(model, recipe, data=data)
    assert [entry.precision for entry in q.ledger.where(op="lstm")] == ["int8", "int8"]
    assert all("and not uint8 affine (histogram)" in entry.reason for entry in q.ledger.where(op="lstm"))
    assert sqnr(model(*data[0])[0], q(*data[0])[0]) > 33


ASYMMETRIC = fxq.TensorSpec(signed=True, per="channel", observer="minmax")


@pytest.mark.parametrize(
    ("model", "shape", "changes", "reason"),
    [
        (nn.Sequential(nn.Conv2d(3, 8, 3)), (1, 3, 8, 8), {}, "has no kernels with dynamic ranges for conv2d"),
        (nn.GRU(8, 8), (5, 1, 8), {}, "has no kernels with dynamic ranges for gru"),
        (nn.LSTM(8, 8, proj_size=4), (5, 1, 8), {}, "its hidden state is projected"),
        (nn.LSTM(8, 8), (5, 1, 8), {"state": None}, "reads the state of an LSTM as integers"),
        (nn.Linear(8, 8), (5, 8), {"weight": ASYMMETRIC}, "computes dynamic ranges beside symmetric weights only"),
    ],
)
def test_what_it_does_not_measure_stays_in_float(model, shape, changes, reason, free):
    recipe = fxq.Recipe.dynamic(backend="onnxruntime", optimize="coverage")
    recipe = replace(recipe, config=replace(recipe.config, **changes))
    x = torch.randn(shape)
    with pytest.warns(fxq.FxqWarning, match="nothing runs on integers"):
        q = fxq.quantize(model.eval(), recipe, example_inputs=x)
    (entry,) = q.ledger.where(lambda e: reason in e.reason)
    assert entry.precision == "float"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")  # of that one which is the quickest for so few values
def test_fastest_tries_it_with_dynamic_ranges(free):
    model, x = Attention().eval(), torch.randn(1, 5, 32)
    q = fxq.quantize(model, fxq.Recipe.dynamic(backend="fastest", optimize="coverage"), example_inputs=x)
    (attempt,) = q.attempts.where(backend="onnxruntime")
    assert attempt.int8 >= 4 and attempt.us is not None and attempt.sqnr > 30
