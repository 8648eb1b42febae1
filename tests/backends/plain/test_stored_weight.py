"""Stored weights: converted to float, they equal the result of dequantize."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.plain.stored_weight import StoredWeight
from fxq.quant.observers import observer_for
from fxq.quant.packing import Packing
from fxq.quant.qparams import dequantize, quantize
from fxq.quant.spec import TensorSpec

AXES = {"tensor": None, "channel": 0}


def stored(weight, spec, axis):
    """Weight on the grid of a spec, and its stored form."""
    observer = observer_for(spec, axis, "w")
    observer(weight)
    qp = observer.qparams()
    values, packing = quantize(weight, qp), Packing.of_grid(qp.qmin, qp.qmax, tuple(weight.shape[1:]))
    assert (packing is None) == (spec.bits > 6)
    zero = qp.zero_point.to(qp.dtype) if bool(qp.zero_point.any()) else None
    kept = StoredWeight(values if packing is None else packing.pack(values), qp.scale, zero, qp.axis, qp.block, packing)
    return kept, values, qp


@settings(max_examples=15, deadline=None)
@given(
    shape=st.sampled_from([(1, 1), (1, 70), (5, 3), (7, 64), (3, 130), (4, 5, 3), (6, 9, 3, 3), (2, 3, 1, 2, 2)]),
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    per=st.sampled_from(["tensor", "channel", 1, 32, 64]),
    seed=st.integers(0, 99),
)
def test_floats_are_those_of_dequantize(shape, bits, symmetric, per, seed):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    spec = TensorSpec(bits, symmetric, symmetric, per, "minmax")
    kept, values, qp = stored(weight, spec, AXES.get(per, 1))
    wanted = dequantize(values, qp)
    assert torch.equal(kept.floats(kept.empty()), wanted)
    assert torch.equal(kept.integers(kept.empty()), values.float())
    rows = torch.tensor([0, shape[0] - 1, 0])
    some = kept.some(lambda tensor: tensor.index_select(0, rows))
    assert torch.equal(some.floats(some.empty()), wanted[rows])
    none = kept.some(lambda tensor: tensor[:0])
    assert none.floats(none.empty()).shape == (0, *shape[1:])
    assert kept.numel == weight.numel() and kept.row == shape[1:]


def test_blocks_of_a_convolution_are_whole_channels_of_its_kernel():
    _, _, qp = stored(torch.randn(4, 20, 3, 3), TensorSpec(4, per=64, observer="minmax"), 1)
    assert (qp.block, tuple(qp.scale.shape)) == (7, (4, 3, 1, 1))  # 63 values, and 54 at the end


def test_a_scale_for_each_block_is_that_of_its_range():
    weight = torch.tensor([[1.2, -2.0, 0.0, 0.5, 0.25]])
    _, values, qp = stored(weight, TensorSpec(4, True, True, 2, "minmax"), 1)
    torch.testing.assert_close(qp.scale, torch.tensor([[2.0, 0.5, 0.25]]) / 7)
    assert values.tolist() == [[4, -7, 0, 7, 7]]


@pytest.mark.parametrize("zero", [None, torch.tensor(3)])
def test_results_are_scaled_only_where_that_is_the_same(zero):
    kept = StoredWeight(torch.zeros(2, 2, dtype=torch.int8), torch.ones(()), zero)
    assert kept.scales_results is (zero is None)
    assert not StoredWeight(kept.values, torch.ones(2, 1), None, 1, 2).scales_results
