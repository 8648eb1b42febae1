"""The arithmetic of quantization against float64 references, and the two operators."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxq.errors import InputError
from fxq.quant.qparams import QParams, choose_qparams, dequantize, quantize, spread
from fxq.quant.spec import ACTIVATION, WEIGHT, TensorSpec

TINY = 2.0**-126  # the smallest normal float32
specs = st.builds(TensorSpec, bits=st.integers(2, 8), signed=st.booleans(), symmetric=st.booleans())
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
ends = st.tuples(finite, finite).map(sorted)
normal = st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda v: v == 0 or abs(v) > 1e-30)
normal_ends = st.tuples(normal, normal).map(sorted)


def grid_of(low: float, high: float, spec: TensorSpec) -> QParams:
    return choose_qparams(torch.tensor(low), torch.tensor(high), spec)


def reference(x: np.ndarray, scale: float, zero_point: int, qmin: int, qmax: int) -> np.ndarray:
    """`x` on the grid: the quotient in float32, as every kernel has it, all else in float64. np.rint ties to even."""
    with np.errstate(over="ignore"):
        return np.clip(np.rint((x / np.float32(scale)).astype(np.float64)) + zero_point, qmin, qmax)


# --- specs ----------------------------------------------------------------------------------------------------------


# --- choosing scale and zero point ----------------------------------------------------------------------------------


@given(ends=ends, spec=specs)
@settings(max_examples=37)
def test_any_finite_range(ends, spec):
    qp = grid_of(*ends, spec)
    assert (qp.qmin, qp.qmax, qp.dtype, qp.axis) == (spec.qmin, spec.qmax, spec.dtype, None)
    assert qp.scale.dtype == torch.float32 and qp.zero_point.dtype == torch.int32
    assert TINY <= qp.s < math.inf
    assert qp.qmin <= qp.z <= qp.qmax
    # Zero is a point of the grid, and comes back as zero.
    q = quantize(torch.tensor([0.0, -0.0]), qp)
    assert q.tolist() == [qp.z, qp.z] and dequantize(q, qp).tolist() == [0.0, 0.0]


@given(ends=normal_ends, spec=specs)
@settings(max_examples=37)
def test_scale_and_cover(ends, spec):
    """The scale is range / steps in float64, rounded to float32; the grid covers the range but for half a step."""
    low, high = min(ends[0], 0.0), max(ends[1], 0.0)
    assume(high > low)
    qp = grid_of(*ends, spec)
    if spec.symmetric:
        zero = 0 if spec.signed else 2 ** (spec.bits - 1)
        assert qp.z == zero
        expected = max(-low / (zero - spec.qmin), high / (spec.qmax - zero))
        slack = 1e-6
    else:
        expected = (high - low) / (spec.qmax - spec.qmin)
        slack = 0.5 + 1e-4
    assert qp.s == pytest.approx(expected, rel=1e-7)
    assert (spec.qmin - qp.z) * qp.s <= low + slack * qp.s + 1e-6 * abs(low)
    assert (spec.qmax - qp.z) * qp.s >= high - slack * qp.s - 1e-6 * abs(high)
    assert float(qp.low) == pytest.approx((spec.qmin - qp.z) * qp.s, rel=1e-6)
    assert float(qp.high) == pytest.approx((spec.qmax - qp.z) * qp.s, rel=1e-6)


@given(high=st.floats(2.0**-100, 2.0**100, width=32), bits=st.integers(2, 8), signed=st.booleans())
def test_one_sided_ranges_use_the_whole_affine_grid(high, bits, signed):
    spec = TensorSpec(bits=bits, signed=signed)
    assert grid_of(0.0, high, spec).z == grid_of(high / 2, high, spec).z == spec.qmin
    assert grid_of(-high, 0.0, spec).z == grid_of(-high, -high / 2, spec).z == spec.qmax
    assert grid_of(high / 2, high, spec).same_as(grid_of(0.0, high, spec))


@given(spec=specs)
def test_only_zeros_get_the_grid_of_values_up_to_one(spec):
    wanted = grid_of(0.0, 1.0, spec)
    assert grid_of(0.0, 0.0, spec).same_as(wanted) and grid_of(-0.0, 0.0, spec).same_as(wanted)


def test_a_channel_of_zeros_gets_the_largest_scale_of_the_others():
    low, high = torch.tensor([0.0, -0.25, 0.0]), torch.tensor([0.0, 0.5, 0.125])
    assert choose_qparams(low, high, WEIGHT, 0).scale.tolist() == pytest.approx([0.5 / 127, 0.5 / 127, 0.125 / 127])


@given(spec=specs, low=st.sampled_from([0.0, -1e-45, -1e-40]), high=st.sampled_from([0.0, 1e-45, 1e-40, 1e-38]))
def test_denormal_ranges(spec, low, high):
    assume(low < high)
    qp = grid_of(low, high, spec)
    assert TINY <= qp.s <= 2 * TINY
    x = torch.tensor([low, 0.0, high])
    assert (dequantize(quantize(x, qp), qp) - x).abs().max() <= qp.s / 2


@given(spec=specs)
def test_huge_ranges(spec):
    most = torch.finfo(torch.float32).max
    for low, high in ((-most, most), (0.0, most), (-most, 0.0)):
        qp = grid_of(low, high, spec)
        q = quantize(torch.tensor([low, 0.0, high]), qp)
        assert q[1] == qp.z
        step = (high - low) / (2**spec.bits - 2)
        exact = (q.double() - qp.z) * qp.s  # float32 may overflow half a step beyond the largest float
        assert (exact - torch.tensor([low, 0.0, high]).double()).abs().max() <= step


@given(data=st.lists(ends, min_size=1, max_size=6), spec=specs)
def test_channels_are_chosen_on_their_own(data, spec):
    assume(all(any(range_) for range_ in data))
    low, high = torch.tensor([e[0] for e in data]), torch.tensor([e[1] for e in data])
    together = choose_qparams(low, high, spec, axis=1)
    assert together.axis == 1 and together.scale.shape == together.zero_point.shape == low.shape
    alone = [grid_of(a, b, spec) for a, b in data]
    assert together.scale.tolist() == [qp.s for qp in alone]
    assert together.zero_point.tolist() == [qp.z for qp in alone]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_refused(bad):
    for low, high in ((bad, 1.0), (0.0, bad), (bad, bad)):
        with pytest.raises(InputError, match="NaN or Inf"):
            grid_of(low, high, ACTIVATION)
    with pytest.raises(InputError, match="NaN or Inf"):
        choose_qparams(torch.tensor([0.0, bad]), torch.tensor([1.0, 1.0]), WEIGHT, 0)


def test_reversed_range_is_refused():
    with pytest.raises(InputError, match="low > high"):
        grid_of(1.0, -1.0, ACTIVATION)


def test_gradients_do_not_leak():
    low = torch.tensor(-1.0, requires_grad=True)
    assert not choose_qparams(low, torch.tensor(1.0), ACTIVATION).scale.requires_grad


# --- quantize and dequantize ----------------------------------------------------------------------------------------


@given(values=st.lists(finite, min_size=1, max_size=30), ends=ends, spec=specs)
@settings(max_examples=37)
def test_quantize_is_the_formula(values, ends, spec):
    qp, x = grid_of(*ends, spec), np.array(values, dtype=np.float32)
    q = quantize(torch.from_numpy(x), qp)
    assert q.dtype == spec.dtype
    np.testing.assert_array_equal(q.numpy(), reference(x, qp.s, qp.z, spec.qmin, spec.qmax))


@given(ends=normal_ends, spec=specs, fractions=st.lists(st.floats(0, 1), min_size=1, max_size=30))
@settings(max_examples=37)
def test_values_in_range_come_back_within_half_a_step(ends, spec, fractions):
    qp = grid_of(*ends, spec)
    low, high = (qp.qmin - qp.z) * qp.s, (qp.qmax - qp.z) * qp.s
    x = torch.tensor([low + f * (high - low) for f in fractions], dtype=torch.float32)
    back = dequantize(quantize(x, qp), qp)
    assert (back.double() - x.double()).abs().max() <= 0.5001 * qp.s
    assert quantize(back, qp).equal(quantize(x, qp))  # the grid's points stay where they are


@given(spec=specs, scale=st.floats(TINY, 2.0**118, width=32))
def test_every_integer_survives(spec, scale):
    for zero_point in {spec.qmin, 0, spec.qmax}:
        qp = QParams.per_tensor(scale, zero_point, spec.qmin, spec.qmax, spec.dtype)
        q = torch.arange(spec.qmin, spec.qmax + 1).to(spec.dtype)
        x = dequantize(q, qp)
        assert x.dtype == torch.float32
        np.testing.assert_array_equal(x.numpy(), (q.numpy().astype(np.float32) - zero_point) * np.float32(scale))
        assert torch.equal(quantize(x, qp), q)


def test_ties_round_to_even():
    qp = QParams.per_tensor(1.0, 10)
    x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5])
    assert (quantize(x, qp).int() - 10).tolist() == [-2, -2, 0, 0, 2, 2, 4]
    odd = QParams.per_tensor(1.0, 3)  # even before the zero point is added
    assert (quantize(x[2:], odd).int() - 3).tolist() == [0, 0, 2, 2, 4]


def test_out_of_range_saturates():
    for dtype, qmin, qmax in ((torch.uint8, 0, 255), (torch.int8, -127, 127), (torch.int8, -2, 1)):
        qp = QParams.per_tensor(1e-3, 0, qmin, qmax, dtype)
        x = torch.tensor([-math.inf, -3.4e38, 3.4e38, math.inf])
        assert quantize(x, qp).tolist() == [qmin, qmin, qmax, qmax]


@pytest.mark.parametrize("spec", [WEIGHT, TensorSpec(bits=4), TensorSpec(signed=True), TensorSpec(symmetric=True)])
@pytest.mark.parametrize("axis", [0, 1, 3, -1, -4])
def test_per_channel_is_per_tensor_on_each_channel(axis, spec):
    x = torch.randn(3, 4, 2, 5, generator=torch.Generator().manual_seed(0)) * 10
    others = [d for d in range(4) if d != axis % 4]
    qp = choose_qparams(x.amin(others), x.amax(others), spec, axis)
    q = quantize(x, qp)
    back = dequantize(q, qp)
    assert q.shape == back.shape == x.shape and q.dtype == spec.dtype and back.dtype == torch.float32
    for i in range(x.shape[axis]):
        channel = QParams.per_tensor(float(qp.scale[i]), int(qp.zero_point[i]), qp.qmin, qp.qmax, qp.dtype)
        assert torch.equal(q.select(axis, i), quantize(x.select(axis, i), channel))
        assert torch.equal(back.select(axis, i), dequantize(q.select(axis, i), channel))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3)])
def test_any_shape(shape):
    x = torch.ones(shape)
    q = quantize(x, QParams.per_tensor(0.5, 1))
    assert q.shape == x.shape and bool((q == 3).all())
    assert dequantize(q, QParams.per_tensor(0.5, 1)).shape == x.shape


def test_inputs_are_not_written():
    x, qp = torch.randn(4, 3), QParams.per_tensor(0.1, 7)
    before = x.clone()
    q = quantize(x, qp)
    held = q.clone()
    dequantize(q, qp)
    assert torch.equal(x, before) and torch.equal(q, held)


def test_layout_is_kept():
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    channels = choose_qparams(x.amin((0, 2, 3)), x.amax((0, 2, 3)), WEIGHT, 1)
    for qp in (QParams.per_tensor(0.1, 7), channels):
        q = quantize(x, qp)
        assert q.is_contiguous(memory_format=torch.channels_last)
        assert dequantize(q, qp).is_contiguous(memory_format=torch.channels_last)


def test_same_as():
    qp = QParams.per_tensor(0.5, 3)
    assert qp.same_as(qp) and qp.same_as(QParams.per_tensor(0.5, 3))
    assert not qp.same_as(None)
    others = [(0.25, 3), (0.5, 4), (0.5, 3, 0, 127), (0.5, 3, -127, 255), (0.5, 3, 0, 255, torch.int8)]
    assert not any(qp.same_as(QParams.per_tensor(*arguments)) for arguments in others)


# --- the operators --------------------------------------------------------------------------------------------------

X = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
LAYOUTS = {
    "contiguous": X,
    "channels last": X.contiguous(memory_format=torch.channels_last),
    "transposed": X.transpose(1, 3).contiguous().transpose(1, 3),
    "strided": torch.randn(2, 3, 8, 10)[:, :, ::2, 1::2],
    "scalar": torch.tensor(0.3),
    "empty": torch.empty(0, 3),
}
OPS = torch.ops.fxq


@pytest.mark.one_in(6)
@pytest.mark.parametrize("x", LAYOUTS.values(), ids=LAYOUTS)
def test_opcheck_per_tensor(x):
    torch.library.opcheck(OPS.quantize.default, (x, 0.1, 7, 0, 255, torch.uint8))
    q = OPS.quantize.default(x, 0.1, 0, -127, 127, torch.int8)
    torch.library.opcheck(OPS.dequantize.default, (q, 0.1, 0))


@pytest.mark.one_in(12)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "transposed", "strided"])
def test_opcheck_per_channel(layout, axis):
    x = LAYOUTS[layout]
    scale, zero_point = torch.rand(x.shape[axis]) + 0.1, torch.arange(x.shape[axis], dtype=torch.int32)
    torch.library.opcheck(OPS.quantize.tensor, (x, scale, zero_point, axis, None, 0, 255, torch.uint8))
    q = OPS.quantize.tensor(x, scale, zero_point, axis, None, 0, 255, torch.uint8)
    torch.library.opcheck(OPS.dequantize.tensor, (q, scale, zero_point, axis, None))


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9)),
    axis=st.sampled_from([0, 1, -1]),
    block=st.integers(1, 10),
    seed=st.integers(0, 99),
)
def test_blocks_are_quantized_one_by_one(shape, axis, block, seed):
    """The last one may be shorter. Source of the layout: a scale for each row and block, as of int4 weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    counts = [*shape]
    counts[axis] = -(-shape[axis] // block)
    scale = torch.rand(counts, generator=generator) + 0.1
    zero_point = torch.randint(-3, 4, counts, generator=generator, dtype=torch.int32)
    qp = QParams(scale, zero_point, -8, 7, torch.int8, axis, block)
    q = quantize(x, qp)
    for i, row in enumerate(x.movedim(axis, -1)):
        for j, value in enumerate(row):
            s, z = (float(t.movedim(axis, -1)[i, j // block]) for t in (scale, zero_point))
            expected = reference(value.numpy(), s, int(z), -8, 7)
            assert int(q.movedim(axis, -1)[i, j]) == int(expected)
            assert float(dequantize(q, qp).movedim(axis, -1)[i, j]) == pytest.approx((expected - z) * s, rel=1e-6)


def test_a_scale_for_each_row_that_is_computed():
    x = torch.tensor([[1.0, -2.0], [30.0, 15.0]])
    scale, zero_point = x.abs().amax(1, keepdim=True) / 127, torch.zeros((), dtype=torch.int32)
    q = OPS.quantize.tensor(x, scale, zero_point, None, None, -127, 127, torch.int8)
    assert q.tolist() == [[64, -127], [127, 64]]  # 63.5 to even
    assert OPS.dequantize.tensor(q, scale, zero_point, None, None)[1, 0] == 30.0


def per_tensor_both_ways(x: Tensor) -> tuple[Tensor, Tensor]:
    q = OPS.quantize.default(x, 0.1, 7, 0, 255, torch.uint8)
    return q, OPS.dequantize.default(q, 0.1, 7)


def per_channel_both_ways(x: Tensor) -> tuple[Tensor, Tensor]:
    scale, zero_point = torch.ones(3, device=x.device), torch.zeros(3, dtype=torch.int32, device=x.device)
    q = OPS.quantize.tensor(x, scale, zero_point, 1, None, -127, 127, torch.int8)
    return q, OPS.dequantize.tensor(q, scale, zero_point, 1, None)


@pytest.mark.parametrize("both_ways", [per_tensor_both_ways, per_channel_both_ways])
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "transposed"])
def test_meta_and_fake_tensors(both_ways, layout):
    x = LAYOUTS[layout]
    with FakeTensorMode() as mode:
        fake = both_ways(mode.from_tensor(x))
    for results in (both_ways(x.to("meta")), fake):
        for a, b in zip(results, both_ways(x), strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_meta_tensors_take_real_parameters():
    per_channel = choose_qparams(torch.full((3,), -1.0), torch.full((3,), 1.0), WEIGHT, 1)
    for qp in (QParams.per_tensor(0.1, 7), per_channel):
        q = quantize(X.to("meta"), qp)
        assert q.is_meta and q.shape == X.shape and dequantize(q, qp).is_meta


@pytest.mark.filterwarnings("ignore")
def test_operators_survive_export():
    class Both(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return OPS.dequantize.default(OPS.quantize.default(x, 0.1, 7, 0, 255, torch.uint8), 0.1, 7)

    exported = torch.export.export(Both(), (X,))
    targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert targets == [OPS.quantize.default, OPS.dequantize.default]
    assert torch.equal(exported.module()(X), Both()(X))


def test_a_block_larger_than_the_axis_takes_no_memory():
    x, scale = torch.ones(2, 4), torch.tensor([[0.5], [2.0]])
    assert torch.equal(spread(scale, x, 1, 10**12), scale.expand(2, 4))


def test_rounded_is_the_nearest_value_of_the_grid():
    grid = QParams.per_tensor(0.1, 100)
    x = torch.linspace(-9.9, 15.4, 41)
    assert (grid.rounded(x) - x).abs().max() <= 0.05 * 1.001
    assert torch.equal(grid.rounded(grid.rounded(x)), grid.rounded(x))
    assert grid.rounded(torch.tensor([-20.0, 20.0])).tolist() == pytest.approx([-10.0, 15.5])


@pytest.mark.parametrize("has_zero_points", [False, True])
def test_a_large_weight_is_quantized_by_rows(monkeypatch, has_zero_points):
    """The result is that of the whole."""
    x, scale = torch.randn(40, 3, 7), torch.rand(40, 2, 7) + 0.1
    zero_point = torch.randint(-3, 3, scale.shape) if has_zero_points else torch.zeros((), dtype=torch.int32)
    qp = QParams(scale, zero_point.expand_as(scale), -8, 7, torch.int8, 1, 2)
    whole = quantize(x, qp)
    monkeypatch.setattr("fxq.quant.qparams._AT_ONCE", 3 * 7 * 2)
    assert torch.equal(quantize(x, qp), whole)
