"""Compiled steps against steps of PyTorch's ops; test_recurrent_loop.py tests them against float64."""

import pytest
import torch

from fxq.backends import cpu
from fxq.backends.loops.code import compiler
from fxq.backends.x86 import jit_steps, recurrent_loop
from fxq.backends.x86.recurrent_loop import GATES
from fxq.common.timed_calls import threads_set_to
from tests.backends.x86.test_recurrent_loop import STATE, kernel
from tests.support.kernels import activations
from tests.support.machine import needs_x86

pytestmark = needs_x86
pytest.importorskip("numba")


@pytest.mark.parametrize("quick", [True, False], ids=["int_mm", "rows"])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("scale", [None, 0.5 / STATE])
@pytest.mark.parametrize("op", GATES)
def test_as_by_pytorchs_ops(op, scale, samples, quick, monkeypatch):
    monkeypatch.setattr(cpu, "has_int_mm", lambda: quick)
    layer, _ = kernel(op, 5, 40, state_scale=scale, reverse=samples == 3)
    x = activations(7, samples, 5)
    got = layer(x)
    monkeypatch.setattr(compiler, "loops", lambda name: None)
    torch.testing.assert_close(
        type(layer).from_config(layer.config(), dict(layer.named_buffers()))(x), got, rtol=0, atol=1e-5
    )


def test_large_products_of_rows_are_divided_among_threads(monkeypatch):
    monkeypatch.setattr(cpu, "has_int_mm", lambda: False)
    ran = []
    run = jit_steps.run_together
    monkeypatch.setattr(jit_steps, "run_together", lambda *args: ran.append(run(*args)) or ran[-1])
    layer, _ = kernel("lstm", 5, 300)  # 1200 x 320 integers
    x, results = activations(7, 1, 5), []
    for threads in (1, 2):
        with threads_set_to(threads):
            results.append(layer(x))
        monkeypatch.setattr(jit_steps, "_MIN_PART_BYTES", 1 << 17)
    assert torch.equal(*results) and ran == 7 * [True]


def test_they_run(monkeypatch):
    """Every op except an lstm with a projection runs compiled."""
    ran = []
    run = recurrent_loop.run_steps
    monkeypatch.setattr(recurrent_loop, "run_steps", lambda *args: (ran.append(args[1]), run(*args)))
    for op in GATES:
        kernel(op, 5, 16)[0](activations(7, 2, 5))
    kernel("lstm", 5, 16, 8)[0](activations(7, 2, 5))
    assert ran == list(GATES)


def test_a_state_that_is_not_a_number(monkeypatch):
    layer, _ = kernel("gru", 5, 16, state_inputs=("h",))
    h = torch.zeros(2, 16)
    h[0, 3] = torch.nan
    y = layer(activations(7, 2, 5), h)
    assert bool(y[-1, 0].isnan().any()) and bool(y[:, 1].isfinite().all())
