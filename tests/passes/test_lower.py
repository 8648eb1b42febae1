"""lower: units become the x86 backend's kernels; the reference backend leaves the graph."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.backends import layer_kernel as kernel_module
from fxq.backends.kernel import Kernel
from fxq.backends.layer_kernel import LayerKernel, sums_refused
from fxq.backends.layer_spec import LayerSpec
from fxq.backends.packed import quantized_tensors as packed
from fxq.common.metrics import sqnr
from fxq.graph.query import submodule
from fxq.passes import Lower
from fxq.quant.qparams import QParams
from tests.graphs import MINMAX, again, equal, expected, kinds, text, until
from tests.helpers import REFERENCE
from tests.machine import X86, needs_x86
from tests.models import NETWORKS, batch, build, call, settled

pytestmark = needs_x86


def lowered(model, x, recipe=X86):
    return until(model, x, "lower", recipe)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "prelu_chain",
            """
            x = input
            x_q = module cpu.quantize(x)
            extract = x86.conv(x_q)
            act1 = cpu.prelu_quantize(extract)
            shrink = x86.conv(act1)
            act2 = cpu.prelu_quantize(shrink)
            map_1 = x86.conv(act2)
            act3 = cpu.prelu_quantize(map_1)
            expand = x86.conv(act3)
            act4 = cpu.prelu_quantize(expand)
            up = x86.conv_transpose2d(act4)
            return up
            """,
        ),
        (
            "residual",
            """
            x = input
            x_q = module cpu.quantize(x)
            stem_relu = x86.conv(x_q)
            conv1_relu = x86.conv(stem_relu)
            conv2_add_relu = x86.conv(conv1_relu, stem_relu)
            down = x86.conv(conv2_add_relu)
            conv3_add_relu = x86.conv(conv2_add_relu, down)
            mean = cpu.mean(conv3_add_relu)
            head = x86.linear(mean)
            return head
            """,
        ),
        (
            "squeeze_excite",
            """
            x = input
            x_q = module cpu.quantize(x)
            stem_hardswish = x86.conv(x_q)
            pool_conv2d_relu_conv2d_hardsigmoid_mul = x86.squeeze_excite(stem_hardswish)
            out = x86.conv(pool_conv2d_relu_conv2d_hardsigmoid_mul)
            return out
            """,
        ),
        (
            "shapes",
            """
            x = input
            x_q = module cpu.quantize(x)
            a_relu = x86.conv(x_q)
            size = .size(a_relu, 0)
            getattr_1 = getattr(a_relu, 'shape')
            getitem = getitem(getattr_1, 2)
            mul = mul(getitem, 2)
            view = reshape(a_relu, shape=(size, 2, mul, -1))
            b_relu = x86.conv(view)
            permute = permute(b_relu, dims=(0, 2, 3, 1))
            fc = x86.linear(permute)
            return fc
            """,
        ),
    ],
)
def test_text(name, lines):
    """Also: one quantize per PReLU and nothing between it and its convolution; sizes read without a dequantize."""
    manager = lowered(build(name), batch(name))
    assert text(manager.gm) == expected(lines)
    assert again(manager, Lower()) == []


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_their_qdq_form(name):
    model, inputs = build(name), batch(name, 8)
    qdq = until(model, inputs, "fallback", X86)
    manager = lowered(model, inputs)
    for given in (inputs, batch(name, 3, seed=5)):  # kernels keep what they packed, for inputs of other sizes too
        before = copy.deepcopy(given)
        # A tie moves an element by one step of many: 50 dB leaves room for a few.
        assert sqnr(call(qdq.gm, given), call(manager.gm, given)) > 50
        assert equal(given, before)


def test_a_convolution_in_front_of_a_prelu_emits_float():
    manager = lowered(build("prelu_chain"), batch("prelu_chain"))
    emitted = {
        n.name: submodule(manager.gm, n).out for n in manager.gm.graph.nodes if hasattr(submodule(manager.gm, n), "out")
    }
    assert [name for name, out in emitted.items() if out is None] == ["extract", "shrink", "map_1", "expand", "up"]


def test_the_reference_backend_leaves_the_graph():
    manager = lowered(build("residual"), batch("residual"), REFERENCE)
    assert manager.history["lower"].edits == ()
    assert not any(isinstance(m, Kernel) for m in manager.gm.modules())


def test_what_has_no_kernel_stays_in_qdq_form():
    """A layer whose sums could leave int32."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(150_000, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.b(self.a(x))

    model, x = settled(Model), torch.rand(4, 150_000)
    nn.init.constant_(model.a.weight, 1e-3)
    manager = lowered(model, x, X86.with_optimize("coverage"))
    assert text(manager.gm).splitlines()[1:6] == [
        "x_q = module cpu.quantize(x)",
        "x_dq = module cpu.dequantize(x_q)",
        "a_weight_dq = int8(a_weight, axis=0)",
        "a = linear(x_dq, a_weight_dq, @a.bias)",
        "a_q = module cpu.quantize(a)",
    ]
    quantized = fxq.quantize(model, X86.with_optimize("coverage"), data=[x])
    entry = next(e for e in quantized.ledger if e.path == "a")
    assert (entry.fate, "beyond int32" in entry.reason) == ("float", True)
    assert sqnr(model(x), quantized(x)) > 25


ENGINES = ["x86", *(name for name in ("fbgemm", "qnnpack") if packed.has_engine(name))]


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (lambda: nn.Linear(150_000, 4), (2, 150_000)),
        (lambda: nn.Conv1d(150_000, 4, 1), (1, 150_000, 2)),
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


class Layer(LayerKernel):
    """A layer whose sums are to be bounded."""

    name = "layer"
    options = ("x", "groups")


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_bound_of_the_sums(groups, transposed):
    """Against the sums of the worst inputs, in float64: those at either end of the grid by the weight's sign."""
    weight = torch.randint(-127, 128, (8, 8 // groups, 3, 3), dtype=torch.int8)
    x = QParams.per_tensor(0.1, 40)
    qparams = QParams(torch.ones(()), torch.zeros((), dtype=torch.int32), -127, 127, torch.int8)
    kernel = Layer(LayerSpec(weight, qparams, None, x, None, groups=groups))
    kernel.channel_axis = int(transposed)
    rows = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1) if transposed else weight
    rows = rows.double().flatten(1)
    ends = [(0.0, 255.0), (-40.0, 215.0)]
    worst = max(
        float((rows.clamp(min=0) * a + rows.clamp(max=0) * b).sum(1).abs().max())
        for low, high in ends
        for a, b in ((low, high), (high, low))
    )
    assert sums_refused(kernel) is None
    for limit, refused in ((worst, False), (worst - 1, True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel_module, "_INT32", limit)
            assert (sums_refused(kernel) is not None) is refused


def test_a_bias_that_is_summed_as_int32_is_within_it():
    model = settled(lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8)))
    with torch.no_grad():
        model[0].weight[0] *= 1e-9
        model[0].bias[0] = 3.0
    x = torch.randn(32, 16)
    for backend in ENGINES:
        quantized = fxq.quantize(model, fxq.Recipe.static(backend=backend, optimize="coverage"), data=[x])
        assert sqnr(model(x), quantized(x)) > 25
        assert quantized.ledger[0].fate == ("float" if backend == "qnnpack" else "int8")


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


# ---- residuals that are overwritten


class Block(nn.Module):
    """conv(x) + x in the middle of layers, with something done to x besides."""

    def __init__(self, forward):
        super().__init__()
        self.stem, self.conv, self.head = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.body = forward

    def forward(self, x):
        return self.body(self, x)


def dies(m, x):
    x = F.relu(m.stem(x))
    return m.head(F.relu(m.conv(x) + x))


def other_operand_order(m, x):
    x = F.relu(m.stem(x))
    return m.head(F.relu(x + m.conv(x)))


def another_tensor(m, x):
    y = m.stem(x)
    return m.head(m.conv(F.relu(m.head(y))) + y)


def read_later(m, x):
    x = F.relu(m.stem(x))
    y = F.relu(m.conv(x) + x)
    return m.head(y) + m.head(x)


def read_later_twice(m, x):
    x = F.relu(m.stem(x))
    y = F.relu(m.conv(x) + x)
    z = F.relu(m.conv(y) + x)
    return m.head(z)


def is_returned(m, x):
    x = F.relu(m.stem(x))
    return m.head(F.relu(m.conv(x) + x)), x


def is_a_view(m, x):
    x = F.relu(m.stem(x))
    view = x.transpose(2, 3)
    return m.head(F.relu(m.conv(x) + view)), m.head(x)


def has_a_view(m, x):
    x = F.relu(m.stem(x))
    view = x.transpose(2, 3)
    y = m.head(F.relu(m.conv(F.relu(m.stem(x))) + x))
    return y, m.head(view)


def is_the_input(m, x):
    return m.head(F.relu(m.conv(x) + x))


def is_twice_the_same(m, x):
    y = m.conv(F.relu(m.stem(x)))
    return m.head(y + y)


def adds_the_same_value_twice(m, x):
    x = F.relu(m.stem(x))
    y = F.relu(m.conv(x) + x)
    return m.head(F.relu(F.max_pool2d(y, 1) + F.max_pool2d(y, 1)))


def two_sums_of_one_value(m, x):
    x = F.relu(m.stem(x))
    a = m.conv(F.max_pool2d(x, 1)) + x
    b = m.head(F.max_pool2d(x, 1)) + x
    return m.head(a + b)


def is_pooled_first(m, x):
    x = F.relu(m.stem(x))
    return m.head(F.relu(m.conv(x) + F.max_pool2d(x, 3, 1, 1)))


def an_identity_pad(m, x):
    x = F.relu(m.stem(x))
    y = F.pad(x, (0, 0, 0, 0))
    return m.head(F.relu(m.conv(x) + y)), m.head(x)


# How many kernels overwrite their residual.
BLOCKS = {
    dies: 0,  # the convolution reads it, too
    other_operand_order: 0,
    another_tensor: 1,
    read_later: 0,
    read_later_twice: 1,  # the second sum is its last reader
    is_returned: 0,
    is_a_view: 0,
    has_a_view: 0,
    is_the_input: 0,
    is_twice_the_same: 0,
    adds_the_same_value_twice: 1,
    two_sums_of_one_value: 2,
    is_pooled_first: 1,
    an_identity_pad: 0,
}


@pytest.mark.parametrize("fast", [True, False], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize(("block", "inplace"), BLOCKS.items(), ids=[b.__name__ for b in BLOCKS])
def test_residuals_are_overwritten_only_where_they_die(block, inplace, fast):
    model, x = settled(lambda: Block(block)), torch.randn(2, 4, 8, 8)
    if fast:
        x = x.contiguous(memory_format=torch.channels_last)
    kept = x.clone()
    quantized = fxq.quantize(model, X86, data=[x])
    first = call(quantized, x)
    held = [t.clone() for t in (first if isinstance(first, tuple) else (first,))]
    assert equal(call(quantized, x), first)  # a second run is not disturbed by the first
    assert equal(list(first) if isinstance(first, tuple) else [first], held)  # nor the first result by the second run
    assert torch.equal(x, kept)
    kernels = [m for m in quantized.modules() if getattr(m, "inplace", False)]
    for kernel in kernels:
        kernel.inplace = False
    assert equal(call(quantized, x), first)
    assert sqnr(call(model, x), first) > 30
    assert len(kernels) == inplace


def test_inplace_is_found_to_be_wrong_where_it_is_forced():
    """The test above can fail: an overwritten residual that is read later gives another result."""
    model, x = settled(lambda: Block(read_later)), torch.randn(2, 4, 8, 8)
    quantized = fxq.quantize(model, X86, data=[x])
    first = call(quantized, x)
    for kernel in quantized.modules():
        if getattr(kernel, "residual", None) is not None:
            kernel.inplace = True
    assert not equal(call(quantized, x), first)
