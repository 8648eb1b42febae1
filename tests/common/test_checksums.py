"""Checksums of tensors: other values, other numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxq.common.checksums import bit_sum, checksum, stride, word_sum

pytestmark = pytest.mark.any_cpu


def test_one_changed_value_is_seen():
    x = torch.rand(3, 5)
    for i in range(x.numel()):
        changed = x.clone()
        changed.view(-1)[i] += 1
        assert checksum(changed) != checksum(x)
    assert checksum(x.t().contiguous().t()) == checksum(x)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.complex64])
def test_any_dtype_and_shape(dtype):
    for shape in ((), (0,), (2, 3)):
        assert checksum(torch.ones(shape, dtype=dtype)) == checksum(torch.ones(shape, dtype=dtype))
    assert checksum(torch.ones(3, dtype=dtype)) != checksum(torch.zeros(3, dtype=dtype))


def test_of_a_large_tensor_some_values_of_each_channel_are_looked_at():
    x = torch.zeros(64, 64)
    for channel in range(64):
        changed = x.clone()
        changed[:, channel] = 1
        assert checksum(changed, max_values=500) != checksum(x, max_values=500)


@given(st.integers(0, 10**7), st.integers(1, 10**5))
def test_no_more_values_than_asked_for_are_looked_at(count, most):
    assert len(range(0, count, stride(count, most))) <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool,
                                   torch.complex64, torch.float8_e4m3fn])  # fmt: skip
def test_a_bit_sum_sees_each_value(dtype):
    tensor = torch.zeros(1_000_003).to(dtype)
    before = bit_sum(tensor[1:])
    tensor[777_777] = 1
    assert bit_sum(tensor[1:]) != before and bit_sum(tensor[:777_777]) == bit_sum(torch.zeros(3, 259_259).to(dtype).t())


def test_a_single_value_may_have_a_stride():
    """Contiguous for PyTorch, which refuses to view its bytes."""
    assert checksum(torch.ones(1, 4)[:, 0]) == checksum(torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool, torch.float16, torch.float32, torch.complex64])
def test_the_sum_of_words_notices_each_value(dtype):
    x = torch.randint(0, 2, (3, 7)).to(dtype)
    before = word_sum(x)
    assert before == word_sum(x.clone()) == word_sum(torch.cat([x[:1], x])[1:])
    for i in range(3):
        for j in range(7):
            changed = x.clone()
            changed[i, j] = x[i, j] == 0
            assert word_sum(changed) != before
    assert word_sum(x.t()) == word_sum(x.t().contiguous()) and word_sum(x[:0]) == 0
