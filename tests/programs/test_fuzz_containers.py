"""Random states in random containers, which a model changes or returns: as in the float model, call after call."""

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.common.containers import ContainerNames, Structure, register_container, taken_apart
from fxq.common.metrics import sqnr

RECIPE = fxq.Recipe.weight_only(backend="reference").override("*", fxq.FLOAT)


class Box:
    """Registered container whose parts the model replaces."""

    def __init__(self, items):
        self.items = items


register_container(Box, lambda box: ({"items": box.items}, None), lambda parts, _: Box(parts["items"]))


@dataclass
class Pair:
    first: object
    second: object


@dataclass
class Plan:
    """Program of a random model.

    Attributes:
        state: containers, with a number in place of each tensor.
        ops: what happens to each tensor.
        returns: whether the state is returned, too.
        optional: whether calls with a further tensor are a second program.
    """

    state: object
    ops: list
    returns: bool
    optional: bool = False


OPS = ("keep", "replace", "append", "add", "count", "in place", "part", "crop", "reorder", "alias", "cat in place")
leaf = st.just(0)
inner = st.recursive(
    leaf,
    lambda part: st.one_of(
        st.lists(part, min_size=1, max_size=2),
        st.tuples(part, part),
        st.dictionaries(st.sampled_from(["a", "b"]), part, min_size=1, max_size=2),
        st.builds(Pair, part, part),
        st.builds(lambda items: Box([items]), part),
    ),
    max_leaves=4,
)
plans = st.builds(
    Plan,
    st.one_of(inner, st.builds(lambda items: Box([items]), inner)),
    st.lists(st.sampled_from(OPS), min_size=4, max_size=4),
    st.booleans(),
    st.booleans(),
)


def rebuilt(value, by):
    """Containers with `by()` of each tensor, changed in place where they can be."""
    if isinstance(value, Box):
        value.items = rebuilt(value.items, by)
        return value
    if isinstance(value, list):
        value[:] = [rebuilt(part, by) for part in value]
        return value
    if isinstance(value, dict):
        for key in value:
            value[key] = rebuilt(value[key], by)
        return value
    if isinstance(value, Pair):
        value.first, value.second = rebuilt(value.first, by), rebuilt(value.second, by)
        return value
    return tuple(rebuilt(part, by) for part in value) if isinstance(value, tuple) else by(value)


class Model(nn.Module):
    """Reads all tensors of its state, and changes them as a plan says."""

    def __init__(self, plan):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.plan = nn.Linear(4, 4), nn.Linear(4, 4), plan

    def forward(self, x, state, more=None):
        h, ops, total, news = self.a(x), iter(self.plan.ops * 4), [], []
        if more is not None:
            h = h * more

        def changed(tensor):
            op = next(ops)
            total.append(tensor.mean(1, keepdim=True))
            news.append(self.changed(op, tensor, h, news))
            return news[-1]

        new = rebuilt(state, changed)
        y = self.b(h + sum(total))
        return (y, new) if self.plan.returns else y

    def changed(self, op, tensor, h, before):
        if op == "append":
            return torch.cat([tensor, h], 1)
        if op == "in place":
            return tensor.mul_(0.5)
        if op == "part":
            tensor[:, :1] += h[:, :1]
            return tensor
        if op == "cat in place":
            return torch.cat([tensor.mul_(0.9), h], 1).add_(0.1)
        if op == "alias":  # of another tensor of the state, with its values or a view of them
            return before[-1][:, :1] if before else tensor[:, -1:]
        if op == "crop":
            return tensor[:, -2:]
        if op == "reorder":
            return tensor.index_select(0, torch.tensor([1, 0]))
        return {"keep": tensor, "replace": h, "add": tensor + 0.1, "count": tensor * tensor.shape[1]}[op]


def state_of(plan):
    numbers = iter(range(100))
    return rebuilt(copy.deepcopy(plan.state), lambda _: torch.full((2, 3, 4), 0.1 * next(numbers)))


def containers_of(state):
    """The containers that can be changed, by name."""
    names = ContainerNames()
    taken_apart(state, "state", {}, containers=names)
    return names.values


def leaves_of(state):
    leaves: dict = {}
    structure: Structure = taken_apart(state, "state", leaves)
    return structure, leaves


def check(plan):
    model, random = Model(plan).eval(), torch.Generator().manual_seed(1)
    x, more = torch.randn(2, 2, 4, generator=random), torch.rand(2, 1, 4, generator=random)
    examples = [{"x": x, "state": state_of(plan)}]
    examples += [{"x": x, "state": state_of(plan), "more": more}] if plan.optional else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxq.FxqWarning)
        try:
            qmodel = fxq.quantize(model, RECIPE, example_inputs=examples)
        except fxq.FxqError:
            return "refused"
    own, quantized = state_of(plan), state_of(plan)
    for number in range(4):
        before = containers_of(quantized)
        x = torch.randn(2, 2, 4, generator=random)
        options = {"more": more + number} if plan.optional and number % 2 else {}
        with torch.no_grad():
            want = model(x, own, **options)
            try:
                got = qmodel(x, quantized, **options)
            except fxq.FxqError:
                return "refused in a call"
        assert containers_of(quantized).keys() == before.keys()
        assert all(container is before[name] for name, container in containers_of(quantized).items())
        if plan.returns:
            (want, own), (got, quantized) = want, got
        assert sqnr(want, got) > 90
        (structure, leaves), (structure_again, leaves_again) = leaves_of(own), leaves_of(quantized)
        assert structure == structure_again
        for name, tensor in leaves.items():
            assert tensor.shape == leaves_again[name].shape
            assert torch.allclose(tensor, leaves_again[name], atol=1e-5)
    return "right"


@settings(max_examples=12, suppress_health_check=list(HealthCheck), deadline=None)
@given(plans)
def test_states_in_containers_change_as_in_the_float_model(plan):
    check(plan)


def test_changes_are_right_rather_than_refused():
    states = [Box([[0, {"a": 0}]]), [[0], {"a": 0}], ({"a": [0, 0]}, 0), Pair([0], 0)]
    plans = [Plan(state, [op] * 4, i % 2 == 0, i == 0) for i, state in enumerate(states) for op in OPS]
    results = [check(plan) for plan in plans]
    assert results == ["right"] * len(plans)


def test_a_view_of_a_written_tensor_in_the_state_is_refused():
    plan = Plan([0, 0], ["part", "alias"] * 2, False)
    with pytest.raises(fxq.InputError, match=r"stores a view of state_0.*as new_state_1.*view.clone"):
        fxq.quantize(Model(plan).eval(), RECIPE, example_inputs=(torch.rand(2, 2, 4), state_of(plan)))


@pytest.mark.slow
@settings(max_examples=600, suppress_health_check=list(HealthCheck), deadline=None)
@given(plans)
def test_more_states_in_containers(plan):
    check(plan)
