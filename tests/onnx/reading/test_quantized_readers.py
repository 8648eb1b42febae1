"""Quantized ONNX files: their grids, and the integers that fxq computes with on them."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxq
from fxq.quant.dynamic_grid import ROUND_TO_RANGE
from fxq.quant.stored_grids import stored_grid
from tests.support.machine import WITH_8_BITS
from tests.support.onnx_runs import exact_session
from tests.support.onnx_text import parsed, reference

onnx = pytest.importorskip("onnx")


class Net(nn.Module):
    """Convolutions, a residual sum, pooling, a concatenation and a linear layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = F.relu(self.first(x))
        x = F.max_pool2d(F.relu(x + self.second(x)), 2)
        x = torch.cat([x, torch.sigmoid(x)], 1)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def inputs(count=4):
    return [torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(i)) * 2 - 1 for i in range(count)]


def run_by_onnx_runtime(path, x):
    session = exact_session(path)
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.fixture(scope="module")
def float_file(tmp_path_factory):
    """ONNX file of `Net`, written by PyTorch."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("onnx") / "float.onnx"
    torch.onnx.export(Net().eval(), (inputs(1)[0],), path, opset_version=17, dynamo=False, input_names=["x"])
    return path


def quantized_by_onnx_runtime(float_file, form, activations):
    quantization = pytest.importorskip("onnxruntime.quantization")

    class Reader(quantization.CalibrationDataReader):
        batches = iter([{"x": x.numpy()} for x in inputs()])

        def get_next(self):
            return next(self.batches, None)

    path = float_file.with_name(f"{form}-{activations}.onnx")
    quantization.quantize_static(
        float_file, path, Reader(), quant_format=quantization.QuantFormat[form], per_channel=activations == "QInt8",
        activation_type=quantization.QuantType[activations], weight_type=quantization.QuantType.QInt8,
    )  # fmt: skip
    return path


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore")  # of PyTorch's exporter
@pytest.mark.parametrize(("form", "activations"), [("QDQ", "QInt8"), ("QOperator", "QUInt8")])
def test_a_file_of_onnx_runtimes_quantizer_runs_on_its_integers(float_file, form, activations):
    path = quantized_by_onnx_runtime(float_file, form, activations)
    x = inputs(9)[8]
    qmodel = fxq.quantize(str(path), fxq.Recipe.stored(backend=WITH_8_BITS), example_inputs=x)
    assert not qmodel.ledger.count("float"), str(qmodel.ledger)
    assert qmodel.ledger.count("int8") >= 6  # layers, sum, sigmoid and the average
    last = list(onnx.load(path).graph.initializer)
    scales = {t.name: float(onnx.numpy_helper.to_array(t)) for t in last if t.name.endswith("_scale") and not t.dims}
    step = next(scale for name, scale in scales.items() if name.startswith(onnx.load(path).graph.output[0].name))
    apart = (qmodel(x) - run_by_onnx_runtime(path, x)).abs() / step
    assert apart.max() <= 1.01  # one step of the output's grid
    assert (apart > 0.5).float().mean() <= 0.1  # in few values


@pytest.mark.one_in(2)
@pytest.mark.parametrize("preset", ["static", "weight_only"])
def test_an_export_of_fxq_comes_back_with_its_grids(tmp_path, preset):
    torch.manual_seed(0)
    net, x = Net().eval(), inputs(9)[8]
    recipe = getattr(fxq.Recipe, preset)(backend="reference", optimize="coverage")
    exported = fxq.quantize(net, recipe, data=inputs())
    path = exported.export(tmp_path / "m.onnx", check=False)
    back = fxq.quantize(path, fxq.Recipe.stored(backend="reference"), example_inputs=x)
    assert back.ledger.count("weight-only") == exported.ledger.count("weight-only")
    assert preset != "static" or not back.ledger.count("float")
    torch.testing.assert_close(back(x), exported(x), rtol=0, atol=2e-4)  # float32 sums in another order


def test_weights_of_matmul_nbits_keep_their_blocks(tmp_path):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32)).eval(), torch.randn(3, 64)
    exported = fxq.quantize(net, fxq.Recipe.weight_only(bits=4, per=32, backend="reference"), example_inputs=x)
    model = fxq.read_onnx(exported.export(tmp_path / "m.onnx", format="matmulnbits", check=False))
    grids = [stored_grid(p) for p in model.parameters() if p.dim() == 2]
    assert [(grid.bits, grid.block, grid.axis) for grid in grids] == [(4, 32, 1), (4, 32, 1)]
    qmodel = fxq.quantize(model, fxq.Recipe.stored(backend="reference"), example_inputs=x)
    assert qmodel.ledger.count("weight-only") == 2
    torch.testing.assert_close(qmodel(x), exported(x), rtol=1e-5, atol=1e-5)


def quantized_linear(axis=0, dtype=np.int8):
    """Linear layer without bias in QDQ form: a weight (I, O) = (4, 3) with a scale per output channel."""
    middle = 128 if dtype == np.uint8 else 0
    weight = np.arange(12, dtype=np.int64).reshape(4, 3) * 9 - 50 + middle
    constants = {
        "x_scale": np.float32(0.05), "x_zero": np.uint8(100), "w": weight.astype(dtype),
        "w_scale": np.array([0.1, 0.2, 0.3], np.float32), "w_zero": np.full(3, middle, dtype),
        "y_scale": np.float32(0.5), "y_zero": np.int8(-3),
    }  # fmt: skip
    body = """
        q = QuantizeLinear(x, x_scale, x_zero)
        d = DequantizeLinear(q, x_scale, x_zero)
        wd = DequantizeLinear<axis = 1>(w, w_scale, w_zero)
        m = MatMul(d, wd)
        yq = QuantizeLinear(m, y_scale, y_zero)
        y = DequantizeLinear(yq, y_scale, y_zero)
    """
    return parsed(body, "float[N, 4] x", "float[N, 3] y", constants)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_scales_of_a_transposed_weight_go_with_their_channels(dtype):
    model = fxq.read_onnx(quantized_linear(dtype=dtype))
    (weight,) = model.parameters()
    grid = stored_grid(weight)
    assert (grid.axis, grid.qmin, grid.zero_point.tolist()) == (0, -127, [0, 0, 0])  # unsigned around 128 is signed
    torch.testing.assert_close(grid.scale, torch.tensor([0.1, 0.2, 0.3]))
    x = torch.randn(5, 4) * 3
    qmodel = fxq.quantize(model, fxq.Recipe.stored(backend=WITH_8_BITS), example_inputs=x)
    assert qmodel.ledger.count("int8") == 1
    assert torch.equal(qmodel(x), model(x))


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_other_recipes_refuse_a_quantized_model(is_dynamic):
    weight = np.arange(12, dtype=np.int8).reshape(4, 3)
    file = dynamic_layer("MatMulInteger", weight, 0) if is_dynamic else quantized_linear()
    model, x = fxq.read_onnx(file), torch.randn(5, 4)
    with pytest.raises(fxq.RecipeError, match=r'quantized already.*fxq.quantize\(model, "stored", example_inputs=x\)'):
        fxq.quantize(model, "static", data=[x])


def test_a_missing_example_is_asked_for():
    with pytest.raises(fxq.InputError, match="give one batch of inputs to infer shapes from"):
        fxq.quantize(fxq.read_onnx(quantized_linear()), "stored")


@pytest.mark.parametrize("scale", [0.0, -0.02])
def test_scales_that_are_no_grid_are_computed_as_written(scale):
    """Values on a scale of 0 are 0, as those of a layer that never fires."""
    constants = {"s": np.float32(scale), "z": np.uint8(120), "s2": np.float32(0.03), "z2": np.uint8(9)}
    body = """
        q = QuantizeLinear(x, s, z)
        d = DequantizeLinear(q, s, z)
        e = Add(d, x)
        q2 = QuantizeLinear(e, s2, z2)
        y = DequantizeLinear(q2, s2, z2)
    """
    file = parsed(body, "float[N, 4] x", "float[N, 4] y", constants)
    x = torch.randn(5, 4)
    qmodel = fxq.quantize(fxq.read_onnx(file), fxq.Recipe.stored(backend="reference"), example_inputs=x)
    expected = run_by_onnx_runtime(file.SerializeToString(), x)
    torch.testing.assert_close(qmodel(x), expected, rtol=0, atol=1e-6)  # products in float32


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("mode", "sizes"),
    [("nearest", "L"), ("nearest", "8"), ("nearest", "H, W"), ("nearest", "8, 6"), ("linear", "8, 6")],
)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_integers_are_resized_and_pooled(dtype, mode, sizes):
    """Files of the form QOperator have such ops between their layers."""
    rank = sizes.count(",") + 1
    options = f'mode = "{mode}", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"'
    scales = np.array([1, 1] + [2] * rank, np.float32)
    constants = {"s": np.float32(0.02), "z": np.array(9, dtype), "scales": scales}
    body = f"""
        q = QuantizeLinear(x, s, z)
        p = MaxPool<kernel_shape = {[2] * rank}>(q)
        r = Resize<{options}>(p, , scales)
        y = DequantizeLinear(r, s, z)
    """
    file = parsed(body, f"float[2, 3, {sizes}] x", f"float[2, 3, {'A, B' if rank == 2 else 'A'}] y", constants)
    x = torch.randn([2, 3, 8, 6][: 2 + rank])
    model, expected = fxq.read_onnx(file), run_by_onnx_runtime(file.SerializeToString(), x)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-6)  # the products of integers and a scale
    qmodel = fxq.quantize(model, fxq.Recipe.stored(backend="reference"), example_inputs=x)
    torch.testing.assert_close(qmodel(x), expected, rtol=0, atol=1e-6)


def dynamic_layer(op, weight, zero, layer_attributes="", scale=0.03):
    """Layer with a dynamic range as ONNX Runtime's quantizer writes it, with an integer weight of one scale."""
    constants = {"w": weight, "w_scale": np.array(scale, np.float32), "w_zero": np.array(zero, weight.dtype)}
    body = f"""
        q, s, z = DynamicQuantizeLinear(x)
        m = {op}{layer_attributes}(q, w, z, w_zero)
        f = Cast<to = 1>(m)
        both = Mul(s, w_scale)
        y = Mul(f, both)
    """
    rank = weight.ndim
    inputs, outputs = {2: ("float[N, 4] x", "float[N, 3] y"), 4: ("float[N, 2, 6, 6] x", "float[N, 3, 4, 4] y")}[rank]
    return parsed(body, inputs, outputs, constants)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("dtype", "zero"), [(np.int8, 0), (np.uint8, 119)])
@pytest.mark.parametrize(("op", "shape"), [("MatMulInteger", (4, 3)), ("ConvInteger", (3, 2, 3, 3))])
def test_layers_with_dynamic_ranges_run_on_integers(op, shape, dtype, zero):
    info = np.iinfo(dtype)
    weight = np.random.default_rng(0).integers(info.min, info.max + 1, shape).astype(dtype)
    file = dynamic_layer(op, weight, zero)
    torch.manual_seed(0)  # a value between two integers may be rounded to either
    x = torch.randn((5, 4) if len(shape) == 2 else (2, 2, 6, 6))
    model = fxq.read_onnx(file)
    qmodel = fxq.quantize(model, fxq.Recipe.stored(backend="reference"), example_inputs=x)
    assert qmodel.ledger.count("int8") == 1
    expected = torch.from_numpy(reference(file, x)[0])
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)  # integers, and float32 products
    torch.testing.assert_close(qmodel(x), expected, rtol=1e-4, atol=1e-4)


def test_integers_with_a_scale_of_another_range_are_no_layer():
    """The product is then read as it is written."""
    file = dynamic_layer("MatMulInteger", np.arange(12, dtype=np.int8).reshape(4, 3), 0)
    file.graph.node[3].input[0] = "w_scale"  # the square of a constant
    x = torch.randn(5, 4)
    read = fxq.read_onnx(file)
    assert not any(node.target is ROUND_TO_RANGE for node in read.graph.nodes)
    torch.testing.assert_close(read(x), torch.from_numpy(reference(file, x)[0]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("scale", "zero", "is_layer"),
    [
        ([0.1, 0.2, 0.3], 0, True),  # for each output channel
        ([[0.1, 0.2, 0.3]], [1, 2, 3], True),
        (0.1, [1, 2, 3], True),
        ([[0.1], [0.2], [0.3]], 0, False),  # for each row of the input
        ([[[0.1, 0.2, 0.3]]], 0, False),  # with a further axis
    ],
)
def test_scales_that_are_not_of_output_channels_are_read_as_written(scale, zero, is_layer):
    file = dynamic_layer("MatMulInteger", np.arange(12, dtype=np.int8).reshape(4, 3), zero, scale=scale)
    file.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
    read, x = fxq.read_onnx(file), torch.randn(3, 4)
    assert any(node.target is ROUND_TO_RANGE for node in read.graph.nodes) == is_layer
    torch.testing.assert_close(read(x), torch.from_numpy(reference(file, x)[0]), rtol=1e-4, atol=1e-4)


def test_a_product_of_the_integers_themselves_is_no_scale():
    file = dynamic_layer("MatMulInteger", np.arange(16, dtype=np.int8).reshape(4, 4)[:, :4], 0)
    file.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 4
    file.graph.node.insert(3, onnx.helper.make_node("Cast", ["q"], ["real_q"], to=1))
    file.graph.node[4].input[0] = "real_q"
    read, x = fxq.read_onnx(file), torch.randn(3, 4)
    torch.testing.assert_close(read(x), torch.from_numpy(reference(file, x)[0]), rtol=1e-4, atol=1e-4)


def other_quantization(scale, dtype, zero=3):
    """Values that are quantized as no grid of fxq does, before a linear layer with integers as its weight."""
    scale = np.array(scale)
    kind = "float16" if scale.dtype == np.float16 else "float"
    weight = np.arange(12, dtype=np.int8).reshape(4, 3) * 9 - 50
    constants = {"s": scale, "z": np.full(scale.shape, zero, dtype), "w": weight, "w_scale": np.array(0.1, scale.dtype)}
    body = """
        q = QuantizeLinear<axis = 1>(x, s, z)
        d = DequantizeLinear<axis = 1>(q, s, z)
        real = DequantizeLinear(w, w_scale)
        y = MatMul(d, real)
    """
    return parsed(body, f"{kind}[N, 4] x", f"{kind}[N, 3] y", constants, opset=21)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("scale", "dtype", "reason"),
    [
        (np.float16(0.05), np.uint8, "float16"),
        (np.float32(0.0005), np.uint16, "its integers are torch.uint16"),
        (np.float32(0.0005), np.int16, "its integers are torch.int16"),
        (np.array([0.05, 0.04, 0.03, 0.02], np.float32), np.uint8, "it has several scales"),
    ],
)
def test_values_that_a_file_quantizes_otherwise_are_said_to_be_float(tmp_path, scale, dtype, reason):
    file = other_quantization(scale, dtype)
    with pytest.warns(fxq.FxqWarning, match=rf"in float, with the same results: '.*' \(.*{reason}"):
        model = fxq.read_onnx(file)
    x = (torch.randn(5, 4) * 3).to(torch.float16 if scale.dtype == np.float16 else torch.float32)
    expected = torch.from_numpy(reference(file, x)[0])
    sums = {"rtol": 0, "atol": float(expected.abs().max()) * 4 * torch.finfo(x.dtype).eps}  # of four products
    torch.testing.assert_close(model(x), expected, **sums)
    qmodel = fxq.quantize(model, fxq.Recipe.weight_only(backend="reference", optimize="coverage"), example_inputs=x)
    torch.testing.assert_close(qmodel(x), expected, **sums)  # the weight is on its integers
    exported = qmodel.export(tmp_path / "m.onnx", check=False)
    torch.testing.assert_close(torch.from_numpy(reference(onnx.load(exported), x)[0]), expected, **sums)


def test_exports_with_dynamic_ranges_are_said_to_be_float(tmp_path):
    """Of ranges per row, which ONNX has no op for; those of ONNX Runtime's quantizer are read as layers."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(16, 8), nn.ReLU()).eval(), torch.randn(3, 16)
    exported = fxq.quantize(net, fxq.Recipe.dynamic(backend="reference", optimize="coverage"), example_inputs=x)
    with pytest.warns(fxq.FxqWarning, match="its scale is computed at run time"):
        model = fxq.read_onnx(exported.export(tmp_path / "m.onnx", check=False))
    torch.testing.assert_close(model(x), exported(x), rtol=0, atol=1e-5)


def test_weights_of_a_float16_model_have_their_integers_in_float32():
    weight = np.random.default_rng(0).integers(0, 256, (8, 2, 16)).astype(np.uint8)
    constants = {"w": weight, "s": np.linspace(0.1, 1.1, 16).reshape(8, 2).astype(np.float16)}
    body = "y = com.microsoft.MatMulNBits<K = 64, N = 8, bits = 4, block_size = 32>(x, w, s)"
    model, x = fxq.read_onnx(parsed(body, "float16[N, 64] x", "float16[N, 8] y", constants)), torch.randn(3, 64)
    with pytest.warns(fxq.FxqWarning, match="is float16, not float32"):
        fxq.quantize(model, fxq.Recipe.stored(backend="reference"), example_inputs=x.half())
    qmodel = fxq.quantize(model.float(), fxq.Recipe.stored(backend="reference"), example_inputs=x)
    assert qmodel.ledger.count("weight-only") == 1
    integers = torch.from_numpy(np.stack([weight & 15, weight >> 4], -1).reshape(8, 64).astype(np.float32)) - 8
    exact = F.linear(x, integers * torch.from_numpy(constants["s"]).float().repeat_interleave(32, 1))
    torch.testing.assert_close(qmodel(x), exact, rtol=1e-5, atol=1e-4)  # float32 sums
