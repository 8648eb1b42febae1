"""Forms of calls: what a message says of the difference between two."""

import pytest

from fxq.common.containers import Structure
from fxq.programs.call_form import structure_difference


class Cache:
    """Class of containers, with a long text."""


def layer(constant):
    return Structure(
        "registered", "cache", Cache, constant, (("a_part_with_a_long_name" * 4, Structure("leaf", "x", "tensor")),)
    )


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ((("window", 8), ("past", True)), (("window", 8), ("past", False)), "with past=True, not with past=False"),
        ((("window", 8), ("past", 1)), (("window", 8),), "with past=1, not with nothing else"),
        ({"window": 8}, {"window": 9}, "with {'window': 8}, not with {'window': 9}"),
    ],
)
def test_constants_that_differ_are_named(first, second, said):
    assert structure_difference("cache", layer(first), layer(second)) == f"cache is Cache(...) {said}"
    assert structure_difference("cache", layer(first), layer(first)) == ""
