"""Check that AMX works on this machine, before code that uses it is compiled.

AMX needs a flag of the CPU, and permission of Linux for the process. Then a small product is computed with it in a
forked process, where an illegal instruction harms nothing, and compared with NumPy's. A right result is remembered in
the cache folder.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import logging
import os
import platform
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fxq.backends.cpu import cpu_name
from fxq.common.cache_folder import cache_folder
from fxq.common.files import write_file
from fxq.errors import RenderError

log = logging.getLogger("fxq")
CONFIG = bytes([1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8])
"""Operand of `ldtilecfg`: palette 1; eight tiles with rows of 64 bytes; eight tiles with 16 rows."""
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Number of the system call on x86-64, its code ARCH_REQ_XCOMP_PERM, and the state that is asked for."""
_SECONDS = 10.0
"""Time that the forked process has."""
_PRODUCT = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tdpbusd(i8 immarg, i8 immarg, i8 immarg)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)
declare void @llvm.x86.tilerelease()

define void @product(ptr %config, ptr %start, ptr %x, ptr %weight, ptr %sums) {
  call void @llvm.x86.ldtilecfg(ptr %config)
  call void @llvm.x86.tileloadd64(i8 3, ptr %start, i64 0)
  call void @llvm.x86.tileloadd64(i8 5, ptr %x, i64 64)
  call void @llvm.x86.tileloadd64(i8 7, ptr %weight, i64 64)
  call void @llvm.x86.tdpbusd(i8 3, i8 5, i8 7)
  call void @llvm.x86.tilestored64(i8 3, ptr %sums, i64 64)
  call void @llvm.x86.tilerelease()
  ret void
}
"""
"""sums = start + x @ weight: int32 (16, 16), int32 (16,), uint8 (16, 64), int8 (16, 16, 4) by fours of rows."""


@cache
def has_amx() -> bool:
    """Whether the CPU has AMX with integers of 8 bits and bfloat16, and the operating system has switched it on."""
    import llvmlite.binding

    features = llvmlite.binding.get_host_cpu_features()
    return all(features.get(name) for name in ("amx-int8", "amx-bf16", "amx-tile"))


@cache
def refusal() -> str:
    """Reason why fxq's loops do not use AMX here; empty if it works."""
    if not has_amx():
        return "the CPU has none"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "it is used on Linux only"
    denied = _ask_permission()
    if denied:
        return denied
    verdict = _verdict_file()
    if verdict.exists():
        return ""
    try:
        reason = in_fork(_product_is_right(product_code()))
    except Exception as error:  # of LLVM, which may lack AMX, or of a system without memory for a process
        reason = f"its check fails: {error}"
    if not reason:
        try:
            write_file(verdict, b"right\n")
        except RenderError as error:
            log.debug("the check of AMX is repeated in the next process: %s", error)
    return reason


def _ask_permission() -> str:
    """Ask Linux for permission to use AMX in this process, with all its threads. Returns the reason if it denies it."""
    call: Any = ctypes.CDLL(None, use_errno=True).syscall
    call.restype, call.argtypes = ctypes.c_long, [ctypes.c_long] * 3
    if call(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        return ""
    return f"Linux denies permission: {os.strerror(ctypes.get_errno())}"


def _verdict_file() -> Path:
    """File that exists if AMX has computed a right product on a CPU like this one, with this kernel and this LLVM."""
    import llvmlite

    facts = repr((cpu_name(), platform.release(), llvmlite.__version__, _PRODUCT))
    return cache_folder() / f"amx-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


def product_code() -> Callable[..., None]:
    """Compile the product, as a function of the addresses of the configuration, `start`, x, weight and sums."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = f"{llvm.get_host_cpu_features().flatten()},+amx-int8,+amx-tile"
    machine = llvm.Target.from_default_triple().create_target_machine(features=features, jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(_PRODUCT), machine)
    engine.finalize_object()
    call: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5)(engine.get_function_address("product"))
    call.keeps = engine
    result: Callable[..., None] = call
    return result


def _product_is_right(product: Callable[..., None]) -> Callable[[], bool]:
    """Function that runs the product and compares it with NumPy's. The largest sums would not fit into 16 bits."""
    random = np.random.default_rng(0)
    x, weight = random.integers(0, 256, (16, 64)).astype(np.uint8), random.integers(-128, 128, (16, 16, 4))
    x[:2], weight[:, :2] = 255, np.array([-128, 127])[:, None]
    start, weight = random.integers(-(2**30), 2**30, 16).astype(np.int32), weight.astype(np.int8)
    sums, config = np.zeros((16, 16), np.int32), np.frombuffer(CONFIG, np.uint8)
    expected = start + np.einsum("mgk,gnk->mn", x.reshape(16, 16, 4).astype(np.int64), weight.astype(np.int64))

    def is_right() -> bool:
        product(*(a.ctypes.data for a in (config, start, x, weight, sums)))
        return bool((sums == expected).all())

    return is_right


def in_fork(is_right: Callable[[], bool], seconds: float = _SECONDS) -> str:
    """Call a function in a forked process. Returns the reason if it does not return True; empty if it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of other threads: the function needs none
        child = os.fork()
    if not child:
        status = 2
        try:
            faulthandler.disable()
            status = 0 if is_right() else 1
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"its check takes more than {seconds:g} s"
        time.sleep(0.001)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"its check ends with {signal.Signals(-code).name}"
    return {0: "", 1: "it computes a wrong product"}.get(code, "its check fails")
