"""Conditions of tests on the CPU. CPUs with AMX, with VNNI and without either must all pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

import fxq
from fxq.backends import cpu

BITS = 8 if cpu.has_vnni() else 7
"""Bits of activations whose products with int8 weights this machine sums without saturation."""
QMAX = 2**BITS - 1
"""Largest integer of such an activation."""
X86 = fxq.Recipe.static(backend="x86")
WITH_8_BITS = "x86" if cpu.has_vnni() else "reference"
"""Backend whose kernels take 8 bits of both activations and weights on this machine, as stored grids have them."""
needs_x86 = pytest.mark.skipif(not cpu.has_onednn_int8(), reason="needs the oneDNN int8 kernels")
needs_vnni = pytest.mark.skipif(not cpu.has_vnni(), reason="8-bit activations need a CPU with VNNI")


def portable(bits: int = BITS) -> fxq.Recipe:
    """Recipe of the reference backend with the bits of the x86 backend on this machine, for equal results of both."""
    return fxq.Recipe.static(backend="reference", activation=fxq.TensorSpec(bits=bits))


def decibels(with_8_bits: float, backend: str = "x86") -> float:
    """Expected SQNR in dB on this machine, of a network that has `with_8_bits` dB with 8-bit activations.

    Each bit less doubles the step of the grid and the error: 20 * log10(2) = 6.02 dB. The reference backend and qnnpack
    use 8 bits on every machine.
    """
    return with_8_bits if backend in ("reference", "qnnpack") else with_8_bits - 6.02 * (8 - BITS)


# ---- warnings

OF_THE_MACHINE = "this CPU has no VNNI"
"""Beginning of the warning about missing features of this machine."""
no_warnings = pytest.mark.filterwarnings("error::fxq.FxqWarning", f"ignore:{OF_THE_MACHINE}:fxq.FxqWarning")
"""Mark of a test in which fxq must not warn, except about missing features of this machine."""


@contextmanager
def quiet() -> Iterator[None]:
    """Forbid warnings of fxq in a part of a test, as `no_warnings` does in a whole test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxq.FxqWarning)
        warnings.filterwarnings("ignore", message=OF_THE_MACHINE, category=fxq.FxqWarning)
        yield


def told(caught: Iterable[warnings.WarningMessage]) -> list[str]:
    """Warnings of fxq, except those about missing features of this machine."""
    texts = [str(w.message) for w in caught if issubclass(w.category, fxq.FxqWarning)]
    return [text for text in texts if not text.startswith(OF_THE_MACHINE)]
