"""Caches in integers: rows that are rounded as by the ops, and attention to them against float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.loops.code.compiler import loops
from fxq.ops.conversions import choose_scale, quantize
from fxq.ops.states import pack_rows, state_zero_point
from fxq.quant.packing import Packing
from fxq.quant.quantized_rows import QuantizedRows

LOOPS = loops("token_loops")
pytestmark = [pytest.mark.any_cpu, pytest.mark.skipif(LOOPS is None, reason="needs Numba")]


def run_step(code, x, out, states, mask=None, factor=1.0, parts=None, grid=()):
    """Run one step on x, float32 (samples, heads, count, depth), and states in integers."""
    field, bases, factor = LOOPS.TokenField, [0, 0], torch.tensor(factor)
    varying = {"x": x, "out": out}
    bases += [varying[name].data_ptr() if varying[name] is not None else 0 for name in varying]
    at_mask = len(bases) if mask is not None else 0
    bases += [] if mask is None else [mask.data_ptr(), *mask.stride()]
    indices = []
    for state in states:
        indices.append(len(bases))
        for part in state.parts:
            bases += part.data_ptr(), state.shape[2], *part.stride()[:3]
    step = torch.zeros(1, LOOPS.MAX_FIELDS, dtype=torch.int64)
    samples, heads, count, depth = x.shape
    numbers = {
        field.CODE: [code], field.OUT: [3, 0], field.X: [2, 0], field.SIZES: [samples, heads, count],
        field.X_STRIDES: x.stride()[:3], field.STATE: indices, field.MASK: [at_mask], field.ARGUMENT: [depth],
        field.FACTOR: [factor.data_ptr()], field.COLUMNS: parts or (0, samples * heads), field.LEVELS: grid,
        field.BITS: [8 if states[0].packing is None else 4, states[0].blocks],
    }  # fmt: skip
    for first, values in numbers.items():
        if values:
            step[0, first : first + len(values)] = torch.tensor(list(values))
    memory = torch.tensor(bases)
    LOOPS.run(step.data_ptr(), 1, memory.data_ptr())


def empty_rows(samples, heads, length, depth, room=3, block=None, packed=False):
    """Rows that are the first ones in larger memory."""
    shape, blocks = (samples, heads, length + room), 1 if block is None else depth // block
    packing = Packing((depth,), 4, signed=False) if packed else None
    parts = (
        torch.zeros(*shape, packing.row_bytes if packed else depth, dtype=torch.uint8),
        torch.zeros(*shape, blocks),
        torch.zeros(*shape, blocks, dtype=torch.uint8),
    )
    return QuantizedRows(*(part[:, :, :length] for part in parts), packing)


def rounded(x, bits, block=None, packed=False):
    """Integers, scales and zero points of rows by the ops that `store-states` writes."""
    steps, qmax = 2**bits - 2, 2**bits - 1
    scale = choose_scale(x, steps=steps, axis=-1, symmetric=False, block=block)
    zero_point = state_zero_point(x, scale, block=block)
    axis = None if block is None else -1
    integers = quantize(x, scale=scale, zero_point=zero_point, qmax=qmax, axis=axis, block=block)
    return pack_rows(integers, bits=4) if packed else integers, scale, zero_point


def appended(x, bits=8, earlier=2, **form):
    state = empty_rows(*x.shape[:2], earlier + x.shape[2], x.shape[3], **form)
    run_step(LOOPS.APPEND_INTEGERS, x, None, [state], grid=(2**bits - 2, 2**bits - 1))
    assert not any(part[:, :, :earlier].any() for part in state.parts)  # earlier entries are not touched
    return tuple(part[:, :, earlier:] for part in state.parts)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="PyTorch rounds products apart")
@settings(max_examples=40, deadline=None)
@given(
    samples=st.integers(1, 2), heads=st.integers(1, 3), count=st.integers(1, 5), depth=st.sampled_from([32, 64, 80]),
    bits=st.sampled_from([8, 8, 7, 4, 2]), block=st.sampled_from([None, 16, 8, 2]),
    shift=st.sampled_from([-30.0, -1.0, 0.0, 0.5, 30.0]),
    size=st.sampled_from([1e-38, 1e-6, 1.0, 1e4, 3e37]), seed=st.integers(0, 999),
)  # fmt: skip
def test_rows_are_rounded_as_by_the_ops(samples, heads, count, depth, bits, block, shift, size, seed):
    torch.manual_seed(seed)
    x = (torch.randn(samples, count, heads, depth).transpose(1, 2) + shift) * size
    form = {"block": block, "packed": bits <= 4}
    for ours, theirs in zip(appended(x, bits, **form), rounded(x, bits, **form), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)  # bit by bit


def test_rows_without_a_grid_are_stored_as_by_the_ops():
    x = torch.randn(1, 8, 1, 32)
    for head, value in enumerate([math.nan, math.inf, -math.inf, 0.0]):
        x[0, head, 0, 3] = value
    x[0, 3], x[0, 4], x[0, 5, 0, :2] = 0.0, 3.4e38, torch.tensor([math.inf, -math.inf])
    x[0, 6], x[0, 7, 0, 5] = -0.0, -math.nan
    for ours, theirs in zip(appended(x), rounded(x, 8), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_values_between_two_integers_are_rounded_as_by_the_ops():
    """Half of a step, and a float beside it, where a product with 1 / scale may be on the other side."""
    steps = torch.arange(0, 254) + 0.5
    for scale in (1.0, 0.1, 0.003, 7 / 3):
        x = torch.stack([steps[:64], steps[64:128], steps[128:192], steps[190:254]]) * scale
        x = torch.stack([x, torch.nextafter(x, x + 1), torch.nextafter(x, x - 1)])[None]
        x[..., 0], x[..., 1] = 254 * scale, -0.3 * scale
        for ours, theirs in zip(appended(x), rounded(x, 8), strict=True):
            assert torch.equal(ours, theirs)


def rows_of(x, bits=8, block=None):
    form = {"block": block, "packed": bits == 4}
    state = empty_rows(*x.shape, **form)
    for part, value in zip(state.parts, rounded(x, bits, **form), strict=True):
        part.copy_(value)
    return state


@settings(max_examples=40, deadline=None)
@given(
    samples=st.integers(1, 2), heads=st.integers(1, 3), queries=st.integers(1, 9), keys=st.integers(1, 70),
    depth=st.sampled_from([32, 64, 96]), mask=st.sampled_from(["none", "shared", "per head"]),
    shift=st.sampled_from([0.0, 4.0, -4.0]), bits=st.sampled_from([8, 8, 4]),
    block=st.sampled_from([None, None, 32, 16, 8]), seed=st.integers(0, 99),
)  # fmt: skip
def test_attention_of_any_size(samples, heads, queries, keys, depth, mask, shift, bits, block, seed):
    torch.manual_seed(seed)
    query = torch.randn(samples, queries, heads, depth).transpose(1, 2)
    key, value = (rows_of(torch.randn(samples, heads, keys, depth) + shift, bits, block) for _ in range(2))
    allowed = None
    if mask != "none":
        allowed = torch.rand(samples, heads if mask == "per head" else 1, queries, keys) > 0.4
        allowed[..., 0] = True
        allowed = allowed.expand(samples, heads, queries, keys)
    expected = F.scaled_dot_product_attention(
        query.double(), key.dequantize().double(), value.dequantize().double(), allowed, scale=0.1
    )
    out = torch.full(query.shape, math.nan)
    middle = samples * heads // 2  # of heads that two threads compute
    for part in ((0, middle), (middle, samples * heads)):
        run_step(LOOPS.ATTEND_TO_INTEGERS, query, out, [key, value], allowed, factor=0.1, parts=part)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)  # float32 sums of 96 terms up to 20


def test_a_query_that_no_key_is_allowed_for():
    x, mask = torch.randn(1, 1, 2, 64), torch.tensor([[False, False], [True, False]])[None, None]
    state, out = rows_of(x), torch.empty(1, 1, 2, 64)
    run_step(LOOPS.ATTEND_TO_INTEGERS, x, out, [state, state], mask)
    assert torch.equal(out[0, 0, 0], torch.zeros(64))
    torch.testing.assert_close(out[0, 0, 1], state.dequantize()[0, 0, 0], rtol=0, atol=1e-6)  # float32 rounding
