"""lower: a kernel overwrites its residual if nothing else reads it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.graphs import equal
from tests.support.machine import X86, needs_x86
from tests.support.models import call, settled

pytestmark = needs_x86


class Block(nn.Module):
    """conv(x) + x in the middle of layers, with something done to x besides."""

    def __init__(self, forward):
        super().__init__()
        self.stem, self.conv, self.head = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.body = forward

    def forward(self, x):
        return self.body(self, x)


def dies(m, x):
    x = F.relu(m.stem(x))
    return m.head(F.relu(m.conv(x) + x))


def other_operand_order(m, x):
    x = F.relu(m.stem(x))
    return m.head(F.relu(x + m.conv(x)))


def another_tensor(m, x):
    y = m.stem(x)
    return m.head(m.conv(F.relu(m.head(y))) + y)


def read_later(m, x):
    x = F.relu(m.stem(x))
    y = F.relu(m.conv(x) + x)
    return m.head(y) + m.head(x)


def read_later_twice(m, x):
    x = F.relu(m.stem(x))
    y = F.relu(m.conv(x) + x)
    z = F.relu(m.conv(y) + x)
    return m.head(z)


def is_returned(m, x):
    x = F.relu(m.stem(x))
    return m.head(F.relu(m.conv(x) + x)), x


def is_a_view(m, x):
    x = F.relu(m.stem(x))
    view = x.transpose(2, 3)
    return m.head(F.relu(m.conv(x) + view)), m.head(x)


def has_a_view(m, x):
    x = F.relu(m.stem(x))
    view = x.transpose(2, 3)
    y = m.head(F.relu(m.conv(F.relu(m.stem(x))) + x))
    return y, m.head(view)


def is_the_input(m, x):
    return m.head(F.relu(m.conv(x) + x))


def is_twice_the_same(m, x):
    y = m.conv(F.relu(m.stem(x)))
    return m.head(y + y)


def adds_the_same_value_twice(m, x):
    x = F.relu(m.stem(x))
    y = F.relu(m.conv(x) + x)
    return m.head(F.relu(F.max_pool2d(y, 1) + F.max_pool2d(y, 1)))


def two_sums_of_one_value(m, x):
    x = F.relu(m.stem(x))
    a = m.conv(F.max_pool2d(x, 1)) + x
    b = m.head(F.max_pool2d(x, 1)) + x
    return m.head(a + b)


def is_pooled_first(m, x):
    x = F.relu(m.stem(x))
    return m.head(F.relu(m.conv(x) + F.max_pool2d(x, 3, 1, 1)))


def an_identity_pad(m, x):
    x = F.relu(m.stem(x))
    y = F.pad(x, (0, 0, 0, 0))
    return m.head(F.relu(m.conv(x) + y)), m.head(x)


# How many kernels overwrite their residual.
BLOCKS = {
    dies: 0,  # the convolution reads it, too
    other_operand_order: 0,
    another_tensor: 1,
    read_later: 0,
    read_later_twice: 1,  # the second sum is its last reader
    is_returned: 0,
    is_a_view: 0,
    has_a_view: 0,
    is_the_input: 0,
    is_twice_the_same: 0,
    adds_the_same_value_twice: 1,
    two_sums_of_one_value: 2,
    is_pooled_first: 1,
    an_identity_pad: 0,
}


@pytest.mark.one_in(28)
@pytest.mark.parametrize("fast", [True, False], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize(("block", "inplace"), BLOCKS.items(), ids=[b.__name__ for b in BLOCKS])
def test_residuals_are_overwritten_only_where_they_die(block, inplace, fast):
    model, x = settled(lambda: Block(block)), torch.randn(2, 4, 8, 8)
    if fast:
        x = x.contiguous(memory_format=torch.channels_last)
    kept = x.clone()
    quantized = fxq.quantize(model, X86, data=[x])
    first = call(quantized, x)
    held = [t.clone() for t in (first if isinstance(first, tuple) else (first,))]
    assert equal(call(quantized, x), first)  # a second run is not disturbed by the first
    assert equal(list(first) if isinstance(first, tuple) else [first], held)  # nor the first result by the second run
    assert torch.equal(x, kept)
    kernels = [m for m in quantized.modules() if getattr(m, "inplace", False)]
    for kernel in kernels:
        kernel.inplace = False
    assert equal(call(quantized, x), first)
    assert sqnr(call(model, x), first) > 30
    assert len(kernels) == inplace


def test_inplace_is_found_to_be_wrong_where_it_is_forced():
    """The test above can fail: an overwritten residual that is read later gives another result."""
    model, x = settled(lambda: Block(read_later)), torch.randn(2, 4, 8, 8)
    quantized = fxq.quantize(model, X86, data=[x])
    first = call(quantized, x)
    for kernel in quantized.modules():
        if getattr(kernel, "residual", None) is not None:
            kernel.inplace = True
    assert not equal(call(quantized, x), first)
