"""Values of a fixed kind, compared with runs on other values."""

import operator

import pytest
import torch
from torch import fx

from fxq.runtime.stable_kinds import ValueReads, holds_tensor, run

pytestmark = pytest.mark.any_cpu

MASK = torch.tensor([True, False, True])


def of(function, *args, **kwargs):
    """Value, and whether its kind is fixed."""
    graph = fx.Graph()
    nodes = tuple(graph.placeholder(f"x{i}") for i in range(len(args)))
    return run(graph.call_function(function, nodes, {}), function, args, kwargs, sure=False)


@pytest.mark.parametrize(
    ("function", "args", "fixed"),
    [
        (torch.sin, (torch.ones(3),), True),
        (operator.add, (2, 3), True),
        (operator.getitem, (torch.ones(3), 1), True),
        (operator.getitem, (torch.ones(3), MASK), False),
        (operator.getitem, (torch.ones(3), torch.tensor([0, 2])), True),
        (torch.nonzero, (MASK,), False),
        (torch.masked_select, (torch.ones(3), MASK), False),
        (torch.unique, (torch.ones(3),), False),
        (lambda x: x + 1, (torch.ones(3),), False),  # a user's own function: unknown
    ],
)
def test_a_kind_that_values_decide_is_not_fixed(function, args, fixed):
    value, is_fixed = of(function, *args)
    wanted = function(*args)
    assert is_fixed is fixed and (torch.equal(value, wanted) if isinstance(value, torch.Tensor) else value == wanted)


def test_what_is_sure_is_not_looked_at():
    graph = fx.Graph()
    node = graph.call_module("kernel", (graph.placeholder("x"),))
    assert run(node, lambda x: x[MASK], (torch.arange(3),), {}, sure=True)[1]


def test_reading_a_number_out_of_a_tensor_is_seen():
    for look, seen in ((lambda x: x.sum().item(), True), (lambda x: x.sum() * 2, False), (lambda x: x.shape[0], False)):
        with ValueReads() as reads:
            look(torch.ones(3))
        assert reads.happened is seen


@pytest.mark.parametrize(
    ("values", "holds"),
    [([1, (2, {"a": torch.ones(1)})], True), (slice(None, torch.tensor(2)), True), ({"a": [1, "b", None]}, False)],
)
def test_tensors_are_found_in_what_is_nested(values, holds):
    assert holds_tensor(values) is holds
