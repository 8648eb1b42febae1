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


@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_recurrent_layers_of_any_number_of_steps(op, gates):
    reset = ", linear_before_reset = 1" if op == "GRU" else ""
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
