"""Steps of recurrent layers in TorchScript and in Python."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch

from fxq.backends.loops.code import compiler
from fxq.backends.x86 import recurrent_loop, recurrent_steps
from fxq.backends.x86.recurrent_loop import GATES
from tests.backends.x86.test_recurrent_loop import STATE, kernel
from tests.support.kernels import activations
from tests.support.machine import needs_x86

pytestmark = needs_x86
LOOPS = (recurrent_steps.lstm, recurrent_steps.gru, recurrent_steps.rnn)


@pytest.fixture(autouse=True)
def _anew(monkeypatch):
    monkeypatch.setattr(compiler, "loops", lambda name: None)
    recurrent_steps.scripted.cache_clear()
    yield
    recurrent_steps.scripted.cache_clear()


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="TorchScript does not know newer Pythons")
@pytest.mark.parametrize("steps", LOOPS, ids=lambda steps: steps.__name__)
def test_torchscript_runs_them_without_a_warning(steps):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(recurrent_steps.scripted(steps), torch.jit.ScriptFunction)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("scale", [None, 0.5 / STATE])
@pytest.mark.parametrize("op", GATES)
def test_python_runs_them_alike(op, scale, samples, monkeypatch):
    layer, _ = kernel(op, 5, 16, state_scale=scale)
    x = activations(7, samples, 5)
    wanted = layer(x)
    monkeypatch.setattr(recurrent_loop, "scripted", lambda steps: steps)
    torch.testing.assert_close(layer(x), wanted, rtol=0, atol=1e-6)


def test_without_torchscript_python_runs_them(monkeypatch):
    def refuse(function):
        raise RuntimeError("there is no TorchScript")

    monkeypatch.setattr(torch.jit, "script", refuse)
    assert all(recurrent_steps.scripted(steps) is steps for steps in LOOPS)


def test_under_autocast_they_compute_in_float32():
    layer, _ = kernel("lstm", 5, 16)
    x = activations(7, 1, 5)
    wanted = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), wanted)
