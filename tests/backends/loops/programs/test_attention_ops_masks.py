"""Attention with masks: those that are added to scores, and those that say which keys count."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.backends.loops.programs.test_attention_ops import attend, joined, projected, split
from tests.support.models import settled
from tests.support.programs import Draft, check, check_both, compare, program, quantized, refused, regions

pytestmark = pytest.mark.any_cpu

N, HEADS, LENGTH, KEYS = 2, 3, 6, 9
SHAPES = [
    (N, HEADS, LENGTH, KEYS), (N, 1, LENGTH, KEYS), (1, HEADS, LENGTH, KEYS), (N, 1, 1, KEYS), (N, HEADS, LENGTH, 1),
    (1, 1, 1, KEYS), (HEADS, LENGTH, KEYS), (1, LENGTH, KEYS), (LENGTH, KEYS), (1, KEYS), (LENGTH, 1),
]  # fmt: skip


def drawn(draft, shape, is_bool):
    """A mask in which some scores do not count; the first key always does."""
    left_out = torch.rand(shape, generator=draft.random) < 0.3
    left_out[..., 0] = False
    return ~left_out if is_bool else draft.normal(*shape).masked_fill(left_out, -math.inf)


def masked(draft, mask):
    """Attention of three values with a mask, rounded or not, is as PyTorch's."""
    images = [draft.image(N, count, 16 * HEADS) for count in (LENGTH, KEYS, KEYS)]
    check_both(draft, joined(draft, attend(draft, *(split(draft, x, HEADS) for x in images), mask)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_bool", [True, False])
@pytest.mark.parametrize("is_constant", [True, False])
def test_masks(shape, is_bool, is_constant):
    draft = Draft()
    mask = drawn(draft, shape, is_bool)
    masked(draft, draft.constant(mask) if is_constant else draft.input(mask))


@settings(deadline=None, max_examples=10)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 14), st.integers(1, 40), st.sampled_from([1, 5, 16, 33]),
    st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_masks_of_any_size(batch, heads, length, keys, depth, is_bool, seed):
    draft = Draft(seed)
    parts = [split(draft, draft.image(batch, count, heads * depth), heads) for count in (length, keys, keys)]
    mask = draft.input(drawn(draft, (batch, 1, length, keys), is_bool))
    check_both(draft, joined(draft, attend(draft, *parts, mask)))


def test_a_mask_that_lies_otherwise():
    """Expanded, transposed, or with the heads as channels of an image."""
    for mask in (
        torch.rand(N, 1, 1, KEYS).expand(N, HEADS, LENGTH, KEYS),
        torch.rand(N, HEADS, KEYS, LENGTH).transpose(2, 3),
        torch.rand(N, HEADS, LENGTH, KEYS).contiguous(memory_format=torch.channels_last),
    ):
        for given_mask in (mask, mask > 0.4):
            draft = Draft()
            masked(draft, draft.input(given_mask))


def test_a_mask_that_the_region_computes():
    """As of padding: 0 at words and large numbers below zero elsewhere."""
    draft = Draft()
    mask = draft.op("mul", draft.input(drawn(draft, (N, 1, 1, KEYS), True).float()), draft.constant(torch.tensor(3.0)))
    masked(draft, mask)


def test_one_mask_for_two_layers():
    draft = Draft()
    mask = draft.input(drawn(draft, (N, 1, LENGTH, LENGTH), True))
    x = draft.image(N, LENGTH, 32)
    for _ in range(2):
        x = draft.qdq(joined(draft, attend(draft, *projected(draft, x, 2), mask)))
    check(draft, x, share=1 / 50)


@pytest.mark.parametrize("is_bool", [True, False])
def test_a_query_without_keys_gives_zeros(is_bool):
    draft = Draft()
    mask = drawn(draft, (N, 1, LENGTH, KEYS), is_bool)
    mask[1, 0, 2] = False if is_bool else -math.inf
    images = [draft.image(N, count, 32) for count in (LENGTH, KEYS, KEYS)]
    y = joined(draft, attend(draft, *(split(draft, x, 2) for x in images), draft.input(mask)))
    compiled = program(draft.form(y), draft.inputs)(*draft.inputs)
    assert bool((compiled[1, 2] == 0).all()) and not bool((compiled[1, 1] == 0).any())
    check(draft, y)


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e30, -1e9, 1e30, 3e38])
@pytest.mark.parametrize("everywhere", [True, False])
def test_large_numbers_in_masks(value, everywhere):
    """As transformers of libraries have them: where all keys have the same one, all count alike."""
    draft = Draft()
    mask = torch.zeros(N, 1, 1, KEYS)
    mask[1, ..., 0 if everywhere else 4 :] = value
    masked(draft, draft.input(mask))


@pytest.mark.parametrize("is_bool", [True, False])
def test_one_tensor_as_two_masks(is_bool):
    """A program that is made for it takes two others as well."""
    draft = Draft()
    x = draft.image(N, LENGTH, 32)
    masks = [draft.input(drawn(draft, (LENGTH, LENGTH), is_bool)) for _ in range(2)]
    for mask in masks:
        x = joined(draft, attend(draft, *[split(draft, x, 2)] * 3, mask))
    form = draft.form(x)
    given_x, first, second = draft.inputs
    compiled = program(form, [given_x, first, first])
    compare(compiled(given_x, first, second), form(given_x, first, second))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_masks_of_other_types_are_refused(dtype):
    for make in ("constant", "input"):
        draft = Draft()
        parts = [split(draft, draft.image(N, LENGTH, 32), 2) for _ in range(3)]
        mask = getattr(draft, make)(torch.zeros(LENGTH, LENGTH, dtype=torch.float32))
        y = attend(draft, *parts, mask)
        if make == "constant":
            setattr(draft.root, mask.target, torch.zeros(LENGTH, LENGTH, dtype=dtype))
        else:
            draft.inputs[-1] = draft.inputs[-1].to(dtype)
        assert refused(draft, joined(draft, y)) == "its mask is neither bool nor float32"


class Masked(nn.Module):
    """Attention that leaves padding out, as transformers of libraries do."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x, words):
        n, length, _ = x.shape
        mask = (words > 0)[:, None, None, :].expand(n, 1, length, length)
        query, key, value = (
            part(x).view(n, length, 4, 8).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        y = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.output(y.transpose(1, 2).reshape(n, length, 32))


def test_a_network_with_padding():
    """Of other lengths and batch sizes, too."""
    model = settled(Masked)
    x, words = torch.randn(16, 12, 32), torch.randint(0, 2, (16, 12)) | (torch.arange(12) == 0)
    q = quantized(model, x, words)
    (kernel,) = regions(q)
    assert "scaled_dot_product_attention" in str(kernel.form.module(kernel).graph)
    for n, length in ((2, 7), (1, 5), (3, 12)):
        x, words = torch.randn(n, length, 32), torch.randint(0, 2, (n, length)) | (torch.arange(length) == 0)
        wanted = model(x, words)
        # 8 bits of weights and activations
        torch.testing.assert_close(q(x, words), wanted, rtol=0, atol=0.05 * wanted.abs().max().item())
