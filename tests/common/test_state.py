"""Snapshots: whatever code changes in an object is seen, named and put back."""

import random
from collections import OrderedDict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fxq.common.state import StateSnapshot

pytestmark = pytest.mark.any_cpu


class Slotted:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 1


def holder():
    return SimpleNamespace(
        number=1,
        items=[1, [2]],
        table={"a": {"b": 1}},
        order=OrderedDict(a=1, b=2),
        last=deque([1, 2], maxlen=2),
        seen={1},
        pair=([1], 2),
        slots=Slotted(),
        tensor=torch.ones(2),
        array=np.ones(2),
        draws=np.random.default_rng(0),
        old_draws=np.random.RandomState(0),
        python=random.Random(0),
        torch_draws=torch.Generator().manual_seed(0),
        plain=[nn.Linear(2, 2)],
    )


CHANGES = {
    "number": lambda h: setattr(h, "number", 2),
    "extra": lambda h: setattr(h, "extra", 2),
    "items[1][0]": lambda h: h.items[1].__setitem__(0, 5),
    "items[2]": lambda h: h.items.append(3),
    "table['a']['b']": lambda h: h.table["a"].update(b=7),
    "order['c']": lambda h: h.order.update(c=3),
    "last[0]": lambda h: h.last.append(2.5),
    "seen[2]": lambda h: h.seen.add(2),
    "pair[0][0]": lambda h: h.pair[0].clear(),
    "slots.value": lambda h: setattr(h.slots, "value", 2),
    "tensor": lambda h: h.tensor.data.mul_(2),
    "array": lambda h: h.array.fill(3),
    "draws": lambda h: h.draws.random(),
    "old_draws": lambda h: h.old_draws.rand(),
    "python": lambda h: h.python.random(),
    "torch_draws": lambda h: torch.rand(1, generator=h.torch_draws),
    "plain[0].weight": lambda h: setattr(h.plain[0].weight, "data", torch.zeros(2, 2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_undone(name):
    value = holder()
    snapshot = StateSnapshot()
    snapshot.add("m", vars(value))
    assert list(snapshot.changes()) == []
    CHANGES[name](value)
    assert name in {c.name for c in snapshot.changes()}
    snapshot.restore()
    assert list(snapshot.changes()) == []


def test_values_are_those_of_before():
    value = holder()
    snapshot, weight = StateSnapshot(), value.plain[0].weight.detach().clone()
    snapshot.add("m", vars(value))
    for change in CHANGES.values():
        change(value)
    snapshot.restore()
    assert (value.number, value.items, value.table, value.seen) == (1, [1, [2]], {"a": {"b": 1}}, {1})
    assert (list(value.order), list(value.last), value.pair, value.slots.value) == (["a", "b"], [1, 2], ([1], 2), 1)
    assert value.tensor.tolist() == [1, 1] and value.array.tolist() == [1, 1] and not hasattr(value, "extra")
    assert torch.equal(value.plain[0].weight, weight)
    assert value.draws.random() == np.random.default_rng(0).random()
    assert value.python.random() == random.Random(0).random()


def test_what_refers_to_itself_ends():
    loop = [1]
    loop.append(loop)
    snapshot = StateSnapshot()
    snapshot.add("m", {"loop": loop})
    loop[0] = 2
    assert [c.name for c in snapshot.changes()] == ["loop[0]"]


def test_a_tensor_too_large_to_copy_leaves_room_for_others():
    large, small = torch.zeros(1000), torch.zeros(4)
    snapshot = StateSnapshot(_room=200)
    snapshot.add("", {"large": large, "small": small})
    small.add_(1)
    snapshot.restore()
    assert small.tolist() == [0.0] * 4


def test_many_objects_in_one_module_do_not_hide_another(monkeypatch, caplog):
    monkeypatch.setattr("fxq.common.state.MAX_VISITED_OBJECTS", 10)
    snapshot, state = StateSnapshot(), [1]
    snapshot.add("words", {"vocabulary": [{"id": i} for i in range(20)]})
    snapshot.add("memory", {"h": state})
    state[0] = 2
    assert [(c.owner, c.name) for c in snapshot.changes()] == [("memory", "h[0]")]
    assert "words" in caplog.text
