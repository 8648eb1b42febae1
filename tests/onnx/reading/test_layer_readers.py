"""Layers of ONNX files whose form PyTorch lacks, or whose sizes are dynamic."""

import numpy as np
import pytest
import torch

import fxq
from tests.support.onnx_text import parsed, reference

pytest.importorskip("onnx")
GENERATOR = np.random.default_rng(0)


def normal(*shape):
    return GENERATOR.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("op", "gates", "reset"), [("LSTM", 4, ""), ("GRU", 3, ", linear_before_reset = 1"),
                                                    ("GRU", 3, ""), ("RNN", 1, "")])  # fmt: skip
def test_recurrent_layers_of_any_number_of_steps(op, gates, reset):
    weights = {"w": normal(1, gates * 5, 4), "r": normal(1, gates * 5, 5), "b": normal(1, gates * 10)}
    body = f"y, last = {op}<hidden_size = 5{reset}>(x, w, r, b)"
    model = parsed(body, "float[T, N, 4] x", "float[T, 1, N, 5] y, float[1, N, 5] last", weights)
    read = fxq.read_onnx(model)
    for shape in ((6, 2, 4), (3, 1, 4), (1, 5, 4)):
        x = torch.randn(shape)
        for result, expected in zip(read(x), reference(model, x), strict=True):
            torch.testing.assert_close(result, torch.from_numpy(expected), rtol=1e-4, atol=1e-5)


def test_bidirectional_layers_of_any_number_of_steps():
    """Against a PyTorch layer with the same weights, reordered: ONNX has the gates i, o, f, c, PyTorch i, f, c, o."""
    layer = torch.nn.LSTM(4, 5, bidirectional=True)
    ends = ("", "_reverse")

    def stacked(name):
        parts = [getattr(layer, f"{name}_l0{end}").detach().chunk(4) for end in ends]
        return torch.stack([torch.cat([i, o, f, c]) for i, f, c, o in parts]).numpy()

    weights = {
        "w": stacked("weight_ih"), "r": stacked("weight_hh"),
        "b": np.concatenate([stacked("bias_ih"), stacked("bias_hh")], 1),
    }  # fmt: skip
    body = 'y, h1, c1 = LSTM<hidden_size = 5, direction = "bidirectional">(x, w, r, b, , h, c)'
    inputs = "float[T, N, 4] x, float[2, N, 5] h, float[2, N, 5] c"
    read = fxq.read_onnx(parsed(body, inputs, "float[T, 2, N, 5] y, float[2, N, 5] h1, float[2, N, 5] c1", weights))
    for steps, batch in ((6, 2), (3, 1)):
        x, h, c = torch.randn(steps, batch, 4), torch.randn(2, batch, 5), torch.randn(2, batch, 5)
        out, last = layer(x, (h, c))
        y, *states = read(x, h, c)
        expected = out.reshape(steps, batch, 2, 5).transpose(1, 2)
        torch.testing.assert_close([y, *states], [expected, *last], rtol=1e-4, atol=1e-5)


def test_transposed_convolution_with_more_output_than_products():
    """Output beyond the last product is the bias, not zero."""
    weights = {"w": normal(3, 4, 3, 3), "b": normal(4)}
    body = "y = ConvTranspose<strides = [2, 2], output_shape = [12, 12]>(x, w, b)"
    read = fxq.read_onnx(parsed(body, "float[N, 3, 5, 6] x", "float[N, 4, 12, 12] y", weights))
    x = torch.randn(2, 3, 5, 6)
    weight, bias = (torch.from_numpy(weights[name]) for name in ("w", "b"))
    whole = torch.nn.functional.conv_transpose2d(x, weight, bias, 2, output_padding=(1, 0))
    torch.testing.assert_close(read(x), whole[..., 1:], rtol=1e-4, atol=1e-5)
    body = "y = ConvTranspose<strides = [2, 2], pads = [0, 0, -1, 0]>(x, w, b)"
    with pytest.raises(fxq.FileError, match=r"its padding is negative"):
        fxq.read_onnx(parsed(body, "float[N, 3, 5, 6] x", "float[N, 4, H, W] y", weights))


@pytest.mark.parametrize("direction", ["reverse", "bidirectional"])
def test_a_gru_that_resets_its_state_before_the_product_runs_backwards(direction):
    """Against ONNX's forward layer on the reversed sequence."""
    count = 2 if direction == "bidirectional" else 1
    weights = {"w": normal(count, 15, 4), "r": normal(count, 15, 5), "b": normal(count, 30)}
    body = f'y, last = GRU<hidden_size = 5, direction = "{direction}">(x, w, r, b)'
    read = fxq.read_onnx(
        parsed(body, "float[T, N, 4] x", f"float[T, {count}, N, 5] y, float[{count}, N, 5] last", weights)
    )
    x = torch.randn(6, 2, 4)
    y, last = read(x)
    backwards = {name: value[-1:] for name, value in weights.items()}
    forward = parsed("y, last = GRU<hidden_size = 5>(x, w, r, b)", "float[T, N, 4] x",
                     "float[T, 1, N, 5] y, float[1, N, 5] last", backwards)  # fmt: skip
    expected, end = map(torch.from_numpy, reference(forward, x.flip(0)))
    torch.testing.assert_close(y[:, -1:], expected.flip(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last[-1:], end, rtol=1e-4, atol=1e-5)


def test_average_pools_with_dilation():
    body = "y = AveragePool<kernel_shape = [2, 3], dilations = [2, 1], pads = [1, 0, 0, 1], ceil_mode = 1>(x)"
    model = parsed(body, "float[1, 2, 6, 7] x", "float[1, 2, A, B] y", opset=19)
    x = torch.randn(1, 2, 6, 7)
    torch.testing.assert_close(fxq.read_onnx(model)(x), torch.from_numpy(reference(model, x)[0]), rtol=1e-5, atol=1e-6)


def test_a_file_that_draws_numbers_is_quantized_and_saved(tmp_path):
    """With the noise of a voice turned down to zero, as its inputs can say."""
    body = "z = RandomNormalLike(x)  n = Mul(z, loud)  h = Add(x, n)  y = MatMul(h, w)"
    model = fxq.read_onnx(parsed(body, "float[N, 2] x, float[1] loud", "float[N, 2] y", {"w": normal(2, 2)}))
    inputs = torch.rand(4, 2), torch.zeros(1)
    qmodel = fxq.quantize(model, fxq.Recipe.static(backend="reference"), data=[inputs], progress=False)
    qmodel.save(tmp_path / "m.fxq")
    assert torch.equal(fxq.load(tmp_path / "m.fxq")(*inputs), qmodel(*inputs))
    assert not torch.equal(qmodel(inputs[0], torch.ones(1)), qmodel(inputs[0], torch.ones(1)))
