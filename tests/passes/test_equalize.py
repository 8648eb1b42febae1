"""equalize: channels between two layers are scaled, and the output stays what it is."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.passes import Equalize
from tests.support.graphs import expected, program, run_pass
from tests.support.helpers import REFERENCE, module

WHOLE = fxq.TensorSpec(signed=True, symmetric=True)  # one scale for all channels
STATIC = fxq.Recipe.static(weight=WHOLE, backend="reference", optimize="coverage")
EQUALIZED = STATIC.insert_pass(Equalize(), after="fold-batch-norm")

TWO = """
    x: float32[2, 3, 8, 8] = input()
    w: float32[4, 3, 3, 3] = tensor('w')
    b: float32[4] = tensor('b')
    v: float32[2, 4, 1, 1] = tensor('v')
    y = conv2d(x, w, b)
    z = relu(y)
    a = conv2d(z, v)
    return a
"""


def test_text_before_and_after():
    assert program(run_pass(Equalize(), TWO)) == expected("""
        x: float32[2, 3, 8, 8] = input()
        w_equalized: float32[4, 3, 3, 3] = tensor('fxq_data.w_equalized')
        b_equalized: float32[4] = tensor('fxq_data.b_equalized')
        y: float32[2, 4, 6, 6] = conv2d(x, w_equalized, b_equalized)
        z: float32[2, 4, 6, 6] = relu(y)
        v_equalized: float32[2, 4, 1, 1] = tensor('fxq_data.v_equalized')
        a: float32[2, 2, 6, 6] = conv2d(z, v_equalized)
        return a
    """)


def test_what_is_cut_off_is_cut_off_by_channel():
    text = program(run_pass(Equalize(), TWO.replace("relu(y)", "relu6(y)"), recipe=STATIC))
    assert "relu6" not in text
    for line in (
        "y: float32[2, 4, 6, 6] = conv2d(x, w_equalized, b_equalized)",
        "z_relu: float32[2, 4, 6, 6] = relu(y)",
        "z_bound: float32[4, 1, 1] = tensor('fxq_data.z_bound')",
        "z_minimum: float32[2, 4, 6, 6] = minimum(z_relu, z_bound)",
    ):
        assert line in text


def test_functions_that_clip_stay_after_weights_with_a_scale_per_channel():
    assert program(run_pass(Equalize(), TWO.replace("relu(y)", "relu6(y)"), recipe=REFERENCE)) == expected("""
        x: float32[2, 3, 8, 8] = input()
        w: float32[4, 3, 3, 3] = tensor('w')
        b: float32[4] = tensor('b')
        v: float32[2, 4, 1, 1] = tensor('v')
        y: float32[2, 4, 6, 6] = conv2d(x, w, b)
        z: float32[2, 4, 6, 6] = relu6(y)
        a: float32[2, 2, 6, 6] = conv2d(z, v)
        return a
    """)


def spread_out(model):
    """Let the channels between layers differ by factors up to a thousand, and the model compute the same."""
    layers = [m for m in model if hasattr(m, "weight") and m.weight.dim() > 1]
    for first, second in itertools.pairwise(layers):
        factors = 10 ** (3 * torch.rand(first.weight.shape[0]) - 1.5)
        shape = [-1, *[1] * (first.weight.dim() - 1)]
        with torch.no_grad():
            first.weight *= factors.view(shape)
            first.bias *= factors
            if getattr(second, "groups", 1) > 1:  # depthwise
                second.weight /= factors.view(shape)
            else:
                second.weight /= factors.view([1, -1, *[1] * (second.weight.dim() - 2)])
    return model


@pytest.mark.one_in(4)
@pytest.mark.parametrize("function", [nn.ReLU, nn.PReLU, lambda: nn.LeakyReLU(0.1), nn.Identity])
def test_weights_with_one_scale_lose_nothing_to_channels_that_are_large(function):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3), function(), nn.Conv2d(16, 16, 3, groups=16), function(), nn.Conv2d(16, 4, 1)
    plain = nn.Sequential(*layers).eval()
    model = spread_out(copy.deepcopy(plain))
    data = [torch.randn(8, 3, 10, 10) for _ in range(4)]
    torch.testing.assert_close(model(data[0]), plain(data[0]), rtol=1e-4, atol=1e-4)
    with_pass = fxq.quantize(model, EQUALIZED, data=data)
    without, before = (fxq.quantize(m, STATIC, data=data).output_sqnr for m in (model, plain))
    assert with_pass.output_sqnr > without + 10 and with_pass.output_sqnr > before - 3
    compared = fxq.compare(model, with_pass, data)
    assert min(row.sqnr for row in compared) > 25  # values that are scaled are compared with scaled ones
    assert len(with_pass.history["equalize"].edits) > 0


def ranges(weight, axis, groups=1):
    """The largest of each channel of a weight, by a loop."""
    if groups > 1 and axis == 1:
        group_size = weight.shape[0] // groups
        return torch.cat([ranges(weight[i * group_size : (i + 1) * group_size], 1) for i in range(groups)])
    return torch.stack([part.abs().max() for part in weight.unbind(axis)])


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 3), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.booleans(), st.booleans(), st.data())
def test_the_output_stays_and_ranges_become_equal(dims, groups, kernel, transposed, bias, data):
    torch.manual_seed(data.draw(st.integers(0, 100)))
    if dims:
        kinds = [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
        second = kinds[dims - 1 + 3 * transposed](8, 4, kernel, groups=groups, bias=bias)
        model = nn.Sequential(kinds[dims - 1](4, 8, kernel, bias=bias), nn.ReLU(), second).eval()
        x = torch.randn(2, 4, *[5] * dims)
    else:
        groups = 1
        model = nn.Sequential(nn.Linear(4, 8, bias=bias), nn.ReLU(), nn.Linear(8, 4, bias=bias)).eval()
        x = torch.randn(2, 3, 4)
    with torch.no_grad():
        model[0].weight *= 10 ** torch.randn(8).view(-1, *[1] * (model[0].weight.dim() - 1))
    gm = fxq.extend.run_passes(model, EQUALIZED, example_inputs=x, until="equalize")
    wanted = model(x)
    torch.testing.assert_close(gm(x), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    weights = {name: tensor for name, tensor in fxq.extend.graph_tensors(gm).items() if "weight" in name}
    first, second = (next(t for name, t in weights.items() if name.startswith(f"fxq_data.{i}_")) for i in "02")
    read = ranges(second, 0) if transposed and dims else ranges(second, 1, groups)
    torch.testing.assert_close(ranges(first, 0), read, rtol=1e-3, atol=0)


def test_a_chain_ends_where_all_ranges_are_equal():
    torch.manual_seed(0)
    model = spread_out(nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])).eval()
    gm = fxq.extend.run_passes(model, EQUALIZED, example_inputs=torch.randn(2, 8), until="equalize")
    weights = [t for name, t in fxq.extend.graph_tensors(gm).items() if "weight" in name]
    for first, second in itertools.pairwise(weights):
        torch.testing.assert_close(ranges(first, 0), ranges(second, 1), rtol=0.01, atol=0)


def conv():
    return nn.Conv2d(4, 4, 1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(conv(), nn.Sigmoid(), conv()),
        nn.Sequential(conv(), nn.Hardtanh(), conv()),
        nn.Sequential(conv(), nn.Flatten(), nn.Linear(4 * 16, 4)),
        nn.Sequential(conv(), nn.ReLU(), nn.Linear(4, 4)),  # of the width
        nn.Sequential(nn.Linear(4, 4), nn.MaxPool1d(3, 1, 1), nn.Linear(4, 4)),  # over the channels
        module(lambda self, x: self.b(y := self.a(x)) + y, a=conv(), b=conv()),
        module(lambda self, x: self.a(self.a(x).relu()), a=conv()),
        module(lambda self, x: self.b(self.a(x) * 2 + x), a=conv(), b=conv()),
    ],
    ids=["sigmoid", "hardtanh", "flatten", "other axis", "pool over channels", "read twice", "shared", "sum"],
)
def test_what_it_leaves_alone(model):
    x = torch.randn(2, 4, 4) if isinstance(getattr(model, "0", None), nn.Linear) else torch.randn(2, 4, 4, 4)
    traced = fxq.extend.run_passes(model.eval(), EQUALIZED, example_inputs=x, until="fold-batch-norm")
    before, after = (
        program(traced),
        program(fxq.extend.run_passes(model.eval(), EQUALIZED, example_inputs=x, until="equalize")),
    )
    assert before == after


def test_pools_of_single_channels_and_folded_norms():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU6(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1)
    model = nn.Sequential(*layers).eval()
    nn.init.uniform_(model[1].weight, 0.01, 20)
    x = torch.randn(2, 3, 12, 12)
    gm = fxq.extend.run_passes(model, EQUALIZED, example_inputs=x, until="equalize")
    torch.testing.assert_close(gm(x), model(x), rtol=1e-4, atol=1e-4)
    assert "minimum" in program(gm) and "relu6" not in program(gm)


@pytest.mark.slow
def test_tools_that_try_other_recipes_know_every_value():
    torch.manual_seed(0)
    model = spread_out(
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU6(), nn.Conv2d(8, 8, 1), nn.ReLU6(), nn.Conv2d(8, 4, 1))
    )
    assert len(fxq.sensitivity(model.eval(), EQUALIZED, [torch.randn(4, 3, 6, 6)])) == 3


def test_the_recipe_goes_to_a_file_and_back(tmp_path):
    recipe = REFERENCE.insert_pass(Equalize(rounds=3), after="fold-batch-norm")
    (tmp_path / "r.toml").write_text(recipe.to_toml())
    assert fxq.Recipe.load(tmp_path / "r.toml") == recipe
