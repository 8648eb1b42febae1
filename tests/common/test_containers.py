"""Containers taken apart to tensors and numbers by name, and constructed again."""

import json
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import fxq
from fxq.common.container_data import as_data, from_data
from fxq.common.container_types import register_container
from fxq.common.containers import ContainerNames, matches, put_together, taken_apart

Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    logits: torch.Tensor
    states: list
    count: int = 0
    total: int = field(init=False)

    def __post_init__(self):
        self.total = self.count + 1


class Cache:
    """A user's own container, registered below."""

    def __init__(self, kind, keys):
        self.kind, self.keys = kind, keys


register_container(Cache, lambda cache: ({"keys": cache.keys}, cache.kind), lambda parts, kind: Cache(kind, **parts))


class Node:
    """A user's own container, registered as a pytree."""

    def __init__(self, value, label):
        self.value, self.label = value, label


pytree.register_pytree_node(Node, lambda n: ([n.value], n.label), lambda values, label: Node(values[0], label))

X, Y = torch.arange(3.0), torch.ones(2)


def apart(value, name="x"):
    leaves = {}
    return taken_apart(value, name, leaves), leaves


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (X, ["x"]),
        (3, ["x"]),
        ((X, [Y, None]), ["x_0", "x_1_0"]),
        ({"a": X, "b-c": Y}, ["x_a", "x_b_c"]),
        (OrderedDict(k=X), ["x_k"]),
        (defaultdict(list, k=X), ["x_k"]),
        (Pair(X, 2), ["x_0", "x_1"]),
        (Output(X, [Y], 4), ["x_logits", "x_states_0", "x_count", "x_total"]),
        (Cache("full", [X, Y]), ["x_keys_0", "x_keys_1"]),
        (Node(X, "n"), ["x_0"]),
        ([Cache("a", [X]), Node({"y": Y}, "b")], ["x_0_keys_0", "x_1_0_y"]),
    ],
)
def test_a_value_is_taken_apart_and_put_together(value, names):
    structure, leaves = apart(value)
    assert list(leaves) == names
    again = put_together(structure, leaves)
    assert type(again) is type(value)
    structure_again, leaves_again = apart(again)
    assert structure_again == structure and all(leaves_again[name] is leaves[name] for name in names)
    assert from_data(as_data(structure)) == structure


def test_a_defaultdict_keeps_its_factory():
    structure, leaves = apart(defaultdict(list, k=X))
    assert put_together(structure, leaves)["new"] == []
    assert apart(defaultdict(lambda: 0, k=X))[0] == apart(defaultdict(lambda: 0, k=X))[0]


def test_names_are_unique():
    leaves = {}
    taken_apart(X, "x_0", leaves)
    taken_apart([Y], "x", leaves)
    assert list(leaves) == ["x_0", "x_0_"] and leaves["x_0_"] is Y


def test_constants_are_told_apart_by_type_and_kept_in_files():
    structures = [apart(Cache(kind, [X]))[0] for kind in (True, 1, 1.0, [1], (1,), (True,), {"a": [1, (2,)]})]
    for i, structure in enumerate(structures):
        assert [structure == again for again in structures] == [i == j for j in range(len(structures))]
        assert from_data(json.loads(json.dumps(as_data(structure)))) == structure
    kind = ["a"]
    before = apart(Cache(kind, [X]))[0]
    kind.append("b")
    assert before.constant == ["a"]


def test_keys_of_dicts_are_kept_in_files():
    structure, leaves = apart({("a", 1): X, 2: Y, None: X, True: X})
    again = from_data(json.loads(json.dumps(as_data(structure))))
    assert again == structure and list(put_together(again, leaves)) == [("a", 1), 2, None, True]
    with pytest.raises(fxq.InputError, match="cannot hold a bytes"):
        as_data(apart({b"a": X})[0])


def updated(container, after, name="x"):
    """Update a container to what an equal one is after a call. Leaves get their own names."""
    structure, leaves = apart(after, name)
    own = ContainerNames()
    taken_apart(container, name, {}, containers=own)
    assert put_together(structure, leaves, dict(own.values)) is container


def test_a_container_is_updated_in_place():
    cache = Cache("full", [X])
    keys = cache.keys
    updated(cache, Cache("grown", [X, Y]))
    assert cache.kind == "grown" and cache.keys is keys and keys[1] is Y
    items = [X]
    updated(items, [Y, X])
    assert items[0] is Y and items[1] is X
    table = {"a": X}
    updated(table, {"b": Y})
    assert table == {"b": Y}


def test_inner_containers_stay_the_same_objects():
    table = defaultdict(list, a=[X])
    inner, record = table["a"], Output(X, [X])
    states, items = record.states, [(table, record)]
    updated(items, [(defaultdict(list, a=[Y]), Output(Y, [Y, X]))])
    assert items[0][0] is table and table["a"] is inner and inner[0] is Y and table["new"] == []
    assert items[0][1] is record and record.logits is Y and record.states is states and len(states) == 2


def test_an_update_sets_the_parts_alone():
    cache = Cache("full", [X])
    cache.note = "mine"
    updated(cache, Cache("full", [Y]))
    assert cache.note == "mine" and cache.keys[0] is Y


class Slots:
    """A container without `__dict__`, registered below."""

    __slots__ = ("_hidden", "keys")

    def __init__(self, keys):
        self.keys = keys


register_container(Slots, lambda s: ({"keys": s.keys}, None), lambda parts, _: Slots(**parts))


class Hidden:
    """A container whose part is not an attribute of its name, registered below."""

    __slots__ = ("_keys",)

    def __init__(self, keys):
        self._keys = keys


register_container(Hidden, lambda h: ({"keys": h._keys}, None), lambda parts, _: Hidden(**parts))


def test_objects_with_slots_are_updated_or_refused():
    slots = Slots(X)
    updated(slots, Slots(Y))
    assert slots.keys is Y
    with pytest.raises(fxq.InputError, match=r"cannot change a Hidden.*the argument `update`"):
        updated(Hidden(X), Hidden(Y))
    with pytest.raises(fxq.InputError, match="cannot change a Frozen"):
        updated(Frozen(X), Frozen(Y))


@dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


def test_one_container_in_two_places_is_told_from_two_equal_ones():
    table = {"a": X}
    structure, leaves = apart([table, table])
    assert list(leaves) == ["x_0_a"] and structure != apart([table, {"a": X}])[0]
    first, second = put_together(structure, leaves)
    assert first is second and first is not table
    assert from_data(as_data(structure)) == structure


def test_what_no_graph_can_take_is_refused():
    with pytest.raises(fxq.InputError, match="x_0 holds a object"):
        apart([object()])
    with pytest.raises(fxq.InputError, match=r"import nowhere first"):
        from_data(["plain", "", "nowhere:Missing", None, []])
    with pytest.raises(fxq.InputError, match="not a class of containers"):
        from_data(["plain", "", "torch:Tensor", None, []])
    with pytest.raises(fxq.InputError, match="not registered"):
        from_data(["registered", "", "torch:Tensor", None, []])
    with pytest.raises(fxq.InputError, match="no dtype of torch"):
        from_data(["constant", "", None, {"dtype": "save"}, []])


plain = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.just(X), st.just(torch.float16))
values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=20)
@given(values)
def test_any_nesting_comes_back(value):
    structure, leaves = apart(value)
    again = put_together(structure, leaves)
    assert str(again) == str(value)
    assert from_data(as_data(structure)) == structure


@given(values, values)
def test_a_value_matches_a_structure_that_it_has(value, other):
    structure = apart(value)[0]
    for argument in (value, other, [value, value], [other, value]):
        again, own_leaves = apart(argument)
        got, containers, names = {}, {}, {}
        assert matches(structure, argument, got, containers, names) is (structure == again)
        if structure == again:
            assert got == own_leaves and list(got) == list(own_leaves)


def test_containers_match_with_their_class_constant_and_identity():
    def fits(structure, value):
        return matches(structure, value, {}, {}, {})

    cache = apart(Cache("a", [X]))[0]
    assert fits(cache, Cache("a", [Y])) and not fits(cache, Cache("b", [Y])) and not fits(cache, [Y])
    assert not fits(cache, Cache("a", [1])) and not fits(cache, Cache("a", [X, X])) and not fits(cache, None)
    twice = apart([table := {"a": X}, table])[0]
    assert fits(twice, [table, table]) and not fits(twice, [table, {"a": X}])
    assert not fits(apart([{"a": X}, {"a": X}])[0], [table, table])
    node, pair = apart(Node(X, "x"))[0], apart(Pair(X, 1))[0]
    assert fits(node, Node(Y, "x")) and not fits(node, Node(Y, "y"))
    assert fits(pair, Pair(Y, 2)) and not fits(pair, (Y, 2)) and not fits(pair, Pair(Y, True))
    counts = apart(defaultdict(list, a=X))[0]
    assert fits(counts, defaultdict(list, a=X)) and not fits(counts, defaultdict(dict, a=X))
