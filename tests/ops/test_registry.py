"""Helpers that rows of the op table share."""

import pytest
import torch

from fxq.ops import OPS
from fxq.ops.registry import as_tuple, pick_values

pytestmark = pytest.mark.any_cpu


@pytest.mark.parametrize(
    ("value", "n", "expected"), [(3, 2, (3, 3)), ([1, 2], 2, (1, 2)), ((4,), 3, (4, 4, 4)), (0, 1, (0,))]
)
def test_an_option_for_all_axes_or_for_each(value, n, expected):
    assert as_tuple(value, n) == expected


def test_values_are_picked_and_indices_are_not():
    bound = {"x": 1}
    assert pick_values(bound, 0) is pick_values(bound, "values") is bound
    assert isinstance(pick_values(bound, 1), str) and isinstance(pick_values(bound, "indices"), str)


def test_the_table_has_every_subject():
    spelled = (
        torch.relu,
        torch.add,
        torch.cat,
        torch.conv2d,
        torch.mean,
        torch.softmax,
        torch.ops.fxq.quantize.default,
    )
    assert [OPS.of_call(function)[0].name for function in spelled] == [
        "relu", "add", "cat", "conv2d", "mean", "softmax", "quantize",
    ]  # fmt: skip
