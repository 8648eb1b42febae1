"""Compiled steps against steps of PyTorch's ops; test_recurrent_loop.py tests them against float64."""

import pytest
import torch

from fxq.backends import cpu
from fxq.backends.loops.code import compiler
from fxq.backends.plain.time_steps import GATES
from fxq.backends.x86 import recurrent_loop
from tests.backends.x86.test_recurrent_loop import kernel
from tests.support.kernels import activations
from tests.support.machine import needs_x86
from tests.support.recurrent import STATE

pytestmark = needs_x86
pytest.importorskip("numba")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("quick", [True, False], ids=["int_mm", "onednn"])
@pytest.mark.parametrize("samples", [1, 33])
@pytest.mark.parametrize("scale", [None, 0.5 / STATE])
@pytest.mark.parametrize("op", GATES)
def test_as_by_pytorchs_ops(op, scale, samples, quick, monkeypatch):
    monkeypatch.setattr(cpu, "has_int_mm", lambda: quick)
    layer, _ = kernel(op, 5, 40, state_scale=scale, reverse=samples == 33)
    x = activations(7, samples, 5)
    got = layer(x)
    monkeypatch.setattr(compiler, "loops", lambda name: None)
    torch.testing.assert_close(
        type(layer).from_config(layer.config(), dict(layer.named_buffers()))(x), got, rtol=0, atol=1e-5
    )


def test_they_run(monkeypatch):
    """With many samples, every op except an lstm with a projection."""
    ran = []
    run = recurrent_loop.run_steps
    monkeypatch.setattr(recurrent_loop, "run_steps", lambda *args: (ran.append(args[1]), run(*args)))
    for op in GATES:
        kernel(op, 5, 16)[0](activations(7, 33, 5))
    kernel("lstm", 5, 16, 8)[0](activations(7, 33, 5))
    assert ran == list(GATES)


@pytest.mark.parametrize("samples", [2, 33])
def test_a_state_that_is_not_a_number(samples):
    layer, _ = kernel("gru", 5, 16, state_inputs=("h",))
    h = torch.zeros(samples, 16)
    h[0, 3] = torch.nan
    y = layer(activations(7, samples, 5), h)
    assert bool(y[-1, 0].isnan().any()) and bool(y[:, 1].isfinite().all())
