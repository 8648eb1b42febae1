"""The range of a tensor: of all of it, of channels, of blocks, in every layout."""

import pytest
import torch

from fxq.quant.tensor_range import flat, range_of
from tests.support.layouts import LAYOUTS


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_all_of_a_tensor_in_every_layout(layout):
    x = layout(torch.randn(2, 6, 4, 5))
    assert torch.equal(flat(x).sort().values, x.reshape(-1).sort().values)
    assert range_of(x) == (x.min(), x.max())


@pytest.mark.parametrize("layout", ["channels last", "transposed", "reversed", "scalar", "size one"])
def test_dense_layouts_are_not_copied(layout):
    x = LAYOUTS[layout](torch.randn(2, 6, 4, 5))
    assert flat(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_channels(axis):
    x = torch.randn(2, 6, 4)
    low, high = range_of(x, axis)
    slices = x.unbind(axis)
    assert low.tolist() == [float(s.min()) for s in slices] and high.tolist() == [float(s.max()) for s in slices]


def test_channels_of_a_vector():
    low, high = range_of(torch.tensor([1.0, -2.0]), 0)
    assert (low.tolist(), high.tolist()) == ([1.0, -2.0], [1.0, -2.0])


def test_blocks_of_channels_hold_the_kernel_and_the_last_may_be_smaller():
    w = torch.randn(3, 5, 2, 2)
    low, high = range_of(w, 1, 2)
    assert low.shape == high.shape == (3, 3, 1, 1)
    for row in range(3):
        for i, block in enumerate((w[row, :2], w[row, 2:4], w[row, 4:])):
            assert (low[row, i], high[row, i]) == (block.min(), block.max())


def test_nan_makes_the_range_nan():
    assert all(end.isnan() for end in range_of(torch.tensor([1.0, float("nan")])))


@pytest.mark.parametrize(
    ("shape", "axis", "block"),
    [((6, 8), 1, 4), ((6, 8), -1, 3), ((6, 8), 0, 3), ((6, 8, 3, 3), 1, 4), ((6, 8, 3, 3), 0, 2), ((6, 9, 3, 3), 1, 4)],
)
def test_the_range_of_a_block_is_that_of_its_values(shape, axis, block):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    low, high = range_of(x, axis, block)
    for i, rows in enumerate(x.movedim(axis, 0).split(block)):
        values = rows.movedim(0, axis).movedim(1 - axis % x.dim(), 0).flatten(1)
        ends = (end.movedim(axis, 0)[i].flatten().tolist() for end in (low, high))
        assert list(ends) == [values.amin(1).tolist(), values.amax(1).tolist()]
