"""annotate: what runs on integers, what does not, and why."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.graph.info import info
from fxq.graph.unit import reads_of
from fxq.passes import Annotate
from tests.support.graphs import graph, node, program, run_pass
from tests.support.helpers import REFERENCE, module
from tests.support.machine import X86, needs_x86
from tests.support.models import batch, build, settled

LAYERS = """
    x: float32[2, 3, 8, 8] = input()
    v: float32[4, 3, 1, 1] = tensor('a.weight')
    w: float32[4, 4, 1, 1] = tensor('w')
    s: float32[4, 1, 1] = tensor('s')
    a = conv2d(x, v)  # 'a'
    MIDDLE
    b = conv2d(y, w)  # 'b'
    return b
"""

POOL = "max_pool2d({}, kernel_size=(2, 2), stride=(2, 2))"


def plans(gm):
    """Precision and reason of each op, by node."""
    by_name = {n.name: info(n).plan for n in gm.graph.nodes}
    return {name: (plan.precision, plan.decision.text) for name, plan in by_name.items() if plan is not None}


def annotated(*middle, recipe=REFERENCE, behind="conv2d(y, w)"):
    """The plans of a graph with these lines between two layers: they read `a` and make `y`."""
    written = LAYERS.replace("MIDDLE", "\n    ".join(middle)).replace("conv2d(y, w)", behind)
    return plans(run_pass(Annotate(), written, recipe=recipe))


def test_text_before_and_after():
    """Nothing changes but the plans."""
    written = LAYERS.replace("MIDDLE", "y = " + POOL.format("a"))
    gm = run_pass(Annotate(), written)
    assert program(gm) == program(fxq.extend.read_graph(written, fxq.extend.graph_tensors(gm)))
    wanted = "plan=Plan(decision=Decision(precision='{}', decided_by='annotate'), reads=TensorSpec(){})".format
    weight = ", weight=TensorSpec(signed=True, symmetric=True, per='channel', observer='minmax')"
    facts = dict(line.partition(" = ")[::2] for line in fxq.extend.write_graph(gm).splitlines())
    assert facts["a: float32[2, 4, 8, 8]"] == f"conv2d(x, v)  # 'a', {wanted('int8', weight)}"
    assert facts["y: float32[2, 4, 4, 4]"].endswith(f"stride=(2, 2))  # {wanted('moves', '')}")


# ---- the reasons

RUN_TIME = ("mean: float32[()] = a.mean()  # kept=Decision('float', 'unsupported', 'all axes')", "v2 = mul(mean, w)")
RANDOM = (
    "u: float32[4, 4, 1, 1] = tensor('u')  # memory=(2,)",
    "n: float32[4, 4, 1, 1] = u.normal_()  # memory=(2,), changes=(2,)",
)
REFILLED = ("s2: float32[4, 1, 1] = tensor('s')  # memory=(3,)", "n: float32[4, 1, 1] = s2.normal_()  # memory=(3,), "
            "changes=(3,)")  # fmt: skip
SIZE, RESHAPE = "size = a.size(0)", "y: float32[2, 4, 4, 16] = reshape(a, shape=(size, 4, 4, -1))"
HALF = "half = operator.truediv(size, 2)"
COSTS_NOTHING = "is float, so float costs no conversion"


@pytest.mark.parametrize(
    ("middle", "precision", "reason"),
    [
        (("y = sigmoid(a)",), "int8", ""),
        (("y = erf(a)",), "float", "erf has no integer form"),
        (("y: float32[2, 4, 8, 8] = torch.sinc(a)",), "float", "sinc is not in the op table"),
        (("y = add(a, 1.0)",), "int8", ""),
        (("y = mul(a, s)",), "int8", ""),
        (("y = div(a, s)",), "int8", ""),
        (("c: float32[4, 8, 8] = tensor('c')", "y = add(a, c)"), "float", "its input c is a constant"),
        (("c: float32[2, 4, 8, 8] = tensor('c')", "y = sigmoid(c)"), "float", "its inputs are constants"),
        (("top = amax(a, dim=1, keepdim=True)", "y = div(a, top)"), "float", "it divides by a value that is computed"),
        (("y = add(a, a, alpha=2)",), "float", "its second operand is scaled (alpha)"),
        (("y = interpolate(a, scale_factor=2, mode='bilinear')",), "float", "interpolates (bilinear)"),
        ((*RUN_TIME, "y = conv2d(a, v2)"), "float", "its weight is computed at run time"),
        ((*RANDOM, "y = conv2d(a, n)"), "float", "its weight is computed at run time"),
        ((*RANDOM, "y = conv2d(a, u)"), "float", "its weight is changed in place by %n"),
        ((*REFILLED, "y = mul(a, s2)"), "float", "its input %s2 is changed in place by %n"),
        ((*RUN_TIME, "c: float32[4] = tensor('c')", "c2 = mul(mean, c)", "y = conv2d(a, w, c2)"), "float",
         "its bias is computed at run time"),
        (("e = exp(a)", "y = add(e, a)"), "float", f"its input %e {COSTS_NOTHING}"),
        (("e = exp(a)", "f = erf(a)", "y = add(e, f)"), "float", COSTS_NOTHING),
        ((SIZE, HALF, "y: float32[2, 4, 8, 8] = mul(a, half)"), "float", "its input %half is no tensor"),
        ((SIZE, RESHAPE), "moves", ""),
        (("e = erf(a)", "y = " + POOL.format("e")), "moves", ""),
        (("e = erf(a)", "y = relu(e)"), "float", COSTS_NOTHING),
    ],
)  # fmt: skip
def test_reasons(middle, precision, reason):
    got = annotated(*middle)["y"]
    assert got[0] == precision
    assert reason in got[1]
    assert bool(got[1]) == (precision == "float")


def test_a_size_is_no_tensor():
    got = annotated(SIZE, HALF, "y: float32[2, 4, 8, 8] = mul(a, half)")
    assert got["size"] == got["half"] == ("float", "its value is not a tensor")


def test_integers_that_no_kernel_reads():
    got = annotated("y = " + POOL.format("a"), behind="softmax(y, dim=1)")
    assert got["y"] == ("float", "nothing reads integers from it")
    assert got["a"] == ("int8", "")


def test_sums_that_share_all_their_inputs_run():
    """A value that two sums read as integers is converted once for both: neither is turned down."""
    got = annotated("e = erf(a)", "f = exp(a)", "y = add(e, f)", "z = sub(f, e)", "b2 = conv2d(z, w)")
    assert got["y"] == got["z"] == ("int8", "")


@pytest.mark.parametrize(
    ("dtype", "precision", "reason"),
    [("float32", "int8", ""), ("float64", "float", "its input %x is float64, not float32")],
)
def test_only_float32_is_quantized(dtype, precision, reason):
    written = f"x: {dtype}[2, 4] = input()\nw: {dtype}[3, 4] = tensor('w')\ny = linear(x, w)\nreturn y"
    gm = run_pass(Annotate(), written, {"w": torch.rand(3, 4, dtype=getattr(torch, dtype))})
    assert plans(gm)["y"] == (precision, reason)


def test_integer_inputs_are_no_activations():
    gm = run_pass(
        Annotate(),
        """
        index: int64[4, 2] = input()
        table: float32[10, 4] = tensor('table')
        w: float32[2, 4] = tensor('w')
        flat = reshape(index, shape=(-1,))
        found = embedding(flat, table)
        y = linear(found, w)
        return y
        """,
    )
    assert plans(gm)["flat"][0] == "float"
    assert plans(gm)["found"] == ("weight-only", "")
    assert plans(gm)["y"] == ("int8", "")


@pytest.mark.parametrize(
    ("per", "head", "wanted"),
    [("channel", "w", 64), ("channel", "table", 64), (4, "w", 4), ("tensor", "w", "tensor")],
)
def test_a_table_has_a_scale_for_each_block_also_where_a_layer_multiplies_with_it(per, head, wanted):
    gm = run_pass(
        Annotate(),
        f"""
        index: int64[4] = input()
        table: float32[10, 4] = tensor('table')
        w: float32[10, 4] = tensor('w')
        found = embedding(index, table)
        y = linear(found, {head})
        return y
        """,
        recipe=fxq.Recipe.weight_only(backend="reference", per=per),
    )
    weight = WEIGHTS.config.weight
    assert info(node(gm, "y")).plan.weight == replace(weight, per=wanted if head == "table" else per)
    assert info(node(gm, "found")).plan.weight == replace(weight, per=wanted)


def test_a_table_has_the_grid_of_a_layer_that_multiplies_integers_with_it():
    gm = run_pass(
        Annotate(),
        """
        index: int64[4] = input()
        table: float32[10, 4] = tensor('table')
        found = embedding(index, table)
        y = linear(found, table)
        return y
        """,
        recipe=fxq.Recipe.dynamic(backend="reference"),
    )
    assert plans(gm)["y"] == ("int8", "")
    assert info(node(gm, "found")).plan.weight == info(node(gm, "y")).plan.weight == WEIGHTS.config.weight


WEIGHTS = fxq.Recipe.weight_only(backend="reference")
LINEAR = """
    x: float32[2, 4] = input()
    w: float32[3, 4] = tensor('w')
    y = linear(x, w)  # 'y'
    z = relu(y)
    return z
"""


def test_with_activations_in_float_a_layer_has_its_weight_in_integers_and_nothing_follows():
    gm = run_pass(Annotate(), LINEAR, recipe=WEIGHTS)
    assert plans(gm) == {
        "y": ("weight-only", ""), "z": ("float", "it has no weight, and the recipe leaves activations in float"),
    }  # fmt: skip
    plan = info(node(gm, "y")).plan
    assert (plan.reads, plan.weight, plan.in_float) == (None, WEIGHTS.config.weight, True)


@pytest.mark.parametrize(
    ("written", "tensors", "reason"),
    [
        (LINEAR.replace("tensor('w')", "input()"), {}, "its weight is computed at run time"),
        (LINEAR, {"w": torch.full((3, 4), 1e5)}, "its weight has values up to 1e+05, beyond float16"),
        (
            LINEAR,
            {"w": torch.full((3, 4), 1e-9)},
            "its weight has values of 1e-09 at most, which float16 rounds to a few bits or to zero",
        ),
        (LINEAR.replace("float32", "float64"), {"w": torch.rand(3, 4).double()}, "its weight is float64, not float32"),
    ],
)
def test_a_weight_that_cannot_be_kept_otherwise(written, tensors, reason):
    halves = fxq.Recipe.weight_only(backend="reference", dtype=torch.float16)
    assert plans(run_pass(Annotate(), written, tensors, halves))["y"] == ("float", reason)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize(("inside", "outside"), [(4, 0), (0, 4)])
def test_a_layer_without_a_weight_to_speak_of(inside, outside, backend):
    model = module(
        lambda self, x: (self.first(x), self.empty(self.first(x)[:, :inside])),
        first=nn.Linear(8, 4), empty=nn.Linear(inside, outside),
    )  # fmt: skip
    x = torch.randn(3, 8)
    qmodel = fxq.quantize(model.eval(), fxq.Recipe.static(backend=backend, optimize="coverage"), data=[x])
    (entry,) = qmodel.ledger.where(path="empty")
    assert (entry.precision, entry.reason) == ("float", f"its weight is empty: ({outside}, {inside})")
    assert torch.equal(qmodel(x)[1], model(x)[1])


# ---- backends


@needs_x86
def test_what_x86_has_no_kernel_for():
    middle = "y = avg_pool2d(a, kernel_size=(2, 2), stride=(2, 2), ceil_mode=True)"
    precision, reason = annotated(middle, recipe=X86)["y"]
    assert precision == "float" and "ceil_mode=True" in reason
    assert "x86" not in annotated(middle)["y"][1]


UNIT = """
    def conv2d_prelu(x, weight, slope):
        conv2d = conv2d(x, weight)
        prelu = prelu(conv2d, slope)
        return prelu

    x: float32[2, 3, 8, 8] = input()
    v: float32[4, 3, 1, 1] = tensor('a.weight')
    w: float32[2, 4, 1, 1] = tensor('b.weight')
    slope: float32[4] = tensor('slope')
    y = conv2d_prelu(x, v, slope)  # 'a'
    b = conv2d(y, w)  # 'b'
    return b
"""


@needs_x86
def test_a_kernel_that_runs_only_the_first_ops():
    plan = info(node(run_pass(Annotate(), UNIT, recipe=X86), "y")).plan
    assert (plan.precision, plan.kernel_ops) == ("int8", (1, 2))
    assert plan.decision.text == "prelu costs a second conv2d on integers"
    plan = info(node(run_pass(Annotate(), UNIT), "y")).plan
    assert (plan.precision, plan.kernel_ops, plan.decision.text) == ("int8", (), "")


@pytest.mark.parametrize("recipe", [REFERENCE, pytest.param(X86, marks=needs_x86)], ids=lambda r: r.backend)
def test_a_constant_after_a_layer_does_not_turn_it_into_float(recipe):
    """A learned offset of the layer's own shape: conv + add is one unit, where a backend runs it."""

    class Offset(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.offset = nn.Conv2d(3, 4, 3, padding=1), nn.Parameter(torch.randn(2, 4, 8, 8))

        def forward(self, x):
            return torch.relu(self.conv(x) + self.offset)

    model, x = settled(Offset), torch.randn(2, 3, 8, 8)
    got = plans(graph(model, x, "annotate", recipe))
    assert got["conv_add_relu" if recipe is REFERENCE else "conv"][0] == "int8"
    quantized = fxq.quantize(model, recipe, data=[x])
    assert next(e.precision for e in quantized.ledger if e.op == "conv2d") == "int8"
    assert sqnr(model(x), quantized(x)) > 30


# ---- the recipe


@pytest.mark.parametrize("selector", ["a", fxq.by_op("relu")])
def test_recipe_says_float(selector):
    written = LAYERS.replace("MIDDLE", "y = relu(a)")
    gm = run_pass(Annotate(), written, recipe=REFERENCE.override(selector, fxq.FLOAT))
    name, other_name = ("a", "b") if selector == "a" else ("y", "a")
    decision = info(node(gm, name)).plan.decision
    said = "'a'" if selector == "a" else "fxq.by_op('relu')"
    assert (decision.precision, decision.kind) == ("float", "excluded by the recipe")
    assert decision.text == f"the recipe says float for {said}"
    assert decision.fix.startswith("recipe.override(")
    assert plans(gm)[other_name] == ("int8", "")


def test_a_spec_of_its_own_reaches_the_edge():
    """Also through what moves data."""
    spec = fxq.TensorSpec(bits=4, observer="minmax")
    written = LAYERS.replace("MIDDLE", "y = " + POOL.format("a"))
    gm = run_pass(Annotate(), written, recipe=REFERENCE.override("b", fxq.QuantConfig(activation=spec)))
    reads = {n.name: {v.name: form.spec for v, form in reads_of(gm, n).items()} for n in gm.graph.nodes}
    assert reads["b"] == {"y": spec}
    assert reads["y"] == {"a": spec}
    assert reads["a"] == {"x": fxq.TensorSpec()}


def test_nan_in_a_weight_names_the_layer():
    model = build("dense")
    with torch.no_grad():
        model.c.weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(fxq.InputError, match=r'layer "c".*c\.weight holds NaN or Inf'):
        graph(model, batch("dense"), "annotate")
    graph(model, batch("dense"), "annotate", REFERENCE.override("c", fxq.FLOAT))


@needs_x86
@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        (
            {"activation": fxq.TensorSpec(signed=True, symmetric=True)},
            "x86 kernels take unsigned activations; set signed=False",
        ),
        ({"weight": fxq.TensorSpec(observer="minmax")}, "x86 kernels take signed symmetric weights"),
    ],
)
def test_specs_that_x86_does_not_take(specs, reason):
    assert annotated("y = relu(a)", recipe=fxq.Recipe.static(backend="x86", **specs))["a"] == ("float", reason)


def test_the_way_back_from_float_where_activations_are_in_float():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    recipe = WEIGHTS.override("0", fxq.FLOAT).override("1", fxq.FLOAT)
    rows = fxq.quantize(model, recipe, example_inputs=torch.rand(1, 3, 4, 4)).ledger
    assert [e.precision for e in rows] == ["float", "float", "weight-only"]
    assert rows[0].fix == "recipe.override('0', fxq.Recipe.weight_only().config)" and rows[1].fix == ""


class Tied(nn.Module):
    """Embedding, layer, and a head with the table of the embedding: (N,) int64 to (N, 40)."""

    def __init__(self):
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(40, 64), nn.Linear(64, 64), nn.Linear(64, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.layer(self.words(x)))


def test_embeddings_and_their_heads_have_eight_bits_unless_selected():
    torch.manual_seed(0)
    recipe, x = fxq.Recipe.weight_only(bits=4, backend="reference"), torch.arange(40)
    qmodel = fxq.quantize(Tied().eval(), recipe, example_inputs=x)
    bits = {entry.path: entry.weight_bits for entry in qmodel.ledger if entry.weight_bits}
    # Scale per block of 64: 16 bits; its zero point, if affine: 8 bits
    assert bits == {"words": 8.25, "layer": 4.375, "head": 8.25}
    assert "8 bits, not 4, as no override selects it" in qmodel.ledger.where(path="head")[0].reason
    # Shared weights count for each of their layers: (2 * 2560 * 8.25 + 4096 * 4.375) / 9216
    assert "at 6.53 bits per weight" in str(qmodel.ledger)
    selected = fxq.quantize(Tied().eval(), recipe.override("*", recipe.config), example_inputs=x)
    assert {entry.weight_bits for entry in selected.ledger if entry.weight_bits} == {4.375}
