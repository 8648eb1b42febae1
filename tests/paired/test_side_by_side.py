"""Two graphs side by side: which values are compared, and what a node does wrong alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxq
from fxq.common.data import Batch
from fxq.graph.info import info, set_info
from fxq.graph.program import IsolatedGraph
from fxq.ledger.layer_error import same_values
from fxq.ledger.ledger import rows_by_node
from fxq.paired.side_by_side import corrected, side_by_side
from tests.support.graphs import until
from tests.support.helpers import PLAIN, module, plain
from tests.support.machine import X86, needs_x86
from tests.support.models import NETWORKS, batch, build

RECIPES = [PLAIN, pytest.param(plain(X86), marks=needs_x86)]
X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


class Residual(nn.Module):
    """A sum whose kernel may overwrite the value that it adds."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.side, self.head = nn.Conv2d(6, 6, 1), nn.Linear(6, 4)

    def forward(self, x):
        y = torch.relu(self.stem(x))
        return self.head(torch.relu(self.conv(y) + self.side(y)).mean((2, 3)))


def built(kind):
    torch.manual_seed(0)
    return kind().eval()


def programs(model, recipe, data):
    """The float and the integer program of a model, its quantized form, and where they meet."""
    qmodel = fxq.quantize(model, recipe, data=[data])
    original = until(model, data, "decompose", recipe).context.original
    ends = same_values(qmodel, rows_by_node(qmodel.ledger), original.nodes)
    return IsolatedGraph(original.gm, original.graph), IsolatedGraph(qmodel, qmodel.graph), ends, qmodel


def run(reference, compared, ends, data, **options):
    """Every value by the name of its node, copied while it is there."""
    inputs = data if isinstance(data, tuple) else (data,)
    values = {}
    with torch.no_grad():
        for v in side_by_side(reference, compared, ends, Batch(inputs), **options):
            own = None if v.own is None else [t.clone() for t in v.own]
            values[v.node.name] = [t.clone() for t in v.want], [t.clone() for t in v.got], own
    return values


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_both_sides_are_what_the_models_compute(recipe):
    model = built(Residual)
    reference, compared, ends, qmodel = programs(model, recipe, X)
    values = run(reference, compared, ends, X)
    assert list(values) == [n.name for n in qmodel.graph.nodes if n in ends]
    with torch.no_grad():
        stem = torch.relu(model.stem(X))
        total = torch.relu(model.conv(stem) + model.side(stem))
        want = {"stem_relu": stem, "conv_add_relu": total, "mean": total.mean((2, 3)), "head": model(X)}
        for name, expected in want.items():
            assert torch.allclose(values[name][0][0], expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(values["head"][1][0], qmodel(X))
    assert all(own is None for _, _, own in values.values())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_node_does_alone_starts_from_the_reference(recipe):
    """The head on the float mean, rounded once: what the kernels before it did wrong does not count."""
    model = built(Residual)
    reference, compared, ends, qmodel = programs(model, recipe, X)
    values = run(reference, compared, ends, X, own=True)
    head = qmodel.qparams()["head"]
    mean = values["mean"][0][0]
    q = torch.clamp(torch.round(mean / head.input_scale) + head.input_zero_point, 0, 255) - head.input_zero_point
    weight = head.weight.double() * head.weight_scale.double().reshape(-1, 1)
    expected = F.linear(q.double() * float(head.input_scale), weight, model.head.bias.double())
    assert torch.allclose(values["head"][2][0].double(), expected, rtol=1e-5, atol=1e-6)  # the model returns float
    assert not torch.equal(values["head"][2][0], values["head"][1][0])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_node_inherits_nothing(recipe):
    values = run(*programs(built(Residual), recipe, X)[:3], X, own=True)
    _, got, own = values["stem_relu"]
    assert torch.equal(got[0], own[0])


@pytest.mark.one_in(30)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_looking_alone_changes_no_other_value(name, recipe):
    data = batch(name)
    reference, compared, ends, _ = programs(build(name), recipe, data)
    inputs = data if isinstance(data, (tuple, dict)) else (data,)
    example = Batch((), inputs) if isinstance(inputs, dict) else Batch(inputs)

    def values(own):
        with torch.no_grad():
            return {
                v.node.name: [t.clone() for t in (*v.want, *v.got)]
                for v in side_by_side(reference, compared, ends, example, own=own)
            }

    plain, with_own = values(False), values(True)
    assert plain and list(plain) == list(with_own)
    for node, tensors in plain.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, with_own[node], strict=True))


def test_an_op_in_qdq_form_hands_on_integers():
    """Its value is the quantized one."""
    model = built(Residual)
    *sides, qmodel = programs(model, PLAIN, X)
    values = run(*sides, X, own=True)
    stem = qmodel.qparams()["stem"]
    for value in (values["stem_relu"][1][0], values["stem_relu"][2][0]):
        steps = value / stem.output_scale
        assert torch.allclose(steps, steps.round(), rtol=0, atol=1e-3)


def test_a_value_that_is_overwritten_before_it_is_asked_for_was_copied():
    """The other graph makes the two values in another order."""

    def graph_of(forward):
        class Plain(nn.Module):
            pass

        Plain.forward = forward
        gm = fx.symbolic_trace(Plain())
        return IsolatedGraph(gm, gm.graph), {n.name: n for n in gm.graph.nodes}

    def doubled_in_place(self, x):
        y = torch.relu(x)
        return y, y.mul_(2)

    def the_other_way_round(self, x):
        double = torch.relu(x) * 2
        return torch.relu(x), double

    (reference, theirs), (compared, ours) = graph_of(doubled_in_place), graph_of(the_other_way_round)
    set_info(theirs["mul_"], traced=info(theirs["mul_"]).traced._replace(changes=(1,)))
    ends = {ours["mul"]: theirs["mul_"], ours["relu_1"]: theirs["relu"]}
    values = run(reference, compared, ends, X)
    assert list(values) == ["mul", "relu_1"]
    for want, got, _ in values.values():
        assert torch.equal(want[0], got[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_quantized_model_agrees_with_itself(recipe):
    qmodel = fxq.quantize(built(Residual), recipe, data=[X])
    program = IsolatedGraph(qmodel, qmodel.graph)
    ends = {n: n for n in qmodel.graph.nodes if n.name in rows_by_node(qmodel.ledger)}
    values = run(program, program, ends, X)
    assert set(values) >= {"stem_relu", "conv_add_relu", "mean", "head"}
    for want, got, _ in values.values():
        assert torch.equal(want[0], got[0])


def test_every_value_of_the_reference_can_be_seen():
    model = module(lambda self, x: self.b(torch.relu(self.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 3))
    x = torch.randn(5, 4)
    reference, compared, ends, _ = programs(model, PLAIN, x)
    seen = {}
    run(reference, compared, ends, x, see=lambda node, value: seen.setdefault(node.name, value))
    assert [n.name for n in reference.graph.nodes] == list(seen)
    assert torch.allclose(seen["a"], model.a(x)) and torch.allclose(seen["b"], model(x))


def test_a_value_with_several_tensors_is_fed_whole():
    """The ops after a float LSTM start from the float model's LSTM."""

    def forward(self, x):
        x = self.a(x)
        return self.b(self.rnn(x)[0]), self.c(x)

    torch.manual_seed(0)
    parts = {"a": nn.Linear(4, 6), "rnn": nn.LSTM(6, 7, batch_first=True), "b": nn.Linear(7, 2), "c": nn.Linear(6, 2)}
    model, x = module(forward, **parts), torch.randn(3, 5, 4)
    reference, compared, ends, qmodel = programs(model, PLAIN.leaf("rnn"), x)
    values = run(reference, compared, ends, x, own=True)
    rnn = next(n for n in values if len(values[n][0]) == 3)
    want, _, own = values[rnn]
    assert not torch.equal(want[0], own[0])  # the rounding of its input
    b = qmodel.qparams()["b"]
    q = torch.clamp(torch.round(want[0] / b.input_scale) + b.input_zero_point, 0, 255) - b.input_zero_point
    weight = b.weight.double() * b.weight_scale.double().reshape(-1, 1)
    expected = F.linear(q.double() * float(b.input_scale), weight, model.b.bias.double())
    assert torch.allclose(values["b"][2][0].double(), expected, rtol=1e-5, atol=1e-6)  # the model returns float


def test_both_sides_draw_the_same_random_numbers():
    """The error of a layer after a dropout is its own rounding, not that other values were dropped."""
    parts = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}

    def forward(self, x):
        return self.b(F.dropout(self.a(x), 0.5, training=True) + torch.randn_like(x))

    torch.manual_seed(0)
    model, x = module(forward, **parts), torch.randn(512, 8)  # enough for ranges that hold other draws, too
    qmodel = fxq.quantize(model, PLAIN, data=[x])
    entries = {entry.name: entry for entry in qmodel.ledger}
    assert entries["randn_like"].sqnr == entries["dropout"].own_sqnr == math.inf
    assert entries["b"].sqnr > 30  # dB
    sqnrs = {row.name: row.sqnr for row in fxq.compare(qmodel, qmodel, [x, x])}
    assert set(sqnrs.values()) == {math.inf}


def test_a_module_with_state_runs_once_for_each_side():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Counting(), nn.Linear(4, 3)).eval(), torch.randn(5, 4)
    qmodel = fxq.quantize(model, PLAIN.leaf("1"), data=[x])
    assert [entry.own_sqnr for entry in qmodel.ledger if entry.path == "1"] == [math.inf]
    assert all(entry.sqnr > 30 for entry in qmodel.ledger)  # dB


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_that_make_no_error(recipe):
    """With none corrected it is the quantized model's output, with all but the last what that one does alone."""
    reference, compared, ends, qmodel = programs(built(Residual), recipe, X)
    ends = {**ends, compared.graph.output_node(): reference.graph.output_node()}
    layers = [node for node in compared.graph.nodes if node in ends and node.op != "output"]
    alone = run(reference, compared, ends, X, own=True)[layers[-1].name][2]
    with torch.no_grad():
        none, before, every = (
            corrected(reference, compared, ends, Batch((X,)), exact) for exact in ([], layers[:-1], layers)
        )
        assert torch.equal(none.got[0], qmodel(X)) and torch.equal(before.got[0], alone[0])
        errors = [float((value.got[0] - value.want[0]).abs().max()) for value in (none, before, every)]
    assert errors[0] > errors[1] > errors[2] == 0.0
