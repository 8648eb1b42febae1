"""Layers as products of matrices, against the layers themselves."""

import pytest
import torch
from torch import fx

from fxq.graph.analysis import layer_matrix
from fxq.graph.analysis.layer_matrix import LayerMatrix
from fxq.graph.unit import OpCall
from fxq.ops import OPS


def layer(name, shape, **options):
    op = OPS[name]
    call = OpCall(op, {**op.options, **options}, {}, name)
    assert LayerMatrix.takes(call)
    return LayerMatrix(call, tuple(shape))


def outputs(y, groups, axes):
    """Output of a convolution as (G, n, R)."""
    y = y if y.dim() == axes + 2 else y[None]
    return y.unflatten(1, (groups, -1)).movedim(2, -1).transpose(0, 1).flatten(1, -2)


def check(form, x, weight, groups=1):
    options = form.call.options
    wanted = form.call.op.target(x, weight, None, **options)
    axes = weight.dim() - 2
    wanted = outputs(wanted, groups, axes) if axes else wanted.reshape(1, -1, len(weight))
    rows = form.rows(weight)
    assert torch.equal(form.weight(rows), weight)
    got = torch.cat([part @ rows.mT for part in form.patches(x)], 1)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (0, 8)])
def test_linear(shape):
    check(layer("linear", (5, 8)), torch.randn(shape), torch.randn(5, 8))


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (1, 2, 2), (3, 1, 2)], ids=str)
def test_convolutions(axes, groups, stride, padding, dilation):
    sizes, kernel = (9, 8, 7)[:axes], (3, 2, 3)[:axes]
    options = {"stride": (stride,) * axes, "padding": (padding,) * axes, "dilation": (dilation,) * axes}
    x = torch.randn(2, 4, *sizes)
    form = layer(f"conv{axes}d", (6, 4 // groups, *kernel), groups=groups, **options)
    check(form, x, torch.randn(form.shape), groups)
    form = layer(
        f"conv_transpose{axes}d",
        (4, 6 // groups, *kernel),
        groups=groups,
        output_padding=(stride - 1,) * axes,
        **options,
    )
    check(form, x, torch.randn(form.shape), groups)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{"padding": "same"}, {"padding_mode": "reflect"}, {"padding_mode": "circular"}],
    ids=str,
)
def test_other_paddings_and_one_sample_alone(axes, options):
    options = {"padding": (1,) * axes, **options}
    form = layer(f"conv{axes}d", (6, 4, *[3] * axes), **options)
    check(form, torch.randn(4, *(9, 8, 7)[:axes]), torch.randn(form.shape))


def test_depthwise():
    form = layer("conv2d", (8, 1, 3, 3), groups=8)
    check(form, torch.randn(2, 8, 6, 6), torch.randn(8, 1, 3, 3), 8)


def test_samples_are_taken_some_at_a_time(monkeypatch):
    form = layer("conv2d", (6, 4, 3, 3))
    x, weight = torch.randn(5, 4, 6, 6), torch.randn(6, 4, 3, 3)
    monkeypatch.setattr(layer_matrix, "MAX_PATCH_VALUES", 2 * 9 * 4 * 16)
    assert [part.shape[1] for part in form.patches(x)] == [32, 32, 16]
    check(form, x, weight)


def test_what_is_no_such_layer():
    assert not LayerMatrix.takes(OpCall(OPS["relu"], {}, {}, "relu"))
    graph = fx.Graph()
    size = graph.placeholder("size")
    op = OPS["conv2d"]
    assert not LayerMatrix.takes(OpCall(op, {**op.options, "stride": (size, 1)}, {}, "conv2d"))


@pytest.mark.parametrize(
    ("name", "shape", "size", "count"),
    [
        ("linear", (5, 8), (3, 20, 8), 20),
        ("conv2d", (6, 4, 3, 3), (3, 4, 8, 9), 42),
        ("conv1d", (6, 4, 1), (3, 4, 9), 9),
    ],
)
def test_some_places_of_each_sample(name, shape, size, count):
    """Selected positions are distinct positions of the input, and the same ones in each call and for each input."""
    form, x = layer(name, shape), torch.randn(size)
    every, some = (torch.cat(list(form.patches(x, most)), 1)[0].unflatten(0, (3, -1)) for most in (None, 7))
    assert some.shape[1] == 7 and every.shape[1] == count
    for few, whole in zip(some, every, strict=True):
        matches = (few[:, None] == whole).all(2)
        assert (matches.sum(1) == 1).all() and matches.sum(0).max() == 1
    again = torch.cat(list(form.patches(2 * x, 7)), 1)[0]
    assert torch.equal(again, 2 * some.flatten(0, 1))
    assert sum(part.shape[1] for part in form.patches(x, count + 1)) == 3 * count
