"""Code that reads images, against NumPy, on each kind of CPU; whole steps are tested in test_image_loops.py."""

from functools import cache, partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.any_cpu

image_code = pytest.importorskip("fxq.backends.loops.code.image_code", reason="needs Numba", exc_type=ImportError)
emitted = pytest.importorskip("tests.support.emitted")

KINDS = [pytest.param(kind, id=kind.name) for kind in emitted.PLAYED if not kind.has_amx]
PIXELS = 16


@cache
def made(make, *arguments):
    """Function that makes code."""
    return partial(make, *arguments)


def run(kind, code, parameters, *arguments):
    """Compile code for a kind of CPU, and call it with arrays and counts."""
    call = emitted.emitted(kind, code, *parameters)
    call(*(a.ctypes.data if isinstance(a, np.ndarray) else int(a) for a in arguments))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_pixels_become_integers(kind, channels, gap):
    """Halves become even integers before the zero point is added, which is odd here. Nothing else is written."""
    if gap and channels in (2, 3):
        return
    x = np.random.default_rng(channels).integers(-400, 400, (channels, PIXELS + 5)).astype(np.float32) / 4
    x[0, :5] = np.nan, np.inf, -np.inf, 1e38, -1e38
    grid, step = np.array([2, 99, -94, 101], np.float32), channels + gap
    out = np.full(step * PIXELS + 2, 9, np.uint8)
    make, more = (image_code.quantize_apart, [step]) if gap else (image_code.quantize_packed, [])
    run(kind, made(make, channels), [None] * (4 + len(more)), x, x.strides[0], out[1:], *more, grid)
    wanted = np.nan_to_num(np.rint(x[:, :PIXELS] * 2), nan=-94).clip(-94, 101) + 99
    got = out[1:-1].reshape(PIXELS, step)
    assert np.array_equal(got[:, :channels].T, wanted) and bool((got[:, channels:] == 9).all())
    assert out[[0, -1]].tolist() == [9, 9]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=14)
@given(
    operation=st.sampled_from(["max", "mean", "mean of floats"]), rows=st.integers(0, 4), columns=st.integers(0, 4),
    channels=st.one_of(st.integers(1, 70), st.integers(120, 200)), step=st.integers(0, 3), count=st.integers(1, 4),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_windows(kind, operation, rows, columns, channels, step, count, seed):
    """Memory has no bytes after the last pixel that is read; results have others around them, which stay."""
    is_float = operation == "mean of floats"
    random = np.random.default_rng(seed)
    width = max(columns + step * (count - 1), 1)
    image = random.integers(0, 256, (max(rows, 1), width, channels)).astype(np.float32 if is_float else np.uint8)
    windows = [image[:rows, step * k : step * k + columns].reshape(-1, channels) for k in range(count)]
    if operation == "max":
        code = made(image_code.max_of_windows, columns if columns in image_code.UNROLLED_COLUMNS else 0)
        exact = [window.max(0, initial=0) for window in windows]
    else:
        code = made(image_code.mean_of_windows, is_float)
        exact = [window.astype(np.int64).sum(0) / 8 for window in windows]  # all is exact
        exact = exact if is_float else [(8 * mean - 3 * rows * columns) / 4 / 8 for mean in exact]
    out = np.full((count, channels + 3), 9, np.uint8 if operation == "max" else np.float32)
    more = [] if operation == "max" else [np.array([0.25, 3], np.float32), 8]
    fields = (
        image, rows, columns, image.strides[0], image.strides[1], channels, step * image.strides[1], count, out,
        out.strides[0],
    )  # fmt: skip
    run(kind, code, [image_code.WindowRow, *[None] * len(more)], *fields, *more)
    assert np.array_equal(out[:, :channels], exact) and bool((out[:, channels:] == 9).all())
