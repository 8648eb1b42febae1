"""Time steps in one compiled loop against float64, on one thread and on several."""

import pytest
import torch

from fxq.backends.loops.code import thread_pool
from fxq.backends.plain import time_steps
from fxq.backends.plain.time_steps import StateGrid, TimeSteps, in_blocks
from fxq.common.timed_calls import threads_set_to
from fxq.ops.recurrent import gru, lstm, on_grid, rnn

pytestmark = pytest.mark.any_cpu
recurrent_loops = pytest.importorskip(
    "fxq.backends.loops.code.recurrent_loops", reason="needs Numba", exc_type=ImportError
)
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
STEPS = 5


def layer(kind, hidden, samples, scale=None):
    """Time steps of a layer with random weights, their arguments, and the weight in float64."""
    rows, generator = GATES[kind] * hidden, torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    weight = torch.randint(-127, 128, (rows, hidden), dtype=torch.int8, generator=generator)
    scales = normal(rows).abs() / 180 / hidden**0.5
    bias = normal(hidden) if kind == "gru" else None
    steps = TimeSteps(recurrent_loops, kind, weight, scales, StateGrid(127, scale), bias)
    tensors = normal(STEPS, samples, rows), normal(samples, hidden) / 2, normal(samples, hidden)
    return steps, tensors, (weight.double() * scales.double()[:, None], bias)


def run(steps, kind, gates, h, c, reverse=False):
    """States, and the last cell state of an lstm."""
    ordered = in_blocks(gates.movedim(2, 0), GATES[kind]).movedim(0, 2).contiguous()
    cell = c.clone() if kind == "lstm" else None
    return steps.run(ordered, h, cell, reverse), cell


def exact(kind, gates, h, c, weight, bias, scale, reverse):
    """Results of `run` by the definition of the ops in float64. The input of the ops is the gates."""
    gates, h, rows = gates.double(), h.double(), gates.shape[2]
    options = {"reverse": reverse, "state_qmax": 127, "state_scale": scale}
    zeros = torch.zeros(rows).double()
    tensors = gates, torch.eye(rows).double(), weight, zeros
    if kind == "lstm":
        y = lstm(*tensors, zeros, h, c.double(), cell=True, **options)
        return y[:-1], y[-1]
    if kind == "gru":
        return gru(*tensors, torch.cat([zeros[: -len(bias)], bias.double()]), h, **options), None
    return rnn(*tensors, zeros, h, nonlinearity=kind.removeprefix("rnn_"), **options), None


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("scale", [None, 1 / 127])
@pytest.mark.parametrize(("hidden", "samples"), [(1, 1), (5, 2), (16, 5), (33, 4), (70, 9), (160, 1)])
@pytest.mark.parametrize("kind", GATES)
def test_float64(kind, hidden, samples, scale, reverse):
    steps, tensors, weights = layer(kind, hidden, samples, scale)
    (y, cell), (wanted, last) = run(steps, kind, *tensors, reverse), exact(kind, *tensors, *weights, scale, reverse)
    off = (y - wanted).abs() / (1 + wanted.abs())
    # A state near a half may be rounded to the other side, which moves what follows by less than a step.
    assert (off > 1e-4).sum() <= max(0.05 * off.numel(), 2) and off.max() < 1e-2
    assert cell is None or (cell - last).abs().max() < 1e-2


@pytest.mark.parametrize("kind", GATES)
def test_products_are_exact(kind):
    """The state is on its grid, and the sums have few bits: one step differs from float64 by rounding only."""
    hidden, samples = 80, 6
    steps, (gates, h, c), weights = layer(kind, hidden, samples, 1 / 127)
    h = on_grid(h.double(), 127, 1 / 127).float()
    (y, _), (wanted, _) = run(steps, kind, gates[:1], h, c), exact(kind, gates[:1], h, c, *weights, 1 / 127, False)
    torch.testing.assert_close(y.double(), wanted, rtol=2e-6, atol=2e-6)


def test_the_largest_products():
    """Sums of pairs of them leave 16 bits."""
    hidden = 96
    for end in (-128, 127):
        weight = torch.full((hidden, hidden), end, dtype=torch.int8)
        steps = TimeSteps(recurrent_loops, "rnn_relu", weight, torch.ones(hidden), StateGrid(127, 1.0))
        for state in (-127.0, 127.0):
            y = steps.run(torch.full((1, 1, hidden), 1.0), torch.full((1, hidden), state), None, False)
            assert torch.equal(y, torch.full((1, 1, hidden), max(1 + hidden * end * state, 0.0)))


def test_small_states_keep_their_digits():
    """A state far below 1 is as precise, relative to its size, as any other."""
    steps = TimeSteps(recurrent_loops, "rnn_tanh", torch.zeros(16, 16).char(), torch.ones(16), StateGrid(127, None))
    x = torch.logspace(-20, 0.5, 16).repeat(2, 1, 1)
    torch.testing.assert_close(steps.run(x, torch.zeros(1, 16), None, False), x.tanh(), rtol=3e-6, atol=0)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("samples", [1, 6])
def test_threads_compute_the_same(kind, samples, monkeypatch):
    """Bit by bit, also with more threads than blocks of units, and while the pool is busy."""
    monkeypatch.setattr(time_steps, "_MIN_PART_BYTES", 1)
    ran = []
    together = thread_pool.run_together
    monkeypatch.setattr(time_steps, "run_together", lambda *args: ran.append(together(*args)) or ran[-1])
    for hidden in (20, 150):
        steps, tensors, _ = layer(kind, hidden, samples)
        results = []
        for threads in (1, 2, 3, 12):
            with threads_set_to(threads):
                results.append(run(steps, kind, *tensors, reverse=True))
        with threads_set_to(2), monkeypatch.context() as patch:
            patch.setattr(time_steps, "run_together", lambda *args: False)
            results.append(run(steps, kind, *tensors, reverse=True))
        (wanted, cell), *others = results
        for y, last in others:
            assert torch.equal(y, wanted) and (cell is None or torch.equal(last, cell))
    assert ran == [True] * 6


def test_calls_of_several_sizes():
    steps, (gates, h, c), _ = layer("lstm", 20, 3)
    whole, _ = run(steps, "lstm", gates, h, c)
    for count in (1, 3, STEPS):
        assert torch.equal(run(steps, "lstm", gates[:count], h, c)[0], whole[:count])
    assert torch.equal(run(steps, "lstm", gates[:, 1:2], h[1:2], c[1:2])[0], whole[:, 1:2])
