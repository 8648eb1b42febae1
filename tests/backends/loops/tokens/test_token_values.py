"""Views of values in memory against the strides of PyTorch, and the three axes of a step."""

import torch

from fxq.backends.loops.tokens.token_values import TokenValue, step_axes


def same_view(value, tensor):
    assert value.shape == tuple(tensor.shape) and value.offset == tensor.storage_offset()
    pairs = zip(value.shape, value.strides, tensor.stride(), strict=True)
    assert all(size == 1 or ours == theirs for size, ours, theirs in pairs)


def test_views_have_the_strides_of_torch():
    value, tensor = TokenValue.contiguous(0, (2, 3, 8)), torch.zeros(2, 3, 8)
    same_view(value.reshaped((2, 3, 2, 4)), tensor.view(2, 3, 2, 4))
    same_view(value.transposed(0, 1), tensor.transpose(0, 1))
    same_view(value.permuted((2, 0, 1)), tensor.permute(2, 0, 1))
    same_view(value.sliced((slice(None), slice(1, 3), slice(-4, None))), tensor[:, 1:3, -4:])


def test_views_that_would_move_values():
    value = TokenValue.contiguous(0, (2, 3, 8))
    assert value.transposed(0, 1).reshaped((6, 8)) is None
    assert TokenValue.contiguous(0, (1, 3, 8)).transposed(0, 1).reshaped((3, 8)) is not None  # an axis of size 1
    assert value.sliced((0,)) is None and value.sliced((slice(None, None, 2),)) is None
    assert value.sliced((slice(2, 2),)) is None


def test_axes_of_a_step_are_joined_where_all_operands_allow():
    x, row = TokenValue.contiguous(0, (2, 3, 8)), TokenValue.contiguous(1, (8,))
    assert step_axes(x.shape, x, x) == ((1, 1, 48), [(0, 0, 1)] * 2)
    assert step_axes(x.shape, x, row) == ((1, 6, 8), [(0, 8, 1), (0, 0, 1)])
    assert step_axes(x.shape, x.transposed(1, 2)) is None  # the last axis is not side by side
    four = TokenValue.contiguous(0, (2, 3, 5, 8))
    assert step_axes(four.shape, four, TokenValue.contiguous(1, (2, 1, 5, 1))) is None  # four axes
    single = TokenValue.contiguous(0, (1, 1))
    assert step_axes(single.shape, single) == ((1, 1, 1), [(0, 0, 0)])
