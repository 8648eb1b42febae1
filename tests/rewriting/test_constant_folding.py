"""Constant folding: calls of weights alone are computed once, and no others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.graphs import expected, graph, text
from tests.support.helpers import REFERENCE, module

X = torch.linspace(-1, 1, 512).reshape(2, 4, 8, 8)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


class StandardizedConv(nn.Conv2d):
    """Layer whose weight is normalized in every call, as in timm's NFNets and ResNetV2."""

    def forward(self, x):
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


def test_a_standardized_weight_is_a_weight():
    model = module(lambda self, x: F.relu(self.conv(x)), conv=StandardizedConv(4, 4, 3, padding=1)).eval()
    gm = graph(model, X, "canonicalize")
    assert text(gm) == expected("""
        x = input
        conv2d = conv2d(x, @fxq_data.conv_weight_reshape_batch_norm_reshape_as, @conv.bias, padding=(1, 1))
        relu = relu(conv2d)
        return relu
    """)
    torch.testing.assert_close(gm(X), model(X), rtol=0, atol=1e-6)
    qmodel = fxq.quantize(model, REFERENCE, data=[X])
    assert sqnr(model(X), qmodel(X)) > 30
    assert [(e.op, e.precision) for e in qmodel.ledger if e.precision != "folded"] == [
        ("conv2d", "int8"),
        ("relu", "int8"),
    ]
    assert {e.reason for e in qmodel.ledger if e.precision == "folded"} == {"its value is a constant"}


def test_a_table_of_positions_is_a_constant():
    def forward(self, x):
        bias = self.table[self.index.view(-1)].view(4, 4, 2).permute(2, 0, 1).contiguous()
        return torch.softmax(x + 16 * torch.sigmoid(bias), -1)

    model = module(forward)
    model.table = nn.Parameter(torch.randn(7, 2))
    model.register_buffer("index", torch.arange(16).reshape(4, 4) % 7)
    gm = graph(model, torch.randn(3, 2, 4, 4), "canonicalize")
    assert [line.partition(" = ")[2].partition("(")[0] for line in text(gm).splitlines()[1:3]] == ["add", "softmax"]
    x = torch.randn(3, 2, 4, 4)
    torch.testing.assert_close(gm(x), model(x))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x + torch.rand_like(self.w),
        lambda self, x: x + F.dropout(self.w, training=True),
        lambda self, x: x + torch.bernoulli(self.w),
    ],
)
def test_what_is_left_to_chance_is_not_computed_once(forward):
    model = module(forward)
    model.w = nn.Parameter(torch.full((8,), 0.5))
    state = torch.get_rng_state()
    gm = graph(model, X, "canonicalize")
    assert torch.equal(torch.get_rng_state(), state)
    assert "@fxq_data" not in text(gm)
    assert not torch.equal(gm(X), gm(X))


def test_what_is_changed_in_place_is_not_shared():
    def forward(self, x):
        mask = torch.zeros_like(self.w)
        mask.index_fill_(0, self.first, 1.0)
        return x * mask

    model = module(forward)
    model.w = nn.Parameter(torch.ones(8))
    model.register_buffer("first", torch.tensor([0]))
    gm = graph(model, X, "canonicalize")
    for x in (X, 2 * X):
        torch.testing.assert_close(gm(x), model(x))


def test_a_small_constant_is_not_made_a_large_one():
    model = module(lambda self, x: x + self.w.repeat(2000, 2000)[:1, :8])
    model.w = nn.Parameter(torch.ones(1, 1))
    gm = graph(model, X, "canonicalize")
    assert "repeat" in text(gm)
    assert sum(buffer.numel() for buffer in gm.buffers()) < 100


def test_a_view_shares_the_memory_of_its_weight():
    model = module(lambda self, x: F.linear(x, self.w.t()))
    model.w = nn.Parameter(torch.randn(8, 4))
    gm = graph(model, X, "canonicalize")
    assert gm.fxq_data.w_transpose.data_ptr() == model.w.data_ptr()
