"""Nested containers: what is inside, and new ones like them."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import fx

from fxq.common.trees import leaves, mapped

Pair = namedtuple("Pair", "a b")


@dataclass
class Fields:
    a: object
    b: object


@pytest.mark.parametrize(
    ("value", "inside"),
    [
        (1, [1]),
        ((1, [2, (3,)]), [1, 2, 3]),
        (Pair(1, [2]), [1, 2]),
        (torch.Size([1, 2]), [1, 2]),
        (OrderedDict(x=1, a=2), [1, 2]),
        (UserDict(x=1, a=[2]), [1, 2]),
        (Fields(1, (2,)), [1, 2]),
        (Fields, [Fields]),
        (slice(1, None), [1, None, None]),
        ("ab", ["ab"]),
        ([], []),
    ],
    ids=str,
)
def test_leaves(value, inside):
    assert list(leaves(value)) == inside


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 2),
        ((1, [2, (3,)]), (2, [3, (4,)])),
        (Pair(1, [2]), Pair(2, [3])),
        (torch.Size([1, 2]), torch.Size([2, 3])),
        (UserDict(x=1, a=[2]), {"x": 2, "a": [3]}),
        (slice(1, 2, 3), slice(2, 3, 4)),
        (fx.immutable_collections.immutable_list([1]), [2]),
    ],
    ids=str,
)
def test_mapped(value, expected):
    result = mapped(value, lambda n: n + 1)
    assert result == expected and type(result) is type(expected)


def test_what_is_a_leaf_is_not_looked_into():
    assert list(leaves([1, Pair(1, 2)], lambda v: isinstance(v, Pair))) == [1, Pair(1, 2)]
    assert mapped([1, (1, 2)], str, lambda v: isinstance(v, tuple)) == ["1", "(1, 2)"]
