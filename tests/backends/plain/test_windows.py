"""Max pooling of windows along axes, against all values in each window."""

import pytest
import torch

from fxq.backends.plain.windows import Window, largest
from fxq.errors import InputError


def under(window, size, i):
    """Indices of the values in window `i`."""
    start = i * window.stride - window.padding
    taps = (start + tap * window.dilation for tap in range(window.kernel))
    return [at for at in taps if 0 <= at < size]


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("sizes", [(3, 2, 1, 1), (2, 2, 0, 1), (5, 1, 2, 1), (2, 3, 1, 2), (9, 9, 0, 1), (2, 1, 2, 4)])
@pytest.mark.parametrize("channels", [1, 300])  # of many, PyTorch reduces; of few, maxima of pairs are taken
def test_one_axis(sizes, ceil, channels):
    window = Window(*sizes, ceil)
    for size in (9, 10, 14):
        x = torch.randint(0, 256, (2 + 1, size, channels), dtype=torch.uint8)[1:]  # not at the start of its memory
        taken = [under(window, size, i) for i in range(window.count(size))]
        want = [x[:, values].amax(1) if values else x.new_zeros(2, channels) for values in taken]
        assert torch.equal(largest(x.shape, [window])(x), torch.stack(want, 1))


def test_windows_of_single_values_are_copied():
    x = torch.randint(0, 256, (2, 5, 4, 3), dtype=torch.uint8)
    y = largest(x.shape, [Window(1, 1, 0, 1, False)] * 2)(x)
    assert torch.equal(y, x)
    assert y.data_ptr() != x.data_ptr()


def test_how_many_windows():
    """The count is as `torch.nn.MaxPool2d` documents: with `ceil_mode`, no window begins in the padding at the end."""
    assert [Window(2, 2, 0, 1, ceil).count(7) for ceil in (False, True)] == [3, 4]
    assert [Window(2, 2, 1, 1, ceil).count(7) for ceil in (False, True)] == [4, 4]
    with pytest.raises(InputError, match="2 values along an axis are too few for a pooling window of 3"):
        Window(3, 1, 0, 1, False).count(2)
