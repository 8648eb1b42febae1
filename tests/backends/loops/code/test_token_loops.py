"""Attention of a few queries to a cache in a compiled loop, against float64."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.loops.code.compiler import loops
from fxq.backends.loops.code.thread_pool import run_together
from fxq.backends.loops.tokens import token_attention
from fxq.backends.loops.tokens.token_attention import TokenAttention
from fxq.common.timed_calls import threads_set_to

LOOPS = loops("token_loops")
pytestmark = [pytest.mark.any_cpu, pytest.mark.skipif(LOOPS is None, reason="needs Numba")]


@settings(max_examples=10, deadline=None)
@given(
    samples=st.integers(1, 3), heads=st.integers(1, 3), queries=st.integers(1, 5), keys=st.integers(1, 70),
    depth=st.sampled_from([32, 64, 96]), mask=st.sampled_from(["none", "shared", "per head"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_attention_of_any_size(samples, heads, queries, keys, depth, mask, seed):
    torch.manual_seed(seed)
    query = torch.randn(samples, queries, heads, depth).transpose(1, 2)
    key, value = (torch.randn(samples, heads, keys + 7, depth)[:, :, :keys] for _ in range(2))
    allowed = None
    if mask != "none":
        allowed = torch.rand(samples, heads if mask == "per head" else 1, queries, keys) > 0.4
        allowed[..., 0] = True
    expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), allowed, scale=0.3)
    result = TokenAttention(LOOPS, 0.3)(query, key, value, allowed)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=5e-6)  # float32 sums of 70 terms up to 4


def test_threads_compute_the_same_numbers(monkeypatch):
    """Also with callers at once, of which the threads serve one at a time."""
    monkeypatch.setattr(token_attention, "_MIN_PART_BYTES", 1)
    calls = list[bool]()
    monkeypatch.setattr(token_attention, "run_together", lambda *args: calls.append(run_together(*args)) or calls[-1])
    attention, (query, key, value) = TokenAttention(LOOPS, None), torch.randn(3, 2, 5, 19, 64)
    query, mask = query[:, :, :2], torch.rand(2, 5, 2, 19) > 0.3
    with threads_set_to(1):
        alone = attention(query, key, value, mask)
    assert not calls
    for threads in (2, 3):
        with threads_set_to(threads), ThreadPoolExecutor(8) as callers:
            assert torch.equal(attention(query, key, value, mask), alone) and calls.pop()
            assert all(
                torch.equal(y, alone) for y in callers.map(attention, *([x] * 40 for x in (query, key, value, mask)))
            )


def test_default_scale_and_what_the_loop_does_not_support():
    attention, x = TokenAttention(LOOPS, None), torch.randn(1, 2, 3, 64)
    torch.testing.assert_close(attention(x, x, x), F.scaled_dot_product_attention(x, x, x), rtol=0, atol=2e-6)
    odd = torch.randn(1, 2, 3, 20)  # no multiple of a vector
    assert torch.equal(attention(odd, odd, odd), F.scaled_dot_product_attention(odd, odd, odd))
    added = torch.randn(3, 3)  # a mask of floats
    assert torch.equal(attention(x, x, x, added), F.scaled_dot_product_attention(x, x, x, added))


def test_a_query_that_no_key_is_allowed_for():
    x, mask = torch.randn(1, 1, 2, 64), torch.tensor([[False, False], [True, False]])
    result = TokenAttention(LOOPS, None)(x, x, x, mask)
    assert torch.equal(result[0, 0, 0], torch.zeros(64))
    assert torch.equal(result[0, 0, 1], x[0, 0, 0])
