"""Programs that append to states and attend to them: masks, groups of queries, inputs of other kinds."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.backends.loops.code.compiler import loops
from fxq.backends.loops.tokens.token_program import GrowingInputs, MaskForm, StateForm, TokenProgram
from fxq.backends.loops.tokens.token_program_builder import workspace_offsets
from fxq.common.metrics import sqnr
from fxq.quant.quantized_rows import QuantizedRows
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
    assert len(program._growing.masks) == 1  # both layers repeat one mask
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


def test_forms_of_states_and_masks_are_checked():
    growing = GrowingInputs([StateForm(1, 2, 4, 1)] * 3, [MaskForm(1, 2, 1, 0)])
    growing.must_be_equal(0, 1)
    ok = [torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 3, 4)]
    assert growing.lengths(ok) == [6, 6, 4]
    growing.must_be_equal(1, 2)
    assert growing.equal == [{0, 1, 2}]
    wrong = [ok, [ok[0].double(), *ok[1:]], [ok[0][0], *ok[1:]], [ok[0][:, :, :0], *ok[1:]], [ok[0][:, :1], *ok[1:]]]
    wrong.append([QuantizedRows(ok[0].byte(), ok[0][..., :1], ok[0][..., :1].byte()), *ok[1:]])
    for pasts in wrong:
        with pytest.raises(OtherInputsError):
            growing.lengths(pasts)
    assert growing.masks_as_integers([torch.ones(1, 1, 1, 6, dtype=torch.bool)], [6])[1:] == [6, 0, 6, 1]
    for mask in (torch.ones(1, 1, 1, 6), torch.ones(1, 1, 1, 5, dtype=torch.bool)):
        with pytest.raises(OtherInputsError):
            growing.masks_as_integers([mask], [6])


def test_memory_isworkspace_offsets_after_the_last_reader():
    offsets, size = workspace_offsets([16, 16, 16, 100], [{0}, {0, 1}, {1, 2}, {2, 3}])
    assert offsets == {0: 0, 1: 64, 2: 0, 3: 128} and size == 128 + 448
    for k, buffers in enumerate([{0}, {0, 1}, {1, 2}, {2, 3}]):
        places = [offsets[buffer] for buffer in buffers]
        assert len(set(places)) == len(places), k


class ReadsItsState(nn.Module):
    """Attention whose result is multiplied by a function of the keys after the new entry."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(64, 64), function

    def forward(self, x, keys):
        keys = torch.cat([keys, self.layer(x)[:, None]], 2)
        y = F.scaled_dot_product_attention(self.layer(x)[:, None], keys, keys)
        return self.layer(y[:, 0]) * self.function(keys), keys


FUNCTIONS = {
    "length": lambda keys: keys.shape[2],
    "length after an op of no program": lambda keys: torch.fft.rfft(keys).real.mean() * keys.shape[2],
    "values": lambda keys: (keys * 2.0).unsqueeze(2).mean((1, 2, 3)),
    "transposed": lambda keys: keys.transpose(1, 2).unsqueeze(1)[:, 0, :1, 0],
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@torch.no_grad()
def test_a_state_that_other_ops_read(function):
    """Also after calls with states of one length, and of one layout in every other call."""
    torch.manual_seed(0)
    example = torch.randn(1, 1, 64), torch.randn(1, 1, 9, 64)
    qmodel = fxq.quantize(ReadsItsState(function).eval(), "weight_only", example_inputs=example)
    x, keys = example
    in_columns = keys.transpose(2, 3).contiguous().transpose(2, 3)
    for state in (
        keys,
        in_columns,
        keys,
        in_columns,
        keys,
        keys,
        keys,
        torch.randn(1, 1, 12, 64),
        torch.randn(1, 1, 13, 64),
    ):
        for ours, theirs in zip(qmodel(x, state), plain(qmodel, x, state), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # float32 rounding


@pytest.mark.parametrize("odd", ["empty", "other strides", "float16"])
@torch.no_grad()
def test_programs_stay_after_an_odd_call(odd):
    qmodel = quantized()
    generated(qmodel, call)
    held = states(0) if odd == "empty" else states(9)
    if odd == "other strides":
        held = [state.transpose(2, 3).contiguous().transpose(2, 3) for state in held]
    if odd == "float16":
        held = [state.half() for state in held]
    args = (*token(held[0].shape[2]), *held)
    for ours, theirs in zip(qmodel(*args), plain(qmodel, *args), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)  # float32 rounding
    generated(qmodel, call)
    assert any(program.attends for program in programs(qmodel))


def test_a_state_without_its_new_entry_is_noticed(monkeypatch):
    """Although the entries before it are right: those of a long cache hide a wrong one."""
    run = TokenProgram.__call__

    def run_without_writing(self, *values):
        results = run(self, *values)
        for state in results[-len(self._growing.states) :] if self.attends else ():
            state[:, :, -1:] = 0
        return results

    monkeypatch.setattr(TokenProgram, "__call__", run_without_writing)
    qmodel = quantized(fxq.Recipe.dynamic(optimize="coverage"))
    generated(qmodel, call, past=90)
    assert programs(qmodel) and not any(program.attends for program in programs(qmodel))


def test_a_program_that_differs_in_some_calls_only_is_used(monkeypatch):
    """As where a value halfway between two integers goes to the other one, which differs from call to call."""
    run, calls = TokenProgram.__call__, itertools.count()

    def run_differently(self, *values):
        results, number = run(self, *values), next(calls)
        return [y * 1.05 for y in results] if number < 2 else results  # 26 dB

    monkeypatch.setattr(TokenProgram, "__call__", run_differently)
    qmodel = quantized(fxq.Recipe.dynamic(optimize="coverage"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, wanted = generated(qmodel, call), generated(qmodel, plain)
    assert any(program.attends for program in programs(qmodel))
    for ours, theirs in zip(got, wanted, strict=True):
        assert sqnr(theirs, ours) > 45  # a value between two integers may be rounded to either
