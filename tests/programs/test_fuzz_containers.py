"""Random states in random containers, which a model changes or returns: as in the float model, call after call."""

import copy
import warnings
from dataclasses import dataclass, field

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
    """

    state: object
    ops: list
    returns: bool
    count: int = field(init=False, default=0)


OPS = ("keep", "replace", "append", "add", "count", "in place")
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

    def forward(self, x, state):
        h, ops, total = self.a(x), iter(self.plan.ops * 4), []

        def changed(tensor):
            op = next(ops)
            total.append(tensor.mean(1, keepdim=True))
            if op == "append":
                return torch.cat([tensor, h], 1)
            if op == "in place":
                return tensor.mul_(0.5)
            return {"keep": tensor, "replace": h, "add": tensor + 0.1, "count": tensor * tensor.shape[1]}[op]

        new = rebuilt(state, changed)
        y = self.b(h + sum(total))
        return (y, new) if self.plan.returns else y


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
    x = torch.randn(2, 2, 4, generator=random)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxq.FxqWarning)
        try:
            qmodel = fxq.quantize(model, RECIPE, example_inputs=(x, state_of(plan)))
        except fxq.FxqError:
            return "refused"
    own, quantized = state_of(plan), state_of(plan)
    for _ in range(3):
        before = containers_of(quantized)
        x = torch.randn(2, 2, 4, generator=random)
        with torch.no_grad():
            want, got = model(x, own), qmodel(x, quantized)
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
    plans = [Plan(state, [op] * 4, i % 2 == 0) for i, state in enumerate(states) for op in OPS]
    results = [check(plan) for plan in plans]
    assert results == ["right"] * len(plans)


@pytest.mark.slow
@settings(max_examples=600, suppress_health_check=list(HealthCheck), deadline=None)
@given(plans)
def test_more_states_in_containers(plan):
    check(plan)
