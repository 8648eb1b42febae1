"""Dependence of values: on the data of an input, on its sizes only, or on neither."""

import queue

import pytest
import torch

import fxq
from fxq.tracing.proxies import Dependence, TracedValue
from tests.support.helpers import REFERENCE, module

pytestmark = pytest.mark.any_cpu


def dependence(function):
    """Dependence of the traced value of `function(x)`."""
    returned = queue.SimpleQueue()  # what a list held would be put back

    def forward(self, x):
        value = function(x)
        returned.put(value)
        return x + 1

    fxq.extend.run_passes(module(forward), REFERENCE, example_inputs=(torch.rand(2, 3),), until="trace")
    values = [returned.get() for _ in range(returned.qsize())]
    return next((value._dependence for value in values if isinstance(value, TracedValue)), Dependence.CONSTANT)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x, Dependence.DATA),
        (lambda x: x.sum(), Dependence.DATA),
        (lambda x: x.size(0), Dependence.SIZES),
        (lambda x: x.shape[1] * 2 + 1, Dependence.SIZES),
        (lambda x: x.numel(), Dependence.SIZES),
        (lambda x: torch.zeros_like(x), Dependence.SIZES),
        (lambda x: x.new_ones(3), Dependence.SIZES),
        (lambda x: x.new_ones(3) + x, Dependence.DATA),
        (lambda x: torch.rand_like(x), Dependence.DATA),
        (lambda x: 3, Dependence.CONSTANT),
    ],
)
def test_dependence(function, expected):
    assert dependence(function) is expected
