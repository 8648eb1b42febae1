"""Networks in Python for aarch64, under qemu."""

import os
import subprocess
import sys

import pytest

from scripts.dev import aarch64

FOLDER = os.environ.get("FXQ_AARCH64", "")


@pytest.mark.slow
@pytest.mark.skipif(not (FOLDER and aarch64.EMULATOR), reason="needs qemu, and FXQ_AARCH64: see scripts/dev/aarch64.py")
@pytest.mark.parametrize("cpu", [aarch64.CPU, "cortex-a76"])
def test_networks_on_aarch64(cpu):
    """With `i8mm`, and without."""
    command = [sys.executable, "-m", "scripts.dev.aarch64", FOLDER, "--cpu", cpu]
    done = subprocess.run(command, cwd=aarch64.CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "WRONG" not in done.stdout, done.stdout + done.stderr


def test_packages_on_aarch64():
    """Packages that fxq needs, directly or not, but none of development."""
    needed = aarch64._needed()
    assert {"torch", "numpy", "sympy", "safetensors", "tomli-w"} <= needed
    assert not needed & {"fxq", "mypy", "ruff", "sphinx"} and not any("nvidia" in name for name in needed)
