"""What values depend on: on the numbers in an input, on its sizes alone, or on neither."""

import queue

import pytest
import torch

import fxq
from fxq.tracing.proxies import Origin, TracedValue
from tests.support.helpers import REFERENCE, module

pytestmark = pytest.mark.any_cpu


def origin(function):
    """What the traced value of `function(x)` depends on."""
    found = queue.SimpleQueue()  # what a list held would be put back

    def forward(self, x):
        value = function(x)
        found.put(value)
        return x + 1

    fxq.extend.run_passes(module(forward), REFERENCE, example_inputs=(torch.rand(2, 3),), until="trace")
    values = [found.get() for _ in range(found.qsize())]
    return next((value._origin for value in values if isinstance(value, TracedValue)), Origin.CONSTANT)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x, Origin.DATA),
        (lambda x: x.sum(), Origin.DATA),
        (lambda x: x.size(0), Origin.SIZES),
        (lambda x: x.shape[1] * 2 + 1, Origin.SIZES),
        (lambda x: x.numel(), Origin.SIZES),
        (lambda x: torch.zeros_like(x), Origin.SIZES),
        (lambda x: x.new_ones(3), Origin.SIZES),
        (lambda x: x.new_ones(3) + x, Origin.DATA),
        (lambda x: torch.rand_like(x), Origin.DATA),
        (lambda x: 3, Origin.CONSTANT),
    ],
)
def test_origins(function, expected):
    assert origin(function) is expected
