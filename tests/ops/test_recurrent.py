"""Recurrent layers: the float form against torch.nn, and the form with a quantized state against its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fxq.ops import OPS
from fxq.ops.recurrent import on_affine_grid, on_grid, rows_of_cell

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


def layer(kind, inputs=3, hidden=5, seed=0, **options):
    """Module of one layer, and its weights and biases by their names in the op."""
    torch.manual_seed(seed)
    module = KINDS[kind](inputs, hidden, **options).eval()
    tensors = {name.removesuffix("_l0"): p.detach() for name, p in module.named_parameters() if name.endswith("_l0")}
    return module, tensors


def call(kind, x, tensors, **options):
    """The op on the module's tensors."""
    return OPS[kind].target(x, **tensors, **options)


SIZES = st.integers(1, 5)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(KINDS)), SIZES, SIZES, SIZES, SIZES, st.booleans(), st.booleans(), st.integers(0, 3))
def test_is_the_module(kind, steps, samples, inputs, hidden, bias, states, proj):
    options = {"proj_size": proj} if kind == "lstm" and proj < hidden else {}
    module, tensors = layer(kind, inputs, hidden, bias=bias, **options)
    width = options.get("proj_size") or hidden
    x, h, c = torch.randn(steps, samples, inputs), torch.randn(samples, width), torch.randn(samples, hidden)
    given_ = {"h": h, **({"c": c} if kind == "lstm" else {})} if states else {}
    pair = (h[None], c[None]) if kind == "lstm" else h[None]
    with torch.no_grad():
        y, last = module(x, pair) if states else module(x)
        torch.testing.assert_close(call(kind, x, {**tensors, **given_}), y, rtol=1e-5, atol=1e-6)
        fine = call(kind, x, {**tensors, **given_}, state_qmax=2**22)
        torch.testing.assert_close(fine, y, rtol=1e-4, atol=1e-5)
        reverse = call(kind, x.flip(0), {**tensors, **given_}, reverse=True)
        torch.testing.assert_close(reverse, y.flip(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            call(kind, x.flip(0), {**tensors, **given_}, reverse=True, state_qmax=2**22), fine.flip(0)
        )
        if kind == "lstm":
            for qmax in (0, 2**22):
                both = call(kind, x, {**tensors, **given_}, cell=True, state_qmax=qmax)
                torch.testing.assert_close(both[:steps], y, rtol=1e-4, atol=1e-5)
                cell = both[steps:].transpose(0, 1).flatten(1)
                assert both.shape == (steps + -(-hidden // width), samples, width)
                torch.testing.assert_close(cell[:, :hidden], last[1][0], rtol=1e-4, atol=1e-5)
                assert not cell[:, hidden:].any()


@pytest.mark.parametrize("name", ["tanh", "relu"])
@pytest.mark.parametrize("steps", [1, 4])
def test_nonlinearity(name, steps):
    module, tensors = layer("rnn", nonlinearity=name)
    x = torch.randn(steps, 2, 3)
    with torch.no_grad():
        for qmax, close in ((0, 1e-6), (2**22, 1e-5)):
            y = call("rnn", x, tensors, nonlinearity=name, state_qmax=qmax)
            torch.testing.assert_close(y, module(x)[0], rtol=close, atol=close)


def test_each_step_reads_a_rounded_state():
    """The second step of an LSTM, computed by hand in float64."""
    _, tensors = layer("lstm")
    x = torch.randn(2, 4, 3)
    y = call("lstm", x, tensors, state_qmax=7, cell=True)
    first, cell = call("lstm", x[:1], tensors, cell=True)
    steps = first.abs().amax(1, keepdim=True) / 7
    rounded = (first / steps).round() * steps
    assert not torch.allclose(rounded, first, atol=1e-3)
    torch.testing.assert_close(y[1:], call("lstm", x[1:], {**tensors, "h": rounded, "c": cell}, cell=True))


def test_a_grid():
    h = torch.tensor([[0.1, -0.34, 1.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(on_grid(h, 10, None), torch.tensor([[0.1, -0.3, 1.0], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(on_grid(h, 2, 0.2), torch.tensor([[0.0, -0.4, 0.4], [0.0, 0.0, 0.0]]))


def test_a_grid_with_a_zero_point():
    """Computed by hand: three steps from -1 to 2 for all samples; the range includes 0."""
    h = torch.tensor([[-1.0, 0.4, 0.6], [0.0, 0.0, 0.0], [2.0, 1.4, 1.0]])
    wanted = torch.tensor([[-1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [2.0, 1.0, 1.0]])
    torch.testing.assert_close(on_affine_grid(h, 3), wanted)
    torch.testing.assert_close(on_affine_grid(h[2:] + 1, 3), torch.tensor([[3.0, 2.0, 2.0]]))
    assert torch.equal(on_affine_grid(torch.zeros(2, 3), 3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="has a dynamic scale"):
        on_affine_grid(h, 3, 0.1)


def test_each_step_reads_a_state_rounded_from_a_zero_point():
    _, tensors = layer("lstm")
    x = torch.randn(2, 4, 3)
    y = call("lstm", x, tensors, state_qmax=7, state_affine=True)
    first, cell = call("lstm", x[:1], tensors, cell=True)
    low, high = first.amin().clamp(max=0), first.amax().clamp(min=0)
    scale = (high - low) / 7
    zero = (-low / scale).round()
    rounded = (((first / scale).round() + zero).clamp(0, 7) - zero) * scale
    assert not torch.allclose(rounded, first, atol=1e-3)
    wanted = call("lstm", x[1:], {**tensors, "h": rounded, "c": cell})
    torch.testing.assert_close(y[1:], wanted, rtol=1e-5, atol=1e-6)


def test_rows_of_a_cell():
    c = torch.arange(10.0).reshape(2, 5)
    assert rows_of_cell(c, 2).tolist() == [[[0, 1], [5, 6]], [[2, 3], [7, 8]], [[4, 0], [9, 0]]]
    assert torch.equal(rows_of_cell(c, 5), c[None])


def test_multiply_accumulates():
    macs = OPS["lstm"].macs
    assert macs((7, 2, 5), (7, 2, 3), (20, 3), (20, 5)) == 7 * 2 * (20 * 3 + 20 * 5)
    assert macs((7, 2, 4), (7, 2, 3), (20, 3), (20, 4), None, None, None, None, (4, 5)) == 14 * (60 + 80 + 20)
    assert macs((7, 2, 4), (7, 2, 3), (20, 3), (20, 4), (20,), (20,), (2, 4), (2, 5)) == 14 * (60 + 80)
