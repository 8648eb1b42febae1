"""fold-batch-norm: batch norms into the layers before or after them."""

import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import fxq
from fxq.passes import FoldBatchNorm
from fxq.patterns.fusions.norm import norm_after_layer, norm_before_layer
from tests.support.graphs import drawn, expected, program, run_pass
from tests.support.helpers import REFERENCE
from tests.support.models import call, settled


def written(layer, shape, weight, channels, norm="batch_norm({}, mean, var, g, h)", ahead=False):
    """A layer with a norm after it; or a norm, after a relu, with a layer after it."""
    first, second = norm.format("relu"), layer.replace("(x", "(first")
    lines = ["relu = relu(x)", f"first = {first}", f"layer = {second}", "return layer"]
    if not ahead:
        lines = [f"layer = {layer}", f"norm = {norm.format('layer')}", "return norm"]
    vectors = [f"{name}: float32[{channels}] = tensor('{name}')" for name in ("mean", "var", "g", "h")]
    bias = weight.partition(",")[0] if ahead else channels
    tensors = [f"w: float32[{weight}] = tensor('w')", f"b: float32[{bias}] = tensor('b')", *vectors]
    return "\n".join([f"x: float32[{shape}] = input()", *tensors, *lines])


AFTER = {
    "conv1d": ("conv1d(x, w, b)", "2, 4, 9", "6, 4, 3", 6),
    "conv2d": ("conv2d(x, w, b)", "2, 4, 9, 9", "6, 4, 3, 3", 6),
    "no bias": ("conv2d(x, w)", "2, 4, 9, 9", "6, 4, 3, 3", 6),
    "no affine": ("conv2d(x, w, b)", "2, 4, 9, 9", "6, 4, 3, 3", 6, "batch_norm({}, mean, var)"),
    "eps": ("conv2d(x, w, b)", "2, 4, 9, 9", "6, 4, 3, 3", 6, "batch_norm({}, mean, var, g, h, eps=0.5)"),
    "grouped": ("conv2d(x, w, b, groups=2)", "2, 4, 9, 9", "6, 2, 3, 3", 6),
    "depthwise": ("conv2d(x, w, b, groups=4)", "2, 4, 9, 9", "4, 1, 3, 3", 4),
    "transposed": ("conv_transpose2d(x, w, b, stride=(2, 2))", "2, 4, 5, 5", "4, 6, 3, 3", 6),
    "transposed grouped": ("conv_transpose2d(x, w, b, groups=2)", "2, 4, 5, 5", "4, 3, 2, 2", 6),
    "conv3d": ("conv3d(x, w, b)", "2, 4, 5, 5, 5", "6, 4, 3, 3, 3", 6),
    "transposed 1d": ("conv_transpose1d(x, w, b, stride=(2,))", "2, 4, 5", "4, 6, 3", 6),
    "transposed 3d": ("conv_transpose3d(x, w, b, groups=2)", "2, 4, 3, 3, 3", "4, 3, 2, 2, 2", 6),
    "linear": ("linear(x, w, b)", "8, 4", "6, 4", 6),
}
AHEAD = {
    "conv1d": ("conv1d(x, w, b)", "2, 4, 9", "6, 4, 3", 4),
    "conv2d": ("conv2d(x, w, b, stride=(2, 2))", "2, 4, 9, 9", "6, 4, 3, 3", 4),
    "conv3d": ("conv3d(x, w, b)", "2, 4, 5, 5, 5", "6, 4, 2, 2, 2", 4),
    "no bias": ("conv2d(x, w)", "2, 4, 9, 9", "6, 4, 3, 3", 4),
    "no affine": ("conv2d(x, w, b)", "2, 4, 9, 9", "6, 4, 3, 3", 4, "batch_norm({}, mean, var)"),
    "grouped": ("conv2d(x, w, b, groups=2)", "2, 4, 9, 9", "6, 2, 3, 3", 4),
    "depthwise": ("conv2d(x, w, b, groups=4)", "2, 4, 9, 9", "8, 1, 3, 3", 4),
    "linear": ("linear(x, w, b)", "8, 4", "6, 4", 4),
}
CASES = [pytest.param(case, False, id=name) for name, case in AFTER.items()]
CASES += [pytest.param(case, True, id=f"ahead of {name}") for name, case in AHEAD.items()]


def ops(gm):
    """The program's calls, without inputs and tensors."""
    shown = [line.partition(" = ")[2] or line for line in program(gm).splitlines()]
    return [call for call in shown if not call.startswith(("tensor(", "input("))]


@pytest.mark.parametrize(("case", "ahead"), CASES)
def test_folds(case, ahead):
    before = written(*case, ahead=ahead)
    tensors = {name: tensor - 0.25 * (name != "var") for name, tensor in drawn(before).items()}
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    gm = run_pass(FoldBatchNorm(), before, tensors)
    read = "relu" if ahead else "x"
    folded = re.sub(r"\(x, w(, b)?", f"({read}, w_weight_folded, w_bias_folded", case[0])
    assert ops(gm) == ["relu(x)"] * ahead + [folded, "return layer"]
    x = torch.randn([int(size) for size in case[1].split(", ")])
    wanted = fxq.extend.read_graph(before, kept)(x)
    torch.testing.assert_close(gm(x), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    assert all(torch.equal(tensors[name], kept[name]) for name in kept)


CONV = written("conv2d(x, w, b)", "2, 4, 6, 6", "4, 4, 3, 3", 4)


def test_a_shared_conv_with_two_norms_gets_two_weights():
    before = CONV.replace("return norm", "again = conv2d(norm, w)\nlast = batch_norm(again, var, mean)\nreturn last")
    gm = run_pass(FoldBatchNorm(), before)
    assert program(gm) == expected("""
        x: float32[2, 4, 6, 6] = input()
        w_weight_folded: float32[4, 4, 3, 3] = tensor('fxq_data.w_weight_folded')
        w_bias_folded: float32[4] = tensor('fxq_data.w_bias_folded')
        layer: float32[2, 4, 4, 4] = conv2d(x, w_weight_folded, w_bias_folded)
        w_weight_folded_1: float32[4, 4, 3, 3] = tensor('fxq_data.w_weight_folded_1')
        w_bias_folded_1: float32[4] = tensor('fxq_data.w_bias_folded_1')
        again: float32[2, 4, 2, 2] = conv2d(layer, w_weight_folded_1, w_bias_folded_1)
        return again
    """)
    assert not torch.equal(gm.fxq_data.w_weight_folded, gm.fxq_data.w_weight_folded_1)


def test_two_norms_in_a_row():
    before = CONV.replace("return norm", "second = batch_norm(norm, mean, var)\nreturn second")
    tensors, x = drawn(before), torch.randn(2, 4, 6, 6)
    gm = run_pass(FoldBatchNorm(), before, tensors)
    assert ops(gm) == ["conv2d(x, w_weight_folded_weight_folded, w_weight_folded_bias_folded)", "return layer"]
    torch.testing.assert_close(gm(x), fxq.extend.read_graph(before, tensors)(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (written("linear(x, w)", "2, 4, 4", "4, 4", 4), "channels_are_not_the_second_axis"),
        (CONV.replace("return norm", "add = add(norm, layer)\nreturn add"), "%layer is also read by %add"),
        (CONV.replace("conv2d(x, w, b)", "conv2d(x, w2)").replace("layer =", "w2 = mul(w, x)\nlayer =")
         .replace("[2, 4, 6, 6]", "[4, 4, 3, 3]"), "weight_is_computed_at_run_time"),
        (CONV.replace("conv2d(x, w, b)", "relu(x)"), ""),
    ],
)  # fmt: skip
def test_refuses(before, reason):
    gm = run_pass(FoldBatchNorm(), before)
    assert ops(gm) == ops(fxq.extend.read_graph(before, drawn(before)))
    assert any(reason in fxq.extend.explain(rule, gm, "norm") for rule in norm_after_layer)


@pytest.mark.parametrize("layer", [nn.Linear(4, 5), nn.ReLU()])
def test_what_is_not_folded_goes_through_the_pipeline_all_the_same(layer):
    model, x = settled(lambda: nn.Sequential(layer, nn.BatchNorm1d(5))), torch.randn(2, 5, 4)
    with pytest.warns(fxq.FxqWarning) if isinstance(layer, nn.ReLU) else nullcontext():
        assert call(fxq.quantize(model, REFERENCE, data=[x]), x).shape == call(model, x).shape


# ---- into the layer after it


def test_padding_is_right_at_the_borders():
    """Zeros around the norm's output are not what it makes of zeros, unless it has no shift."""
    padded = written("conv2d(x, w, b, padding=(1, 1))", "2, 4, 5, 5", "6, 4, 3, 3", 4, ahead=True)
    gm = run_pass(FoldBatchNorm(), padded)
    assert ops(gm) == ops(fxq.extend.read_graph(padded, drawn(padded)))
    assert "padding_is_not_normalized" in fxq.extend.explain(norm_before_layer[1], gm, "layer")
    centred = padded.replace("mean, var, g, h)", "mean, var, g)")
    tensors, x = {**drawn(centred), "mean": torch.zeros(4)}, torch.randn(2, 4, 5, 5)
    gm = run_pass(FoldBatchNorm(), centred, tensors)
    assert "batch_norm" not in program(gm)
    torch.testing.assert_close(gm(x), fxq.extend.read_graph(centred, tensors)(x), rtol=1e-5, atol=1e-5)


def test_a_norm_that_others_read_stays():
    same = written("conv2d(x, w, b)", "2, 4, 5, 5", "6, 4, 3, 3", 4, ahead=True).replace(
        "return layer", "other = conv2d(first, w, b)\nadd = add(layer, other)\nreturn add"
    )
    assert ops(run_pass(FoldBatchNorm(), same)) == ops(fxq.extend.read_graph(same, drawn(same)))


@pytest.mark.parametrize(("floats", "apart"), [("0", False), ("1", True), ("*", False)])
def test_a_norm_goes_into_a_float_layer_but_no_float_norm_into_an_integer_one(floats, apart):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    recipe = REFERENCE.override(floats, fxq.FLOAT)
    gm = fxq.extend.run_passes(model, recipe, example_inputs=torch.rand(1, 3, 8, 8), until="fold-batch-norm")
    assert ("batch_norm" in gm.code) == apart
