"""Recurrent layers and cells of torch.nn as ops, with the numbers of the modules."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.graph.info import info
from fxq.graph.query import op_of
from fxq.passes import Decompose
from tests.support.graphs import again, expected, graph, text, until
from tests.support.helpers import REFERENCE
from tests.support.models import call, settled

N, T, C, H = 3, 6, 4, 5


class Net(nn.Module):
    """Recurrent module and a function of its outputs."""

    def __init__(self, layer, forward):
        super().__init__()
        self.rnn, self.body = layer, forward

    def forward(self, x):
        return self.body(self.rnn, x)


class WithStates(Net):
    """Runs a recurrent module on an input and initial states."""

    def forward(self, x, h, c):
        return self.body(self.rnn, x, h, c)


def data(*shape):
    return torch.randn(shape or (T, N, C), generator=torch.Generator().manual_seed(3))


def close(gm, model, x):
    torch.testing.assert_close(call(gm, x), call(model, x), rtol=1e-5, atol=1e-5)


def check(model, x, others=()):
    """Check that no module is left, the values are equal, also for other sizes, and a second run makes no edits."""
    manager = until(model, x, "decompose")
    assert not [n for n in manager.gm.graph.nodes if n.op == "call_module"]
    for batch in (x, *others):
        close(manager.gm, model, batch)
    assert again(manager, Decompose()) == []
    return manager


def test_text_before_and_after():
    model = Net(settled(lambda: nn.LSTM(C, H, 2, batch_first=True)), lambda rnn, x: rnn(x)[0][:, -1])
    manager = check(model, data(N, T, C), [data(1, 2, C), data(4, 1, C)])
    assert "rnn = module LSTM(x)" in text(manager.history["canonicalize"].graph)
    assert text(manager.gm) == expected("""
        x = input
        transpose = transpose(x, dim0=0, dim1=1)
        rnn_l0 = lstm(transpose, @rnn.weight_ih_l0, @rnn.weight_hh_l0, @rnn.bias_ih_l0, @rnn.bias_hh_l0)
        rnn_l1 = lstm(rnn_l0, @rnn.weight_ih_l1, @rnn.weight_hh_l1, @rnn.bias_ih_l1, @rnn.bias_hh_l1)
        transpose_1 = transpose(rnn_l1, dim0=0, dim1=1)
        getitem_1 = getitem(transpose_1, index=(slice(None, None, None), -1))
        return getitem_1
    """)


def test_each_layer_and_direction_has_a_path():
    model = Net(nn.GRU(C, H, 2, bidirectional=True).eval(), lambda rnn, x: rnn(x)[0])
    gm = graph(model, data(), "decompose")
    ops = [(info(n).path, n.kwargs) for n in gm.graph.nodes if op_of(n) is not None and op_of(n).name == "gru"]
    assert ops == [
        ("rnn.l0", {}),
        ("rnn.l0_reverse", {"reverse": True}),
        ("rnn.l1", {}),
        ("rnn.l1_reverse", {"reverse": True}),
    ]


@torch.fx.wrap
def sum_of(values):
    return values[0].sum() + values[1][0].sum() + values[1][1].sum()


def in_turn(rnn, x):
    y, state = rnn(x)
    for _ in range(2):
        y, state = rnn(x, state)
    return y, state


USES = {
    "nn.LSTM": {
        "output": lambda rnn, x: rnn(x)[0],
        "hidden": lambda rnn, x: rnn(x)[1][0],
        "cell": lambda rnn, x: rnn(x)[1][1],
        "last layer": lambda rnn, x: rnn(x)[1][0][-1] + rnn(x)[-1][-1][-1],
        "apart": lambda rnn, x: (lambda y, hc: (hc[1], y, hc[0]))(*rnn(x)),
        "whole": lambda rnn, x: rnn(x),
        "state whole": lambda rnn, x: rnn(x)[1],
        "to a function": lambda rnn, x: sum_of(rnn(x)),
        "cat of states": lambda rnn, x: torch.cat([rnn(x)[1][0], rnn(x)[1][1]], -1),
        "fed back": in_turn,
    },
    "nn.GRU": {
        "output": lambda rnn, x: rnn(x)[0],
        "hidden": lambda rnn, x: rnn(x)[1][-1],
        "both": lambda rnn, x: rnn(x),
        "fed back": in_turn,
    },
}
USES["nn.RNN"] = USES["nn.GRU"]
CASES = [(kind, use) for kind, uses in USES.items() for use in uses]


@pytest.mark.one_in(18)
@pytest.mark.parametrize(("kind", "use"), CASES, ids=lambda value: str(value))
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}], ids=str)
def test_values_are_used_in_any_way(kind, use, options):
    module = settled(lambda: getattr(nn, kind.removeprefix("nn."))(C, H, **options))
    check(Net(module, USES[kind][use]), data())


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(["LSTM", "GRU", "RNN"]),
    sizes=st.tuples(*[st.integers(1, 4)] * 5),
    flags=st.tuples(*[st.booleans()] * 4),
    states=st.booleans(),
    proj=st.integers(0, 2),
)
def test_any_module(kind, sizes, flags, states, proj):
    steps, samples, inputs, hidden, layers = sizes
    bias, batch_first, bidirectional, batched = flags
    options = {"bias": bias, "batch_first": batch_first, "bidirectional": bidirectional}
    if kind == "LSTM" and proj < hidden:
        options["proj_size"] = proj
    elif kind == "RNN":
        options["nonlinearity"] = "relu" if proj else "tanh"
    module = settled(lambda: getattr(nn, kind)(inputs, hidden, layers, **options))
    shape = (samples, steps) if batch_first else (steps, samples)
    x = data(*shape, inputs) if batched else data(steps, inputs)
    count, batch = layers * (1 + bidirectional), (samples,) if batched else ()
    pair = data(count, *batch, options.get("proj_size") or hidden), data(count, *batch, hidden)
    if not states:
        check(Net(module, lambda rnn, x: rnn(x)), x)
    elif kind == "LSTM":
        check(WithStates(module, lambda rnn, x, h, c: rnn(x, (h, c))), (x, *pair))
    else:
        check(WithStates(module, lambda rnn, x, h, c: (rnn(x, hx=h), c)), (x, *pair))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(N, C), (1, C), (C,)], ids=str)
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_cells(kind, shape, bias):
    cell = settled(lambda: getattr(nn, kind)(C, H, bias=bias))
    check(Net(cell, lambda cell, x: cell(x)), data(*shape))

    def twice(cell, x):
        state = cell(x)
        return cell(2 * x, state)

    check(Net(cell, twice), data(*shape))
    if kind == "LSTMCell":
        check(Net(cell, lambda cell, x: cell(x)[0]), data(*shape))
        check(Net(cell, lambda cell, x: cell(x)[1]), data(*shape))


def packed(rnn, x):
    given_ = nn.utils.rnn.pack_padded_sequence(x, [T, 3, 2])
    return nn.utils.rnn.pad_packed_sequence(rnn(given_)[0])[0]


def hooked(module):
    module.register_forward_hook(lambda module, args, y: y)
    return module


REFUSED = {
    "its input is a packed sequence": (lambda: nn.LSTM(C, H), packed),
    "it is a subclass of LSTM": (
        lambda: nn.utils.parametrizations.weight_norm(nn.LSTM(C, H), "weight_hh_l0"),
        lambda rnn, x: rnn(x)[0],
    ),
    "it has forward hooks": (lambda: hooked(nn.LSTM(C, H)), lambda rnn, x: rnn(x)[0]),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses(reason):
    make, forward = REFUSED[reason]
    model = Net(settled(make), forward)
    gm = graph(model, data(), "decompose")
    left = next(n for n in gm.graph.nodes if n.op == "call_module")
    assert reason in info(left).traced.kept.text
    close(gm, model, data())


def test_dropout_does_nothing_in_eval_mode():
    check(Net(settled(lambda: nn.LSTM(C, H, 2, dropout=0.5)), lambda rnn, x: rnn(x)[0]), data())


def test_the_reference_runs_it_on_integers():
    model = Net(settled(lambda: nn.LSTM(C, H, bidirectional=True)), lambda rnn, x: rnn(x)[0])
    quantized = fxq.quantize(model, REFERENCE, data=[data()])
    assert sqnr(call(model, data()), call(quantized, data())) > 30  # dB
    layers = [(e.path, e.op, e.precision) for e in quantized.ledger if e.op == "lstm"]
    assert layers == [("rnn.l0", "lstm", "int8"), ("rnn.l0_reverse", "lstm", "int8")]


def test_a_selector_reaches_a_layer_inside():
    model = Net(settled(lambda: nn.LSTM(C, H, 2)), lambda rnn, x: rnn(x)[0])
    for selector, floats in (
        ("rnn.l1", ["rnn.l1"]),
        (nn.LSTM, ["rnn.l0", "rnn.l1"]),
        (fxq.by_op("lstm"), ["rnn.l0", "rnn.l1"]),
    ):
        ledger = fxq.quantize(model, REFERENCE.override(selector, fxq.FLOAT), data=[data()]).ledger
        assert [e.path for e in ledger if e.kind == "excluded by the recipe"] == floats
