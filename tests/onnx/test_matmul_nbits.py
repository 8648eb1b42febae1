"""Weight-only linear layers as MatMulNBits: ONNX Runtime's outputs with default options, against a float64 product."""

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.qdq_graph import qdq_graph
from fxq.common.data import Batch
from fxq.errors import ExportError, FxqWarning, InputError
from fxq.graph.run import inputs_for
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.onnx.whole_model import write_model
from tests.support.onnx_runs import onnx, ort, same

pytestmark = pytest.mark.any_cpu


def quantized(layer, x, **spec):
    weight = fxq.TensorSpec(**{"observer": "minmax", **spec})
    recipe = fxq.Recipe.weight_only(weight=weight, backend="reference", optimize="coverage")
    return fxq.quantize(layer, recipe, example_inputs=x)


def run(path_or_model, x):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(path_or_model, options, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


AFFINE = {"signed": False, "symmetric": False}
SYMMETRIC = {"signed": True, "symmetric": True}
GRIDS = [
    ({"bits": 4, "per": 32, **AFFINE}, (8, 128), 1, 32),
    ({"bits": 4, "per": 32, **SYMMETRIC}, (7, 100), 1, 32),
    ({"bits": 4, "per": 96, **AFFINE}, (8, 300), 1, 32),
    ({"bits": 4, "per": 512, **AFFINE}, (3, 1100), 1, 256),
    ({"bits": 4, "per": "channel", **SYMMETRIC}, (8, 20), 1, 32),
    ({"bits": 4, "per": 32, **AFFINE}, (1, 128), 1, 32),
    ({"bits": 3, "per": 48, **AFFINE}, (7, 100), 1, 16),
    ({"bits": 8, "per": 64, **AFFINE}, (5, 128), 2, 64),
    ({"bits": 8, "per": "channel", **SYMMETRIC}, (5, 600), 2, 256),
    ({"bits": 8, "per": "tensor", **SYMMETRIC}, (5, 20), 2, 32),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (1,), ()], ids=str)
@pytest.mark.parametrize(("spec", "size", "parts", "block"), GRIDS, ids=str)
def test_products_with_every_grid(spec, size, parts, block, shape):
    torch.manual_seed(0)
    x = torch.randn(*shape, size[1])
    qmodel = quantized(nn.Linear(size[1], size[0]), x, **spec)
    gm = qdq_graph(qmodel)
    model = write_model(gm, inputs_for(gm.graph, Batch((x,), {})), bool(shape), nbits=True).model
    onnx.checker.check_model(model, full_check=True)
    nodes = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    forms = [{a.name: a.i for a in node.attribute} for node in nodes]
    wanted_form = {"K": size[1], "N": size[0], "bits": 4, "block_size": block, "accuracy_level": 1}
    assert forms == [wanted_form] * parts  # 8 bits are two parts of 4: kernels of 8 bits with float32 sums are slow
    rows = torch.eye(size[1], dtype=torch.float64)
    weight = torch.stack([gm(row.float()) for row in rows]).double() - qmodel(torch.zeros(size[1])).double()
    wanted = x.double() @ weight + qmodel(torch.zeros(size[1])).double()
    same(run(model.SerializeToString(), x), wanted.float(), 2e-6)  # sums in another order


def test_blocks_without_a_kernel_are_refused():
    x = torch.randn(3, 100)
    gm = qdq_graph(quantized(nn.Linear(100, 4), x, bits=4, per=20))
    with pytest.raises(NotInOnnx, match=r"a scale per 20 values, and MatMulNBits takes blocks of multiples of 16.*per"):
        write_model(gm, inputs_for(gm.graph, Batch((x,), {})), True, nbits=True)


@pytest.mark.filterwarnings("error::fxq.FxqWarning")  # the default form is rounded further by a default session
def test_an_exported_file_needs_no_options(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 256)
    net = nn.Sequential(nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 8)).eval()
    qmodel = fxq.quantize(net, fxq.Recipe.weight_only(bits=4, backend="reference"), example_inputs=x)
    path = qmodel.export(tmp_path / "m.onnx", format="matmulnbits")
    assert [node.op_type for node in onnx.load(path).graph.node].count("MatMulNBits") == 2
    same(run(path, x[:3]), qmodel(x[:3]), 2e-6)  # sums in another order


def test_the_warning_of_the_default_form_names_the_format(tmp_path):
    x = torch.randn(4, 256)
    qmodel = fxq.quantize(nn.Linear(256, 32), fxq.Recipe.weight_only(bits=4), example_inputs=x)
    with pytest.warns(FxqWarning, match='Exported with format="matmulnbits", or with add_session_config_entry'):
        qmodel.export(tmp_path / "m.onnx")


def test_layers_with_integer_inputs_keep_integer_kernels(tmp_path):
    x = torch.randn(8, 32)
    qmodel = fxq.quantize(nn.Linear(32, 8), fxq.Recipe.static(backend="reference", optimize="coverage"), data=[x])
    with pytest.raises(ExportError, match=r'no linear layer with a float input has integer weights.*"weight_only"'):
        qmodel.export(tmp_path / "m.onnx", format="matmulnbits")
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        ("m.xml", "matmulnbits", "is one of .onnx files, and .*m.xml"),
        ("m.onnx", "matmulnbit", "matmulnbits"),
    ],
)
def test_formats_that_a_file_cannot_have(name, format, message, tmp_path):
    qmodel = fxq.quantize(nn.Linear(32, 8), "weight_only", example_inputs=torch.randn(2, 32))
    with pytest.raises(InputError, match=message):
        qmodel.export(tmp_path / name, format=format)
