"""Memory that values share, as observed in a run of the model."""

import gc

import pytest
import torch
from torch import fx

from fxq.graph.analysis.memory import MemoryWatch

pytestmark = pytest.mark.any_cpu


def test_views_lie_in_the_block_of_what_they_are_views_of():
    watch, x = MemoryWatch(), torch.zeros(4, 4)
    assert watch.memory(x) == watch.memory(x.t()) == watch.memory([x[1:], {"a": x.view(-1)}])
    assert watch.memory(x.clone()) != watch.memory(x)
    assert len(watch.memory((x, x.clone()))) == 2
    assert watch.memory(torch.eye(2).to_sparse()) == () and watch.memory((3, None, "x")) == ()


def test_a_block_that_is_gone_does_not_lend_its_number():
    watch, seen = MemoryWatch(), set()
    for _ in range(20):
        (number,) = watch.memory(torch.zeros(1000))
        gc.collect(0)
        assert number not in seen
        seen.add(number)


@pytest.mark.parametrize(
    ("write", "changes"), [(lambda x: x.add_(1), True), (lambda x: x[0].zero_(), True), (lambda x: x.add(1), False)]
)
def test_what_has_been_changed_since(write, changes):
    watch, x, unchanged = MemoryWatch(), torch.zeros(3), torch.zeros(3)
    before = watch.versions((x, [unchanged]))
    write(x)
    assert watch.changed(before) == (watch.memory(x) if changes else ())


def test_the_same_part_of_the_same_memory():
    watch, x, graph = MemoryWatch(), torch.arange(6.0).view(2, 3), fx.Graph()
    parts = {"x": x, "again": x.view(2, 3), "flat": x.view(-1), "row": x[1], "other": x.clone(), "number": 3}
    nodes = {name: graph.placeholder(name) for name in parts}
    for name, value in parts.items():
        watch.see(nodes[name], value)
    assert [name for name in parts if watch.same(nodes["x"], nodes[name])] == ["x", "again"]
    assert not watch.same(nodes["number"], nodes["number"])


@pytest.mark.parametrize(
    ("written", "place", "read", "overwrites"),
    [
        (lambda x: x[1:], ..., lambda x: x[:-1], True),
        (lambda x: x[:-1], ..., lambda x: x[1:], False),  # each element is read before it is written
        (lambda x: x, (slice(None), slice(1, None)), lambda x: x[:, :-1], True),
        (lambda x: x, (slice(None), 2), lambda x: x[:, 1], False),  # other elements
        (lambda x: x[:, ::2], ..., lambda x: x[:, 1::2], False),
        (lambda x: x, ..., lambda x: x, False),
        (lambda x: x, ..., lambda x: x[:, :1], True),  # broadcast
        (lambda x: x, ..., lambda x: x.t(), True),
        (lambda x: x[:2], ..., lambda x: x.view(-1)[:3], True),  # the shape does not broadcast
        (lambda x: x, ..., lambda x: x.view(torch.int16)[:, :4], True),
        (lambda x: x, torch.tensor([1, 2]), lambda x: x[:2], True),
    ],
)
def test_a_write_to_what_is_still_to_be_read(written, place, read, overwrites):
    watch, x, graph = MemoryWatch(), torch.zeros(4, 4), fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    watch.see(a, written(x))
    watch.see(b, read(x))
    assert watch.overwrites(a, place, b) is overwrites
