"""Models of ONNX files: names, dynamic sizes, control flow, quantized files, damaged files."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxq
from tests.support.onnx_text import parsed, reference

onnx = pytest.importorskip("onnx")


def weights(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


CONV_BODY = """
c = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, conv_weight, conv_bias)
b = BatchNormalization(c, bn_weight, bn_bias, bn_mean, bn_var)
r = Relu(b)
p = GlobalAveragePool(r)
f = Flatten(p)
y = Gemm<transB = 1>(f, head_weight, head_bias)
"""


def conv_model():
    """Convolution, batch norm, ReLU, pooling and a linear layer, whose weights have dots in their names."""
    constants = {
        "conv_weight": weights(4, 3, 3, 3), "conv_bias": weights(4, seed=1), "bn_weight": weights(4, seed=2),
        "bn_bias": weights(4, seed=3), "bn_mean": weights(4, seed=4), "bn_var": np.ones(4, np.float32),
        "head_weight": weights(5, 4, seed=5), "head_bias": weights(5, seed=6),
    }  # fmt: skip
    return named(parsed(CONV_BODY, constants=constants), {name: f"net.{name.replace('_', '.')}" for name in constants})


def named(model, names):
    """Rename values of a model; ONNX's text form has no dots in names."""
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    for constant in model.graph.initializer:
        constant.name = names.get(constant.name, constant.name)
    return model


def test_layers_have_the_names_of_their_weights():
    model = conv_model()
    read = fxq.read_onnx(model)
    layers = {name: type(module) for name, module in read.named_modules() if type(module) is not nn.Module and name}
    assert layers == {"net.conv": nn.Conv2d, "net.bn": nn.BatchNorm2d, "net.head": nn.Linear}
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(read(x), torch.from_numpy(reference(model, x)[0]), rtol=1e-5, atol=1e-5)
    assert all(parameter.requires_grad for parameter in read.parameters())
    assert not read.training


def test_a_dotted_weight_names_its_layer():
    model = named(
        parsed("y = MatMul(x, w)", "float[N, 4] x", "float[N, 3] y", {"w": weights(4, 3)}), {"w": "encoder.0.fc.weight"}
    )
    read = fxq.read_onnx(model)
    assert isinstance(read.get_submodule("encoder.0.fc"), nn.Linear)
    assert read.graph.find_nodes(op="call_module", target="encoder.0.fc")


def test_quantized_and_exported_again(tmp_path):
    path = tmp_path / "m.onnx"
    model = conv_model()
    onnx.save(model, path)
    data = [torch.randn(4, 3, 8, 8) for _ in range(4)]
    q = fxq.quantize(path, "static", data=data)
    assert q.output_sqnr > 25
    q.export(tmp_path / "q.onnx")
    again = fxq.read_onnx(tmp_path / "q.onnx")
    step = q(data[0]).abs().max() / 127
    torch.testing.assert_close(again(data[0]), q(data[0]), rtol=0, atol=float(2 * step))
    assert fxq.compare(path, q, data)


def test_dynamic_sizes_stay_dynamic():
    body = """
    s = Shape(x)
    batch = Slice(s, zero, one)
    length = Slice(s, one, two)
    half = Div(length, two)
    shape = Concat<axis = 0>(batch, two, half)
    y = Reshape(x, shape)
    """
    constants = {"zero": np.array([0]), "one": np.array([1]), "two": np.array([2])}
    read = fxq.read_onnx(parsed(body, "float[N, L] x", "float[N, 2, H] y", constants))
    for shape in ((1, 6), (3, 10), (5, 4)):
        x = torch.randn(shape)
        assert torch.equal(read(x), x.reshape(shape[0], 2, shape[1] // 2))


def test_quotients_of_negative_differences_are_rounded_towards_zero():
    body = """
    s = Shape<start = 2, end = 3>(x)
    d = Sub(s, eight)
    q = Div(d, two)
    y = Cast<to = 1>(q)
    """
    model = parsed(body, "float[N, 3, H, 8] x", "float[M] y", {"eight": np.array([8]), "two": np.array([2])})
    read = fxq.read_onnx(model)
    for height in (3, 6, 7, 8, 9, 13):
        assert read(torch.zeros(1, 3, height, 8)).tolist() == [int((height - 8) / 2)]


def test_sizes_can_be_fixed():
    body = "s = Shape(x) c = ConstantOfShape(s) y = Add(x, c)"
    model = parsed(body, "float[N, 4] x", "float[N, 4] y")
    fixed = fxq.read_onnx(model, sizes={"N": 3})
    assert not fixed.graph.find_nodes(op="call_method", target="size")
    with pytest.raises(fxq.InputError, match=r"sizes: the model has no dynamic size 'batch'; it has N"):
        fxq.read_onnx(model, sizes={"batch": 1})


def test_sizes_that_are_always_the_same():
    """A file that says that its height is dynamic, and computes with one height."""
    model = parsed("y = Reshape(x, shape)", "float[N, 4, H] x", "float[N, M] y", {"shape": np.array([0, 12])})
    with pytest.raises(fxq.FileError, match=r"dynamic in the file: N, H. If one of them is always the same, fix it"):
        fxq.read_onnx(model)
    assert fxq.read_onnx(model, sizes={"H": 3})(torch.rand(5, 4, 3)).shape == (5, 12)
    model = parsed("y = Add(x, w)", "float[N, 4] x", "float[N, 4] y", {"w": weights(6, 4)})
    with pytest.raises(fxq.FileError, match=r"always the same, fix it with sizes"):
        fxq.read_onnx(model)


def test_unnamed_sizes_are_different_sizes():
    model = parsed("y = Transpose<perm = [1, 0]>(x)", "float[N, M] x", "float[M, N] y")
    for size in model.graph.input[0].type.tensor_type.shape.dim:
        size.dim_param = "?"
    assert fxq.read_onnx(model)(torch.rand(3, 5)).shape == (5, 3)
    with pytest.raises(fxq.InputError, match=r"it has x.0, x.1"):
        fxq.read_onnx(model, sizes={"?": 3})


def test_inputs_can_be_fixed():
    body = """
    fast = Equal(rate, limit)
    y = If(fast) <then_branch = a () => (float[N] p) { p = Neg(x) }, else_branch = b () => (float[N] q) { q = Abs(x) }>
    """
    model = parsed(body, "float[5] x, int64 rate", "float[N] y", {"limit": np.array(16000)})
    x = torch.arange(5.0)
    assert torch.equal(fxq.read_onnx(model, constants={"rate": 16000})(x), -x)
    assert torch.equal(fxq.read_onnx(model, constants={"rate": 8000})(x), x)
    with pytest.raises(fxq.InputError, match=r"constants: the model has no input 'speed'"):
        fxq.read_onnx(model, constants={"speed": 1})


def test_a_range_of_data():
    body = "n = ReduceMax<keepdims = 0>(x) y = Range(zero, n, one)"
    model = parsed(body, "int64[N] x", "int64[M] y", {"zero": np.array(0), "one": np.array(1)})
    assert torch.equal(fxq.read_onnx(model)(torch.tensor([2, 7, 3])), torch.arange(7))


def test_branches_on_constants_and_sizes():
    body = """
    rank = Size(x)
    few = Less(rank, limit)
    y = If(few) <then_branch = a () => (float[N] p) { p = Neg(x) }, else_branch = b () => (float[N] q) { q = Abs(x) }>
    """
    read = fxq.read_onnx(parsed(body, "float[5] x", "float[N] y", {"limit": np.array(100)}))
    assert torch.equal(read(torch.arange(5.0)), -torch.arange(5.0))
    body = """
    total = ReduceSum<keepdims = 0>(x)
    few = Less(total, limit)
    y = If(few) <then_branch = a () => (float[N] p) { p = Neg(x) }, else_branch = b () => (float[N] q) { q = Abs(x) }>
    """
    model = parsed(body, "float[5] x", "float[N] y", {"limit": np.array(1.0, np.float32)})
    with pytest.raises(fxq.FileError, match=r"\(If\) cannot be read: its condition is computed from data"):
        fxq.read_onnx(model)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = Bernoulli(x)", r"node 'y' \(Bernoulli\) cannot be read: fxq has no reader for this op type"),
        ("y = Resize<coordinate_transformation_mode = \"tf_crop_and_resize\">(x, roi, scales)", r"tf_crop_and_resize"),
        ("y, m = Dropout(x, half, yes)", r"\(Dropout\) cannot be read: it drops values at random"),
    ],
)  # fmt: skip
def test_refusals_name_the_node(body, reason):
    constants = {
        "roi": np.zeros(8, np.float32), "scales": np.array([1, 1, 2, 2], np.float32), "half": np.array(0.5, np.float32),
        "yes": np.array(True),
    }  # fmt: skip
    with pytest.raises(fxq.FileError, match=reason):
        fxq.read_onnx(parsed(body, outputs="float[N, 3, H, W] y", constants=constants))


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("coordinates", ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"])
@pytest.mark.parametrize("scale", [2.0, 1.5, 0.4])
def test_resize(mode, coordinates, scale):
    body = f'y = Resize<mode = "{mode}", coordinate_transformation_mode = "{coordinates}">(x, roi, scales)'
    constants = {"roi": np.zeros(0, np.float32), "scales": np.array([1, 1, scale, scale], np.float32)}
    model = parsed(body, "float[1, 2, 5, 7] x", "float[N, C, H, W] y", constants)
    x = torch.randn(1, 2, 5, 7)
    expected = torch.from_numpy(reference(model, x)[0])
    torch.testing.assert_close(fxq.read_onnx(model)(x), expected, rtol=1e-4, atol=1e-4)


def test_a_quantized_file_rounds_to_its_grids():
    body = """
    q = QuantizeLinear(x, sx, zx)
    d = DequantizeLinear(q, sx, zx)
    w = DequantizeLinear<axis = 0>(wq, sw, zw)
    y = MatMul(d, w)
    """
    constants = {
        "sx": np.array(0.1, np.float32), "zx": np.array(128, np.uint8), "sw": np.full(4, 0.02, np.float32),
        "zw": np.zeros(4, np.int8), "wq": np.random.default_rng(0).integers(-127, 127, (4, 3)).astype(np.int8),
    }  # fmt: skip
    model = parsed(body, "float[N, 4] x", "float[N, 3] y", constants, opset=21)
    x = torch.randn(6, 4) * 8
    torch.testing.assert_close(fxq.read_onnx(model)(x), torch.from_numpy(reference(model, x)[0]), rtol=1e-5, atol=1e-5)


def test_boxes_of_non_maximum_suppression():
    body = "y = NonMaxSuppression(boxes, scores, limit, iou, least)"
    inputs = "float[1, 40, 4] boxes, float[1, 2, 40] scores"
    constants = {"limit": np.array([7]), "iou": np.array([0.4], np.float32), "least": np.array([0.2], np.float32)}
    model = parsed(body, inputs, "int64[K, 3] y", constants)
    corners = torch.rand(1, 40, 2)
    boxes, scores = torch.cat([corners, corners + torch.rand(1, 40, 2)], -1), torch.rand(1, 2, 40)
    assert np.array_equal(fxq.read_onnx(model)(boxes, scores).numpy(), reference(model, boxes, scores)[0])


@pytest.mark.parametrize("name", ["1", "class", "self", "torch", "slice", "0.a", "input"])
def test_inputs_with_names_that_code_cannot_have(name):
    node = onnx.helper.make_node("Slice", [name, "zero", "one"], ["y"])
    like = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph([node], "g", [like(name, 1, ["N", 2])], [like("y", 1, ["M", 2])])
    for constant, value in (("zero", [0]), ("one", [1])):
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), constant))
    model = fxq.read_onnx(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]))
    x = torch.randn(3, 2)
    assert torch.equal(model(x), x[:1])
    assert name != "input" or torch.equal(model(input=x), x[:1])


def test_op_types_of_other_domains_are_refused():
    model = parsed("y = Relu(x)")
    model.graph.node[0].domain = "my.ops"
    model.opset_import.append(onnx.helper.make_opsetid("my.ops", 1))
    with pytest.raises(fxq.FileError, match=r"domain 'my\.ops'"):
        fxq.read_onnx(model)


@pytest.mark.parametrize("size", [-1, 2.5, "8"])
def test_sizes_that_are_none(size):
    with pytest.raises(fxq.InputError, match="no size"):
        fxq.read_onnx(parsed("y = Relu(x)"), sizes={"N": size})


def test_constants_that_are_no_tensors():
    with pytest.raises(fxq.InputError, match="'x' is no tensor"):
        fxq.read_onnx(parsed("y = Relu(x)"), constants={"x": "text"})


def test_sparse_constants_are_refused():
    values = onnx.helper.make_tensor("w", 1, [1], [3.0])
    sparse = onnx.helper.make_sparse_tensor(values, onnx.helper.make_tensor("places", 7, [1], [1]), [8])
    model = parsed("y = Add(x, w)")
    model.graph.sparse_initializer.append(sparse)
    with pytest.raises(fxq.FileError, match="'w' is neither"):
        fxq.read_onnx(model)


@pytest.mark.parametrize("size", [4, 5])
def test_local_response_norm(size):
    model = parsed(f"y = LRN<size = {size}, alpha = 0.5, beta = 0.75, bias = 1.0>(x)", "float[N, 6, 3] x")
    x = torch.from_numpy(weights(2, 6, 3))
    squares = torch.zeros_like(x)
    for channel in range(6):  # by ONNX's definition: floor((size - 1) / 2) channels before, ceil((size - 1) / 2) after
        first, last = max(0, channel - (size - 1) // 2), min(5, channel + size // 2)
        squares[:, channel] = x[:, first : last + 1].square().sum(1)
    torch.testing.assert_close(fxq.read_onnx(model)(x), x / (1 + 0.5 / size * squares) ** 0.75, rtol=1e-5, atol=1e-6)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("scale", [0.7, 1.5])
@pytest.mark.parametrize("options", [
    'mode = "linear"', 'mode = "cubic"', 'mode = "nearest", nearest_mode = "round_prefer_ceil"',
    'mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"',
])  # fmt: skip
def test_dynamic_sizes_are_scaled_by_the_factors_of_the_file(options, scale):
    body = f"y = Resize<{options}>(x, r, s)"
    constants = {"r": np.zeros(0, np.float32), "s": np.array([1, 1, scale, scale], np.float32)}
    model = parsed(body, "float[N, 2, H, W] x", "float[N, 2, A, B] y", constants, opset=18)
    read = fxq.read_onnx(model)
    for height, width in ((7, 9), (8, 11)):  # times 1.5 and 0.7, none is a whole number
        x = torch.from_numpy(weights(1, 2, height, width))
        wanted = torch.from_numpy(reference(model, x)[0])
        torch.testing.assert_close(read(x), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("option", ["antialias = 1", "cubic_coeff_a = -0.5", "exclude_outside = 1"])
def test_kernels_that_dynamic_sizes_cannot_have(option):
    constants = {"r": np.zeros(0, np.float32), "s": np.array([1, 1, 0.5, 0.5], np.float32)}
    body = f'y = Resize<mode = "cubic", {option}>(x, r, s)'
    model = parsed(body, "float[N, 2, H, W] x", "float[N, 2, A, B] y", constants, opset=18)
    with pytest.raises(fxq.FileError, match="dynamic size"):
        fxq.read_onnx(model)


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(fxq.FileError, match=r"there is no such file"):
        fxq.read_onnx(tmp_path / "nothing.onnx")
    with pytest.raises(fxq.FileError, match=r"there is no such file"):
        fxq.quantize(str(tmp_path / "nothing.onnx"), data=[torch.rand(1)])
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(fxq.FileError, match=r"this is no readable ONNX model|invalid"):
        fxq.read_onnx(tmp_path / "text.onnx")


def test_constants_larger_than_the_file():
    model = parsed("y = Add(x, w)", "float[4] x", "float[N] y", {"w": weights(4)})
    model.graph.initializer[0].dims[0] = 2**40
    with pytest.raises(fxq.FileError, match=r"the constant 'w' of shape \[1099511627776\] has 16 bytes"):
        fxq.read_onnx(model)
    model = parsed("y = ConstantOfShape(s)", "float[4] x", "float[N] y", {"s": np.array([2**40])})
    with pytest.raises(fxq.FileError, match=r"it computes a constant of more than 1 GiB"):
        fxq.read_onnx(model)


def test_constants_with_too_many_bytes():
    model = parsed("y = Add(x, w)", "float[4] x", "float[N] y", {"w": weights(4)})
    model.graph.initializer[0].dims[0] = 3
    with pytest.raises(fxq.FileError, match=r"the constant 'w' of shape \[3\] is damaged"):
        fxq.read_onnx(model)


def test_outputs_without_a_shape():
    model = parsed("y = Add(x, w)", "float[N, 4] x", "float[N, 4] y", {"w": weights(4)})
    model.graph.output[0].type.tensor_type.ClearField("shape")
    x = torch.randn(3, 4)
    torch.testing.assert_close(fxq.read_onnx(model)(x), torch.from_numpy(reference(model, x)[0]), rtol=0, atol=0)
    assert not model.graph.output[0].type.tensor_type.HasField("shape")


def test_data_outside_of_the_folder(tmp_path):
    (tmp_path / "secret").write_bytes(bytes(16))
    (tmp_path / "models").mkdir()
    model = parsed("y = Add(x, w)", "float[4] x", "float[N] y", {"w": weights(4)})
    constant = model.graph.initializer[0]
    constant.ClearField("raw_data")
    constant.data_location = onnx.TensorProto.EXTERNAL
    constant.external_data.add(key="location", value="../secret")
    (tmp_path / "models" / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(fxq.FileError, match=r"no readable ONNX model"):
        fxq.read_onnx(tmp_path / "models" / "m.onnx")


@given(st.data())
def test_damaged_files_give_a_clear_error_or_a_model(tmp_path_factory, data):
    content = bytearray(conv_model().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    path = tmp_path_factory.mktemp("damaged") / "m.onnx"
    path.write_bytes(bytes(content[:length]))
    try:
        read = fxq.read_onnx(path)
    except fxq.FxqError as error:
        assert str(error)
    else:
        assert isinstance(read, torch.fx.GraphModule) and read.graph.output_node().args
