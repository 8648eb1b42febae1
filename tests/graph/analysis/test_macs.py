"""Multiply-accumulates, compared with torch's flop counter, which counts the kernels that are called."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fxq.graph.analysis.macs import macs_of
from tests.support.graphs import graph
from tests.support.helpers import module


def counted(model, *inputs):
    """Half of the floating-point operations that torch counts."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(*inputs)
    return counter.get_total_flops() // 2


def ours(model, *inputs):
    gm = graph(model, inputs)
    return sum(macs_of(gm, node) for node in gm.graph.nodes)


def of(function):
    return module(lambda self, a, b: function(a, b))


def of_three(function):
    return module(lambda self, a, b, c: function(a, b, c))


X1, X2, X3 = torch.randn(2, 4, 9), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 5, 6, 7)
CASES = {
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2), X1),
    "conv2d": (nn.Conv2d(4, 6, 3, padding=1, groups=2), X2),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4, dilation=2), X2),
    "conv3d": (nn.Conv3d(4, 6, 2), X3),
    "conv_transpose2d": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), X2),
    "grouped transpose": (nn.ConvTranspose2d(4, 6, 3, groups=2), X2),
    "linear": (nn.Linear(8, 5), X2),
    "matmul": (of(torch.matmul), torch.randn(2, 3, 4, 5), torch.randn(2, 3, 5, 6)),
    "operator": (of(lambda a, b: a @ b), torch.randn(4, 5), torch.randn(5, 6)),
    "bmm": (of(torch.bmm), torch.randn(3, 4, 5), torch.randn(3, 5, 6)),
    "addmm": (of_three(torch.addmm), torch.randn(4, 6), torch.randn(4, 5), torch.randn(5, 6)),
    "baddbmm": (of_three(torch.baddbmm), torch.randn(3, 4, 6), torch.randn(3, 4, 5), torch.randn(3, 5, 6)),
    "added to": (of_three(lambda a, b, c: a.addmm(b, c)), torch.randn(4, 6), torch.randn(4, 5), torch.randn(5, 6)),
    "names": (
        of_three(lambda a, b, c: torch.addmm(mat2=c, input=a, mat1=b) + torch.mm(b, mat2=c)),
        torch.randn(4, 6),
        torch.randn(4, 5),
        torch.randn(5, 6),
    ),
    "names of batches": (
        of_three(lambda a, b, c: a.baddbmm(batch2=c, batch1=b, beta=0.5)),
        torch.randn(3, 4, 6),
        torch.randn(3, 4, 5),
        torch.randn(3, 5, 6),
    ),
    "nothing": (nn.ReLU(), X2),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_as_torch_counts(name):
    model, *inputs = CASES[name]
    model.eval()
    assert ours(model, *inputs) == counted(model, *inputs)
    assert name == "nothing" or ours(model, *inputs) > 0


def test_attention():
    q, k, v = torch.randn(2, 3, 7, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 5)
    assert ours(of_three(F.scaled_dot_product_attention), q, k, v) == 2 * 3 * 7 * 9 * (8 + 5)


@settings(deadline=None, max_examples=10)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(7, 12), st.integers(1, 2)
)
def test_any_convolution(n, group, inner, kernel, size, stride):
    model = nn.Conv2d(group * inner, 2 * group, kernel, stride=stride, groups=group).eval()
    x = torch.randn(n, group * inner, size, size + 1)
    assert ours(model, x) == counted(model, x)


def test_a_recurrent_layer():
    """Computed by hand, since torch does not count the kernel: 3 gates, both directions, two layers."""
    model = nn.Sequential(nn.GRU(6, 5, num_layers=2, bidirectional=True, batch_first=True)).eval()
    first, second = 2 * 15 * (6 + 5), 2 * 15 * (10 + 5)
    assert ours(model, torch.randn(3, 4, 6)) == 3 * 4 * (first + second)


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.conv = nn.Embedding(50, 6), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.conv(x) if x.shape[0] < 100 else x


def test_a_module_that_is_kept_counts_by_its_weights():
    import fxq

    model = nn.Sequential(Kept()).eval()
    gm = graph(model, X2, recipe=fxq.Recipe.static(backend="reference").leaf("0"))
    assert sum(macs_of(gm, node) for node in gm.graph.nodes) == counted(model, X2)  # the table is not multiplied


def test_a_recurrent_layer_of_a_packed_sequence():
    """A packed sequence has no shape, so the steps of the data that was packed count."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(5, 7, batch_first=True)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]

    gm = graph(Packed(), (torch.randn(3, 6, 5), torch.tensor([6, 4, 2])))
    assert sum(macs_of(gm, node) for node in gm.graph.find_nodes(op="call_module")) == (6 + 4 + 2) * 4 * 7 * (5 + 7)
