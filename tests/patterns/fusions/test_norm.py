"""The pattern of batch norms: its arithmetic. Which layers it is folded into is in test_fold_batch_norm.py."""

import pytest
import torch
from torch import nn

import fxq
from fxq.patterns.fusions.norm import norm_after_layer, scale_and_shift
from fxq.rewriting.match import Matcher
from tests.support.graphs import graph
from tests.support.models import settled


def matched(layer, norm, x):
    model = settled(lambda: nn.Sequential(layer, norm))
    gm = graph(model, x, "canonicalize")
    node = next(n for n in gm.graph.nodes if n.name == "_1")
    return next(m for rule in norm_after_layer if (m := Matcher(gm).match(rule, node)) is not None), gm


@pytest.mark.parametrize("affine", [True, False])
def test_scale_and_shift(affine):
    norm = nn.BatchNorm2d(4, eps=1e-3, affine=affine)
    settled(lambda: nn.Sequential(nn.Conv2d(3, 4, 1), norm))
    scale, shift = scale_and_shift(norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
    y = torch.randn(50, 4, 3, 3)
    got = y * scale.reshape(1, 4, 1, 1) + shift.reshape(1, 4, 1, 1)
    torch.testing.assert_close(got, norm.eval()(y).detach(), rtol=1e-5, atol=1e-5)


def test_one_rule_for_each_layer():
    assert [rule.name for rule in norm_after_layer] == [
        "fold_batch_norm_conv1d",
        "fold_batch_norm_conv2d",
        "fold_batch_norm_conv3d",
        "fold_batch_norm_linear",
        "fold_batch_norm_conv_transpose1d",
        "fold_batch_norm_conv_transpose2d",
        "fold_batch_norm_conv_transpose3d",
    ]
    match, gm = matched(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), torch.randn(1, 3, 4, 4))
    assert match.rule.name == "fold_batch_norm_conv2d"
    assert match.options("conv2d")["groups"] == 1
    assert "expects conv1d, but %_0 is conv2d" in fxq.extend.explain(norm_after_layer[0], gm, "_1")


def test_tiny_variances_do_not_overflow():
    """A dead channel: its variance is 0, its scale 1 / sqrt(eps)."""
    norm = nn.BatchNorm2d(4, eps=1e-5)

    def make():
        return nn.Sequential(nn.Conv2d(3, 4, 1), norm)

    model, x = settled(make), torch.randn(2, 3, 4, 4)
    norm.running_var[1] = 0.0
    gm = graph(model, x, "fold-batch-norm")
    with torch.no_grad():
        torch.testing.assert_close(gm(x), model(x), rtol=1e-4, atol=1e-4)
