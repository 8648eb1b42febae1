"""Networks in Python for aarch64, under qemu."""

import os
import subprocess
import sys

import pytest
import torch

from fxq.backends.loops.code.compiler import loops
from scripts.dev import aarch64, aarch64_networks

FOLDER = os.environ.get("FXQ_AARCH64", "")


@pytest.mark.slow
@pytest.mark.skipif(not (FOLDER and aarch64.EMULATOR), reason="needs qemu, and FXQ_AARCH64: see scripts/dev/aarch64.py")
@pytest.mark.parametrize("cpu", [aarch64.CPU, "cortex-a76"])
def test_networks_on_aarch64(cpu):
    """With `i8mm`, and without."""
    command = [sys.executable, "-m", "scripts.dev.aarch64", FOLDER, "--cpu", cpu]
    done = subprocess.run(command, cwd=aarch64.CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "WRONG" not in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(loops("token_loops") is None, reason="needs Numba")
@pytest.mark.parametrize("name", ["odd blocks and columns, weights of 3 bits", "decoder, cache of 4 bits"])
def test_wrong_results_are_noticed(tmp_path, monkeypatch, name):
    monkeypatch.setattr(aarch64_networks, "CASES", {name: aarch64_networks.CASES[name]})
    aarch64_networks.write(tmp_path)
    assert aarch64_networks.check(tmp_path) == 0
    stored = torch.load(tmp_path / "0.pt")
    assert stored["calls"] > 0
    for changed in ({"jit": stored["jit"] * 1.02}, {"reference": stored["reference"] * torch.nan}, {"calls": 0}):
        torch.save({**stored, **changed}, tmp_path / "0.pt")
        assert aarch64_networks.check(tmp_path) == 1


def test_packages_on_aarch64():
    """Packages that fxq needs, directly or not, but none of development."""
    needed = aarch64._needed()
    assert {"torch", "numpy", "sympy", "safetensors", "tomli-w"} <= needed
    assert not needed & {"fxq", "mypy", "ruff", "sphinx"} and not any("nvidia" in name for name in needed)
