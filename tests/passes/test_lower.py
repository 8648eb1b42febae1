"""lower: units become the x86 backend's kernels; the reference backend leaves the graph."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.backends.packed import quantized_tensors as packed
from fxq.common.metrics import sqnr
from fxq.common.metrics import tensors as tensors_of
from fxq.passes import Lower
from tests.support.graphs import GRID, MINMAX, drawn, expected, integer_weight, joined, kinds, qdq, run_pass, text
from tests.support.machine import X86, needs_x86
from tests.support.models import call, settled

pytestmark = needs_x86


CONV_RELU = """
    def conv2d_relu(x, weight, bias):
        conv2d = conv2d(x, weight, bias, padding=(1, 1))
        relu = relu(conv2d)
        return relu
"""
CONV_ADD_RELU = """
    def conv2d_add_relu(x, weight, bias, other):
        conv2d = conv2d(x, weight, bias, padding=(1, 1))
        add = add(conv2d, other)
        relu = relu(add)
        return relu
"""
EXCITE = """
    def squeeze_excite_relu_hardsigmoid(x, squeeze_weight, squeeze_bias, excite_weight, excite_bias):
        pool = adaptive_avg_pool2d(x, output_size=(1, 1))
        conv2d = conv2d(pool, squeeze_weight, squeeze_bias)
        relu = relu(conv2d)
        conv2d_1 = conv2d(relu, excite_weight, excite_bias)
        hardsigmoid = hardsigmoid(conv2d_1)
        mul = mul(x, hardsigmoid)
        return mul
"""
IMAGE = "x: float32[2, 4, 8, 8] = input()\nb: float32[4] = tensor('bias')"
A, B = integer_weight("a", "4, 4, 3, 3"), integer_weight("b", "4, 4, 3, 3")
RESIDUAL = joined(
    CONV_RELU,
    CONV_ADD_RELU,
    IMAGE,
    A,
    B,
    integer_weight("head", "5, 4"),
    qdq("x"),
    "stem = conv2d_relu(x_qdq, a_dq, b)",
    qdq("stem"),
    "conv = conv2d_add_relu(stem_qdq, b_dq, b, stem_qdq)",
    qdq("conv"),
    "mean = mean(conv_qdq, dim=(2, 3))",
    qdq("mean"),
    "head = linear(mean_qdq, head_dq)",
    "return head",
)
PROGRAMS = {
    "a residual": (
        RESIDUAL,
        """
        x = input
        x_q = module cpu.quantize(x)
        stem = x86.conv(x_q)
        conv = x86.conv(stem, stem)
        mean = cpu.mean(conv)
        head = x86.linear(mean)
        return head
        """,
    ),
    "a prelu": (  # one quantize and nothing else between it and its convolution
        joined(
            IMAGE, "s: float32[4] = tensor('s')", A, B, integer_weight("up", "4, 2, 2, 2", 1), qdq("x"),
            "a = conv2d(x_qdq, a_dq, b)", "act = prelu(a, s)", qdq("act"), "up = conv_transpose2d(act_qdq, up_dq)",
            "return up",
        ),
        """
        x = input
        x_q = module cpu.quantize(x)
        a = x86.conv(x_q)
        act = cpu.prelu_quantize(a)
        up = x86.conv_transpose2d(act)
        return up
        """,
    ),
    "squeeze and excite": (
        joined(
            EXCITE, IMAGE, A, integer_weight("v", "4, 4, 1, 1"), integer_weight("w", "4, 4, 1, 1"), qdq("x"),
            "gate = squeeze_excite_relu_hardsigmoid(x_qdq, v_dq, b, w_dq, b)", qdq("gate"),
            "out = conv2d(gate_qdq, a_dq)", "return out",
        ),
        """
        x = input
        x_q = module cpu.quantize(x)
        gate = x86.squeeze_excite(x_q)
        out = x86.conv(gate)
        return out
        """,
    ),
    "dynamic scales": (
        joined(
            IMAGE, A, integer_weight("fc", "3, 8"),
            "x_scale: float32[2, 1, 1, 1] = choose_scale(x, steps=63, axis=-3)",
            "x_q: uint8[2, 4, 8, 8] = quantize(x, scale=x_scale, zero_point=64, qmax=127)",
            "x_dq: float32[2, 4, 8, 8] = dequantize(x_q, scale=x_scale, zero_point=64, qmax=127)",
            "a: float32[2, 4, 6, 6] = conv2d(x_dq, a_dq, b)", "again: float32[2, 4, 6, 6] = conv2d(x_dq, a_dq)",
            "return (a, again)",
        ),
        """
        x = input
        x_scale_to_x_q = module dynamic_quantize(x)
        x_scale = getitem(x_scale_to_x_q, 0)
        x_q = getitem(x_scale_to_x_q, 1)
        a = dynamic_layer(x_q, x_scale)
        again = dynamic_layer(x_q, x_scale)
        return (a, again)
        """,
    ),
    "dynamic scales and zero points": (
        joined(
            IMAGE, A, integer_weight("fc", "3, 8"),
            "x_scale: float32[2, 1, 1, 1] = choose_scale(x, steps=126, axis=-3, symmetric=False)",
            "x_zero: float32[2, 1, 1, 1] = choose_zero_point(x, scale=x_scale, axis=-3)",
            "x_q: uint8[2, 4, 8, 8] = quantize(x, scale=x_scale, zero_point=x_zero, qmax=127)",
            "x_dq: float32[2, 4, 8, 8] = dequantize(x_q, scale=x_scale, zero_point=x_zero, qmax=127)",
            "a: float32[2, 4, 8, 8] = conv2d(x_dq, a_dq, b, padding=(1, 1))", "return a",
        ),
        """
        x = input
        x_scale_to_x_q = module dynamic_quantize(x)
        x_scale = getitem(x_scale_to_x_q, 0)
        x_zero = getitem(x_scale_to_x_q, 1)
        x_q = getitem(x_scale_to_x_q, 2)
        a = dynamic_layer(x_q, x_scale, x_zero)
        return a
        """,
    ),
    "sizes that are read": (  # without a dequantize
        joined(
            CONV_RELU, IMAGE, A, integer_weight("fc", "3, 8"), qdq("x"), "a = conv2d_relu(x_qdq, a_dq, b)",
            f"a_q = quantize(a, {GRID})", "size = a_q.size(0)", "shape = getattr(a_q, 'shape')",
            "rows = operator.getitem(shape, 1)", "view: uint8[2, 4, 8, 8] = reshape(a_q, shape=(size, rows, -1, 8))",
            f"view_dq = dequantize(view, {GRID})",
            "fc = linear(view_dq, fc_dq)", "return fc",
        ),
        """
        x = input
        x_q = module cpu.quantize(x)
        a = x86.conv(x_q)
        size = .size(a, 0)
        shape = getattr(a, 'shape')
        rows = getitem(shape, 1)
        view = reshape(a, shape=(size, rows, -1, 8))
        fc = x86.linear(view)
        return fc
        """,
    ),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("before", "after"), PROGRAMS.values(), ids=PROGRAMS)
def test_text_before_and_after(before, after):
    tensors, x = drawn(before), 20 * torch.rand(2, 4, 8, 8)
    gm = run_pass(Lower(), before, tensors, recipe=X86)
    assert text(gm) == expected(after)
    for want, got in zip(tensors_of(fxq.extend.read_graph(before, tensors)(x)), tensors_of(gm(x)), strict=True):
        assert sqnr(want, got) > 50


def test_the_reference_backend_leaves_the_graph():
    assert kinds(run_pass(Lower(), RESIDUAL)) == kinds(fxq.extend.read_graph(RESIDUAL, drawn(RESIDUAL)))


def test_what_has_no_kernel_stays_in_qdq_form():
    """A layer whose sums could leave int32."""
    before = joined(
        "x: float32[4, 150000] = input()", integer_weight("a", "4, 150000"), integer_weight("b", "3, 4"), qdq("x"),
        "a = linear(x_qdq, a_dq)", qdq("a"), "b = linear(a_qdq, b_dq)", "return b",
    )  # fmt: skip
    weight = {"fxq_data.a_weight_int8": torch.full((4, 150000), 127, dtype=torch.int8)}
    assert text(run_pass(Lower(), before, weight, recipe=X86)) == expected("""
        x = input
        a_dq = int8(a_weight, axis=0)
        x_q = module cpu.quantize(x)
        x_qdq = module cpu.dequantize(x_q)
        a = linear(x_qdq, a_dq)
        a_q = module cpu.quantize(a)
        b = x86.linear(a_q)
        return b
    """)


ENGINES = ["x86", *(name for name in ("fbgemm", "qnnpack") if packed.has_engine(name))]


@pytest.mark.one_in(12)
@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (lambda: nn.Linear(150000, 4), (2, 150000)),
        (lambda: nn.Conv1d(150000, 4, 1), (1, 150000, 2)),
        (lambda: nn.Conv2d(8_000, 2, 3, padding=1), (1, 8_000, 2, 2)),
        (lambda: nn.ConvTranspose2d(20_000, 2, 2), (1, 20_000, 2, 2)),
    ],
)
def test_sums_stay_within_int32(layer, inputs, backend):
    """In the first batch, on which kernels are verified, no sum leaves int32."""
    ones = torch.ones(inputs)
    model = nn.Sequential(layer()).eval()
    with torch.no_grad():
        model[0].weight.fill_(1e-3).view(-1)[0] = -1e-3
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage", activation=MINMAX)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="nothing runs on integers")
        quantized = fxq.quantize(model, recipe, data=[torch.rand(inputs), ones])
    assert sqnr(model(ones), quantized(ones)) > 25


def test_a_bias_that_is_summed_as_int32_is_within_it():
    model = settled(lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8)))
    with torch.no_grad():
        model[0].weight[0] *= 1e-9
        model[0].bias[0] = 3.0
    x = torch.randn(32, 16)
    for backend in ENGINES:
        quantized = fxq.quantize(model, fxq.Recipe.static(backend=backend, optimize="coverage"), data=[x])
        assert sqnr(model(x), quantized(x)) > 25
        assert quantized.ledger[0].precision == ("float" if backend == "qnnpack" else "int8")


def test_clamps_of_their_own():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1)

        def forward(self, x):
            return self.b(F.relu6(F.max_pool2d(self.a(x), 2)))

    model, x = settled(Model), torch.randn(4, 3, 8, 8)
    quantized = fxq.quantize(model, X86, data=[x])
    assert kinds(quantized) == ["cpu.quantize", "x86.conv", "cpu.max_pool2d", "cpu.clamp", "x86.conv"]
    assert sqnr(call(model, x), call(quantized, x)) > 30
