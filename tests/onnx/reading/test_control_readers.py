"""Scans of ONNX, written out in the graph: against ONNX Runtime, and the graph that the file was written from."""

import pytest
import torch

import fxq
from fxq.onnx.graph import write_onnx
from tests.onnx.test_recurrent_nodes import STATE, X, weights
from tests.support.onnx_runs import call, onnx, run_onnxruntime, single

pytestmark = pytest.mark.any_cpu

RUNNING_SUM = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[2] start, float[3, 4, 2] x, float[5, 4] z) => (float[2] last, float[3, 2, 4] y) {
    last, y = Scan <num_scan_inputs = 2, scan_input_axes = [1, 1], scan_input_directions = [1, 0],
        scan_output_axes = [2], scan_output_directions = [1],
        body = step (float[2] before, float[3, 2] part, float[5] row) => (float[2] after, float[3, 2] seen) {
            two = Constant <value_float = 2.0> ()
            factor = Exp(two)
            total = ReduceSum <keepdims = 0> (row)
            added = ReduceMax <keepdims = 0> (part)
            more = Add(before, total)
            after = Add(more, added)
            seen = Mul(part, factor)
        }> (start, x, z)
}"""


def test_scan_with_axes_and_directions():
    model = onnx.parser.parse_model(RUNNING_SUM)
    inputs = [torch.randn(2), torch.randn(3, 4, 2), torch.randn(5, 4)]
    read = fxq.read_onnx(model)
    for result, expected in zip(read(*inputs), run_onnxruntime(model, inputs), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ["lstm", "gru"])
def test_quantized_recurrent_layers_of_fxq_come_back(op):
    """The weights are there once, not once for each of the steps."""
    options = {"reverse": True} if op == "lstm" else {}
    states = () if op == "lstm" else (STATE,)
    case = call(op, X, *weights({"lstm": 4, "gru": 3}[op]), *states, state_qmax=127, **options)
    gm = single(case.op, *case.values, **case.options)
    read = fxq.read_onnx(write_onnx(gm, case.inputs, portable=True).model)
    torch.testing.assert_close(read(*case.inputs), gm(*case.inputs), rtol=0, atol=2e-3)  # a tie of the state's grid
    own, written = (sum(t.numel() for t in model.state_dict().values()) for model in (read, gm))
    assert own <= written + 64


@pytest.mark.parametrize("length", ["T", 1001])
def test_the_number_of_steps_must_be_known_and_small(length):
    text = f"""
    <ir_version: 10, opset_import: ["" : 21]>
    g (float s, float[{length}] x) => (float e) {{
        e = Scan <num_scan_inputs = 1, body = step (float a, float b) => (float c) {{ c = Add(a, b) }}> (s, x)
    }}"""
    reason = "depends on a dynamic size" if length == "T" else "has more than 1000 steps"
    with pytest.raises(fxq.FileError, match=rf"\(Scan\) cannot be read: it.* {reason}"):
        fxq.read_onnx(onnx.parser.parse_model(text))


LOOP = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[{size}] x) => (float[{size}] y, float[K, {size}] rows) {{
    one = Constant <value = bool {{1}}> ()
    zero = Constant <value_int = 0> ()
    limit = Constant <value_int = 3> ()
    y, last, rows = Loop ({count}, one, x, zero) <body = step (int64 i, bool c, float[{size}] a, int64 k)
        => (bool again, float[{size}] doubled, int64 next, float[{size}] row) {{
            increment = Constant <value_int = 1> ()
            next = Add (k, increment)
            again = {again}
            doubled = Add (a, a)
            row = Neg (a)
        }}>
}}"""


def loop_of(count, again="Less (next, limit)", size=2):
    return onnx.parser.parse_model(LOOP.format(count=count, again=again, size=size))


def test_a_loop_that_its_condition_ends():
    model, x = loop_of(""), torch.tensor([1.0, -2.0])
    y, rows = fxq.read_onnx(model)(x)
    assert torch.equal(y, 8 * x) and torch.equal(rows, torch.stack([-x, -2 * x, -4 * x]))
    with pytest.raises(fxq.FileError, match="more than 1000 iterations"):
        fxq.read_onnx(loop_of("", again="Identity (c)"))


def test_a_loop_without_iterations_collects_nothing():
    x = torch.tensor([1.0, -2.0])
    y, rows = fxq.read_onnx(loop_of("zero"))(x)
    assert torch.equal(y, x) and rows.shape == (0, 2) and rows.dtype == torch.float32
    with pytest.raises(fxq.FileError, match="it collects none of a dynamic size"):
        fxq.read_onnx(loop_of("zero", size="N"))


def test_random_numbers_of_each_iteration_differ():
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 21]>
    g (float[4] x) => (float[4] last, float[3, 4] rows) {
        count = Constant <value_int = 3> ()
        going = Constant <value_int = 1> ()
        condition = Cast <to = 9> (going)
        start = Constant <value_floats = [0.0, 0.0, 0.0, 0.0]> ()
        last, rows = Loop (count, condition, x) <body = step (int64 i, bool c, float[4] before)
            => (bool again, float[4] after, float[4] drawn) {
                again = Identity(c)
                drawn = RandomNormalLike(start)
                after = Add(before, drawn)
            }>
    }""")
    _, rows = fxq.read_onnx(model)(torch.zeros(4))
    assert len({tuple(row) for row in rows.tolist()}) == 3


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ("num_scan_inputs = 3", "says that 3 of its inputs are scanned"),
        ("num_scan_inputs = 1, scan_input_axes = [5]", "an axis that it scans does not exist"),
        ("num_scan_inputs = 1, scan_input_axes = [0, 0]", "an axis that it scans does not exist"),
    ],
)
def test_attributes_that_do_not_fit_are_refused(attributes, reason):
    text = f"""
    <ir_version: 10, opset_import: ["" : 21]>
    g (float s, float[4] x) => (float e) {{
        e = Scan <{attributes}, body = step (float a, float b) => (float c) {{ c = Add(a, b) }}> (s, x)
    }}"""
    with pytest.raises(fxq.FileError, match=reason):
        fxq.read_onnx(onnx.parser.parse_model(text))


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_weight_only_recurrent_layers_of_fxq_come_back(layer, tmp_path):
    qmodel = fxq.quantize(layer(8, 6).eval(), "weight_only", example_inputs=(x := torch.randn(2, 5, 8)))
    qmodel.export(tmp_path / "m.onnx")
    read = fxq.read_onnx(tmp_path / "m.onnx", sizes={"batch": 2})
    torch.testing.assert_close(read(x)[0], qmodel(x)[0], rtol=1e-5, atol=1e-6)
