"""The benchmark of 4-bit weights: its metric, and its table."""

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.any_cpu


class Logits(nn.Module):
    """Table of logits per token, as a language model returns them."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(7, 5)

    def forward(self, tokens):
        return SimpleNamespace(logits=self.table(tokens))


def test_divergence_is_that_of_pytorch(script):
    divergence = script("bench.int4").divergence
    tokens, a, b = torch.randint(0, 7, (9, 4)), Logits(0), Logits(1)
    wanted = F.kl_div(
        b(tokens).logits.log_softmax(-1), a(tokens).logits.log_softmax(-1), reduction="sum", log_target=True
    )
    assert abs(divergence(a, b, tokens) - float(wanted) / 36) < 1e-5
    assert divergence(a, a, tokens) == 0.0


def test_table_shows_the_share_that_is_won_back(script):
    bench = script("bench.int4")
    result_of, rounded = bench.Result, bench.ROUNDED
    results = [
        result_of("net", rounded, 0.02),
        result_of("net", "fitted", 0.005),
        result_of("net", "absent", note="no package"),
    ]
    lines = bench.table(results).splitlines()
    assert "0%" in lines[2] and "75%" in lines[3] and "no package" in lines[4]


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="needs OpenVINO")
def test_bits_in_openvino_are_those_of_integers_scales_and_zero_points(script):
    import openvino
    from openvino import opset13 as ops

    x = ops.parameter([1, 64], np.float32)
    kinds = openvino.Type.u4, openvino.Type.u4, openvino.Type.f16
    weight, zero, scale = (
        ops.constant(np.ones(shape, np.uint8), dtype=kind)
        for shape, kind in zip(((3, 2, 32), (3, 2, 1), (3, 2, 1)), kinds, strict=True)
    )
    integers = ops.subtract(*(ops.convert(value, "f16") for value in (weight, zero)))
    real = ops.reshape(ops.multiply(integers, scale), np.array([3, 64]), False)
    product = ops.matmul(x, ops.convert(real, "f32"), False, True)
    biased = ops.multiply(product, ops.constant(np.ones(3, np.float32)))
    bits_of = script("bench.int4_contenders").bits_in_openvino
    assert bits_of(openvino.Model([biased], [x])) == 4 + (4 + 16) / 32


def test_distance_is_one_minus_the_cosine(script):
    tokens = torch.randint(0, 7, (9, 4))
    a, b = Logits(0).table, Logits(1).table
    wanted = 1 - F.cosine_similarity(a(tokens), b(tokens), dim=-1).mean()
    assert abs(script("bench.int4").distance(a, b, tokens) - float(wanted)) < 1e-6
