"""Functional forms of assignments: they return the changed tensor and do not modify their input."""

import pytest
import torch

from fxq.graph.updates import updated, updated_view

pytestmark = pytest.mark.any_cpu

X = torch.arange(12.0).reshape(3, 4)


def test_an_assignment_by_tensors():
    x, places = X.clone(), torch.tensor([2, 0])
    assert updated(x, (places, places), -1.0).flatten().tolist() == [-1, *range(1, 10), -1, 11]
    assert updated(x, X > 8, X[X > 8] * 0).flatten().tolist() == [*range(9), 0, 0, 0]
    assert torch.equal(x, X)


def test_a_value_written_through_a_view():
    x = X.clone()
    assert updated_view(x, torch.zeros(3), "diagonal", (1,), {}).flatten().tolist() == [
        *(0, 0, 2, 3),
        *(4, 5, 0, 7),
        *(8, 9, 10, 0),
    ]
    assert torch.equal(x, X)
