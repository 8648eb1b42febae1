"""Machine code for aarch64, run under qemu: one function, in a program without a C library."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fxq.backends.loops.code.cpu_kinds import CpuKind
from tests.support.emitted import assembly, module_of

ASSEMBLER, LINKER = map(shutil.which, ("aarch64-linux-gnu-as", "aarch64-linux-gnu-ld"))
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
"""Debian: packages binutils-aarch64-linux-gnu and qemu-user-static."""
TRIPLE = "aarch64-unknown-linux-gnu"
FEATURES = {"neon_i8mm": "+neon,+dotprod,+i8mm", "neon_dot": "+neon,+dotprod"}
_READ, _WRITE, _EXIT = 63, 64, 93
"""Numbers of Linux' system calls."""


def run_on_arm(
    kind: CpuKind, make: Callable[[], Any], parameters: Sequence[Any], values: Sequence[Any], folder: Path
) -> list[Any]:
    """Run an `on_addresses` function, and return its arguments after the call.

    Args:
        kind: Kind of CPU.
        make: Function that returns the `on_addresses` function.
        parameters: See `module_of`.
        values: Arguments: NumPy arrays, whose addresses the function gets, and numbers.
        folder: Folder for the program.
    """
    module = module_of(kind, make, *parameters)
    module.triple = TRIPLE
    if len(values) != len(module.get_global("tile").args):
        raise ValueError(f"the code has {len(module.get_global('tile').args)} arguments, but there are {len(values)}")
    offsets = np.cumsum([0, *(a.nbytes + 64 if isinstance(a, np.ndarray) else 0 for a in values)]).tolist()
    code = assembly(module, "generic", FEATURES[kind.name])
    (folder / "tile.s").write_text(_program(code, offsets, values), encoding="utf-8")
    subprocess.run([str(ASSEMBLER), "-march=armv8.6-a", "-o", "tile.o", "tile.s"], cwd=folder, check=True)
    subprocess.run([str(LINKER), "-o", "tile", "tile.o"], cwd=folder, check=True)
    before = bytearray(offsets[-1])
    for offset, value in zip(offsets[:-1], values, strict=True):
        if isinstance(value, np.ndarray):
            before[offset : offset + value.nbytes] = value.tobytes()
    (folder / "memory").write_bytes(before)
    with (folder / "memory").open("rb") as memory:
        command = [str(EMULATOR), "-cpu", "max", "./tile"]
        after = subprocess.run(command, cwd=folder, stdin=memory, capture_output=True, check=True).stdout
    return [
        np.frombuffer(after, value.dtype, value.size, offset).reshape(value.shape)
        if isinstance(value, np.ndarray)
        else value
        for offset, value in zip(offsets[:-1], values, strict=True)
    ]


def _program(code: str, offsets: Sequence[int], values: Sequence[Any]) -> str:
    """Assembly of the program: it reads its memory from standard input, calls `tile`, and writes the memory."""

    def system(number: int, handle: int) -> list[str]:
        return [f"mov x0, #{handle}", "ldr x1, =memory", f"ldr x2, ={offsets[-1]}", f"mov x8, #{number}", "svc #0"]

    arguments = [
        f"memory+{offset}" if isinstance(value, np.ndarray) else str(value)
        for offset, value in zip(offsets[:-1], values, strict=True)
    ]
    on_stack = [f"ldr x9, ={text}\nstr x9, [sp, #{8 * k}]" for k, text in enumerate(arguments[8:])]
    in_registers = [f"ldr x{k}, ={text}" for k, text in enumerate(arguments[:8])]
    start = [*system(_READ, 0), "sub sp, sp, #64", *on_stack, *in_registers, "bl tile", *system(_WRITE, 1)]
    lines = [".text", ".globl _start", "_start:", *start, *system(_EXIT, 0), ".bss", ".balign 64", "memory:"]
    return "\n".join([code, *lines, f".skip {offsets[-1]}", ""])
