"""Attention, against PyTorch in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.loops.programs.areas import Area
from fxq.backends.loops.programs.layer_steps import AttentionStep
from fxq.quant.qparams import QParams
from tests.support.program_runs import distance, run_steps

pytestmark = pytest.mark.any_cpu

pytest.importorskip("fxq.backends.loops.code.attention_loops", reason="needs Numba", exc_type=ImportError)

GRIDS = st.sampled_from([None, QParams.per_tensor(0.0271, 100), QParams.per_tensor(0.05, 3, 2, 201)])
SEEDS = st.integers(0, 99)


def attention(query, key, value, heads, scale=1.0, is_causal=False, grid=None, dense=True):
    """Run a step of attention on floats (N, L, C). Areas are dense, or have room after the channels."""
    areas = [Area((len(x), 1, *x.shape[1:]), True, x.shape[2] if dense else 0) for x in (query, key, value, query)]
    areas[3].is_float = grid is None
    about = dict(zip(("query", "key", "value"), areas, strict=False), heads=heads, scale=scale, is_causal=is_causal)
    step = AttentionStep("attention", areas[3], grid=grid, **about)
    return run_steps([step], dict(zip(areas, (query[:, None], key[:, None], value[:, None]), strict=False)))[:, 0]


def exact(query, key, value, heads, scale=1.0, is_causal=False):
    """Attention in float64."""
    q, k, v = (x.double().unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    scores = q @ k.transpose(-1, -2) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def normal(*shape):
    return torch.randn(shape)


@settings(deadline=None, max_examples=25)
@given(
    batch=st.integers(1, 2), length=st.integers(1, 30), others=st.integers(1, 40), heads=st.integers(1, 4),
    depth=st.sampled_from([1, 5, 15, 16, 17, 24, 32, 33, 64]), scale=st.sampled_from([None, 0.3, 1, -1.5, 0]),
    is_causal=st.booleans(), grid=GRIDS, dense=st.booleans(), seed=SEEDS,
)  # fmt: skip
def test_attention(batch, length, others, heads, depth, scale, is_causal, grid, dense, seed):
    torch.manual_seed(seed)
    query, *both = (normal(batch, count, heads * depth) for count in (length, others, others))
    scale = 1 / math.sqrt(depth) if scale is None else scale
    outcome = attention(query, *both, heads, scale, is_causal, grid, dense)
    wanted = exact(query, *both, heads, scale, is_causal)
    if grid is not None:
        assert distance(outcome, wanted, grid) <= 0.5 + 2e-3
    else:
        torch.testing.assert_close(outcome.double(), wanted, rtol=1e-5, atol=1e-5)


def test_float64_is_that_of_pytorch():
    query, *both = (normal(2, count, 24) for count in (7, 5, 5))
    for is_causal in (False, True):
        heads = (x.double().unflatten(-1, (3, -1)).transpose(1, 2) for x in (query, *both))
        wanted = F.scaled_dot_product_attention(*heads, is_causal=is_causal, scale=0.4).transpose(1, 2).flatten(2)
        torch.testing.assert_close(exact(query, *both, 3, 0.4, is_causal), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("length", "others"), [(50, 700), (700, 50), (130, 257)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_many_pixels(length, others, is_causal):
    """They take more memory than other steps have."""
    query, *both = (normal(1, count, 2 * 48) for count in (length, others, others))
    outcome = attention(query, *both, 2, 0.2, is_causal)
    torch.testing.assert_close(outcome.double(), exact(query, *both, 2, 0.2, is_causal), rtol=1e-5, atol=1e-5)


def test_parts_of_one_value():
    """Query, key and value lie side by side, and so does what is made, with others."""
    x = normal(2, 1, 9, 4 * 48)
    whole, out = Area(tuple(x.shape), True), Area((2, 1, 9, 64), True)
    parts = [Area((2, 1, 9, 48), True) for _ in range(4)]
    for k, part in enumerate(parts):
        part.become_part(whole if k < 3 else out, 48 * k if k < 3 else 16)
    query, key, value, made_there = parts
    step = AttentionStep("attention", made_there, query=query, key=key, value=value, heads=3, scale=0.5)
    outcome = run_steps([step], {whole: x, out: torch.zeros(out.shape)})[:, 0]
    wanted = exact(*x[:, 0].split(48, -1)[:3], 3, 0.5)
    torch.testing.assert_close(outcome.double(), wanted, rtol=1e-5, atol=1e-5)


def test_one_value_is_all_three():
    area, out, x = Area((2, 1, 9, 32), True), Area((2, 1, 9, 32), True), normal(2, 9, 32)
    step = AttentionStep("attention", out, query=area, key=area, value=area, heads=2, scale=0.25, is_causal=True)
    outcome = run_steps([step], {area: x[:, None]})[:, 0]
    torch.testing.assert_close(outcome.double(), exact(x, x, x, 2, 0.25, True), rtol=1e-5, atol=1e-5)


# ---- which pixels are read


@pytest.mark.parametrize("length", [1, 3, 13])
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_key(length, is_causal):
    """Its value is the result."""
    query, key, value = normal(2, length, 20), normal(2, 1, 20), normal(2, 1, 20)
    assert torch.equal(attention(query, key, value, 4, 3.0, is_causal), value.expand(2, length, 20))


@pytest.mark.parametrize(("length", "others"), [(5, 3), (3, 5), (14, 14), (40, 17), (17, 40)])
def test_a_pixel_reads_those_up_to_its_place(length, others):
    """Keys are all alike, so that results are means of the values that are read."""
    query, key, value = normal(1, length, 8), torch.ones(1, others, 8), normal(1, others, 8)
    counts = torch.arange(1, length + 1).clamp(max=others)
    wanted = (value[0].cumsum(0) / torch.arange(1, others + 1)[:, None])[counts - 1]
    outcome = attention(query, key, value, 1, is_causal=True)
    assert torch.equal(outcome[0, 0], value[0, 0])
    torch.testing.assert_close(outcome[0], wanted, rtol=1e-5, atol=1e-5)


# ---- large scores, and what is not finite


@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores(sign):
    """One is 1e4 above the others, or 1e4 below: those far below have no weight."""
    query, key, value = 100 * torch.eye(20)[None], sign * 100 * torch.eye(20)[None], normal(1, 20, 20)
    outcome = attention(query, key, value, 1)
    wanted = value if sign > 0 else (value.sum(1, keepdim=True) - value) / 19
    torch.testing.assert_close(outcome, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("score", [-1e4, 1e4, -3e37, 3e37])
def test_scores_that_are_all_large(score):
    query, key, value = torch.full((1, 13, 1), score), torch.ones(1, 7, 1), normal(1, 7, 1)
    torch.testing.assert_close(attention(query, key, value, 1), value.mean(1, keepdim=True).expand(1, 13, 1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 11, 12, 14])
def test_a_query_that_is_not_finite(value, place):
    """It makes its own row and head what is not a number, and no other: in tiles of any size."""
    query, *both = (normal(2, count, 32) for count in (15, 9, 9))
    query[1, place, 20] = value
    outcome = attention(query, *both, 2)
    wanted = exact(query, *both, 2)
    assert bool(wanted[1, place, 16:].isnan().all()) and wanted.isnan().sum() == 16
    torch.testing.assert_close(outcome.double(), wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_key_that_is_not_finite(value):
    """Rows before it do not read it."""
    query, *both = (normal(1, 15, 32).abs() for _ in range(3))
    both[0][0, 8, 20] = value
    outcome = attention(query, *both, 2, is_causal=True)
    wanted = exact(query, *both, 2, is_causal=True)
    assert not bool(wanted[0, :8].isnan().any()) and bool(wanted[0, 8:, 16:].isnan().all())
    torch.testing.assert_close(outcome.double(), wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_integers_of_what_is_not_a_number():
    """It becomes the lowest one."""
    query, *both = (normal(1, 3, 16) for _ in range(3))
    query[0, 1] = math.nan
    outcome = attention(query, *both, 1, grid=QParams.per_tensor(0.05, 100, 7, 250))
    assert bool((outcome[0, 1] == 7).all()) and bool((outcome[0, ::2] > 7).all())
