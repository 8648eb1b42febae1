"""fuse: units. Which patterns there are is in test_patterns_*.py; here is what holds for all of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.backends.cpu import has_onednn_int8
from fxq.common.metrics import sqnr
from fxq.graph.info import info
from fxq.graph.unit import unit_of
from fxq.passes import Fuse
from tests.graphs import after, again, equal, expected, text, until
from tests.helpers import REFERENCE, program, restored_fusions, run_pass
from tests.models import NETWORKS, batch, build, call, settled


def test_text_before_and_after():
    model, x = build("residual"), batch("residual")
    manager = until(model, x, "fuse")
    assert text(manager.gm) == expected("""
        x = input
        stem_relu = conv2d_relu(x, @stem.weight, @stem.bias) {conv2d(padding=(1, 1)); relu}
        conv1_relu = conv2d_relu(stem_relu, @fxq_data.conv1_weight_folded, @fxq_data.conv1_bias_folded) \
{conv2d(padding=(1, 1)); relu}
        conv2_add_relu = conv2d_add_relu(conv1_relu, @fxq_data.conv2_weight_folded, @fxq_data.conv2_bias_folded, \
stem_relu) {conv2d(padding=(1, 1)); add; relu}
        down = conv2d(conv2_add_relu, @down.weight, @down.bias, stride=(2, 2))
        conv3_add_relu = conv2d_add_relu(conv2_add_relu, @conv3.weight, @conv3.bias, down) \
{conv2d(stride=(2, 2), padding=(1, 1)); add; relu}
        mean = mean(conv3_add_relu, dim=(2, 3))
        head = linear(mean, @head.weight, @head.bias)
        return head
    """)
    assert again(manager, Fuse()) == []


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_keep_their_output(name):
    model, inputs = build(name), batch(name)
    before = after(model, inputs, "fold-batch-norm")
    manager = until(model, inputs, "fuse")
    assert equal(call(manager.gm, inputs), call(before, inputs))
    assert again(manager, Fuse()) == []
    owned = [p for n in manager.gm.graph.nodes for p in info(n).parts]
    assert len(owned) == len({origin for part in owned for origin in part[:1]})  # an op belongs to one unit


class TwoBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.b(self.act(self.a(x))))


def test_equal_bodies_share_one_module():
    gm = after(TwoBlocks().eval(), torch.randn(1, 3, 5, 5), "fuse")
    targets = [n.target for n in gm.graph.nodes if n.op == "call_module"]
    assert len(targets) == 2
    assert len(set(targets)) == 1


def test_a_unit_knows_where_it_came_from():
    gm = after(TwoBlocks().eval(), torch.randn(1, 3, 5, 5), "fuse")
    unit = next(n for n in gm.graph.nodes if unit_of(gm, n) is not None)
    about = info(unit)
    assert (unit.name, about.path, about.shape, about.dtype) == ("a_relu", "a", (1, 3, 5, 5), torch.float32)
    assert about.origins == ("a", "act")
    assert about.parts == (("a",), ("act",))
    assert about.source.startswith("passes/test_fuse.py:")
    assert about.made_by.startswith("fuse: conv2d_relu (patterns/conv.py:")


def test_the_largest_pattern_wins():
    """conv + add + relu, not conv + add with a relu of its own, nor conv alone with add + relu."""
    gm = run_pass(
        Fuse(),
        """
        x: float32[1, 3, 5, 5] = input()
        w: float32[3, 3, 1, 1] = tensor('a.weight')
        a = conv2d(x, w)
        add = add(a, x)
        relu = relu(add)
        return relu
        """,
        {"a.weight": torch.randn(3, 3, 1, 1)},
    )
    assert program(gm) == expected("""
        def conv2d_add_relu(x, weight, bias, residual):
            conv2d = conv2d(x, weight, bias)
            add = add(conv2d, residual)
            relu = relu(add)
            return relu

        x: float32[1, 3, 5, 5] = input()
        w: float32[3, 3, 1, 1] = tensor('a.weight')
        a_add_relu: float32[1, 3, 5, 5] = conv2d_add_relu(x, w, None, x)
        return a_add_relu
    """)


@pytest.mark.parametrize("selector", ["act", "a", fxq.op("relu")])
def test_ops_that_the_recipe_configures_differently_stay_apart(selector):
    model, x = settled(TwoBlocks), torch.randn(2, 3, 5, 5)
    assert "a_relu = conv2d_relu(" in text(after(model, x, "fuse"))
    recipe = REFERENCE.override(selector, fxq.FLOAT)
    gm = after(model, x, "fuse", recipe)
    assert "a_relu = conv2d_relu(" not in text(gm)
    assert "a = conv2d(x, @a.weight, @a.bias, padding=(1, 1))" in text(gm)
    said = [e for e in fxq.quantize(model, recipe, data=[x]).ledger if "the recipe says float" in e.reason]
    assert [e.name for e in said] == (["a"] if selector == "a" else ["act", "act_1"])
    assert all(e.fix.startswith("recipe.override(") for e in said)


def test_another_spec_for_the_layer_alone_keeps_the_unit():
    """An activation function has no spec of its own."""
    recipe = REFERENCE.override("a", fxq.QuantConfig(activation=fxq.TensorSpec(bits=4)))
    assert "a_relu = conv2d_relu(" in text(after(settled(TwoBlocks), torch.randn(2, 3, 5, 5), "fuse", recipe))


def test_a_sum_with_another_spec_stays_apart():
    recipe = REFERENCE.override("conv2", fxq.QuantConfig(activation=fxq.TensorSpec(bits=4)))
    lines = text(after(build("residual"), batch("residual"), "fuse", recipe)).splitlines()
    assert [line.partition("(")[0] for line in lines[3:5]] == ["conv2 = conv2d", "add_relu = add_relu"]


def test_a_value_read_elsewhere_stays():
    same = expected("""
        x: float32[1, 3, 5, 5] = input()
        w: float32[3, 3, 1, 1] = tensor('a.weight')
        a: float32[1, 3, 5, 5] = conv2d(x, w)
        relu: float32[1, 3, 5, 5] = relu(a)
        mul: float32[1, 3, 5, 5] = mul(relu, a)
        return mul
    """)
    gm = run_pass(Fuse(), same, {"a.weight": torch.randn(3, 3, 1, 1)})
    assert program(gm) == same
    assert "%a is also read by %mul" in fxq.explain("conv2d_relu", gm, "relu")


class Scaled(nn.Module):
    """A layer and a user's factor behind it; a second layer reads them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 4, 1)
        self.s = nn.Parameter(torch.rand(3, 1, 1))

    def forward(self, x):
        return self.b(self.s * torch.relu(self.a(x)))


def scaled_act(op, x, w, b, s):
    return op.mul(op.relu(op.conv2d(x, w, b)), s)


def test_a_user_s_pattern_comes_first():
    with restored_fusions():
        fxq.fusion(scaled_act)
        model, x = settled(Scaled), torch.randn(4, 3, 5, 5)
        gm = after(model, x, "fuse", REFERENCE)
        assert text(gm).splitlines()[1] == "a_relu_mul = scaled_act(x, @a.weight, @a.bias, @s)"
        assert sqnr(call(model, x), call(fxq.quantize(model, data=[x]), x)) > 30


@pytest.mark.skipif(not has_onednn_int8(), reason="needs the oneDNN int8 kernels")
@pytest.mark.parametrize("optimize", ["speed", "coverage"])
def test_a_fusion_makes_no_network_worse(optimize):
    """No kernel of x86 runs all three ops: they are what they are without the pattern, and it says why."""
    recipe = fxq.Recipe.static(backend="x86", optimize=optimize)
    model, x = settled(Scaled), torch.randn(4, 3, 5, 5)
    alone = fxq.quantize(model, recipe, data=[x])
    with restored_fusions():
        fxq.fusion(scaled_act)
        gm = after(model, x, "fuse", recipe)
        fused = fxq.quantize(model, recipe, data=[x])
    assert text(gm) == expected("""
        x = input
        a_relu = conv2d_relu(x, @a.weight, @a.bias)
        mul = mul(a_relu, @s)
        b = conv2d(mul, @b.weight, @b.bias)
        return b
    """)
    reasons = [near.reason for near in fused.history["fuse"].near if near.rule == "scaled_act"]
    assert reasons == ["x86 has a kernel for the first 2 of these 3 ops alone"]
    assert {e.fate for e in alone.ledger} == {e.fate for e in fused.ledger} == {"int8"}
    assert torch.equal(fused(x), alone(x))


@pytest.mark.skipif(not has_onednn_int8(), reason="needs the oneDNN int8 kernels")
def test_a_fusion_takes_no_layer_along_into_float():
    """What has no kernel comes first: in a unit, the layer behind it would be float as well."""
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)).eval()
    with restored_fusions():

        @fxq.fusion
        def norm_linear(op, x, g, h, w, b):
            return op.linear(op.layer_norm(x, g, h, normalized_shape=(6,), eps=1e-5), w, b)

        ledger = fxq.quantize(model, fxq.Recipe.static(backend="x86"), data=[torch.randn(4, 6)]).ledger
    assert [(e.op, e.fate) for e in ledger] == [("layer_norm", "float"), ("linear", "int8")]


def test_a_fusion_with_several_outputs_goes_through_in_float():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

        def forward(self, x):
            y = self.a(x)
            return self.b(F.relu(y)), y

    model, x = settled(Twice), torch.randn(2, 3, 8, 8)
    with restored_fusions():

        @fxq.fusion
        def relu_and_before(op, x, w, b):
            y = op.conv2d(x, w, b)
            return op.relu(y), y

        quantized = fxq.quantize(model, REFERENCE, data=[x])
    assert str(quantized.history["fuse"].graph).splitlines()[1:4] == [
        "a_relu = relu_and_before(x, @a.weight, @a.bias)",
        "getitem = getitem(a_relu, 0)",
        "getitem_1 = getitem(a_relu, 1)",
    ]
    assert [(e.op, e.fate) for e in quantized.ledger] == [("conv2d", "float"), ("relu", "float"), ("conv2d", "int8")]
    assert "several outputs" in quantized.ledger[0].reason
    want, got = model(x), quantized(x)
    assert torch.equal(got[1], want[1])
    assert (got[0] - want[0]).abs().max() < 0.05 * want[0].abs().max()  # a few steps of 1/255
