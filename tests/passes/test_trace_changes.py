"""trace: ops that overwrite their input, or a view of it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.graphs import equal, expected, graph, text
from tests.support.helpers import REFERENCE
from tests.support.models import call, settled


class Overwrites(nn.Module):
    """`change` overwrites its argument; what it returns is not looked at, and the argument is read again."""

    def __init__(self, change):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.hardsigmoid = nn.Hardsigmoid(inplace=True)
        self.change = change

    def forward(self, x):
        y = self.fc(x)
        early = y * 2
        self.change(self, y)
        return early + y


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "change",
    [
        lambda m, y: m.relu(y),
        lambda m, y: m.hardsigmoid(y),
        lambda m, y: F.relu(y, inplace=True),
        lambda m, y: y.relu_(),
        lambda m, y: y.add_(1.5),
        lambda m, y: torch.ops.aten.mul_.Tensor(y, y),
    ],
)
def test_later_readers_read_the_result(change):
    model, x = settled(lambda: Overwrites(change)), torch.randn(64, 4)
    gm = graph(model, x, "trace")
    early, changed, last = [n for n in gm.graph.nodes if n.op != "output"][2:]
    assert early.args[0].name == "fc"
    assert last.args == (early, changed)
    canonical = graph(model, x, "canonicalize")
    assert equal(call(canonical, x), call(model, x))
    assert "_(" not in text(canonical)  # no op with an in-place name is left
    assert sqnr(call(model, x), call(fxq.quantize(model, REFERENCE, data=[x]), x)) > 30


class ThroughView(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.rows = rows

    def forward(self, x):
        y = self.fc(x)
        view = self.rows(y)
        y.relu_()
        return view + 1


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.view(-1),
        lambda y: y[0],
        lambda y: y.transpose(0, 1),
        lambda y: y.unsqueeze(0),
        lambda y: y.view(-1).reshape(4, -1),
    ],
)
def test_a_change_read_through_a_view(view):
    model, x = settled(lambda: ThroughView(view)), torch.randn(3, 4)
    assert equal(call(graph(model, x, "trace"), x), call(model, x))
    assert equal(call(graph(model, x, "canonicalize"), x), call(model, x))


def test_a_change_of_a_view():
    class Model(nn.Module):
        def forward(self, x):
            y = x * 2
            y[0].relu_()
            return y

    x = torch.randn(3, 4)
    assert text(graph(Model().eval(), x, "canonicalize")) == expected("""
        x = input
        mul = mul(x, 2)
        getitem = getitem(mul, index=(0,))
        relu_ = relu(getitem)
        assign = assign(mul, relu_, index=(0,))
        return assign
    """)
    assert equal(call(graph(Model().eval(), x, "canonicalize"), x), Model()(x))


def test_a_view_that_is_not_read_later_is_fine():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            y = self.fc(x)
            z = y.view(-1, 2).sum()
            return y.relu_() + z

    model, x = settled(Model), torch.randn(3, 4)
    assert equal(call(graph(model, x, "canonicalize"), x), call(model, x))


UNCHANGED_MODELS = [
    lambda m, y: m.identity(y),
    lambda m, y: m.dropout(y),
    lambda m, y: F.dropout(y, training=False),
    lambda m, y: y.float(),
    lambda m, y: y.to(torch.float32),
    lambda m, y: y.contiguous(),
    lambda m, y: y.detach(),
    lambda m, y: y.view(64, 4),
    lambda m, y: y.T.T,  # torch.fx records an attribute where it is used
]
VIEWS = [
    lambda m, y: m.flatten(y),
    lambda m, y: m.unflatten(y),
    lambda m, y: y.movedim(0, 1),
    lambda m, y: torch.movedim(y, 0, 1),
    lambda m, y: y.unflatten(1, (2, 2)),
    lambda m, y: torch.narrow(y, 0, 0, 2),
    lambda m, y: torch.select(y, 0, 1),
    lambda m, y: torch.split(y, 2)[0],
    lambda m, y: y.diagonal(),
]


class Aliased(nn.Module):
    """Reads, after a change in place, a value that it took before."""

    def __init__(self, take, change):
        super().__init__()
        self.fc, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.identity, self.dropout = nn.Identity(), nn.Dropout()
        self.flatten, self.unflatten = nn.Flatten(0), nn.Unflatten(1, (2, 2))
        self.take, self.change = take, change

    def forward(self, x):
        y = self.fc(x)
        taken = self.take(self, y)
        y = self.change(self, y)
        return self.last(y), taken * 1


CHANGES = [lambda m, y: m.relu(y), lambda m, y: y.add_(1.5), lambda m, y: y.fill_(2.0)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("take", UNCHANGED_MODELS)
def test_another_name_of_the_whole_value_is_read_as_the_result(take, change):
    """An nn.Identity before an nn.ReLU(inplace=True) was silently wrong, with -0.3 dB."""
    model, x = settled(lambda: Aliased(take, change)), torch.randn(64, 4)
    assert equal(call(graph(model, x, "canonicalize"), x), call(model, x))
    assert sqnr(call(model, x), call(fxq.quantize(model, REFERENCE, data=[x]), x)) > 30


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("take", VIEWS)
def test_any_view_is_read_as_the_result(take, change):
    model, x = settled(lambda: Aliased(take, change)), torch.randn(64, 4)
    assert equal(call(graph(model, x, "canonicalize"), x), call(model, x))


class Doubles(nn.Module):
    def forward(self, x):
        x.mul_(2)
        return x.sum()


def test_a_leaf_that_changes_its_input():
    """It has no attribute `inplace` that would tell."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.doubles = nn.Linear(4, 4), Doubles()

        def forward(self, x):
            y = self.fc(x)
            rows = y[0]
            return self.doubles(y) + rows

    model, x = settled(Model), torch.randn(3, 4)
    gm = graph(model, x, "canonicalize", REFERENCE.leaf("doubles"))
    assert equal(call(gm, x), call(model, x))


def test_the_size_of_a_changed_value_may_be_read():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            y = self.fc(x)
            view = y.view(2, -1)
            return y.relu_().reshape(view.size(0), -1)

    model, x = settled(Model), torch.randn(4, 4)
    assert equal(call(graph(model, x, "canonicalize"), x), call(model, x))


def test_the_run_changes_nothing_of_the_user():
    class Model(nn.Module):
        def forward(self, x):
            total = torch.zeros(4)
            total += x.relu_().sum(0)
            return total

    model, x = Model().eval(), torch.randn(3, 4)
    before = x.clone()
    gm = graph(model, x, "canonicalize")
    assert torch.equal(x, before)
    assert equal(call(gm, before.clone()), model(before.clone()))


def test_a_change_of_the_models_own_tensor_is_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x):
            return x + self.seen.add_(x.mean(0))

    with pytest.raises(fxq.TraceError, match=r"%add_ .*changes 'seen', a tensor of the model, in place"):
        graph(Model().eval(), torch.randn(3, 4), "trace")


def test_inference_mode():
    with torch.inference_mode():
        model, x = settled(lambda: Aliased(VIEWS[0], CHANGES[0])), torch.randn(64, 4)
        assert equal(call(graph(model, x, "canonicalize"), x), call(model, x))


def test_another_size_is_refused():
    class Model(nn.Module):
        def forward(self, x):
            y = x * 2
            y.resize_(4, 3)
            return y

    with pytest.raises(fxq.TraceError, match=r"%resize_ .*changes %mul in place: the op changes its size or storage"):
        graph(Model().eval(), torch.randn(3, 4), "trace")


def test_many_views_that_are_changed_in_turn():
    """Nodes are added for what is read, not for every view at every change."""

    class Model(nn.Module):
        def forward(self, x):
            y = x * 2
            for row in y.unbind(0):
                row.add_(1)
            return y

    x = torch.randn(40, 4)
    gm = graph(Model().eval(), x, "canonicalize", REFERENCE)
    assert equal(call(gm, x), Model()(x))
    assert len(gm.graph.nodes) < 40 * 45
