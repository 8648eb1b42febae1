"""Recurrent layers that are traced into: as the model itself, of a class of the user's own, and called as functions."""

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.graph.info import info
from fxq.graph.query import op_of
from tests.support.graphs import graph, until
from tests.support.helpers import REFERENCE
from tests.support.models import call, settled

N, T, C, H = 3, 6, 4, 5


class OwnLSTM(nn.LSTM):
    """Subclass with torch's forward."""


class Scaled(nn.LSTM):
    """Subclass with its own forward."""

    def forward(self, x, hx=None):
        y, (h, c) = super().forward(2 * x, hx)
        return y + 1, (c, h)


class OwnCell(nn.GRUCell):
    """Subclass of a cell."""


class Functional(nn.Module):
    """Module that calls the function itself."""

    def __init__(self, read, change=lambda weight, x: weight):
        super().__init__()
        self.rnn, self.read, self.change = nn.LSTM(C, H), read, change

    def forward(self, x):
        weights = [self.change(getattr(self.rnn, name), x) for name, _ in self.rnn.named_parameters()]
        zeros = torch.zeros(1, x.shape[1], H)
        return self.read(torch.lstm(x, (zeros, zeros), weights, True, 1, 0.0, self.training, False, False))


def data(*shape):
    return torch.randn(shape or (T, N, C), generator=torch.Generator().manual_seed(3))


def check(model, *batches):
    """Check that only recurrent ops are left, and that the values are equal, also for other sizes."""
    gm = until(model, batches[0], "decompose").gm
    names = [op.name if (op := op_of(n)) else str(n.target) for n in gm.graph.nodes if n.op.startswith("call")]
    assert not any(n.op == "call_module" for n in gm.graph.nodes)
    assert {"lstm", "gru", "rnn"} & set(names) and not any("zeros" in name for name in names)
    for batch in batches:
        torch.testing.assert_close(call(gm, batch), call(model, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}],
    ids=str,
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, OwnLSTM, Scaled])
def test_the_model_itself(kind, options):
    check(settled(lambda: kind(C, H, **options)), data(), data(T, 1, C))


def test_unbatched_and_projected():
    check(settled(lambda: nn.LSTM(C, H, proj_size=2)), data(T, C))
    check(settled(lambda: nn.GRU(C, H)), data(T, C))


def test_the_nonlinearity():
    check(settled(lambda: nn.RNN(C, H, nonlinearity="relu")), data())
    check(settled(lambda: nn.RNNCell(C, H, nonlinearity="relu")), data(N, C))


def test_given_states():
    model = settled(lambda: nn.LSTM(C, H))
    states = (torch.ones(1, N, H), torch.full((1, N, H), 0.5))
    check(model, {"input": data(), "hx": states})


@pytest.mark.parametrize("shape", [(N, C), (C,)], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, OwnCell])
def test_cells(kind, shape):
    check(settled(lambda: kind(C, H)), data(*shape))


@pytest.mark.parametrize("part", [0, 1, 2, slice(1, None)], ids=str)
def test_parts_of_a_function(part):
    check(settled(lambda: Functional(lambda values: values[part])), data())


class OwnPacked(nn.LSTM):
    """Subclass that packs its input."""

    def forward(self, x):
        steps = nn.utils.rnn.pack_padded_sequence(x, [T, 3, 2])
        return nn.utils.rnn.pad_packed_sequence(super().forward(steps)[0])[0]


REFUSED = {
    "its input is a packed sequence": lambda: OwnPacked(C, H),
    "its weights are computed in each call": lambda: Functional(
        lambda values: values[0], lambda weight, x: weight * x.mean()
    ),
    "it is not called as torch.nn calls it": lambda: Functional(lambda values: values[:2]),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses(reason):
    model = settled(REFUSED[reason])
    gm = graph(model, data(), "decompose")
    left = next(n for n in gm.graph.nodes if n.target is torch.lstm)
    assert f"lstm stays as it is: {reason}" in info(left).traced.kept.text
    torch.testing.assert_close(call(gm, data()), call(model, data()))


def test_on_integers():
    model = settled(lambda: Scaled(C, H))
    quantized = fxq.quantize(model, REFERENCE, data=[data()])
    assert sqnr(call(model, data())[0], call(quantized, data())[0]) > 30  # dB
    assert [(e.path, e.precision) for e in quantized.ledger if e.op == "lstm"] == [("l0", "int8")]
    assert not [e for e in quantized.ledger if e.op == "zeros"]
