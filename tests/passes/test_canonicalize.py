"""canonicalize: one spelling per op. That all spellings of an op agree is in test_ops.py; here is what else it does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import fxq
from fxq.common.metrics import sqnr
from fxq.graph.info import info
from fxq.passes import Canonicalize
from tests.support.graphs import again, equal, expected, graph, text, until
from tests.support.helpers import REFERENCE, module
from tests.support.models import batch, build, call, settled


class Spelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2, bias=False)
        self.drop, self.same = nn.Dropout(0.5), nn.Identity()
        self.weight = nn.Parameter(torch.randn(4, 4, 1, 1))

    def forward(self, x):
        x = self.drop(self.conv(x).relu_())
        x = self.same(F.conv2d(x, self.weight, padding="valid"))
        return F.dropout(F.relu(x, inplace=True), training=self.training) + x.size(0)


def test_text_before_and_after():
    model, x = settled(Spelled), torch.randn(2, 3, 8, 8)
    assert text(graph(model, x, "trace")) == expected("""
        x = input
        conv = module Conv2d(x)
        relu_ = .relu_(conv)
        drop = module Dropout(relu_)
        conv2d = conv2d(drop, @weight, padding='valid')
        same = module Identity(conv2d)
        relu = relu(same)
        dropout = dropout(relu, p=0.5, training=False, inplace=False)
        size = .size(same, 0)
        add = add(dropout, size)
        return add
    """)
    manager = until(model, x, "canonicalize")
    assert text(manager.gm) == expected("""
        x = input
        conv = conv2d(x, @conv.weight, stride=(2, 2))
        relu_ = relu(conv)
        conv2d = conv2d(relu_, @weight)
        relu = relu(conv2d)
        size = .size(conv2d, 0)
        add = add(relu, size)
        return add
    """)
    assert equal(call(manager.gm, x), call(model, x))
    assert again(manager, Canonicalize()) == []


# ---- padding of convolutions


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"padding": "same"}, "conv = conv2d(x, @conv.weight, @conv.bias, padding=(1, 1))"),
        (
            {"padding": "same", "dilation": (1, 2)},
            "conv = conv2d(x, @conv.weight, @conv.bias, padding=(1, 2), dilation=(1, 2))",
        ),
        (
            {"padding": "same", "kernel_size": (2, 3)},
            "pad = pad(x, pad=(1, 1, 0, 1))\nconv = conv2d(pad, @conv.weight, @conv.bias)",
        ),
        ({"padding": "valid"}, "conv = conv2d(x, @conv.weight, @conv.bias)"),
        (
            {"padding": (2, 1), "padding_mode": "circular"},
            "pad = pad(x, pad=(1, 1, 2, 2), mode='circular')\nconv = conv2d(pad, @conv.weight, @conv.bias)",
        ),
        (
            {"padding": "same", "padding_mode": "reflect", "kernel_size": (4, 3)},
            "pad = pad(x, pad=(1, 1, 1, 2), mode='reflect')\nconv = conv2d(pad, @conv.weight, @conv.bias)",
        ),
        (
            {"padding": 1, "padding_mode": "replicate", "stride": 2, "groups": 3},
            "pad = pad(x, pad=(1, 1, 1, 1), mode='replicate')\n"
            "conv = conv2d(pad, @conv.weight, @conv.bias, stride=(2, 2), groups=3)",
        ),
        ({"padding": 1, "padding_mode": "zeros"}, "conv = conv2d(x, @conv.weight, @conv.bias, padding=(1, 1))"),
    ],
)
def test_padding_forms(options, lines):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 6, **{"kernel_size": 3, **options})

        def forward(self, x):
            return self.conv(x)

    model, x = settled(Model), torch.randn(2, 3, 9, 7)
    gm = graph(model, x, "canonicalize")
    assert text(gm) == f"x = input\n{lines}\nreturn conv"
    torch.testing.assert_close(call(gm, x), call(model, x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{"padding": "same"}, {"padding": 2, "padding_mode": "circular"}])
def test_padding_forms_in_one_dimension(options):
    model, x = settled(lambda: nn.Sequential(nn.Conv1d(3, 6, 4, **options))), torch.randn(2, 3, 9)
    gm = graph(model, x, "canonicalize")
    assert [n.name for n in gm.graph.nodes if n.op == "call_function"] == ["pad", "_0"]
    torch.testing.assert_close(call(gm, x), call(model, x), rtol=1e-6, atol=1e-6)


# ---- weights


def test_weights_are_those_of_the_model():
    model = build("shared_weight")
    gm = graph(model, batch("shared_weight"), "canonicalize")
    assert gm.a.weight is model.a.weight is gm.b.weight


def test_a_parametrized_weight_is_evaluated():
    def make():
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.ReLU(), nn.Linear(3, 2))

    model, x = settled(make), torch.randn(64, 4)
    gm = graph(model, x, "canonicalize")
    assert text(gm).splitlines()[1] == "_0 = linear(input_1, @fxq_data.0_weight, @0.bias)"
    assert equal(call(gm, x), call(model, x))
    assert sqnr(call(model, x), call(fxq.quantize(model, REFERENCE, data=[x]), x)) > 30


# ---- what stays as it is, with a note


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.fc.register_forward_hook(lambda module, args, result: result * 2)

    def forward(self, x):
        return self.fc(x)


class HookedNorm(Hooked):
    """An embedding that renormalizes its rows, with a hook: the hook's effect was lost."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Embedding(20, 4, max_norm=1.0)
        self.fc.register_forward_hook(lambda module, args, result: result * 3)

    def forward(self, x):
        return self.fc(x.abs().int())


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


@pytest.mark.parametrize(
    ("make", "node", "note"),
    [
        (Hooked, "fc", "has forward hooks"),
        (HookedNorm, "fc", "has forward hooks"),
        (lambda: nn.Sequential(nn.MaxPool2d(2, return_indices=True)), "_0", "returns indices"),
        (lambda: nn.Sequential(nn.BatchNorm2d(4, track_running_stats=False)), "_0", "the statistics of the batch"),
        (lambda: nn.Sequential(nn.ConvTranspose2d(4, 4, 2)), None, ""),
    ],
)
def test_unusual_modules(make, node, note):
    model, x = settled(make), torch.randn(2, 4, 4, 4)
    gm = graph(model, x, "canonicalize")
    assert equal(call(gm, x), call(model, x))
    modules = {n.name: info(n).traced.kept for n in gm.graph.nodes if n.op == "call_module"}
    assert modules.keys() == ({node} if node else set())
    assert all(note in kept.text if kept else not note for kept in modules.values())


def test_a_subclass_with_a_forward_of_its_own_is_no_linear():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = Halved(4, 4)

        def forward(self, x):
            return self.fc(x)

    model, x = settled(Model), torch.randn(2, 4)
    gm = graph(model, x, "canonicalize")
    assert text(gm) == expected("""
        x = input
        linear = linear(x, @fc.weight, @fc.bias)
        truediv = div(linear, 2)
        return truediv
    """)
    assert equal(call(gm, x), call(model, x))


def test_a_subclass_that_only_adds_an_initialisation_is_a_linear():
    class Zeroed(nn.Linear):
        def reset_parameters(self):
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    model, x = nn.Sequential(Zeroed(4, 4)).eval(), torch.randn(2, 4)
    gm = graph(model, x, "canonicalize")
    assert "linear = linear(input_1, @0.weight, @0.bias)" in text(gm)
    assert equal(call(gm, x), call(model, x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(torch.int32),
        lambda x: torch.add(2, x.size(0)),
        lambda x: x.mean(),
        lambda x: torch.mean(x, 1, dtype=torch.float64),
        lambda x: torch.clamp(x, x * 0, x * 0 + 1),
        lambda x: torch.max_pool1d_with_indices(x, 2)[0],
        lambda x: F.dropout(x, 0.0, True),
    ],
)
def test_calls_that_do_not_fit_an_op_stay(function):
    class Model(nn.Module):
        def forward(self, x):
            return function(x)

    model, x = Model().eval(), torch.randn(2, 4, 4)
    manager = until(model, x, "canonicalize", REFERENCE)
    assert equal(call(manager.gm, x), call(model, x))
    assert again(manager, Canonicalize()) == []


def test_the_user_s_model_is_not_changed():
    model = build("in_place")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    names = [n for n, _ in model.named_modules()]
    graph(model, batch("in_place"), "canonicalize")
    assert [n for n, _ in model.named_modules()] == names
    assert equal(dict(model.state_dict()), before)


STATES = {
    "state": (lambda self, x, past: torch.cat([past, self.layer(x)], 1), "append"),
    "window": (lambda self, x, past: torch.cat([past, self.layer(x)], 1)[:, -3:], "append"),
    "at the start": (lambda self, x, past: torch.cat([self.layer(x), past], 1), "cat"),
    "not returned": (lambda self, x, past: torch.cat([past, self.layer(x)], 1).relu(), "cat"),
    "read otherwise": (lambda self, x, past: torch.cat([past, self.layer(past)], 1) + 0 * x[:, :1], "cat"),
    "features": (lambda self, x, past: (torch.cat([x, self.layer(x)], 1), past), "cat"),
    "three parts": (lambda self, x, past: torch.cat([past, self.layer(x), x], 1), "cat"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_concatenation_to_an_input_that_is_returned_is_a_state(name):
    forward, op = STATES[name]
    model, inputs = module(forward, layer=nn.Linear(4, 4)), (torch.randn(2, 3, 4), torch.randn(2, 5, 4))
    gm = graph(model, inputs)
    assert f"cat = {op}(" in text(gm)
    assert equal(gm(*inputs), model(*inputs))


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize(
    "select",
    [
        lambda x: x[[0, 1]],
        lambda x: x[[0, 1, 1]],
        lambda x: x[[x.size(0) - 1, 0]],
        lambda x: x[[slice(0, 2), 0]],
        lambda x: x[:, [2]],
        lambda x: x[[x.argmax(0), 1]],
    ],
)
def test_a_list_of_numbers_selects_positions_of_one_axis(select):
    x = torch.randn(3, 5, 4)
    assert torch.equal(graph(module(lambda self, x: select(x)), (x,))(x), select(x))
