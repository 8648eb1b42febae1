"""Programs that append to states in integers and attend to them: masks, groups of queries, states of other forms."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.backends.loops.code.compiler import loops
from fxq.backends.loops.code.thread_pool import run_together
from fxq.backends.loops.tokens import token_program
from fxq.backends.loops.tokens.stored_states import stored_state
from fxq.backends.loops.tokens.token_program import TokenProgram
from fxq.backends.plain import few_rows
from fxq.common.metrics import sqnr
from fxq.common.timed_calls import threads_set_to
from fxq.errors import InputError, StateError
from fxq.graph.query import is_op
from fxq.quant.quantized_rows import QuantizedRows
from fxq.runtime.growing import OtherInputsError
from tests.backends.loops.tokens.test_attention_steps import DEPTH, HEADS, WIDTH, generated, quantized, states, token
from tests.backends.loops.tokens.test_token_binder import call, programs
from tests.support.bound import plain
from tests.support.helpers import filed

pytestmark = [pytest.mark.any_cpu, pytest.mark.skipif(loops("token_loops") is None, reason="needs Numba")]
PARTS_OF_ROWS = (WIDTH, torch.uint8), (1, torch.float32), (1, torch.uint8)
CACHE = fxq.TensorSpec(per="row", range="dynamic")
STORED = fxq.Recipe.weight_only(state=CACHE)
FORMS = {
    "8 bits": CACHE,
    "4 bits": fxq.TensorSpec(bits=4, per="row", range="dynamic"),
    "4 bits in blocks": fxq.TensorSpec(bits=4, per=16, range="dynamic"),
    "8 bits in blocks": fxq.TensorSpec(per=8, range="dynamic"),
}
of_each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def codes_of(program):
    return program._steps[:, 0].tolist()


def attending(qmodel):
    """Programs that attend to states in integers."""
    code = loops("token_loops").ATTEND_TO_INTEGERS
    return [program for program in programs(qmodel) if code in codes_of(program)]


def check_equal(got, wanted, least=55):
    """Compare outputs and states of calls. A value between two integers may be rounded to either."""
    for ours, theirs in zip(got, wanted, strict=True):
        assert type(ours) is type(theirs)
        assert sqnr(theirs, ours) > least
        if isinstance(ours, QuantizedRows):
            apart = (ours.integers.int() - theirs.integers.int()).abs()
            assert apart.max() <= 1 and apart.double().mean() < 0.01
            torch.testing.assert_close(ours.scale, theirs.scale, rtol=2e-5, atol=0)  # float32 rounding


@pytest.mark.one_in(2)
@pytest.mark.parametrize("threads", [1, 2])
@of_each_form
@torch.no_grad()
def test_two_layers_with_masks_are_one_program(threads, form):
    qmodel = quantized(fxq.Recipe.weight_only(state=form))
    with threads_set_to(threads):
        got = generated(qmodel, call)
    (program,) = programs(qmodel)
    module, codes = loops("token_loops"), codes_of(program)
    counts = [codes.count(code) for code in (module.ATTEND_TO_INTEGERS, module.APPEND_INTEGERS, module.LINEAR)]
    assert counts == [2, 4, 8 + 4] and module.APPEND not in codes and module.ATTEND not in codes
    assert len(program._growing.masks) == 1  # both layers repeat one mask
    rotations = [node for node in qmodel.graph.nodes if is_op(node, "rotate_rows")]
    assert len(rotations) == 2 * 4  # of queries and of new keys, in the program; of states, before and after it
    check_equal(got, generated(qmodel, plain), 55 if form.bits == 8 else 30)  # one step of 15 is much


@pytest.mark.parametrize("threads", [2, 3])
@torch.no_grad()
def test_threads_compute_the_same_numbers(monkeypatch, threads):
    monkeypatch.setattr(few_rows, "_MIN_PART_BYTES", 1)
    qmodel = quantized(STORED)
    with threads_set_to(threads):
        held = generated(qmodel, call)[-4:]
    calls = list[bool]()
    monkeypatch.setattr(token_program, "run_together", lambda *args: calls.append(run_together(*args)) or calls[-1])
    (program,) = attending(qmodel)
    x, mask = token(16)
    held = [state.rotated() if state.is_rotated else state for state in held]  # as the program takes them
    together = program(x, *copy.deepcopy(held), mask)
    assert calls == [True] and program._threads == threads
    monkeypatch.setattr(token_program, "run_together", lambda *_: False)
    for ours, alone in zip(together, program(x, *copy.deepcopy(held), mask), strict=True):
        parts = zip(ours.parts, alone.parts, strict=True) if isinstance(ours, QuantizedRows) else [(ours, alone)]
        assert all(torch.equal(a, b) for a, b in parts)  # bit by bit


class Doubled(nn.Module):
    """Attention to the doubled inputs, so that all ways to run it round the same floats."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x, keys, values):
        x = x * 2.0
        keys, values = torch.cat([keys, x], 2), torch.cat([values, x], 2)
        return self.layer(F.scaled_dot_product_attention(x, keys, values) * 2 + x), keys, values


@of_each_form
@torch.no_grad()
def test_stored_integers_are_those_of_the_graph(form):
    """Bit by bit: integers, scales and zero points, given equal inputs, which rotated keys are not."""
    torch.manual_seed(0)
    x, past = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 5, 32)
    recipe = fxq.Recipe.weight_only(state=form).without_pass("rotate-keys")
    qmodel = fxq.quantize(Doubled().eval(), recipe, example_inputs=(x, past, past))
    got, wanted = [past, past], [past, past]
    for _ in range(12):
        x = torch.randn(1, 2, 1, 32) * 3
        y, *got = qmodel(x, *got)
        z, *wanted = plain(qmodel, x, *wanted)
        torch.testing.assert_close(y, z, rtol=0, atol=2e-5)  # float32 rounding
    assert attending(qmodel)
    for ours, theirs in zip(got, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours.parts, theirs.parts, strict=True))
        assert (ours.packing is None) == (form.bits == 8) and ours.blocks == (32 // (form.block or 32))
        assert ours.memory is not None


@torch.no_grad()
def test_results_of_programs_are_continued_in_place():
    qmodel = quantized(STORED)
    got = generated(qmodel, call, tokens=12)
    addresses = [part.data_ptr() for state in got[1::5] for part in state.parts]
    assert len(set(addresses[-9:])) == 3
    before = copy.deepcopy(got[1::5])
    generated(qmodel, call, tokens=12)
    for state, earlier in zip(got[1::5], before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(state.parts, earlier.parts, strict=True))


@torch.no_grad()
def test_parts_are_made_when_they_are_read():
    """A state is continued by numbers only, and its parts are the same whether they were read before or not."""
    qmodel = quantized(STORED)
    *_, a, b, c, d = generated(qmodel, call, tokens=8)
    assert all(state.memory is not None and state._parts is None for state in (a, b, c, d))
    before = [part.clone() for part in a.parts]
    _, after, *_ = qmodel(*token(17), a, b, c, d)
    assert after._parts is None and after.shape == (2, HEADS, 18, DEPTH)
    for part, earlier in zip(after.parts, before, strict=True):
        assert part.shape[2] == 18 and torch.equal(part[:, :, :17], earlier)


@pytest.mark.parametrize("part", range(3))
@torch.no_grad()
def test_a_write_into_a_state_is_noticed(part):
    qmodel = quantized(STORED)
    *_, a, b, c, d = generated(qmodel, call, tokens=8)
    a.parts[part][0, 0, 0] = 3
    with pytest.raises(StateError, match="was written to after the model returned it"):
        qmodel(*token(17), a, b, c, d)


@torch.no_grad()
def test_more_tokens_than_the_first_memory_has_room_for():
    qmodel = quantized(STORED)
    check_equal(generated(qmodel, call, tokens=90)[-5:], generated(qmodel, plain, tokens=90)[-5:])


@torch.no_grad()
def test_a_second_continuation_leaves_the_first_alone():
    qmodel = quantized(STORED)
    *_, a, b, c, d = generated(qmodel, call, tokens=5)
    first, second = (qmodel(*token(14, seed=seed), a, b, c, d) for seed in (20, 21))
    for seed, got in ((20, first), (21, second)):
        check_equal(got, plain(qmodel, *token(14, seed=seed), *(state.clone() for state in (a, b, c, d))))


def in_columns(state):
    """State with other strides: integers of an entry, and scales of a head, are not side by side."""
    parts = state.parts[0].transpose(2, 3), state.scale.transpose(1, 2), state.zero_point.transpose(1, 2)
    integers, *grid = (part.contiguous() for part in parts)
    return QuantizedRows(integers.transpose(2, 3), *(part.transpose(1, 2) for part in grid), state.packing)


def in_blocks(state, count):
    """State of 8 bits with so many equal scales for each row."""
    grid = (part.repeat_interleave(count, -1) for part in (state.scale[..., :1], state.zero_point[..., :1]))
    return QuantizedRows(state.integers, *grid)


CHANGES = {
    "as they are": lambda state: state,
    "floats": lambda state: state.dequantize(),
    "other strides": in_columns,
    "copied": copy.deepcopy,
    "reordered": lambda state: state.index_select(0, torch.tensor([1, 0])),
    "cropped": lambda state: state[:, :, :-2],
    "a window": lambda state: state[:, :, 3:],
    "cropped to nothing": lambda state: state[:, :, :0],
    "in blocks of another size": lambda state: in_blocks(state, 4),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@of_each_form
@torch.no_grad()
def test_states_of_other_forms(change, form):
    """Also after these calls, programs run."""
    qmodel = quantized(fxq.Recipe.weight_only(state=form))
    *_, a, b, c, d = generated(qmodel, call)
    held = [change(state) for state in (a, b, c, d)]
    for i in range(3):
        inputs = token(held[0].shape[2], seed=i)
        wanted = plain(qmodel, *inputs, *(state.clone() for state in held))
        got = qmodel(*inputs, *held)
        check_equal(got, wanted, 55 if form.bits == 8 else 30)
        held = got[1:]
    generated(qmodel, call)
    assert attending(qmodel)


@torch.no_grad()
def test_states_without_cpu_memory_are_refused():
    """Programs read states by address."""
    qmodel = quantized(STORED)
    *_, a, b, c, d = generated(qmodel, call)
    elsewhere = [QuantizedRows(*(part.to("meta") for part in state.parts)) for state in (a, b, c, d)]
    with pytest.raises(InputError):
        qmodel(*token(a.shape[2]), *elsewhere)


@torch.no_grad()
def test_a_sliding_window_is_continued_in_place():
    class Window(Doubled):
        def forward(self, x, keys, values):
            y, keys, values = super().forward(x, keys, values)
            return y, keys[:, :, -6:], values[:, :, -6:]

    torch.manual_seed(0)
    x, past = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 9, 32)
    qmodel = fxq.quantize(Window().eval(), STORED, example_inputs=(x, past, past))
    got, wanted, addresses = [past, past], [past, past], []
    for _ in range(20):
        x = torch.randn(1, 2, 1, 32)
        (y, *got), (z, *wanted) = qmodel(x, *got), plain(qmodel, x, *wanted)
        torch.testing.assert_close(y, z, rtol=0, atol=2e-5)  # float32 rounding
        addresses.append(got[0].integers.untyped_storage().data_ptr())
    assert attending(qmodel) and got[0].shape[2] == 6 and len(set(addresses[-10:])) == 1
    assert got[0].is_rotated and wanted[0].is_rotated
    check_equal(got, wanted)


class Prefilled(nn.Module):
    """Attention of any number of tokens, with as many queries."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, keys, values):
        shape = (*x.shape[:2], 2 * HEADS, DEPTH)
        query, key = (layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key))
        keys, values = torch.cat([keys, key], 2), torch.cat([values, key * 2.0], 2)
        y = F.scaled_dot_product_attention(query, keys, values)
        return x + self.out(y.transpose(1, 2).reshape(x.shape)), keys, values


@pytest.mark.parametrize("length", [1, 3, 20])
@pytest.mark.parametrize(
    "recipe", [STORED, fxq.Recipe.dynamic(optimize="coverage", state=CACHE)], ids=["floats", "rounded"]
)
@torch.no_grad()
def test_several_tokens_at_once(length, recipe):
    """More than 16 queries of a head are no step: the graph's attention reads what the program has appended."""
    torch.manual_seed(0)
    past = torch.randn(1, 2 * HEADS, 4, DEPTH)
    qmodel = fxq.quantize(Prefilled().eval(), recipe, example_inputs=(torch.randn(1, 3, WIDTH), past, past))
    got = wanted = [past, past]
    for _ in range(6):
        x = torch.randn(1, length, WIDTH)
        (y, *got), (z, *wanted) = qmodel(x, *got), plain(qmodel, x, *wanted)
        check_equal([y, *got], [z, *wanted])
    assert bool(attending(qmodel)) == (length <= 16)


def test_gradients_and_inference_mode():
    qmodel = quantized(STORED)
    for mode in (torch.enable_grad, torch.inference_mode, torch.no_grad):
        with mode():
            check_equal(generated(qmodel, call), generated(qmodel, plain))


@torch.no_grad()
def test_only_one_layer_has_integers():
    recipe = fxq.Recipe.weight_only().override(fxq.by_op("append"), fxq.QuantConfig(None, None, state=CACHE))
    recipe = recipe.override("second*", fxq.Recipe.weight_only().config)
    qmodel = quantized(recipe)
    got = generated(qmodel, call)
    (program,) = programs(qmodel)
    module, codes = loops("token_loops"), codes_of(program)
    assert [form.in_integers for form in program._growing.states].count(True) in (2, 4)
    assert module.ATTEND_TO_INTEGERS in codes
    check_equal(got, generated(qmodel, plain))


@torch.no_grad()
def test_a_file_has_the_same_program():
    qmodel = quantized(STORED)
    loaded = filed(qmodel)
    check_equal(generated(loaded, call), generated(qmodel, plain))
    assert attending(loaded)


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
    "values": lambda keys: (keys * 2.0).unsqueeze(2).mean((1, 2, 3)),
    "transposed": lambda keys: keys.transpose(1, 2).unsqueeze(1)[:, 0, :1, 0],
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@torch.no_grad()
def test_a_state_that_other_ops_read(function):
    """They read the values of the integers that the program has stored, and nothing is appended twice."""
    torch.manual_seed(0)
    example = torch.randn(1, 1, 64), torch.randn(1, 1, 9, 64)
    qmodel = fxq.quantize(ReadsItsState(function).eval(), STORED, example_inputs=example)
    got = wanted = [example[1]]
    for _ in range(8):
        x = torch.randn(1, 1, 64)
        (y, *got), (z, *wanted) = qmodel(x, *got), plain(qmodel, x, *wanted)
        check_equal([y, *got], [z, *wanted])
    assert attending(qmodel)


@torch.no_grad()
def test_a_wrong_program_is_not_used(monkeypatch):
    run = TokenProgram.__call__

    def run_wrongly(self, *values):
        results = run(self, *values)
        for state in results[-len(self._growing.states) :] if self.attends else ():
            state.integers[:, :, -1:] = 7
        return results

    monkeypatch.setattr(TokenProgram, "__call__", run_wrongly)
    qmodel = quantized(STORED)
    got, wanted = generated(qmodel, call, past=90), generated(qmodel, plain, past=90)
    assert programs(qmodel) and not attending(qmodel)
    check_equal(got, wanted)


@torch.no_grad()
def test_integers_in_place_of_other_inputs():
    """A program reads an input by its address, where rows in integers have no floats; and so for a state in float."""
    qmodel = quantized()
    generated(qmodel, call)
    (program,) = programs(qmodel)
    rows = QuantizedRows(*(torch.ones(2, 1, size, dtype=dtype) for size, dtype in PARTS_OF_ROWS))
    assert program._inputs[0] == rows.shape
    with pytest.raises(OtherInputsError):
        program(rows, *program._inputs[1:], *states(9), *token(9)[1:])
    held = [QuantizedRows(s.byte(), s[..., :1].clone(), s[..., :1].byte()) for s in states(9)]
    for _ in range(3):
        check_equal(qmodel(*token(9), *held), plain(qmodel, *token(9), *held))


def test_other_ways_to_compute_a_state_are_not_matched():
    graph = quantized(STORED).graph
    nodes = [node for node in graph.nodes if is_op(node, "quantized_rows")]
    assert len(nodes) == 4 and all(stored_state(node) is not None for node in nodes)
    state = stored_state(nodes[0])
    new_q = state.appends[0].args[1]
    for changed in ({"qmin": 1}, {"axis": 2}, {"dtype": torch.int8}, {"scale": state.appends[1]}):
        before, new_q.kwargs = new_q.kwargs, {**new_q.kwargs, **changed}
        assert stored_state(nodes[0]) is None
        new_q.kwargs = before
    assert stored_state(state.appends[0]) is None and stored_state(nodes[0]) == state
