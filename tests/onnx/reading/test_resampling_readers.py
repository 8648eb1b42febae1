"""Resizing of dynamic sizes, and of sizes whose product with a scale rounds."""

import numpy as np
import pytest
import torch

import fxq
from tests.support.onnx_text import parsed, reference

pytest.importorskip("onnx")


def resizing(scale, shape, rounding="floor", coordinates="half_pixel"):
    options = f'mode = "nearest", coordinate_transformation_mode = "{coordinates}", nearest_mode = "{rounding}"'
    scales = {"scales": np.array([1, 1, scale, scale], np.float32)}
    return parsed(f"y = Resize<{options}>(x, , scales)", f"float[1, 2, {shape}] x", "float[1, 2, A, B] y", scales)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("coordinates", ["half_pixel", "asymmetric", "pytorch_half_pixel", "half_pixel_symmetric"])
@pytest.mark.parametrize("rounding", ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"])
def test_nearest_values_of_dynamic_sizes(coordinates, rounding):
    model = resizing(2, "H, W", rounding, coordinates)
    try:
        read = fxq.read_onnx(model)
    except fxq.FileError as error:  # PyTorch has no such mode
        assert "it resizes nearest" in str(error)
        assert rounding in ("floor", "ceil") or coordinates == "asymmetric"
        return
    for shape in ((1, 2, 5, 3), (1, 2, 4, 7)):
        x = torch.randn(shape)
        assert torch.equal(read(x), torch.from_numpy(reference(model, x)[0]))


@pytest.mark.parametrize("shape", ["10, 20", "H, W"])
def test_a_size_times_a_scale_is_a_product_of_float32(shape):
    read = fxq.read_onnx(resizing(0.7, shape, "round_prefer_ceil"))
    assert read(torch.randn(1, 2, 10, 20)).shape == (1, 2, 7, 14)
