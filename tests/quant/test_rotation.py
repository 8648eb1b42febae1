"""Rotations of rows by a Hadamard matrix."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fxq.quant.rotation import hadamard, rotated, rotation_size


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_a_hadamard_matrix(size):
    matrix = hadamard(size, torch.float64)
    want = torch.full((size, size), size**-0.5, dtype=torch.float64)
    assert torch.allclose(matrix.abs(), want, rtol=1e-15, atol=0)
    assert torch.equal(matrix, matrix.T)
    assert torch.allclose(matrix @ matrix, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-15)


@given(st.integers(1, 300), st.integers(0, 2**31))
def test_rotations_keep_products_and_undo_themselves(count, seed):
    x, y = torch.randn(2, 3, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert count % rotation_size(count) == 0
    assert torch.allclose(rotated(x) @ rotated(y).T, x @ y.T, rtol=0, atol=1e-12 * count)
    assert torch.allclose(rotated(rotated(x)), x, rtol=0, atol=1e-13 * count)


def test_an_outlier_is_divided():
    x = torch.zeros(1, 96)
    x[0, 40] = 8.0
    assert torch.equal(rotated(x).abs()[0, 32:64], torch.full((32,), 8 / 32**0.5))
    assert not rotated(x)[0, :32].any() and not rotated(x)[0, 64:].any()


def test_the_first_rotation_in_inference_mode():
    """The matrix of such a call is used with gradients later."""
    hadamard.cache_clear()
    with torch.inference_mode():
        rotated(torch.randn(2, 32))
    x = torch.randn(2, 32, requires_grad=True)
    rotated(x)[0, 0].backward()
    assert torch.equal(x.grad, torch.stack([hadamard(32)[0], torch.zeros(32)]))


def test_an_exported_rotation():
    class Rotation(nn.Module):
        def forward(self, x):
            return rotated(x)

    hadamard.cache_clear()
    x = torch.randn(3, 96)
    program = torch.export.export(Rotation(), (x,)).module()
    assert torch.allclose(program(x), rotated(x), rtol=0, atol=1e-6)
    assert type(hadamard(32)) is torch.Tensor


def test_autocast_leaves_rotations_in_float32():
    x = torch.randn(4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        got = rotated(x)
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), x.double() @ hadamard(64, torch.float64), rtol=0, atol=1e-5)


def test_long_rows_are_rotated_in_parts():
    x = torch.randn(2, 4096)
    assert torch.allclose(rotated(x), (x.view(2, 32, 128) @ hadamard(128)).flatten(1), rtol=0, atol=1e-6)
