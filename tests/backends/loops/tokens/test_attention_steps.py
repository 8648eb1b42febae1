"""Programs that append to states and attend to them: masks, groups of queries, inputs of other kinds."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.backends.loops.code.compiler import loops
from fxq.backends.loops.tokens.token_program import MaskForm, StateForm, Varying
from fxq.backends.loops.tokens.token_program_builder import _reused
from fxq.runtime.growing import OtherInputsError
from tests.backends.loops.tokens.test_token_binder import call, programs
from tests.support.bound import plain

pytestmark = [pytest.mark.any_cpu, pytest.mark.skipif(loops("token_loops") is None, reason="needs Numba")]
HEADS, DEPTH = 2, 32
WIDTH = 2 * HEADS * DEPTH


class GroupedLayer(nn.Module):
    """Attention of two queries to each head of the keys, with a mask, as transformers computes it on the CPU."""

    def __init__(self):
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, HEADS * DEPTH), nn.Linear(WIDTH, HEADS * DEPTH)

    def forward(self, x, mask, keys, values):
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, HEADS, 2, DEPTH).permute(0, 2, 3, 1, 4)
        query = query.reshape(batch, HEADS, 2 * length, DEPTH)
        keys = torch.cat([keys, self.key(x).view(batch, length, HEADS, DEPTH).transpose(1, 2)], 2)
        values = torch.cat([values, self.value(x).view(batch, length, HEADS, DEPTH).transpose(1, 2)], 2)
        y = F.scaled_dot_product_attention(query, keys, values, mask.repeat(1, 1, 2, 1), scale=0.2)
        y = y.view(batch, HEADS, 2, length, DEPTH).permute(0, 3, 1, 2, 4).reshape(batch, length, WIDTH)
        return x + self.out(y), keys, values


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GroupedLayer(), GroupedLayer()

    def forward(self, x, mask, keys, values, more_keys, more_values):
        x, keys, values = self.first(x, mask, keys, values)
        x, more_keys, more_values = self.second(x, mask, more_keys, more_values)
        return x, keys, values, more_keys, more_values


def token(past, batch=2, seed=0):
    """A token for each sequence, of which the second one starts with padding, and its mask."""
    torch.manual_seed(seed)
    mask = torch.ones(batch, 1, 1, past + 1, dtype=torch.bool)
    mask[1:, ..., :2] = False
    return torch.randn(batch, 1, WIDTH), mask


def states(past, batch=2, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(batch, HEADS, past, DEPTH) for _ in range(4)]


def quantized(recipe=None):
    torch.manual_seed(0)
    recipe = fxq.Recipe.weight_only() if recipe is None else recipe
    return fxq.quantize(TwoLayers().eval(), recipe, example_inputs=(*token(5), *states(5)))


def generated(qmodel, run, tokens=7, past=9):
    results, held = [], states(past)
    for i in range(tokens):
        y, *held = run(qmodel, *token(past + i, seed=i), *held)
        results += [y, *held]
    return results


def test_two_layers_with_masks_are_one_program():
    qmodel = quantized()
    got, wanted = generated(qmodel, call), generated(qmodel, plain)
    (program,) = programs(qmodel)
    codes = program._steps[:, 0].tolist()
    module = loops("token_loops")
    assert (codes.count(module.ATTEND), codes.count(module.APPEND), codes.count(module.LINEAR)) == (2, 4, 8)
    assert len(program._varying.masks) == 1  # both layers repeat one mask
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)  # float32 rounding of seven tokens in turn


@torch.no_grad()
def test_results_of_programs_are_continued_in_place():
    qmodel = quantized()
    got = generated(qmodel, call, tokens=12)
    addresses = [state.data_ptr() for state in got[1::5]]
    assert len(set(addresses[-6:])) == 1
    before = [state.clone() for state in got[1::5]]
    generated(qmodel, call, tokens=12)
    for state, copy in zip(got[1::5], before, strict=True):
        torch.testing.assert_close(state, copy, rtol=0, atol=0)  # bit by bit


@torch.no_grad()
def test_a_second_continuation_leaves_the_first_alone():
    qmodel = quantized()
    *_, a, b, c, d = generated(qmodel, call, tokens=5)
    first, second = (qmodel(*token(14, seed=seed), a, b, c, d) for seed in (20, 21))
    for seed, got in ((20, first), (21, second)):
        wanted = plain(qmodel, *token(14, seed=seed), *(state.clone() for state in (a, b, c, d)))
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)  # float32 rounding


@pytest.mark.parametrize(
    "change",
    [
        lambda x, mask, *s: (x, mask, *(state.transpose(2, 3).contiguous().transpose(2, 3) for state in s)),
        lambda x, mask, *s: (x, mask[:1].expand(2, -1, -1, -1), *s),
        lambda x, mask, *s: (x, mask[..., :1], *s),
        lambda x, mask, *s: (x, mask, *(state.requires_grad_() for state in s)),
    ],
    ids=["columns side by side", "expanded mask", "mask of one key", "gradients"],
)
def test_inputs_of_another_layout(change):
    qmodel = quantized()
    generated(qmodel, call)
    args = change(*token(9), *states(9))
    for _ in range(3):
        for ours, theirs in zip(qmodel(*args), plain(qmodel, *args), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)  # float32 rounding


def test_states_of_other_lengths_are_refused_as_by_the_graph():
    qmodel = quantized()
    generated(qmodel, call)
    keys, values, more_keys, more_values = states(9)
    with pytest.raises((fxq.FxqError, RuntimeError)):
        qmodel(*token(9), keys, values[:, :, :5], more_keys, more_values)
    got, wanted = generated(qmodel, call), generated(qmodel, plain)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)  # float32 rounding of seven tokens in turn


def test_states_that_a_recipe_stores_in_integers_stay_out_of_programs():
    recipe = fxq.Recipe.weight_only(state=fxq.TensorSpec(per="row", range="dynamic"))
    qmodel = quantized(recipe)
    got, wanted = generated(qmodel, call), generated(qmodel, plain)
    assert all(not program.attends for program in programs(qmodel))
    for ours, theirs in zip(got[::5], wanted[::5], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)  # float32 rounding of seven tokens in turn


def test_forms_of_states_and_masks_are_checked():
    varying = Varying([StateForm(1, 2, 4, 1)] * 3, [MaskForm(1, 2, 1, 0)])
    varying.must_be_equal(0, 1)
    ok = [torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 3, 4)]
    assert varying.lengths(ok) == [6, 6, 4]
    varying.must_be_equal(1, 2)
    assert varying.equal == [{0, 1, 2}]
    wrong = [ok, [ok[0].double(), *ok[1:]], [ok[0][0], *ok[1:]], [ok[0][:, :, :0], *ok[1:]], [ok[0][:, :1], *ok[1:]]]
    for pasts in wrong:
        with pytest.raises(OtherInputsError):
            varying.lengths(pasts)
    assert varying.masks_as_integers([torch.ones(1, 1, 1, 6, dtype=torch.bool)], [6])[1:] == [6, 0, 6, 1]
    for mask in (torch.ones(1, 1, 1, 6), torch.ones(1, 1, 1, 5, dtype=torch.bool)):
        with pytest.raises(OtherInputsError):
            varying.masks_as_integers([mask], [6])


def test_memory_is_reused_after_the_last_reader():
    offsets, size = _reused([16, 16, 16, 100], [{0}, {0, 1}, {1, 2}, {2, 3}])
    assert offsets == {0: 0, 1: 64, 2: 0, 3: 128} and size == 128 + 448
    for k, buffers in enumerate([{0}, {0, 1}, {1, 2}, {2, 3}]):
        places = [offsets[buffer] for buffer in buffers]
        assert len(set(places)) == len(places), k
