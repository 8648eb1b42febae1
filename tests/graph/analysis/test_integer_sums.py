"""The bound of integer sums: never below a sum, and no higher than the largest one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxq
from fxq.graph.analysis.integer_sums import MAX_INT32, beyond_int32, largest_sum, node_largest_sum, node_refused
from fxq.quant.qparams import QParams

FITS = MAX_INT32 // (127 * 255)
"""Number of products of the largest integers that fit in int32."""
UINT8 = "scale=0.5, zero_point=3, qmin=0, qmax=255"
GRIDS = st.sampled_from([(0, 255), (0, 127), (1, 255), (-128, 127), (-127, 127)])


@settings(deadline=None)
@given(st.data())
def test_no_sum_is_larger_and_one_is_as_large(data):
    """Covers all partial sums, of raw integers or with any zero point subtracted; the worst input reaches the bound."""
    low, high = data.draw(GRIDS)
    integers = st.lists(st.integers(-128, 127), min_size=4, max_size=4)
    row = torch.tensor(data.draw(integers), dtype=torch.int8).repeat(3)
    few = data.draw(st.lists(st.integers(low, high), min_size=4, max_size=4))
    x, zero = torch.tensor(few).repeat(3), data.draw(st.integers(low, high))
    exact = torch.zeros(1)  # with a bias, the bound reads the weights, even if they are few
    bound = largest_sum(row[None], QParams.per_tensor(0.1, zero, low, high), exact)
    for given_x in (x, x - zero, x - low):
        assert (given_x * row.long()).cumsum(0).abs().max() <= bound
    ends = [torch.where(row.sign() == sign, high if low >= 0 else high - low, 0) for sign in (1, -1)]
    assert max(abs(int((end * row.long()).sum())) for end in ends) == bound


def test_the_bias_counts():
    rows, x = torch.full((2, 3), 100, dtype=torch.int8), QParams.per_tensor(0.1, 7)
    bias = torch.tensor([-5.0, MAX_INT32 - 3 * 100 * 255], dtype=torch.float64)
    assert largest_sum(rows, x, bias) == MAX_INT32 and beyond_int32(largest_sum(rows, x, bias)) is None
    assert beyond_int32(largest_sum(rows, x, bias + 1)) == "its sums can reach 2.1e+09, beyond int32 (2.1e+09)"


LAYERS = {
    "linear": ("linear(x_dq, w_dq)", (2, FITS), 0),
    "what is moved": ("linear(x_moved, w_dq)", (2, FITS), 0),
    "conv1d": ("conv1d(x_dq, w_dq, stride=(1,), padding=(0,), dilation=(1,))", (2, FITS // 7, 7), 0),
    "conv2d": ("conv2d(x_dq, w_dq, groups=2)", (2, FITS, 1, 1), 0),
    "conv_transpose1d": ("conv_transpose1d(x_dq, w_dq)", (FITS, 2, 1), 1),
    "conv_transpose2d": ("conv_transpose2d(x_dq, w_dq, groups=2)", (2 * FITS, 1, 1, 1), 1),
}


def layer(call, sizes, axis, grid=UINT8):
    """A layer of the qdq graph."""
    return f"""
        x: float32[1, 4] = input()
        w: int8[{", ".join(map(str, sizes))}] = tensor('w')
        s: float32[{sizes[axis]}] = tensor('s')
        w_dq = dequantize(w, scale=s, zero_point=0, qmin=-128, qmax=127, axis={axis})
        x_q: uint8[1, 4] = quantize(x, {grid})
        x_dq: float32[1, 4] = dequantize(x_q, {grid})
        x_moved = reshape(x_dq, shape=(4, 1))
        y = {call}
        return y
    """


def of(program, **tensors):
    """The graph, and its node `y`."""
    gm = fxq.extend.read_graph(program, tensors)
    return gm, next(node for node in gm.graph.nodes if node.name == "y")


@pytest.mark.parametrize(("call", "sizes", "axis"), LAYERS.values(), ids=LAYERS)
def test_layers(call, sizes, axis):
    """66,311 products of -127 and 255 are within int32, with seven of -128 too; with eight they are not."""
    weight = torch.full(sizes, -127, dtype=torch.int8)
    first = weight.movedim(axis, 0)[0].view(-1) if axis == 0 else weight[: sizes[0] // (1 if sizes[1] == 2 else 2), 0]
    for count, largest in ((7, 2_147_483_520), (8, 2_147_483_775)):
        first.view(-1)[:count] = -128
        gm, node = of(layer(call, sizes, axis), w=weight, s=torch.ones(sizes[axis]))
        assert node_largest_sum(gm, node) == largest
        assert (node_refused(gm, node) is None) is (largest <= MAX_INT32)


@pytest.mark.parametrize(
    ("measures", "grid"),
    [
        ("", UINT8),
        ("", "scale=0.5, zero_point=0, qmin=-128, qmax=127"),  # some kernels shift it to start at zero
        ("scale = choose_scale(x, steps=255, axis=-1)", "scale=scale, zero_point=128, qmin=0, qmax=255"),
    ],
    ids=["static", "signed", "measured"],
)
def test_grids(measures, grid):
    program = layer("linear(x_dq, w_dq)", (1, FITS), 0, grid).replace("        x_q", f"        {measures}\n        x_q")
    for value, largest in ((127, 2_147_481_735), (-128, 2_164_391_040)):
        gm, node = of(program, w=torch.full((1, FITS), value, dtype=torch.int8), s=torch.ones(1))
        assert node_largest_sum(gm, node) == largest


TWO = f"""
    x: float32[2, {{depth}}] = input()
    other: float32[{{depth}}, 3] = input()
    b: float32[3] = input()
    x_q: uint8[2, {{depth}}] = quantize(x, {UINT8})
    x_dq: float32[2, {{depth}}] = dequantize(x_q, {UINT8})
    other_q = quantize(other, {UINT8})
    other_dq = dequantize(other_q, {UINT8})
    y = {{call}}
    return y
"""


@pytest.mark.parametrize(
    ("call", "most"),
    [
        ("matmul(x_dq, other_dq)", 33025),
        ("addmm(b, x_dq, other_dq)", 33025),
        ("mean(x_dq, dim=(1,))", 8421504),
        ("sum(x_dq, dim=-1)", 8421504),
        ("adaptive_avg_pool1d(x_dq, output_size=(1,))", 8421504),
        ("avg_pool1d(x_dq, kernel_size=({depth},), stride=(1,))", 8421504),
    ],
)
def test_products_and_sums_of_activations(call, most):
    for depth in (most, most + 1):
        gm, node = of(TWO.format(depth=depth, call=call.format(depth=depth)))
        assert (node_refused(gm, node) is None) is (depth == most)


def test_what_is_not_added_does_not_count():
    gm, node = of(TWO.format(depth=10**9, call="mean(x_dq, dim=0)"))
    assert node_largest_sum(gm, node) == 2 * 255


def test_what_reads_floats_adds_none():
    gm, node = of(TWO.format(depth=10**6, call="matmul(x_dq, other)"))
    assert node_largest_sum(gm, node) == 0.0


def test_recurrent_layers():
    """Both products of a recurrent layer count: with the input, and with the state on its own grid."""
    program = f"""
        x: float32[2, 3, {FITS}] = input()
        a: int8[1, {FITS}] = tensor('a')
        b: int8[1, 1] = tensor('b')
        a_dq = dequantize(a, scale=0.5, zero_point=0, qmin=-128, qmax=127)
        b_dq = dequantize(b, scale=0.5, zero_point=0, qmin=-128, qmax=127)
        x_q = quantize(x, {UINT8})
        x_dq = dequantize(x_q, {UINT8})
        y = rnn(x_dq, a_dq, b_dq, state_qmax=127)
        return y
    """
    for value, largest in ((127, 2_147_481_735), (-128, 2_164_391_040)):
        ones = torch.full((1, FITS), value, dtype=torch.int8)
        gm, node = of(program, a=ones, b=torch.ones(1, 1, dtype=torch.int8))
        assert node_largest_sum(gm, node) == largest
