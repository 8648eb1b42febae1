"""Models for TensorRT: which units and grids they have, and what the checks on the graph refuse.

TensorRT itself cannot run here: the files run in ONNX Runtime, and their graphs are compared with what TensorRT's
documentation asks.
"""

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.errors import ExportError, FxqWarning, InputError
from tests.support.onnx_runs import exact_session, onnx

pytestmark = pytest.mark.any_cpu


class Residual(nn.Module):
    """Two convolutions with a sum around the second, a pool, a transposed convolution and a linear layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.relu(x + self.second(x))
        x = nn.functional.silu(self.up(nn.functional.max_pool2d(x, 2)))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """Attention with one head over rows, a softmax and a layer norm."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v)


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
TENSORRT = fxq.Recipe.static(backend="tensorrt")


def quantized(net, x, recipe=TENSORRT):
    torch.manual_seed(0)
    return fxq.quantize(net().eval(), recipe, data=[x, x / 2])


def constants(model):
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def attribute(node, name, default=None):
    return next((onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def check_as_documented(model):
    """Check what TensorRT's documentation asks of every conversion of a file, and return their number."""
    values, producers = constants(model), {name: node for node in model.graph.node for name in node.output}
    readers: dict[str, list] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    conversions = [n for n in model.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    for node in conversions:
        integers, scale, zero = (values.get(name) for name in node.input)
        assert zero.dtype == "int8" and not zero.any() and (scale > 0).all()
        if integers is None:
            assert scale.shape == ()  # activations: one scale
            continue
        assert integers.dtype == "int8" and integers.min() >= -127
        (reader,) = readers[node.output[0]]
        of_output = {"Conv": 0, "ConvTranspose": 1, "Gemm": 1, "MatMul": 1}[reader.op_type]
        assert attribute(node, "axis") == of_output and scale.shape == (integers.shape[of_output],)
        if len(reader.input) > 2:
            assert values[reader.input[2]].dtype == "float32"  # biases are float constants
    for node in model.graph.node:
        kinds = [producers[n].op_type for n in node.input if n in producers]
        if node.op_type == "Add" and "DequantizeLinear" in kinds:
            assert kinds == ["DequantizeLinear"] * 2
        assert node.op_type not in ("Clip", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear")
    return len(conversions)


@pytest.mark.parametrize(("net", "x", "count"), [(Residual, X, 18), (Attention, ROWS, 12)])
def test_a_file_is_as_the_documentation_asks(net, x, count, tmp_path):
    qmodel = quantized(net, x)
    path = qmodel.export(tmp_path / "m.onnx", target="tensorrt", example_inputs=x)
    model = onnx.load(path)
    assert check_as_documented(model) == count
    y = torch.cat([x, x.flip(0) / 2])  # another batch size
    (got,) = exact_session(path).run(None, {"x": y.numpy()})
    assert sqnr(qmodel(y), torch.from_numpy(got)) > 40  # a tie may round to the other side
    assert sqnr(net_of(net)(y), torch.from_numpy(got)) > 30


def net_of(net):
    torch.manual_seed(0)
    return net().eval()


def test_units_and_the_ledger():
    """A sum is a unit of its own, an activation function is not; what TensorRT has no integer form of says so."""
    qmodel = quantized(Residual, X)
    assert {"first_relu", "second", "add_relu", "up_silu"} <= {node.name for node in qmodel.graph.nodes}
    assert all(row.precision in ("int8", "moves") and not row.reason for row in qmodel.ledger)
    rows = {row.op: row for row in quantized(Attention, ROWS).ledger}
    assert rows["linear"].precision == rows["matmul"].precision == "int8" and rows["softmax"].precision == "float"
    lone = nn.Sequential(nn.MaxPool2d(2), nn.Sigmoid(), nn.Conv2d(3, 4, 1)).eval()
    rows = {row.op: row for row in fxq.quantize(lone, TENSORRT, data=[X]).ledger}
    assert rows["sigmoid"].reason == "TensorRT computes sigmoid in float" and not rows["sigmoid"].remedy


def test_values_below_the_calibrated_range_use_one_integer_more(tmp_path):
    """TensorRT clamps to -128, so the file does, too."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 1)).eval()
    qmodel = fxq.quantize(net, TENSORRT, data=[X[:, :, :1, :1].clamp(-1, 1)])
    path = qmodel.export(tmp_path / "m.onnx", target="tensorrt")
    model = onnx.load(path)
    (q,) = (n for n in model.graph.node if n.op_type == "QuantizeLinear")
    scale = float(constants(model)[q.input[1]])
    x = torch.full((1, 3, 1, 1), -1000.0)
    (got,) = exact_session(path).run(None, {"input": x.numpy()})
    layer = net[0]
    rows = layer.weight.detach().flatten(1)
    steps = rows.abs().amax(1, keepdim=True) / 127
    wanted = ((rows / steps).round() * steps) @ torch.full((3,), -128 * scale) + layer.bias
    torch.testing.assert_close(torch.from_numpy(got).flatten(), wanted.detach(), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(qmodel(x).flatten(), wanted, rtol=1e-4)  # here: -127


REMEDY = 'Quantize the float model with backend="tensorrt"'


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (fxq.Recipe.static(backend="reference"), f"the value %x_q has activations with a zero point. {REMEDY}"),
        (fxq.Recipe.dynamic(backend="reference"), "has a range that is computed at run time"),
        (
            fxq.Recipe.static(backend="reference", activation=fxq.TensorSpec(bits=7, signed=True, symmetric=True)),
            "has activations from -63 to 63, not symmetric int8 per tensor",
        ),
        (fxq.Recipe.weight_only(backend="reference"), "has float activations, and a weight that is not int4"),
    ],
    ids=["affine", "dynamic", "7 bits", "weight-only"],
)
def test_other_grids_are_refused(recipe, reason, tmp_path):
    path = tmp_path / "m.onnx"
    with pytest.raises(ExportError, match="cannot be written for TensorRT") as error:
        quantized(Residual, X, recipe).export(path, target="tensorrt")
    assert reason in str(error.value) and not path.exists()


def test_sums_inside_of_a_unit_warn(tmp_path):
    signed = fxq.TensorSpec(signed=True, symmetric=True)
    qmodel = quantized(Residual, X, fxq.Recipe.static(backend="reference", activation=signed))
    with pytest.warns(FxqWarning, match=r"adds in float in 1 places, the first at the layer 'second'"):
        qmodel.export(tmp_path / "m.onnx", target="tensorrt")


def test_four_bit_weights_in_blocks(tmp_path):
    """Symmetric int4 in blocks of 64 or 128 is the one form of weights alone that TensorRT takes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 8), nn.Linear(8, 4)).eval()
    weight = fxq.TensorSpec(bits=4, signed=True, symmetric=True, per=64, observer="mse")
    recipe, x = fxq.Recipe.weight_only(backend="tensorrt", weight=weight), torch.rand(2, 128)
    qmodel = fxq.quantize(net, recipe, example_inputs=x)
    path = qmodel.export(tmp_path / "m.onnx", target="tensorrt")
    weights = [n for n in onnx.load(path).graph.node if n.op_type == "DequantizeLinear"]
    assert [attribute(n, "block_size") for n in weights] == [64, 64]  # the third layer has one block per row
    (got,) = exact_session(path).run(None, {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), qmodel(x), rtol=0.02, atol=0.02)  # the runtime rounds its inputs
    corrected = fxq.quantize(net, recipe.insert_pass(fxq.passes.LowRank(rank=4), after="gptq"), example_inputs=x)
    with pytest.raises(ExportError, match="Leave out the pass low-rank, whose factors have 8 bits"):
        corrected.export(tmp_path / "corrected.onnx", target="tensorrt")
    with pytest.warns(FxqWarning, match="TensorRT takes weights alone only as symmetric int4"):
        plain = fxq.quantize(net, fxq.Recipe.weight_only(backend="tensorrt"), example_inputs=x)
    assert {row.precision for row in plain.ledger} == {"float"}


def test_four_bit_weights_per_tensor_are_refused_or_float(tmp_path):
    weight = fxq.TensorSpec(bits=4, signed=True, symmetric=True, observer="mse")
    alone = quantized(Residual, X, fxq.Recipe.weight_only(backend="reference", weight=weight))
    with pytest.raises(ExportError, match="has float activations, and a weight that is not int4 in several blocks"):
        alone.export(tmp_path / "m.onnx", target="tensorrt")
    rows = quantized(Residual, X, fxq.Recipe.static(backend="tensorrt", weight=weight).with_min_sqnr(None)).ledger
    assert {row.precision for row in rows if "conv" in row.op or row.op == "linear"} == {"float"}


def test_specs_of_the_user_that_are_replaced_are_noted():
    affine = fxq.TensorSpec(observer="minmax")
    rows = {
        row.op: row for row in quantized(Residual, X, fxq.Recipe.static(backend="tensorrt", activation=affine)).ledger
    }
    assert "its activation is int8 symmetric (minmax), and not uint8 affine (minmax)" in rows["conv_transpose2d"].reason
    assert "its weight" not in rows["conv_transpose2d"].reason


def test_the_target_is_checked(tmp_path):
    qmodel = quantized(Residual, X)
    with pytest.raises(InputError, match="did you mean 'tensorrt'"):
        qmodel.export(tmp_path / "m.onnx", target="tensorr")
    with pytest.raises(InputError, match=r"target='tensorrt' is one of \.onnx files"):
        qmodel.export(tmp_path / "m.xml", target="tensorrt")
    with pytest.raises(InputError, match="not both"):
        qmodel.export(tmp_path / "m.onnx", target="tensorrt", format="matmulnbits")


def test_a_file_is_read_with_its_grids(tmp_path):
    qmodel = quantized(Residual, X)
    path = qmodel.export(tmp_path / "m.onnx", target="tensorrt")
    again = fxq.quantize(str(path), fxq.Recipe.stored(backend="reference"), example_inputs=X)
    assert sqnr(qmodel(X), again(X)) > 40  # equal up to ties


@pytest.mark.parametrize(("net", "x", "count"), [(Residual, X, 18), (Attention, ROWS, 12)])
def test_a_file_that_is_read_is_written_for_tensorrt_again(net, x, count, tmp_path):
    path = quantized(net, x).export(tmp_path / "m.onnx", target="tensorrt", example_inputs=x)
    again = fxq.quantize(str(path), fxq.Recipe.stored(backend="tensorrt"), example_inputs=x)
    second = onnx.load(again.export(tmp_path / "again.onnx", target="tensorrt", example_inputs=x))
    assert check_as_documented(second) == count
    (first,), (got,) = (exact_session(tmp_path / name).run(None, {"x": x.numpy()}) for name in ("m.onnx", "again.onnx"))
    assert (first == got).all()


def test_a_file_whose_output_is_quantized_is_written_again(tmp_path):
    """No unit reads the last grid: it is signed, since the unit that computes the value has signed grids."""
    make, constant = onnx.helper.make_node, onnx.numpy_helper.from_array
    weight = torch.randint(-100, 100, (16, 8), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    grids = {"s": torch.tensor(0.03), "z": torch.tensor(0).to(torch.int8)}
    grids |= {"w": weight, "ws": torch.full((8,), 0.01), "wz": torch.zeros(8, dtype=torch.int8)}
    nodes = [
        make("QuantizeLinear", ["x", "s", "z"], ["xq"]), make("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        make("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=1), make("MatMul", ["xd", "wd"], ["y"]),
        make("QuantizeLinear", ["y", "s", "z"], ["yq"]), make("DequantizeLinear", ["yq", "s", "z"], ["out"]),
    ]  # fmt: skip
    kinds = (("x", [3, 16]), ("out", [3, 8]))
    x, out = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in kinds)
    graph = onnx.helper.make_graph(nodes, "g", [x], [out], [constant(v.numpy(), k) for k, v in grids.items()])
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "m.onnx")
    rows = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    qmodel = fxq.quantize(tmp_path / "m.onnx", fxq.Recipe.stored(backend="tensorrt"), example_inputs=rows)
    again = onnx.load(qmodel.export(tmp_path / "again.onnx", target="tensorrt"))
    assert check_as_documented(again) == 5
    (wanted,) = exact_session(tmp_path / "m.onnx").run(None, {"x": rows.numpy()})
    torch.testing.assert_close(qmodel(rows), torch.from_numpy(wanted), rtol=0, atol=1e-6)
