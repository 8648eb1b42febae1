"""insert-qdq: observers become quantize and dequantize, weights become integers."""

import numpy as np
import pytest
import torch
from torch import nn

import fxq
from fxq.backends.reference import Reference
from fxq.common.metrics import sqnr
from fxq.graph.query import argument, is_op
from fxq.passes import InsertQdq
from tests.support.graphs import expected, node, program, run_pass, text, until
from tests.support.helpers import REFERENCE
from tests.support.models import settled

W = "TensorSpec(signed=True, symmetric=True, per='channel')"
INT8 = f"plan=Plan(Decision('int8'), reads=TensorSpec(), weight={W})"
MOVES = "plan=Plan(Decision('moves'), reads=TensorSpec())"


def edge(scale, zero_point=0, spec="TensorSpec()", qmax=255):
    """An edge whose grid is chosen."""
    grid = f"QParams(scale={scale}, zero_point={zero_point}, qmin=0, qmax={qmax}, dtype=torch.uint8)"
    return f"Edge({spec}, 0, True, True, qparams={grid})"


def weight(scale="[0.01, 0.02, 0.03, 0.04]", zero_point="[0, 0, 0, 0]", axis=0):
    """The edge of a weight."""
    grid = f"QParams(scale={scale}, zero_point={zero_point}, qmin=-127, qmax=127, dtype=torch.int8, axis={axis})"
    return f"edges=(Edge({W}, 0, True, True, axis={axis}, qparams={grid}),)"


TWICE = f"""
    modules['seen.x'] = observer(spec=TensorSpec())
    modules['seen.a'] = observer(spec=TensorSpec())

    x: float32[5, 4] = input()  # edges=({edge(0.5, 3)},)
    x_observer: float32[5, 4] = modules['seen.x'](x)
    w: float32[4, 4] = tensor('a.weight')  # {weight()}
    b: float32[4] = tensor('a.bias')
    a = linear(x_observer, w, b)  # 'a', edges=({edge(0.25, 2)},), {INT8}
    a_observer: float32[5, 4] = modules['seen.a'](a)
    again = linear(a_observer, w, b)  # 'a', {INT8}
    return again
"""


def test_text_before_and_after():
    """A weight that two layers read is quantized once."""
    gm = run_pass(InsertQdq(), TWICE)
    assert program(gm) == expected("""
        x: float32[5, 4] = input()
        x_q: uint8[5, 4] = quantize(x, scale=0.5, zero_point=3)
        x_dq: float32[5, 4] = dequantize(x_q, scale=0.5, zero_point=3)
        a_weight_int8: int8[4, 4] = tensor('fxq_data.a_weight_int8')
        a_weight_scale: float32[4] = tensor('fxq_data.a_weight_scale')
        a_weight_zero_point: int32[4] = tensor('fxq_data.a_weight_zero_point')
        a_weight_dq: float32[4, 4] = dequantize(a_weight_int8, scale=a_weight_scale, zero_point=a_weight_zero_point, \
qmin=-127, qmax=127, axis=0)
        b: float32[4] = tensor('a.bias')
        a: float32[5, 4] = linear(x_dq, a_weight_dq, b)
        a_q: uint8[5, 4] = quantize(a, scale=0.25, zero_point=2)
        a_dq: float32[5, 4] = dequantize(a_q, scale=0.25, zero_point=2)
        again: float32[5, 4] = linear(a_dq, a_weight_dq, b)
        return again
    """)


def test_the_numbers_are_those_of_the_grids():
    """Two layers by hand in float64."""
    weight, bias = torch.randn(4, 4), torch.randn(4)
    gm, x = run_pass(InsertQdq(), TWICE, {"a.weight": weight, "a.bias": bias}), torch.randn(5, 4) * 9

    def on_grid(value, scale, zero):
        return ((torch.round(value / scale) + zero).clamp(0, 255) - zero) * scale

    steps = torch.tensor([[0.01], [0.02], [0.03], [0.04]])
    integers = torch.round(weight.double() / steps).clamp(-127, 127)
    first = on_grid(x.double(), 0.5, 3) @ (integers * steps).T + bias
    wanted = on_grid(first, 0.25, 2) @ (integers * steps).T + bias
    torch.testing.assert_close(gm(x).double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(gm.fxq_data.a_weight_int8.double(), integers)


def test_weights_per_tensor():
    written = TWICE.replace(weight(), weight("0.5", "0", None).replace(W, W.replace("channel", "tensor")))
    gm = run_pass(InsertQdq(), written.replace("channel", "tensor"))
    (line,) = [line for line in program(gm).splitlines() if line.startswith("a_weight_dq: ")]
    assert line.endswith(" = dequantize(a_weight_int8, scale=0.5, zero_point=0, qmin=-127, qmax=127)")


ALONE = """
    x: float32[5, 5] = input()
    w: float32[4, 5] = tensor('a.weight')  # edges=(Edge({spec}, 0, True, True, axis={axis}, qparams={grid}),)
    a = linear(x, w)  # 'a', plan=Plan(Decision('weight-only'), weight={spec})
    return a
"""


def test_a_weight_of_four_bits_in_blocks_is_packed():
    grid = f"QParams(scale={[[0.5, 1.0]] * 4}, zero_point={[[3, 8]] * 4}, qmin=0, qmax=15, dtype=torch.uint8, axis=1"
    grid += ", block=4)"
    real = torch.tensor([[0.5, -1.5, 6.0, 0.2, 7.0]]).expand(4, 5)
    gm = run_pass(InsertQdq(), ALONE.format(spec="TensorSpec(bits=4, per=4)", axis=1, grid=grid), {"a.weight": real})
    assert program(gm) == expected("""
        x: float32[5, 5] = input()
        a_weight_int4: uint8[4, 3] = tensor('fxq_data.a_weight_int4')
        a_weight_scale: float16[4, 2] = tensor('fxq_data.a_weight_scale')
        a_weight_zero_point: uint8[4, 2] = tensor('fxq_data.a_weight_zero_point')
        a_weight_dq: float32[4, 5] = dequantize(a_weight_int4, scale=a_weight_scale, zero_point=a_weight_zero_point, \
qmax=15, axis=1, block=4, packed=(5,))
        a: float32[5, 4] = linear(x, a_weight_dq)
        return a
    """)
    assert gm.fxq_data.a_weight_int4[0].tolist() == [4 | 3 << 4, 0 | 15 << 4, 15]
    x = torch.randn(5, 5)
    torch.testing.assert_close(gm(x), x @ torch.tensor([[0.5, -1.5, 6.0, 0.0, 7.0]]).expand(4, 5).T)


def test_a_weight_of_three_bits_is_packed_with_three():
    """And one of seven is not packed."""
    grid = "QParams(scale=[0.5, 0.5, 0.5, 0.5], zero_point=[0, 0, 0, 0], qmin=-{0}, qmax={0}, dtype=torch.int8, axis=0)"
    spec, real = "TensorSpec(bits={}, signed=True, symmetric=True, per='channel')", torch.randint(-3, 4, (4, 5)) / 2
    source = ALONE.format(spec=spec.format(3), axis=0, grid=grid.format(3))
    gm = run_pass(InsertQdq(), source, {"a.weight": real})
    assert "a_weight_int3: uint8[4, 3] = tensor('fxq_data.a_weight_int3')" in program(gm)  # planes of 2 and of 1 bit
    assert "qmin=-3, qmax=3, axis=0, packed=(5,), bits=3)" in program(gm)
    x = torch.randn(5, 5)
    assert torch.equal(gm(x), x @ real.T)
    gm = run_pass(InsertQdq(), ALONE.format(spec=spec.format(7), axis=0, grid=grid.format(63)), {"a.weight": real})
    assert "a_weight_int8: int8[4, 5]" in program(gm) and "packed" not in program(gm)


@pytest.mark.parametrize(("size", "stored"), [(1.0, torch.float16), (1e-5, torch.float32)])
def test_integers_are_those_of_the_scales_that_are_stored(size, stored):
    """Scales of blocks are rounded to float16 first, except where it has too few digits for one of them."""
    steps = (size * torch.tensor([0.30001, 1.0007])).tolist()
    grid = f"QParams(scale={[steps] * 4}, zero_point={[[3, 8]] * 4}, qmin=0, qmax=15, dtype=torch.uint8, axis=1"
    grid += ", block=4)"
    torch.manual_seed(0)
    real = size * torch.randn(4, 5)
    gm = run_pass(InsertQdq(), ALONE.format(spec="TensorSpec(bits=4, per=4)", axis=1, grid=grid), {"a.weight": real})
    assert gm.fxq_data.a_weight_scale.dtype == stored
    scale = gm.fxq_data.a_weight_scale.double().numpy().repeat(4, 1)[:, :5]
    zero = np.array([3, 3, 3, 3, 8.0])
    integers = np.clip(np.round(real.double().numpy() / scale) + zero, 0, 15)
    x = torch.randn(5, 5)
    wanted = x.double().numpy() @ ((integers - zero) * scale).T
    np.testing.assert_allclose(gm(x).double().numpy(), wanted, rtol=1e-5, atol=1e-6 * size)


def test_a_weight_in_float16():
    spec = "TensorSpec(format='float16')"
    grid = "QParams(scale=1.0, zero_point=0, qmin=-65504, qmax=65504, dtype=torch.float16)"
    gm = run_pass(InsertQdq(), ALONE.format(spec=spec, axis=None, grid=grid))
    (line,) = [line for line in program(gm).splitlines() if line.startswith("a_weight_dq: ")]
    assert line.endswith(" = dequantize(a_weight_float16, scale=1.0, zero_point=0, qmin=-65504, qmax=65504)")
    assert gm.fxq_data.a_weight_float16.dtype == torch.float16


def test_two_specs_of_one_value_are_two_quantizations_of_it():
    """The finer form is not made from the coarser one, and readers in float read the first, but for those of floats."""
    coarse = "TensorSpec(bits=3)"
    gm = run_pass(
        InsertQdq(),
        f"""
        x: float32[8, 4] = input()
        w: float32[4, 4] = tensor('w')  # {weight()}
        v: float32[4, 4] = tensor('v')  # {weight()}
        y = sigmoid(x)  # edges=({edge(0.5)}, {edge(0.125, 0, coarse, 7)})
        a = linear(y, w)  # {INT8}
        b = linear(y, v)  # plan=Plan(Decision('int8'), reads={coarse}, weight={W})
        erf = torch.erf(y)
        sin = torch.sin(y)  # plan=Plan(Decision('float'), exact=True)
        return (a, b, erf, sin)
        """,
    )
    assert text(gm) == expected("""
        x = input
        w_dq = int8(w, axis=0)
        v_dq = int8(v, axis=0)
        y = sigmoid(x)
        y_q = quantize(y, A)
        y_dq = dequantize(y_q, A)
        y_q_1 = quantize(y, B, qmax=7)
        y_dq_1 = dequantize(y_q_1, B, qmax=7)
        a = linear(y_dq, w_dq)
        b = linear(y_dq_1, v_dq)
        erf = erf(y_dq)
        sin = sin(y)
        return (a, b, erf, sin)
    """)


def test_what_is_moved_together_comes_onto_the_grid_of_the_result():
    gm = run_pass(
        InsertQdq(),
        f"""
        a: float32[2, 3] = input()  # edges=({edge(0.5)},)
        b: float32[2, 3] = input()  # edges=({edge(0.125)},)
        cat = cat([a, b])  # edges=({edge(0.5)},), {MOVES}
        return cat
        """,
    )
    assert program(gm) == expected("""
        a: float32[2, 3] = input()
        b: float32[2, 3] = input()
        b_q: uint8[2, 3] = quantize(b, scale=0.125, zero_point=0)
        b_dq: float32[2, 3] = dequantize(b_q, scale=0.125, zero_point=0)
        b_q_1: uint8[2, 3] = quantize(b_dq, scale=0.5, zero_point=0)
        b_dq_1: float32[2, 3] = dequantize(b_q_1, scale=0.5, zero_point=0)
        a_q: uint8[2, 3] = quantize(a, scale=0.5, zero_point=0)
        a_dq: float32[2, 3] = dequantize(a_q, scale=0.5, zero_point=0)
        cat: float32[4, 3] = cat([a_dq, b_dq_1])
        cat_q: uint8[4, 3] = quantize(cat, scale=0.5, zero_point=0)
        cat_dq: float32[4, 3] = dequantize(cat_q, scale=0.5, zero_point=0)
        return cat_dq
    """)


def test_readers_of_the_shape_read_the_integers():
    gm = run_pass(
        InsertQdq(),
        f"""
        x: float32[2, 3] = input()  # edges=({edge(0.5)},)
        size = x.size(0)
        shape = getattr(x, 'shape')
        flat = reshape(x, shape=(size, -1))  # {MOVES}
        return (flat, shape)
        """,
    )
    assert text(gm) == expected("""
        x = input
        x_q = quantize(x, A)
        x_dq = dequantize(x_q, A)
        size = .size(x_q, 0)
        shape = getattr(x_q, 'shape')
        flat = reshape(x_dq, shape=(size, -1))
        return (flat, shape)
    """)


def test_refuses_an_edge_without_a_grid():
    program = "x: float32[2] = input()  # edges=(Edge(TensorSpec(), 0, True),)\nreturn x"
    with pytest.raises(fxq.PassError, match=r"%x .*its grid is not chosen. Run choose-grids"):
        run_pass(InsertQdq(), program)


ROWS = "TensorSpec(symmetric=True, per='row', range='dynamic')"


def test_a_dynamic_scale_is_a_value_of_the_graph():
    """Readers of another grid, or of floats, read the value itself, not its form on the dynamic grid."""
    measured = f"Edge({ROWS}, 1, True, axis=-1, qparams=DynamicGrid(0, 255, torch.uint8, -1))"
    row = f"plan=Plan(Decision('int8'), reads={ROWS}, weight={W})"
    gm = run_pass(
        InsertQdq(),
        f"""
        modules['seen.x'] = observer(spec=TensorSpec())
        x: float32[5, 4] = input()  # edges=({edge(0.5, 3)}, {measured})
        x_observer: float32[5, 4] = modules['seen.x'](x)
        w: float32[4, 4] = tensor('a.weight')  # {weight()}
        a = linear(x_observer, w)  # {row}
        b = linear(x_observer, w)  # {INT8}
        c = relu(x_observer)
        return (a, b, c)
        """,
    )
    assert program(gm).partition("a_weight_int8")[0].strip() == expected("""
        x: float32[5, 4] = input()
        x_q: uint8[5, 4] = quantize(x, scale=0.5, zero_point=3)
        x_dq: float32[5, 4] = dequantize(x_q, scale=0.5, zero_point=3)
        x_scale: float32[5, 1] = choose_scale(x, steps=127, axis=-1)
        x_q_1: uint8[5, 4] = quantize(x, scale=x_scale, zero_point=128)
        x_dq_1: float32[5, 4] = dequantize(x_q_1, scale=x_scale, zero_point=128)
    """)
    assert [[n.name for n in node(gm, name).all_input_nodes[:1]] for name in "abc"] == [["x_dq_1"], ["x_dq"], ["x_dq"]]


def test_a_dynamic_zero_point_is_a_value_of_the_graph():
    measured = "TensorSpec(per='row', range='dynamic')"
    edge = f"Edge({measured}, 1, True, axis=-1, qparams=DynamicGrid(0, 255, torch.uint8, -1, False))"
    gm = run_pass(
        InsertQdq(),
        f"""
        x: float32[5, 4] = input()  # edges=({edge},)
        w: float32[4, 4] = tensor('a.weight')  # {weight()}
        a = linear(x, w)  # plan=Plan(Decision('int8'), reads={measured}, weight={W})
        return a
        """,
    )
    assert program(gm).partition("a_weight_int8")[0].strip() == expected("""
        x: float32[5, 4] = input()
        x_scale: float32[5, 1] = choose_scale(x, steps=254, axis=-1, symmetric=False)
        x_zero_point: float32[5, 1] = choose_zero_point(x, scale=x_scale, axis=-1)
        x_q: uint8[5, 4] = quantize(x, scale=x_scale, zero_point=x_zero_point)
        x_dq: float32[5, 4] = dequantize(x_q, scale=x_scale, zero_point=x_zero_point)
    """)


def test_readers_of_a_shared_weight_of_which_one_has_7_bits(monkeypatch):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20)
            self.head.weight = self.table.weight

        def forward(self, x):
            return self.head(self.table(x))

    monkeypatch.setattr(Reference, "adds_in_int16", lambda self, calls: calls[0].op.name == "linear")
    recipe = fxq.Recipe.dynamic(backend="reference", reduce_range="weights")
    layers = fxq.quantize(Tied().eval(), recipe, example_inputs=torch.arange(20)).qparams()
    assert [int(layers[name].weight.abs().max()) for name in ("table", "head")] == [127, 63]


class Stepwise(nn.Module):
    """Two steps of a cell. A layer reads the last state, and another reads what that makes, and returns that, too."""

    def __init__(self):
        super().__init__()
        self.cell, self.head, self.last = nn.GRUCell(8, 8), nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, x, h):
        h = self.cell(x[:, 1], self.cell(x[:, 0], h))
        y = self.head(h)
        return y, h, self.last(y)


def test_hidden_states_go_on_in_float():
    """To the next step and out of the model, beside the integers that a layer reads. Other values go out as these."""
    inputs = torch.randn(16, 2, 8), torch.randn(16, 8)
    gm = until(settled(Stepwise), inputs, "insert-qdq", REFERENCE).gm
    second, head, y = (node(gm, name) for name in ("gru_1", "head", "head_dq"))
    returned = gm.graph.output_node().args[0]
    assert argument(second, "h").args[0] is node(gm, "gru")
    assert returned[1].args[0] is second and returned[0] is y
    assert is_op(head.args[0], "dequantize")


def test_a_state_that_is_handed_in_again():
    """The state itself is not rounded, so that what is lost in a step does not add up."""
    torch.manual_seed(0)
    model, x = settled(Stepwise), torch.randn(16, 40, 8)
    qmodel = fxq.quantize(model, REFERENCE, data=[(part, torch.randn(16, 8)) for part in x[:, :8].split(2, 1)])
    h = state = torch.zeros(16, 8)
    with torch.no_grad():
        for part in x.split(2, 1):
            h, state = model(part, h)[1], qmodel(part, state)[1]
    assert sqnr(h, state) > 39  # on the grid of what the layer reads it would be 36
