"""`QuantizedModel.export`: files that other runtimes load, for all backends, and errors that say what is wrong."""

import copy
import re
import warnings
from functools import cache

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.errors import ExportError, FxqWarning, InputError, RenderError
from fxq.onnx.model_check import Difference, ModelCheck
from fxq.saved import model_export
from tests.support.helpers import REFERENCE
from tests.support.models import batch, build
from tests.support.onnx_runs import exact_session, onnx, ort
from tests.support.processes import full_disk

pytestmark = pytest.mark.any_cpu


def model(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), *more).eval()


X = torch.rand(2, 3, 12, 12)


@cache
def quantized_once():
    return fxq.quantize(model(), REFERENCE, data=[X])


def quantized():
    """A copy of a model that is quantized once."""
    return copy.deepcopy(quantized_once())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("backend", ["reference", "auto", "onnxruntime", "openvino"])
def test_whichever_backend_a_model_was_made_for(backend, tmp_path):
    qmodel = fxq.quantize(model(), fxq.Recipe.static(backend=backend, optimize="coverage"), data=[X])
    path = qmodel.export(tmp_path / "new" / "m.onnx")
    onnx.checker.check_model(path, full_check=True)
    session = exact_session(path)
    y = torch.rand(5, 3, 12, 12)
    (got,) = session.run(None, {"input": y.numpy()})
    assert sqnr(qmodel(y), torch.from_numpy(got)) > 25


def test_a_loaded_model_gives_the_same_file(tmp_path):
    qmodel = quantized()
    first = qmodel.export(tmp_path / "a.onnx").read_bytes()
    assert fxq.load(qmodel.save(tmp_path / "m.fxq")).export(tmp_path / "b.onnx").read_bytes() == first


def optimized(path, tmp_path):
    """The types of the nodes of a model when ONNX Runtime has joined what it can."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]


@pytest.mark.filterwarnings("error::fxq.FxqWarning", "ignore:.*ONNX Runtime with default options does not compute")
def test_kernels_are_fused(tmp_path):
    """All layers run as integer kernels: none in float is left, nor a conversion but those at the ends."""
    net = model(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    kinds = optimized(fxq.quantize(net, REFERENCE, data=[X]).export(tmp_path / "m.onnx"), tmp_path)
    assert kinds.count("QLinearConv") == 2 and kinds.count("QGemm") == 1
    assert not {"Conv", "Gemm", "MatMul", "Relu"} & set(kinds)
    assert kinds.count("QuantizeLinear") == 1 and kinds.count("DequantizeLinear") <= 1


def test_grids_that_engines_have_no_kernels_for_are_told(tmp_path):
    seven = fxq.Recipe.static(backend="reference", optimize="coverage", activation=fxq.TensorSpec(bits=7))
    qmodel = fxq.quantize(model(), seven, data=[X])
    with pytest.warns(fxq.FxqWarning, match='2 of 2 values have fewer than 8 bits.*backend="onnxruntime"'):
        path = qmodel.export(tmp_path / "m.onnx")
    assert "QLinearConv" not in optimized(path, tmp_path)


@pytest.mark.slow
def test_a_residual_block_is_fused(tmp_path):
    """Exported from a model for this runtime: other backends have the layer and the sum after it in one unit."""
    recipe = fxq.Recipe.static(backend="onnxruntime", optimize="coverage")
    qmodel = fxq.quantize(build("residual"), recipe, data=[batch("residual")])
    kinds = optimized(qmodel.export(tmp_path / "m.onnx"), tmp_path)
    assert "QLinearConv" in kinds and "QLinearAdd" in kinds and "Conv" not in kinds


def test_dynamic_layers_are_fused(tmp_path):
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).eval()
    recipe = fxq.Recipe.dynamic(backend="onnxruntime", optimize="coverage")
    kinds = optimized(fxq.quantize(net, recipe, example_inputs=torch.rand(2, 16)).export(tmp_path / "m.onnx"), tmp_path)
    assert {"DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulInteger"} & set(kinds)
    assert not {"MatMul", "Gemm"} & set(kinds)


def test_openvino(tmp_path):
    openvino = pytest.importorskip("openvino")
    qmodel = quantized()
    path = qmodel.export(tmp_path / "m.xml")
    assert path.with_suffix(".bin").exists()
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    assert list(compiled(X.numpy())[0].shape) == list(qmodel(X).shape)


@pytest.mark.slow
def test_openvino_takes_weights_that_are_shorter_than_a_block(tmp_path):
    openvino = pytest.importorskip("openvino")
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
    qmodel = fxq.quantize(net, fxq.Recipe.weight_only(bits=4, backend="reference"), example_inputs=X)
    compiled = openvino.Core().compile_model(
        qmodel.export(tmp_path / "m.xml"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    torch.testing.assert_close(torch.from_numpy(compiled(X.numpy())[0]), qmodel(X), rtol=1e-4, atol=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bits", [4, 8])
def test_openvino_takes_rows_that_are_no_multiple_of_a_block(bits, tmp_path):
    """Blocks of 128 values of a row of 192 are written as blocks of 64."""
    openvino = pytest.importorskip("openvino")
    x = torch.randn(3, 192)
    recipe = fxq.Recipe.weight_only(bits=bits, per=128, backend="reference")
    qmodel = fxq.quantize(nn.Linear(192, 32).eval(), recipe, example_inputs=x)
    compiled = openvino.Core().compile_model(
        qmodel.export(tmp_path / "m.xml"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    torch.testing.assert_close(torch.from_numpy(compiled(x.numpy())[0]), qmodel(x), rtol=0, atol=1e-5)


def test_openvino_does_not_round_the_inputs_of_weight_only_layers(tmp_path):
    openvino = pytest.importorskip("openvino")
    torch.manual_seed(0)
    x = torch.randn(4, 256)
    qmodel = fxq.quantize(nn.Linear(256, 64), fxq.Recipe.weight_only(bits=4, backend="reference"), example_inputs=x)
    path = qmodel.export(tmp_path / "m.xml")

    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    # float32 sums in another order; rounded to 8 bits: 9e-3
    torch.testing.assert_close(torch.from_numpy(compiled(x.numpy())[0]), qmodel(x), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_openvino_takes_tables_of_integers(tmp_path):
    openvino = pytest.importorskip("openvino")
    net = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 8)).eval()
    ids, more = torch.randint(0, 50, (4, 7)), torch.randint(0, 50, (3, 7))
    blocks = fxq.Recipe.weight_only(per=12).config  # two blocks in a row of 16
    for recipe in (fxq.Recipe.weight_only(), fxq.Recipe.weight_only().override("0", blocks)):
        qmodel = fxq.quantize(net, recipe, example_inputs=ids)
        compiled = openvino.Core().compile_model(
            qmodel.export(tmp_path / "m.xml", example_inputs=ids), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
        )
        torch.testing.assert_close(torch.from_numpy(compiled(more.numpy())[0]), qmodel(more), rtol=1e-4, atol=1e-4)


class First(nn.Module):
    """First result of a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.parametrize(
    ("net", "x", "blocks"),
    [
        (nn.Linear(100, 4), torch.rand(2, 100), 64),
        (nn.Conv1d(20, 4, 3), torch.rand(2, 20, 9), 36),
        (nn.Conv2d(23, 4, 3), torch.rand(1, 23, 5, 5), 64),
        (
            nn.Linear(33, 16),
            torch.rand(16, 33),
            11,
        ),  # OpenVINO's own products of an odd number of 4-bit values are wrong
        (nn.Linear(33, 16), torch.rand(16, 33), "channel"),
        (First(nn.LSTM(10, 12)), torch.rand(5, 1, 10), 8),
        (First(nn.GRU(10, 12, bias=False)), torch.rand(5, 1, 10), 8),
    ],
)
def test_openvino_takes_blocks_that_do_not_divide_a_row(net, x, blocks, tmp_path):
    openvino = pytest.importorskip("openvino")
    qmodel = fxq.quantize(net.eval(), fxq.Recipe.weight_only(bits=4, per=blocks), example_inputs=x)
    assert {row.precision for row in qmodel.ledger} == {"weight-only"}
    compiled = openvino.Core().compile_model(
        qmodel.export(tmp_path / "m.xml"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    torch.testing.assert_close(torch.from_numpy(compiled(x.numpy())[0]), qmodel(x), rtol=1e-4, atol=1e-4)


def test_what_openvino_refuses_is_named(tmp_path, monkeypatch):
    openvino = pytest.importorskip("openvino")
    qmodel = fxq.quantize(nn.Linear(100, 4), fxq.Recipe.weight_only(bits=4), example_inputs=torch.rand(2, 100))

    def refuse(*_):
        raise RuntimeError("Check failed:\nno such op")

    monkeypatch.setattr(openvino.Core, "read_model", refuse)
    with pytest.raises(ExportError, match="OpenVINO does not take the model: Check failed"):
        qmodel.export(tmp_path / "m.xml")
    assert not (tmp_path / "m.xml").exists()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 24, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


@pytest.mark.parametrize(
    ("network", "x"),
    [(nn.Linear(100, 4), torch.randn(3, 100)), (Recurrent(), torch.randn(2, 5, 32))],
    ids=["linear", "lstm"],
)
def test_openvino_takes_dynamic_ranges_per_row(network, x, tmp_path):
    openvino = pytest.importorskip("openvino")
    x = x * torch.tensor([0.1, 10.0, 1.0])[: len(x)].reshape(-1, *[1] * (x.ndim - 1))  # each row has a range of its own
    qmodel = fxq.quantize(network.eval(), fxq.Recipe.dynamic(backend="reference"), example_inputs=x)
    assert qmodel.ledger.count("int8")
    path = qmodel.export(tmp_path / "m.xml")
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    got, wanted = torch.from_numpy(compiled(x.numpy())[0]), qmodel(x)
    assert torch.linalg.norm(got - wanted) <= 2e-3 * torch.linalg.norm(wanted)  # a tie can be rounded the other way


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "told"), [((), None), ((nn.MaxPool2d(4),), r"right for sizes with .*h.*//4.*>= 1")])
def test_sizes_that_are_too_small_are_told_where_a_runtime_takes_them(layers, told, tmp_path, recwarn):
    qmodel = fxq.quantize(model(*layers), REFERENCE, data=[X])
    recwarn.clear()
    qmodel.export(tmp_path / "m.onnx", example_inputs=X, dynamic={"input": {0: "n", 2: "h", 3: "w"}})
    texts = [str(w.message) for w in recwarn if "right for sizes" in str(w.message)]
    assert len(texts) == (0 if told is None else 1)
    assert told is None or re.search(told, texts[0])


def test_an_unknown_suffix(tmp_path):
    qmodel = quantized()
    with pytest.raises(InputError, match=r"selects the format: unknown suffix '\.onx'; did you mean '\.onnx'"):
        qmodel.export(tmp_path / "m.onx")


def test_what_onnx_cannot_say_is_named(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return torch.erfinv(self.layer(x))

    qmodel = fxq.quantize(Odd().eval(), REFERENCE, data=[torch.rand(2, 4)])
    with pytest.raises(
        ExportError, match=r"m\.onnx cannot be written: erfinv \(erfinv\).*no ONNX form of this call of erfinv"
    ):
        qmodel.export(tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


def test_types_that_onnxruntime_has_no_kernels_for(tmp_path):
    qmodel = fxq.quantize(nn.Linear(8, 8).bfloat16(), REFERENCE, data=[torch.rand(2, 8).bfloat16()])
    with pytest.raises(ExportError, match=r"cannot run it here: .*implementation.*quantize the model in float32"):
        qmodel.export(tmp_path / "m.onnx")
    assert qmodel.export(tmp_path / "m.onnx", check=False).exists()


def test_a_file_that_computes_otherwise_is_not_written(tmp_path, monkeypatch):
    qmodel = quantized()
    monkeypatch.setattr(ModelCheck, "differences", lambda self, optimized=False, entries=None: [WRONG])
    with pytest.raises(ExportError, match=r"computes something else .* conv_q \(layer '0'\) differs by 3 steps"):
        qmodel.export(tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()
    assert qmodel.export(tmp_path / "m.onnx", check=False).exists()


WRONG = Difference("conv_q", "0", 3.0, 0.5)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("backend", ["reference", "onnxruntime"])
@pytest.mark.parametrize("factor", [1.0, 1e-4])
@pytest.mark.parametrize("dead", [[1], [0, 1, 2, 3]])
def test_channels_of_zeros(backend, factor, dead, tmp_path):
    """Their biases are rounded to steps of scales that nothing else asks for."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    for parameter in layers.parameters():
        parameter.data *= factor
    layers[2].weight.data[dead] = 0
    x = torch.randn(64, 4)
    qmodel = fxq.quantize(layers, fxq.Recipe.static(backend=backend, optimize="coverage"), data=[x])
    assert qmodel.ledger.coverage == 1 and sqnr(layers(x), qmodel(x)) > 30
    assert qmodel.export(tmp_path / "m.onnx", example_inputs=x).exists()


SUMS, INPUTS = {"session.x64quantprecision": "1"}, {"session.qdq_matmulnbits_accuracy_level": "1"}


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("right", "advice"),
    [
        (SUMS, r'With add_session_config_entry\("session\.x64quantprecision", "1"\) of its SessionOptions, it does'),
        ({**SUMS, **INPUTS}, r'precision", "1"\) and add_session_config_entry\("session\.qdq_matmulnbits.*"1"\) of'),
        (None, r"Without its graph optimizations, it does on this machine, up to rounding"),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_options_with_which_a_runtime_computes_the_same_are_named(tmp_path, monkeypatch, right, advice, fails):
    def differences(self, optimized=False, entries=None):
        if optimized and entries != right:
            if fails:
                raise RuntimeError("a zero point must be a scalar")
            return [WRONG]
        return []

    qmodel = quantized()
    monkeypatch.setattr(ModelCheck, "differences", differences)
    problem = "it fails: a zero point must be a scalar" if fails else r"conv_q \(layer '0'\) differs by 3 steps"
    with pytest.warns(FxqWarning, match=rf"does not compute what the quantized model does: {problem}.*{advice}"):
        assert qmodel.export(tmp_path / "m.onnx").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxqWarning)
        assert qmodel.export(tmp_path / "m.xml").exists()  # which another runtime reads


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        (None, "expected True, False or a mapping .* not None"),
        ({"input": [0]}, r"expected True, False or a mapping such as \{'input': \{0: \"batch\"\}\}"),
        ({"input": {True: "batch"}}, "True: 'batch' is not an axis of 'input'"),
    ],
)
def test_axes_that_are_none_are_refused(dynamic, message, tmp_path):
    qmodel = quantized()
    with pytest.raises(InputError, match=message):
        qmodel.export(tmp_path / "m.onnx", dynamic=dynamic)


@pytest.mark.parametrize("example", [X.int(), ((X,),), X[:, :2]], ids=["integers", "tuple", "channels"])
def test_an_example_that_the_model_does_not_take(example, tmp_path):
    qmodel = fxq.quantize(model(), fxq.Recipe.static(), data=[X])
    with pytest.raises(InputError, match="takes"):
        qmodel.export(tmp_path / "m.onnx", example_inputs=example)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "layer", [nn.Conv2d(3, 1, 3), nn.ConvTranspose2d(3, 1, 3)], ids=lambda layer: type(layer).__name__
)
def test_a_single_output_channel_with_weights_in_blocks(layer, tmp_path):
    qmodel = fxq.quantize(layer.eval(), fxq.Recipe.weight_only(bits=4), example_inputs=X)
    path = qmodel.export(tmp_path / "m.onnx", example_inputs=X)
    (y,) = exact_session(path).run(None, {"input": X.numpy()})
    assert float((torch.from_numpy(y) - qmodel(X)).abs().max()) <= 1e-5  # sums in another order


@pytest.mark.parametrize("samples", [1, 8])
def test_layers_with_integer_weights_alone_are_rounded_by_a_default_session(samples, tmp_path):
    x = torch.rand(samples, 256)
    qmodel = fxq.quantize(nn.Linear(256, 32), fxq.Recipe.weight_only(bits=4), example_inputs=x)
    with pytest.warns(FxqWarning, match="qdq_matmulnbits_accuracy_level"):
        path = qmodel.export(tmp_path / "m.onnx")
    options = ort.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    (y,) = ort.InferenceSession(str(path), options).run(None, {"input": x.numpy()})
    assert float((torch.from_numpy(y) - qmodel(x)).abs().max()) <= 1e-5  # sums in another order


def test_without_onnxruntime_nothing_is_run(tmp_path, monkeypatch):
    qmodel = quantized()
    monkeypatch.setattr(model_export, "find_spec", lambda name: None)
    monkeypatch.setattr(ModelCheck, "differences", lambda self, optimized=False, entries=None: [WRONG])
    assert qmodel.export(tmp_path / "m.onnx").exists()


@pytest.mark.slow
def test_a_full_disk_leaves_good_files_as_they_are(tmp_path, recwarn):
    """OpenVINO does not always say that it could not write: its file is read again."""
    first, second = (
        fxq.quantize(model(), REFERENCE.without_pass(name), data=[X]) for name in ("smooth", "correct-bias")
    )
    writers = {
        "m.fxq": lambda q, path: q.save(path),
        "m.onnx": lambda q, path: q.export(path),
        "m.xml": lambda q, path: q.export(path),
        "m.pt2": lambda q, path: q.export(path),
        "r.toml": lambda q, path: q.recipe.save(path),
        "p.html": lambda q, path: q.report(path),
        "p.npz": lambda q, path: q.qparams().save(path),
        "h.dot": lambda q, path: q.history[-1].render(path),
        "l.json": lambda q, path: q.ledger.to_json(path),
    }
    for name, write in writers.items():
        write(first, tmp_path / name)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.keys() == {*writers, "m.bin"}
    for name, write in writers.items():
        with full_disk(10), pytest.raises(RenderError, match=f"cannot write .*{name}"):
            write(second, tmp_path / name)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_inputs_in_containers_are_made_up_of_the_record(tmp_path):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, batch, *, scale=None):
            y = self.layer(batch["x"]) * batch["parts"][0]
            return y if scale is None else y * scale

    x = {"x": torch.rand(4, 8), "parts": (torch.rand(4, 1), None)}
    qmodel = fxq.quantize(Nested().eval(), REFERENCE, data=[{"batch": x, "scale": 2.0}])
    loaded = fxq.load(qmodel.save(tmp_path / "m.fxq"))
    assert loaded.record.inputs == qmodel.record.inputs
    session = exact_session(loaded.export(tmp_path / "m.onnx"))
    (y,) = session.run(None, {"batch_x": x["x"].numpy(), "batch_parts_0": x["parts"][0].numpy()})
    torch.testing.assert_close(torch.from_numpy(y), qmodel(x, scale=2.0), rtol=1e-5, atol=1e-5)  # sums in another order
    assert loaded.export(tmp_path / "m.pt2").exists()


class Streaming(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gru = nn.Linear(8, 8), nn.GRU(8, 6, batch_first=True)

    def forward(self, x, h):
        return self.gru(self.first(x).relu(), h)


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_a_state_whose_batch_is_its_second_axis_is_told(suffix, tmp_path, recwarn):
    """By default, the first axis varies."""
    pytest.importorskip("onnxruntime" if suffix == ".onnx" else "openvino")
    example = torch.rand(2, 3, 8), torch.rand(1, 2, 6)
    qmodel = fxq.quantize(Streaming().eval(), fxq.Recipe.dynamic(backend="reference"), example_inputs=example)
    recwarn.clear()
    qmodel.export(tmp_path / f"m{suffix}", example_inputs=example)
    assert any("rejects inputs of another 'batch'" in str(w.message) for w in recwarn)
    recwarn.clear()
    axes = {"x": {0: "batch"}, "h": {1: "batch"}}
    qmodel.export(tmp_path / f"m{suffix}", example_inputs=example, dynamic=axes)
    assert not any("rejects" in str(w.message) for w in recwarn)
