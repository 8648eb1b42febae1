"""propagate: conversions move through ops that only move data, and cancel."""

import pytest
import torch

import fxq
from fxq.passes import Propagate
from tests.support.graphs import drawn, expected, program, run_pass

CHAIN = """
    x: float32[2, 3, 4] = input()
    x_q = quantize(x, scale=0.5, zero_point=3)
    x_dq = dequantize(x_q, scale=0.5, zero_point=3)
    turned = transpose(x_dq, dim0=1, dim1=2)  # plan=Plan(Decision('moves'))
    flat = reshape(turned, shape=(2, 12))  # plan=Plan(Decision('moves'))
    flat_q = quantize(flat, scale=0.5, zero_point=3)
    flat_dq = dequantize(flat_q, scale=0.5, zero_point=3)
    return flat_dq
"""


def test_a_chain_of_movements():
    gm = run_pass(Propagate(), CHAIN)
    assert program(gm) == expected("""
        x: float32[2, 3, 4] = input()
        x_q: uint8[2, 3, 4] = quantize(x, scale=0.5, zero_point=3)
        turned: uint8[2, 4, 3] = transpose(x_q, dim0=1, dim1=2)
        flat: uint8[2, 12] = reshape(turned, shape=(2, 12))
        flat_dq: float32[2, 12] = dequantize(flat, scale=0.5, zero_point=3)
        return flat_dq
    """)
    x = torch.randn(2, 3, 4)
    assert torch.equal(gm(x), fxq.extend.read_graph(CHAIN, {})(x))


def test_a_float_reader_keeps_its_dequantize():
    gm = run_pass(Propagate(), CHAIN.replace("return flat_dq", "erf = torch.erf(turned)\n    return (flat_dq, erf)"))
    assert program(gm) == expected("""
        x: float32[2, 3, 4] = input()
        x_q: uint8[2, 3, 4] = quantize(x, scale=0.5, zero_point=3)
        turned: uint8[2, 4, 3] = transpose(x_q, dim0=1, dim1=2)
        turned_dq: float32[2, 4, 3] = dequantize(turned, scale=0.5, zero_point=3)
        flat: uint8[2, 12] = reshape(turned, shape=(2, 12))
        flat_dq: float32[2, 12] = dequantize(flat, scale=0.5, zero_point=3)
        erf = torch.erf(turned_dq)
        return (flat_dq, erf)
    """)


@pytest.mark.parametrize("call", ["relu(x_dq)", "max_pool2d(x_dq, kernel_size=(2, 2), stride=(2, 2))"])
def test_what_does_more_than_move_stays(call):
    """relu and max pooling change values in an order that only whole units and kernels can keep."""
    run = f"""
        x: float32[2, 3, 4, 4] = input()
        x_q: uint8[2, 3, 4, 4] = quantize(x, scale=0.5, zero_point=3)
        x_dq: float32[2, 3, 4, 4] = dequantize(x_q, scale=0.5, zero_point=3)
        y = {call}  # plan=Plan(Decision('moves'))
        y_q = quantize(y, scale=0.5, zero_point=3)
        return y_q
    """
    assert program(run_pass(Propagate(), run)) == program(fxq.extend.read_graph(run, {}))


@pytest.mark.parametrize("other", ["scale=0.5, zero_point=4", "scale=0.25, zero_point=3"])
def test_a_cat_of_two_grids_stays(other):
    run = f"""
        a: uint8[2, 3] = input()
        b: uint8[2, 3] = input()
        a_dq: float32[2, 3] = dequantize(a, scale=0.5, zero_point=3)
        b_dq: float32[2, 3] = dequantize(b, {other})
        cat: float32[4, 3] = cat([a_dq, b_dq])  # plan=Plan(Decision('moves'))
        return cat
    """
    assert program(run_pass(Propagate(), run)) == program(fxq.extend.read_graph(run, {}))
    together = run_pass(Propagate(), run.replace(other, "scale=0.5, zero_point=3"))
    assert "cat: uint8[4, 3] = cat([a, b])" in program(together)


@pytest.mark.parametrize(
    ("call", "up"),
    [
        ("interpolate(x, scale_factor=2)", True),  # four times as many values after it
        ("interpolate(x, scale_factor=0.5)", False),
        ("transpose(x, dim0=2, dim1=3)", False),
        ("interpolate(x, scale_factor=2, mode='bilinear')", False),  # arithmetic
    ],
)
def test_quantize_moves_up_where_there_are_fewer_values(call, up):
    """Through an op that computes in float."""
    before = f"""
        x: float32[2, 3, 4, 4] = input()
        y = {call}
        y_q = quantize(y, scale=0.5, zero_point=3)
        y_dq = dequantize(y_q, scale=0.5, zero_point=3)
        return y_dq
    """
    gm = run_pass(Propagate(), before)
    shown = [line.partition(" = ")[2] for line in program(gm).splitlines()[1:3]]
    quantize = "quantize({}, scale=0.5, zero_point=3)".format
    assert shown == ([quantize("x"), call.replace("(x", "(x_q")] if up else [call, quantize("y")])
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(gm(x), fxq.extend.read_graph(before, {})(x))


PAIR = """
    q: uint8[2, 3] = input()
    first = dequantize(q, scale=0.5, zero_point=3)
    second = quantize(first, scale={}, zero_point=3)
    dq = dequantize(second, scale={}, zero_point=3)
    return dq
"""


@pytest.mark.parametrize(
    ("scale", "wanted"),
    [
        (0.5, ["dq: float32[2, 3] = dequantize(q, scale=0.5, zero_point=3)"]),
        (
            0.75,
            [
                "requantize: uint8[2, 3] = requantize(q, from_scale=0.5, from_zero_point=3, scale=0.75, zero_point=3)",
                "dq: float32[2, 3] = dequantize(requantize, scale=0.75, zero_point=3)",
            ],
        ),
    ],
)
def test_pairs_cancel_or_become_one_requantize(scale, wanted):
    """A quantize after a dequantize: a pair that the pipeline itself does not insert with two grids."""
    before = PAIR.format(scale, scale)
    gm = run_pass(Propagate(), before)
    assert program(gm).splitlines() == ["q: uint8[2, 3] = input()", *wanted, "return dq"]
    q = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    assert torch.equal(gm(q), fxq.extend.read_graph(before, {})(q))


ROWS = """
    x: float32[2, 3] = input()
    s: float32[2, 1] = tensor('s')
    other: float32[2, 1] = tensor('other')
    z: int32[2, 1] = tensor('z')
    x_q: uint8[2, 3] = quantize(x, scale=s, zero_point=z)
    x_dq: float32[2, 3] = dequantize(x_q, scale=s, zero_point=z)
    y: uint8[2, 3] = quantize(x_dq, scale={}, zero_point=z)
    return y
"""
GRIDS = {
    "s": torch.tensor([[0.1], [0.2]]),
    "other": torch.tensor([[0.3], [0.1]]),
    "z": torch.full((2, 1), 7, dtype=torch.int32),
}


@pytest.mark.parametrize(("scale", "cancels"), [("s", True), ("other", False)])
def test_a_pair_with_scales_that_the_graph_holds_cancels_or_stays(scale, cancels):
    """requantize takes numbers."""
    before = ROWS.format(scale)
    gm = run_pass(Propagate(), before, GRIDS)
    assert "requantize" not in program(gm) and ("dequantize" not in program(gm)) is cancels
    x = torch.randn(2, 3)
    assert torch.equal(gm(x), fxq.extend.read_graph(before, GRIDS)(x))


def test_quantize_with_a_scale_for_each_row_stays_after_changes_of_rows():
    before = """
        x: float32[2, 3] = input()
        s: float32[4, 1, 1] = tensor('s')
        z: int32[4, 1, 1] = tensor('z')
        y: float32[4, 2, 3] = expand(x, sizes=(4, 2, 3))
        y_q: uint8[4, 2, 3] = quantize(y, scale=s, zero_point=z)
        return y_q
    """
    assert program(run_pass(Propagate(), before)) == program(fxq.extend.read_graph(before, drawn(before)))
