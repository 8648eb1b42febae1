"""Decoders token by token: the bound graph with its programs against the graph run node by node."""

import itertools
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.backends.loops.code.compiler import loops
from fxq.backends.loops.code.thread_pool import run_together
from fxq.backends.loops.tokens import token_program
from fxq.backends.loops.tokens.token_program import TokenProgram
from fxq.backends.plain import few_rows
from fxq.backends.plain.weight_only import WeightOnlyLinear
from fxq.common.metrics import sqnr
from fxq.common.timed_calls import threads_set_to
from fxq.runtime.binding import BoundForward
from tests.support.bound import bindings, plain

pytestmark = [pytest.mark.any_cpu, pytest.mark.skipif(loops("token_loops") is None, reason="needs Numba")]
WIDTH, HEADS = 64, 2


class Decoder(nn.Module):
    """One layer of a decoder: norm, rotary embedding, attention to a cache, gated MLP and residuals."""

    def __init__(self, function=F.silu):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.rand(WIDTH) + 0.5), function
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight

    def rotated(self, x, cos, sin):
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def forward(self, x, cos, sin, keys, values):
        y, shape = self.norm(x), (*x.shape[:-1], HEADS, WIDTH // HEADS)
        query, key, value = (f(y).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value))
        keys = torch.cat([keys, self.rotated(key, cos, sin)], 2)
        values = torch.cat([values, value], 2)
        y = F.scaled_dot_product_attention(self.rotated(query, cos, sin), keys, values)
        x = x + self.out(y.transpose(1, 2).reshape(*x.shape))
        y = self.norm(x)
        return x + self.down(self.function(self.gate(y)) * self.up(y)), keys, values


def inputs(past, batch=1, length=1, seed=0):
    torch.manual_seed(seed)
    angle = torch.randn(batch, 1, length, WIDTH // HEADS)
    states = (torch.randn(batch, HEADS, past, WIDTH // HEADS) for _ in range(2))
    return torch.randn(batch, length, WIDTH), angle.cos(), angle.sin(), *states


def quantized(bits=8, function=F.silu):
    torch.manual_seed(0)
    model = Decoder(function).eval()
    return fxq.quantize(model, fxq.Recipe.weight_only(bits=bits), example_inputs=inputs(5, length=3))


def rounding(**options):
    """Decoder whose layers round their inputs."""
    torch.manual_seed(0)
    recipe = fxq.Recipe.dynamic(optimize="coverage", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxq.FxqWarning)  # small layers are faster in float
        return fxq.quantize(Decoder().eval(), recipe, example_inputs=inputs(5, length=3))


def generated(qmodel, run, past=9, tokens=6, batch=1, length=1):
    """Outputs of calls that append to the states of the call before."""
    _, _, _, *states = inputs(past, batch)
    results = []
    for i in range(tokens):
        x, cos, sin, *_ = inputs(1, batch, length, seed=i + 1)
        y, *states = run(qmodel, x, cos, sin, *states)
        results += [y, *states]
    return results


def call(qmodel, *args):
    return qmodel(*args)


def programs(qmodel):
    cached = bindings(qmodel)._growing._seen.values()
    constants = [value for b in cached if isinstance(b, BoundForward) for value in b.run.__globals__.values()]
    return [value for value in constants if isinstance(value, TokenProgram)]


def arguments(program, past=9):
    """Random inputs of a program, states of this length included."""
    states = [torch.randn(form.samples, form.heads, past, form.depth) for form in program._growing.states]
    return [*(torch.randn(shape) for shape in program._inputs), *states]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_have_the_results_of_the_graph(bits, batch):
    qmodel = quantized(bits)
    got = generated(qmodel, call, batch=batch)
    assert len(programs(qmodel)) == 1  # the attention and its states included
    for ours, theirs in zip(got, generated(qmodel, plain, batch=batch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)  # float32 rounding of six tokens in turn


@pytest.mark.parametrize("rounds_inputs", [False, True], ids=["float inputs", "rounded inputs"])
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_compute_the_same_numbers(monkeypatch, rounds_inputs, threads):
    """Also with callers at once, of which the threads serve one at a time."""
    monkeypatch.setattr(few_rows, "_MIN_PART_BYTES", 1)
    qmodel = rounding(weight=fxq.Recipe.weight_only(bits=4, per=32).config.weight) if rounds_inputs else quantized()
    with threads_set_to(threads):
        generated(qmodel, call, batch=3)
    calls = list[bool]()
    monkeypatch.setattr(token_program, "run_together", lambda *args: calls.append(run_together(*args)) or calls[-1])
    for program in programs(qmodel):
        x = arguments(program)
        with monkeypatch.context() as patch:
            patch.setattr(token_program, "run_together", lambda *_: False)
            alone = program(*x)
        torch.testing.assert_close(program(*x), alone, rtol=0, atol=0)  # bit by bit
        assert calls.pop() and program._threads == threads
        with ThreadPoolExecutor(8) as callers:
            for got in callers.map(lambda run, x=x: run(*x), [program] * 40):
                torch.testing.assert_close(got, alone, rtol=0, atol=0)  # bit by bit
    assert len(programs(qmodel)) == 1


def in_float():
    recipe = fxq.Recipe.weight_only().override("*", fxq.FLOAT)
    with pytest.warns(fxq.FxqWarning, match="nothing runs on integers"):
        return fxq.quantize(Decoder().eval(), recipe, example_inputs=inputs(5, length=3))


def test_ops_between_float_layers_are_programs_too():
    qmodel = in_float()
    got = generated(qmodel, call)
    assert len(programs(qmodel)) >= 2
    for ours, theirs in zip(got, generated(qmodel, plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)  # float32 rounding of six tokens in turn


def test_the_gradient_of_a_norm_passes_through():
    qmodel, grads = in_float(), []
    tensors = (*qmodel.parameters(), *qmodel.buffers())
    (weight,) = (t for t in tensors if t.shape == (WIDTH,) and t.min() >= 0.5)  # biases are smaller
    weight.requires_grad_()
    for run in (call, plain):
        weight.grad = None
        sum(run(qmodel, *inputs(past))[0].sum() for past in range(5, 10)).backward()
        grads.append(weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)  # float32 rounding


@pytest.mark.parametrize("function", [F.silu, F.gelu, torch.sigmoid, F.hardswish, torch.tanh, F.relu])
def test_functions_of_the_mlp(function):
    qmodel = quantized(function=function)
    for ours, theirs in zip(generated(qmodel, call), generated(qmodel, plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)  # float32 rounding of six tokens in turn


def test_several_tokens_at_once_and_a_prefill_in_between():
    qmodel = quantized()
    for length in (1, 4, 20, 1):
        got = generated(qmodel, call, tokens=4, length=length)
        for ours, theirs in zip(got, generated(qmodel, plain, tokens=4, length=length), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5)  # float32 rounding of up to 80 tokens


def test_two_sequences_in_turn_share_a_function():
    """The second call of each length has the kind of the first, and is bound as it is."""
    qmodel = quantized()
    args = inputs(9)
    for length in range(2, 10):
        for _ in range(2):
            got = qmodel(*args[:3], *(state[:, :, :length] for state in args[3:]))
            wanted = plain(qmodel, *args[:3], *(state[:, :, :length] for state in args[3:]))
            torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)  # float32 rounding
    cached = bindings(qmodel)._growing._seen
    assert sum(isinstance(function, BoundForward) for function in cached.values()) == 1 and len(cached) <= 2


def test_a_changed_weight_takes_effect():
    qmodel = quantized()
    generated(qmodel, call)
    assert programs(qmodel)
    with torch.no_grad():
        for name, tensor in qmodel.named_buffers():
            if name.endswith("scale"):
                tensor.mul_(1.5)
    for ours, theirs in zip(generated(qmodel, call), generated(qmodel, plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)  # values are larger now


def test_an_op_with_side_effects_keeps_its_place():
    class Counted(Decoder):
        def forward(self, x, cos, sin, keys, values):
            x = x * 2
            y = self.up(x) * 2
            x.add_(1)  # after its value was read
            z, keys, values = super().forward(x, cos, sin, keys, values)
            return z + self.down(y), keys, values

    torch.manual_seed(0)
    model = Counted().eval()
    qmodel = fxq.quantize(model, "weight_only", example_inputs=inputs(5, length=3))
    for ours, theirs in zip(generated(qmodel, call), generated(qmodel, plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)  # float32 rounding of six tokens in turn


class Counter(nn.Module):
    """Layer with a state that no graph has."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def extended(function):
    """Decoder whose result a function changes."""

    class Extended(Decoder):
        def __init__(self):
            super().__init__()
            self.counter = Counter()

        def forward(self, x, cos, sin, keys, values):
            y, *states = super().forward(x, cos, sin, keys, values)
            return function(self, y), *states

    torch.manual_seed(0)
    recipe = fxq.Recipe.weight_only().leaf("counter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxq.FxqWarning)  # of a large error that the function makes
        return fxq.quantize(Extended().eval(), recipe, example_inputs=inputs(5, length=3))


def test_a_module_of_the_user_runs_once_in_each_call():
    """Also in the call that binds the graph."""
    qmodel = extended(lambda model, y: model.counter(y))
    counter = qmodel.get_submodule("counter")
    counter.calls = 0
    got = generated(qmodel, call)
    assert counter.calls == 6
    counter.calls = 0
    for ours, theirs in zip(got, generated(qmodel, plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)  # float32 rounding, times up to 6


def test_a_hook_runs_once_in_each_call():
    qmodel, calls = quantized(), []
    kernel = next(module for module in qmodel.modules() if isinstance(module, WeightOnlyLinear))
    kernel.register_forward_hook(lambda *_: calls.append(1))
    generated(qmodel, call)
    assert len(calls) == 6


def test_random_numbers_are_those_of_the_graph():
    """They are drawn once in each call, and a graph that draws some is no reason for a warning."""
    qmodel = extended(lambda model, y: y + torch.rand_like(y))

    def drawn(run):
        args = inputs(9)
        torch.manual_seed(3)
        results = []
        for length in (9, 8, 7, 6, 5):
            results.append(run(qmodel, *args[:3], *(state[:, :, :length] for state in args[3:]))[0])
        return results

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = drawn(call)
    for ours, theirs in zip(got, drawn(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)  # float32 rounding


def test_autocast_computes_as_the_graph_does():
    qmodel = quantized()
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        got, wanted = generated(qmodel, call), generated(qmodel, plain)
    assert programs(qmodel) == []
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours, theirs)


DYNAMIC_WEIGHTS = {
    "int8": {},
    "int4 in blocks": {"weight": fxq.Recipe.weight_only(bits=4, per=32).config.weight},
    "symmetric": {"activation": fxq.TensorSpec(per="row", range="dynamic", symmetric=True)},
}


@pytest.mark.parametrize("options", DYNAMIC_WEIGHTS.values(), ids=DYNAMIC_WEIGHTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_layers_that_round_their_input_are_steps(options, batch):
    qmodel = rounding(**options)
    got = generated(qmodel, call, batch=batch)
    (program,) = programs(qmodel)
    codes = program._steps[:, 0].tolist()
    assert codes.count(loops("token_loops").ROUNDED_LINEAR) >= 6 and codes.count(loops("token_loops").ATTEND) == 1
    for ours, theirs in zip(got, generated(qmodel, plain, batch=batch), strict=True):
        assert sqnr(theirs, ours) > 45  # a value between two integers may be rounded to either


@pytest.mark.parametrize(("batch", "length"), [(2, 4), (4, 4), (3, 2)])
def test_several_tokens_of_several_sequences(batch, length):
    """No step can write the transposed heads of such a batch, so layers read what the graph rounds."""
    qmodel = rounding()
    got = generated(qmodel, call, batch=batch, length=length, tokens=4)
    for ours, theirs in zip(got, generated(qmodel, plain, batch=batch, length=length, tokens=4), strict=True):
        assert sqnr(theirs, ours) > 45  # a value between two integers may be rounded to either


def test_an_input_that_other_ops_read_as_integers_is_still_rounded():
    """The layer after the gate is too narrow for the loop in 4 bits, so it reads integers that the graph rounds."""
    qmodel = rounding(weight=fxq.Recipe.weight_only(bits=4, per=32).config.weight)
    got = generated(qmodel, call)
    assert len(programs(qmodel)) == 1
    for ours, theirs in zip(got, generated(qmodel, plain), strict=True):
        assert sqnr(theirs, ours) > 45  # as above


def test_a_wrong_program_is_not_used(monkeypatch):
    run = TokenProgram.__call__

    def run_wrongly(self, *values):
        results = run(self, *values)
        return [y + 1 for y in results] if isinstance(results, list) else results + 1

    monkeypatch.setattr(TokenProgram, "__call__", run_wrongly)
    qmodel = quantized()
    with pytest.warns(fxq.FxqWarning, match="compiled programs for single tokens differ from the graph"):
        got = generated(qmodel, call)
    assert not programs(qmodel)
    for ours, theirs in zip(got, generated(qmodel, plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)  # float32 rounding of six tokens in turn


def changed_results(monkeypatch, change):
    """All programs return results changed by a function, which gets the result and the number of the program's call."""
    run, calls = TokenProgram.__call__, itertools.count()

    def run_changed(self, *values):
        number, results = next(calls), run(self, *values)
        changed = [change(y, number) for y in (results if isinstance(results, list) else [results])]
        return changed if isinstance(results, list) else changed[0]

    monkeypatch.setattr(TokenProgram, "__call__", run_changed)


def test_rounding_that_later_ops_amplify_is_no_reason_for_a_warning(monkeypatch):
    """As of a value that one program rounds to another integer: only what a program computes itself counts."""
    changed_results(monkeypatch, lambda y, number: y * (1 + 1e-5))  # 100 dB
    qmodel = extended(lambda model, y: torch.sin(y * 1e5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = generated(qmodel, call)
    assert programs(qmodel)
    assert sqnr(generated(qmodel, plain)[-3], got[-3]) < 30  # the outputs do differ


@pytest.mark.parametrize("wrong", [0, 1])
def test_one_wrong_program_among_right_ones_is_named(monkeypatch, wrong):
    """The graph that follows hides what is wrong: it adds little of it."""
    changed_results(monkeypatch, lambda y, number: y * 1.001 if number % 2 == wrong else y)  # 60 dB
    qmodel = extended(lambda model, y: y * 1e-6 + 1)
    with pytest.warns(fxq.FxqWarning, match=r"differ from the graph of this model: \w+, 60.0 dB, at least 80 dB"):
        generated(qmodel, call)
    assert not programs(qmodel)


def test_a_wrong_program_of_layers_that_round_their_input_is_not_used(monkeypatch):
    torch.manual_seed(0)
    changed_results(monkeypatch, lambda y, number: y * 1.02)  # 34 dB
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxq.FxqWarning)  # small layers are faster in float
        recipe = fxq.Recipe.dynamic(optimize="coverage")
        qmodel = fxq.quantize(Decoder().eval(), recipe, example_inputs=inputs(5, length=3))
    with pytest.warns(fxq.FxqWarning, match="at least 40 dB were expected"):
        generated(qmodel, call)
    assert not programs(qmodel)


def test_nothing_is_bound_where_the_user_says_so():
    qmodel = quantized()
    qmodel.kinds_kept = 0
    generated(qmodel, call)
    assert programs(qmodel) == []


def test_a_token_with_another_dtype_is_refused_as_before():
    qmodel = quantized()
    generated(qmodel, call)
    with pytest.raises(fxq.FxqError, match="float64"):
        qmodel(*(x.double() for x in inputs(9)))
