"""Inputs that one loop supports. test_dynamic_layer.py compares the results with float64."""

import pytest
import torch

from fxq.backends.kernel import PostOp
from fxq.backends.loops.code import compiler
from fxq.backends.table.row_product import RowProduct
from fxq.backends.x86.onednn_linear import OnednnLinear
from tests.backends.table.test_dynamic_layer import layer
from tests.support.kernels import activations
from tests.support.machine import needs_x86

pytestmark = needs_x86
pytest.importorskip("numba")


@pytest.fixture(params=[True, False], ids=["integers", "float"])
def bound(request):
    spec, _, _ = layer(4, 6, bias=False)

    def made(x, scale, zero_point=None, post=None):
        loops = compiler.loops("row_loops")
        return RowProduct(OnednnLinear(spec), None, post, request.param).bound(loops, x, scale, zero_point)

    return made


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2, 3, 1)])
def test_one_grid_or_one_for_each_row(shape, bound):
    assert bound(activations(2, 3, 6), torch.ones(shape), torch.ones(shape)) is not None


@pytest.mark.parametrize("shape", [(2, 1, 1), (3, 1), (4,)])
def test_grids_of_other_shapes_are_left_to_ops(shape, bound):
    assert bound(activations(2, 3, 6), torch.ones(shape)) is None


def test_rows_that_do_not_fit_are_left_to_the_layer(bound):
    assert bound(activations(2, 3, 5), torch.ones(1)) is None


@pytest.mark.parametrize("post", [None, PostOp("relu"), PostOp("gelu", algorithm="none")])
def test_a_bias_of_another_type_or_with_gaps_counts(post):
    """Edited kernels may have such a bias."""
    spec, _, _ = layer(4, 6)
    x, scale, loops = activations(2, 6), torch.ones(1), compiler.loops("row_loops")
    for integers in (True, False):
        wanted = RowProduct(OnednnLinear(spec), spec.bias, post, integers).bound(loops, x, scale, None)(x, scale)
        for bias in (spec.bias.double(), torch.stack([spec.bias] * 2, 1)[:, 0], torch._neg_view(-spec.bias)):
            result = RowProduct(OnednnLinear(spec), bias, post, integers).bound(loops, x, scale, None)(x, scale)
            assert torch.equal(result, wanted)
