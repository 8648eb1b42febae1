"""annotate: what runs on integers, what does not, and why."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.graph.info import info
from fxq.graph.unit import reads_of
from fxq.passes import Annotate
from tests.graphs import again, text, until
from tests.helpers import REFERENCE, module
from tests.machine import X86, needs_x86
from tests.models import batch, build, settled


def plans(manager):
    """Fate and reason of each op, by node."""
    found = {n.name: info(n).plan for n in manager.gm.graph.nodes}
    return {name: (plan.fate, plan.decision.text) for name, plan in found.items() if plan is not None}


class Model(nn.Module):
    """A forward from outside, between two layers."""

    def __init__(self, middle, width=4, behind=None):
        super().__init__()
        self.before, self.middle = nn.Conv2d(3, 4, 3, padding=1), middle
        self.behind = behind or nn.Conv2d(width, 4, 1)
        self.weight = nn.Parameter(torch.randn(4, 4, 1, 1))
        self.slope = nn.Parameter(torch.full((4,), 0.2))

    def forward(self, x):
        return self.behind(self.middle(self, self.before(x)))


def annotated(middle, recipe=REFERENCE, **options):
    return until(settled(lambda: Model(middle, **options)), torch.randn(2, 3, 8, 8), "annotate", recipe)


def test_the_graph_stays():
    model, x = build("squeeze_excite"), batch("squeeze_excite")
    manager = until(model, x, "annotate")
    assert text(manager.history["annotate"].graph) == text(manager.history["fuse"].graph)
    assert manager.history["annotate"].edits == ()
    before = plans(manager)
    assert again(manager, Annotate()) == []
    assert plans(manager) == before


@needs_x86
def test_plans_of_a_squeeze_and_excite_block():
    assert plans(until(build("squeeze_excite"), batch("squeeze_excite"), "annotate", X86)) == {
        "stem_hardswish": ("int8", ""),
        "pool_conv2d_relu_conv2d_hardsigmoid_mul": ("int8", ""),
        "out": ("int8", ""),
    }


def test_plans_of_dense_connections():
    assert plans(until(build("dense"), batch("dense"), "annotate", REFERENCE)) == {
        "a_relu": ("int8", ""),
        "b_relu": ("int8", ""),
        "cat": ("moves", ""),
        "c_relu": ("int8", ""),
        "cat_1": ("moves", ""),
        "d": ("int8", ""),
    }


# ---- the reasons


def refilled(tensor):
    """The tensor itself, not what the method returns."""
    tensor.normal_()
    return tensor


@pytest.mark.parametrize(
    ("middle", "node", "fate", "reason"),
    [
        (lambda m, x: torch.sigmoid(x), "sigmoid", "int8", ""),
        (lambda m, x: torch.erf(x), "erf", "float", "erf has no integer form"),
        (lambda m, x: torch.sinc(x), "sinc", "float", "sinc is not in the op table"),
        (lambda m, x: x + 1.0, "add", "int8", ""),
        (lambda m, x: x * m.slope.reshape(4, 1, 1), "mul", "int8", ""),
        (lambda m, x: x / m.slope.reshape(4, 1, 1), "truediv", "int8", ""),
        (lambda m, x: x[:, :, :4] + m.weight.reshape(4, 4, 1), "add", "float", "weight_reshape is a constant"),
        (lambda m, x: x / x.amax(1, True), "truediv", "float", "it divides by a value that is computed at run time"),
        (lambda m, x: torch.add(x, x, alpha=2), "add", "float", "its second operand is scaled (alpha)"),
        (
            lambda m, x: F.interpolate(x, scale_factor=2, mode="bilinear"),
            "interpolate",
            "float",
            "interpolates (bilinear)",
        ),
        (lambda m, x: F.conv2d(x, m.weight * x.mean()), "conv2d", "float", "its weight is computed at run time"),
        (lambda m, x: F.conv2d(x, torch.empty(4, 4, 1, 1).normal_()), "conv2d", "float", "computed at run time"),
        (
            lambda m, x: F.conv2d(x, refilled(torch.empty(4, 4, 1, 1))),
            "conv2d",
            "float",
            "changed in place by %normal_",
        ),
        (lambda m, x: x * refilled(torch.empty(1)), "mul", "float", "is changed in place by %normal_"),
        (lambda m, x: F.conv2d(x, m.weight, m.slope * x.mean()), "conv2d", "float", "its bias is computed at run time"),
        (
            lambda m, x: torch.exp(x) + x,
            "add",
            "float",
            "its input %exp is float, so float costs no conversion",
        ),
        (lambda m, x: torch.exp(x) + torch.erf(x), "add", "float", "is float, so float costs no conversion"),
        (lambda m, x: x * (x.size(0) / 2), "mul", "float", "its input %truediv is no tensor but a plain value"),
        (lambda m, x: x.reshape(x.size(0), 4, 4, -1), "size", "float", "its value is not a tensor"),
        (lambda m, x: x.reshape(x.size(0), 4, 4, -1), "reshape", "moves", ""),
        (lambda m, x: F.max_pool2d(torch.erf(x), 2), "max_pool2d", "moves", ""),
        (lambda m, x: torch.relu(torch.erf(x)), "relu", "float", "is float, so float costs no conversion"),
    ],
)
def test_reasons(middle, node, fate, reason):
    got = plans(annotated(middle))[node]
    assert got[0] == fate
    assert reason in got[1]
    assert bool(got[1]) == (fate == "float")


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
    assert (entry.fate, entry.reason) == ("float", f"its weight is empty: ({outside}, {inside})")
    assert torch.equal(qmodel(x)[1], model(x)[1])


def test_nobody_reads_integers():
    got = plans(annotated(lambda m, x: torch.relu(F.max_pool2d(x, 2)), behind=nn.Softmax(1)))
    assert got["max_pool2d"] == ("float", "nothing reads integers from it")
    assert got["before"] == ("int8", "")


def test_integer_inputs_are_no_activations():
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.fc = nn.Embedding(10, 4), nn.Linear(4, 2)

        def forward(self, index):
            return self.fc(self.table(index.reshape(-1)))

    got = plans(until(settled(Lookup), torch.randint(10, (4, 2)), "annotate", REFERENCE))
    assert got["reshape"][0] == "float"
    assert got["fc"] == ("int8", "")


def test_half_precision_is_not_quantized():
    model = settled(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())).double()
    (plan, *_) = plans(until(model, torch.randn(2, 4, dtype=torch.float64), "annotate", REFERENCE)).values()
    assert plan == ("float", "its input %input_1 is float64, not float32")


@needs_x86
@pytest.mark.parametrize(
    ("middle", "node", "reason"),
    [
        (lambda m, x: F.avg_pool2d(x, 2, ceil_mode=True), "avg_pool2d", "ceil_mode=True"),
    ],
)
def test_what_x86_has_no_kernel_for(middle, node, reason):
    on_x86, on_reference = (plans(annotated(middle, recipe)) for recipe in (X86, REFERENCE))
    name = next(n for n in on_x86 if n.startswith(node))
    assert on_x86[name][0] == "float"
    assert reason in on_x86[name][1]
    assert on_reference[name][0] in ("int8", "moves", "float")
    assert "x86" not in on_reference[name][1]


@pytest.mark.parametrize("recipe", [REFERENCE, pytest.param(X86, marks=needs_x86)], ids=lambda r: r.backend)
def test_a_constant_behind_a_layer_does_not_turn_it_into_float(recipe):
    """A learned offset of the layer's own shape: conv + add is one unit, where a backend runs it."""

    class Offset(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.offset = nn.Conv2d(3, 4, 3, padding=1), nn.Parameter(torch.randn(2, 4, 8, 8))

        def forward(self, x):
            return torch.relu(self.conv(x) + self.offset)

    model, x = settled(Offset), torch.randn(2, 3, 8, 8)
    got = plans(until(model, x, "annotate", recipe))
    assert got["conv_add_relu" if recipe is REFERENCE else "conv"][0] == "int8"
    quantized = fxq.quantize(model, recipe, data=[x])
    assert next(e.fate for e in quantized.ledger if e.op == "conv2d") == "int8"
    assert sqnr(model(x), quantized(x)) > 30


@needs_x86
def test_a_kernel_that_runs_only_the_first_ops():
    manager = until(build("prelu_chain"), batch("prelu_chain"), "annotate", X86)
    plan = next(info(n).plan for n in manager.gm.graph.nodes if n.name == "extract_prelu")
    assert (plan.fate, plan.kernel_ops, plan.decision.text) == ("int8", (1, 2), "prelu costs a second conv2d on integers")


# ---- the recipe


def test_recipe_says_float():
    recipe = REFERENCE.override("b", fxq.FLOAT)
    plan = plans(until(build("dense"), batch("dense"), "annotate", recipe))["b"]
    assert plan == ("float", "the recipe says float for 'b'")


def test_recipe_says_float_for_an_op():
    got = plans(until(build("dense"), batch("dense"), "annotate", REFERENCE.override(fxq.op("cat"), fxq.FLOAT)))
    assert got["cat"] == got["cat_1"] == ("float", "the recipe says float for fxq.op('cat')")
    assert got["c_relu"] == ("int8", "")


def test_a_spec_of_its_own_reaches_the_edge():
    spec = fxq.TensorSpec(bits=4, observer="minmax")
    recipe = REFERENCE.override("c", fxq.QuantConfig(activation=spec))
    manager = until(build("dense"), batch("dense"), "annotate", recipe)
    reads = {n.name: {v.name: s for v, s in reads_of(manager.gm, n).items()} for n in manager.gm.graph.nodes}
    assert reads["c_relu"] == {"cat": spec}
    assert reads["cat"] == {"a_relu": spec, "b_relu": spec}
    assert reads["b_relu"]["a_relu"] == fxq.TensorSpec()


def test_nan_in_a_weight_names_the_layer():
    model = build("dense")
    with torch.no_grad():
        model.c.weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(fxq.InputError, match=r'layer "c".*c\.weight holds NaN or Inf'):
        until(model, batch("dense"), "annotate", REFERENCE)
    until(model, batch("dense"), "annotate", REFERENCE.override("c", fxq.FLOAT))


@needs_x86
def test_specs_that_x86_does_not_take():
    signed = fxq.TensorSpec(signed=True, symmetric=True)
    got = plans(until(build("dense"), batch("dense"), "annotate", fxq.Recipe.static(backend="x86", activation=signed)))
    assert got["a_relu"] == ("float", "x86 kernels take unsigned activations; set signed=False")
    affine = fxq.TensorSpec(observer="minmax")
    got = plans(until(build("dense"), batch("dense"), "annotate", fxq.Recipe.static(backend="x86", weight=affine)))
    assert got["a_relu"] == ("float", "x86 kernels take signed symmetric weights")


# ---- settling


def test_sums_that_share_all_their_inputs_run():
    """A value that two sums read as integers is converted once for both: neither is turned down."""

    def middle(m, x):
        a, b = torch.erf(x), torch.sin(x)
        return m.behind(a + b) + m.behind(b - a)

    got = plans(annotated(middle))
    assert got["add"] == got["sub"] == ("int8", "")
