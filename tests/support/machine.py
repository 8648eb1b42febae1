"""What tests ask of the machine they run on: CPUs with AMX, with VNNI and without are all ordinary ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

import fxq
from fxq.backends import cpu

BITS = 8 if cpu.has_vnni() else 7
"""Of the activations whose products with any int8 weights this machine sums right."""
QMAX = 2**BITS - 1
"""The largest integer of such an activation."""
X86 = fxq.Recipe.static(backend="x86")
needs_x86 = pytest.mark.skipif(not cpu.has_onednn_int8(), reason="needs the oneDNN int8 kernels")
needs_vnni = pytest.mark.skipif(not cpu.has_vnni(), reason="8-bit activations need a CPU with VNNI")


def portable(bits: int = BITS) -> fxq.Recipe:
    """The reference backend on the grids that the x86 backend has here: the two give the same numbers."""
    return fxq.Recipe.static(backend="reference", activation=fxq.TensorSpec(bits=bits))


def decibels(with_8_bits: float, backend: str = "x86") -> float:
    """The SQNR against float in dB that a network has here, if it has `with_8_bits` with activations of 8 bits.

    Each bit less makes the steps of a grid twice as large, so the error too: 20 * log10(2) = 6.02 dB.
    The reference backend and qnnpack compute with 8 bits everywhere.
    """
    return with_8_bits if backend in ("reference", "qnnpack") else with_8_bits - 6.02 * (8 - BITS)


# ---- warnings

OF_THE_MACHINE = "this CPU has no VNNI"
"""How the warning begins that tells what this machine lacks."""
no_warnings = pytest.mark.filterwarnings("error::fxq.FxqWarning", f"ignore:{OF_THE_MACHINE}:fxq.FxqWarning")
"""Marks a test in which fxq must not warn of anything, but of what this machine lacks."""


@contextmanager
def quiet() -> Iterator[None]:
    """As `no_warnings`, for a part of a test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxq.FxqWarning)
        warnings.filterwarnings("ignore", message=OF_THE_MACHINE, category=fxq.FxqWarning)
        yield


def told(caught: Iterable[warnings.WarningMessage]) -> list[str]:
    """What fxq warned of, without what this machine lacks."""
    texts = [str(w.message) for w in caught if issubclass(w.category, fxq.FxqWarning)]
    return [text for text in texts if not text.startswith(OF_THE_MACHINE)]
