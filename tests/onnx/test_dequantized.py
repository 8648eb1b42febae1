"""Weights and biases of integer layers in ONNX."""

from __future__ import annotations

import pytest
import torch

from fxq.onnx.dequantized import bias_for, dequantize_node, is_dequantized, transposed, weight_for
from fxq.onnx.writer import Value, Writer
from tests.support.onnx_runs import normal, run_onnxruntime, weight

pytestmark = pytest.mark.any_cpu

LIKE = torch.empty(2, 4, device="meta")


def integers(w: Writer, *shape: int, scale: torch.Tensor, **attributes: int) -> Value:
    q = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(0)).to(torch.int8)
    zero = torch.zeros(scale.shape, dtype=torch.int8)
    return Value(w.emit("DequantizeLinear", q, scale, zero, **attributes), torch.empty(shape, device="meta"))


def activation(w: Writer, scale: float) -> Value:
    q = w.input("q", LIKE.to(torch.uint8))
    return Value(w.emit("DequantizeLinear", q, torch.tensor(scale), torch.tensor(9, dtype=torch.uint8)), LIKE)


def named(w: Writer, tensor: torch.Tensor) -> Value:
    return Value(w.constant(tensor), tensor.to("meta"))


def kind(w: Writer, operand: object) -> str:
    """Op type of the node that computes an operand, or "constant"."""
    node = w.producer(w.name_of(operand))
    return node.op_type if node is not None else "constant"


@pytest.mark.parametrize(
    ("scale", "kinds"),
    [(0.5, "DequantizeLinear"), (1e-12, "constant"), (1e-38, "constant")],
    ids=["fits", "large", "tiny"],
)  # fmt: skip
def test_a_bias_is_in_int32_where_it_fits(scale, kinds):
    w = Writer()
    x, matrix = activation(w, scale), integers(w, 3, 4, scale=torch.tensor([0.1, 0.2, 0.3]), axis=0)
    bias = torch.tensor([1.0, -2.0, 0.26])
    read = bias_for(w, x, matrix, named(w, bias))
    assert kind(w, read) == kinds
    like = torch.empty(3, device="meta")
    (got,) = run_onnxruntime(w.model([Value(w.name_of(read), like)]), [])
    half_a_step = scale * torch.tensor([0.1, 0.2, 0.3]) / 2 if kinds == "DequantizeLinear" else torch.zeros(3)
    assert bool(((got - bias).abs() <= half_a_step * 1.001).all())


def test_a_bias_is_in_float_where_a_part_of_its_grid_is_missing():
    w = Writer()
    x, bias = activation(w, 0.5), named(w, torch.ones(6))
    in_groups = integers(w, 4, 3, 1, 1, scale=torch.ones(3), axis=1)  # a transposed convolution of 2 groups
    in_blocks = integers(w, 6, 4, scale=torch.ones(6, 2), axis=1, block_size=2)
    per_channel = integers(w, 6, 4, scale=torch.ones(6), axis=0)
    real = w.input("x", LIKE)
    for read, matrix in ((x, in_groups), (x, in_blocks), (real, per_channel), (x, named(w, normal(6, 4)))):
        assert bias_for(w, read, matrix, bias) is bias
    assert bias_for(w, x, per_channel, None) is None
    assert kind(w, bias_for(w, x, per_channel, bias)) == "DequantizeLinear"
    w.integer_bias = False
    assert bias_for(w, x, per_channel, bias) is bias


def test_two_layers_have_a_bias_on_the_grids_of_their_inputs():
    w = Writer()
    matrix, bias = integers(w, 3, 4, scale=torch.ones(3), axis=0), named(w, torch.full((3,), 0.5))
    names = [w.name_of(bias_for(w, activation(w, scale), matrix, bias)) for scale in (1.0, 0.125)]
    likes = [Value(name, torch.empty(3, device="meta")) for name in names]
    got = run_onnxruntime(w.model(likes), [])
    assert [float(y[0]) for y in got] == [0.0, 0.5]  # half a step of 1.0 rounds to even


def test_a_weight_beside_floats_is_a_constant_in_float():
    w = Writer()
    scale = torch.tensor([0.5, 1.0, 2.0])
    matrix = integers(w, 3, 4, scale=scale, axis=0)
    real = weight_for(w, w.input("x", LIKE), matrix)
    assert isinstance(real, torch.Tensor) and real is weight_for(w, w.input("y", LIKE), matrix)
    (q,) = (w.constant_of(name) for name in w.producer(matrix.name).inputs[:1])
    assert torch.equal(real, q.float() * scale[:, None])
    blocks = integers(w, 3, 4, scale=torch.ones(3, 2), axis=1, block_size=2)
    assert weight_for(w, w.input("z", LIKE), blocks) is blocks


def test_layers_that_share_a_weight_have_integers_of_their_own():
    w = Writer()
    x, matrix = activation(w, 0.5), integers(w, 3, 4, scale=torch.ones(3), axis=0)
    first, second = weight_for(w, x, matrix), weight_for(w, x, matrix)
    assert first is matrix and second is not matrix
    first_node, second_node = dequantize_node(w, first), dequantize_node(w, second)
    assert not set(first_node.node.inputs[::2]) & set(second_node.node.inputs[::2])
    assert torch.equal(*(w.constant_of(node.node.inputs[0]) for node in (first_node, second_node)))


def test_a_matrix_is_turned_where_it_is_stored():
    w = Writer()
    stored = weight(3, 4)
    assert torch.equal(w.constant_of(transposed(w, stored)), stored.t())
    assert transposed(w, stored) == transposed(w, named(w, stored))
    channels = w.producer(transposed(w, integers(w, 3, 4, scale=torch.ones(3), axis=0)))
    assert channels.op_type == "DequantizeLinear" and channels.attributes == {"axis": 1}
    assert w.constant_of(channels.inputs[0]).shape == (4, 3)
    blocks = w.producer(transposed(w, integers(w, 3, 4, scale=torch.ones(3, 2), axis=1, block_size=2)))
    assert blocks.attributes == {"axis": 0, "block_size": 2} and w.constant_of(blocks.inputs[1]).shape == (2, 3)
    assert kind(w, transposed(w, w.input("x", LIKE))) == "Transpose"


def test_integers_that_were_moved_are_integers_still():
    w = Writer()
    q = w.emit(
        "QuantizeLinear",
        w.input("x", LIKE),
        w.constant(torch.tensor(0.1)),
        w.constant(torch.tensor(3, dtype=torch.uint8)),
    )
    real = w.emit("DequantizeLinear", q, w.constant(torch.tensor(0.1)), w.constant(torch.tensor(3, dtype=torch.uint8)))
    moved = w.emit("Reshape", w.emit("Transpose", real, perm=[1, 0]), w.ints([-1]))
    assert is_dequantized(w, Value(real, LIKE)) and is_dequantized(w, Value(moved, LIKE))
    for name in ("x", q, w.emit("Relu", real)):
        assert not is_dequantized(w, Value(name, LIKE))


def test_a_bias_leaves_room_for_the_products():
    """Four products of 127 and 255 plus the bias just fit int32; with one step more, or transposed, they do not."""
    room = 2**31 - 1 - 4 * 127 * 255
    for steps, kinds in ((room, "DequantizeLinear"), (room + 1, "constant")):
        w = Writer()
        q, scale = torch.full((3, 4), -127, dtype=torch.int8), torch.full((3,), 2.0**-20)
        zero = torch.zeros(3, dtype=torch.int8)
        matrix = Value(w.emit("DequantizeLinear", q, scale, zero, axis=0), torch.empty(3, 4, device="meta"))
        turned = Value(w.emit("DequantizeLinear", q.t().contiguous(), scale, zero, axis=1), matrix.like.t())
        bias = named(w, torch.tensor([0, -steps, 5], dtype=torch.float64) * 2.0**-20)
        x = activation(w, 1.0)
        assert [kind(w, bias_for(w, x, matrix, bias)), kind(w, bias_for(w, x, turned, bias, 1))] == [kinds, kinds]
