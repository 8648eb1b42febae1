"""The check that AMX works here: what it calls wrong, and that an illegal instruction harms only a forked process."""

import ctypes
import os
import platform
import signal
import sys
import time

import numpy as np
import pytest

from fxq.backends.loops.code import amx_probe

pytest.importorskip("llvmlite", reason="needs Numba")
pytestmark = [pytest.mark.any_cpu, pytest.mark.skipif(sys.platform != "linux", reason="AMX is used on Linux only")]


@pytest.fixture
def unknown(monkeypatch, tmp_path):
    """A CPU with AMX, in a process with permission, that is not checked yet."""
    monkeypatch.setenv("FXQ_CACHE", str(tmp_path))
    monkeypatch.setattr(amx_probe, "has_amx", lambda: True)
    monkeypatch.setattr(amx_probe, "_ask_permission", lambda: "")
    monkeypatch.setattr(amx_probe.platform, "machine", lambda: "x86_64")


def product_by_numpy(x_dtype=np.uint8, limit=2**31 - 1):
    """The product of `product_code`, of integers of pixels of a type, with a limit of pairs of products."""

    def array(address, dtype, *shape):
        memory = (ctypes.c_uint8 * (np.dtype(dtype).itemsize * int(np.prod(shape)))).from_address(address)
        return np.frombuffer(memory, dtype).reshape(shape)

    def product(config, start, x, weight, sums):
        assert array(config, np.uint8, 64).tobytes() == amx_probe.CONFIG
        pixels, columns = array(x, x_dtype, 16, 16, 2, 2).astype(int), array(weight, np.int8, 16, 16, 2, 2).astype(int)
        pairs = np.einsum("mgkl,gnkl->mngk", pixels, columns).clip(-limit, limit)
        array(sums, np.int32, 16, 16)[:] = pairs.sum((2, 3)) + array(start, np.int32, 16)

    return product


@pytest.mark.parametrize(
    ("product", "is_right"),
    [
        (product_by_numpy(), True), (product_by_numpy(np.int8), False), (product_by_numpy(limit=2**15 - 1), False),
        (lambda *_: None, False),
    ],
    ids=["right", "signed", "saturating", "nothing"],
)  # fmt: skip
def test_products(product, is_right):
    assert amx_probe._product_is_right(product)() == is_right


def fail():
    raise ValueError


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (lambda: True, ""), (lambda: False, "it computes a wrong product"), (fail, "its check fails"),
        (lambda: os.kill(os.getpid(), signal.SIGILL), "its check ends with SIGILL"),
        (lambda: time.sleep(60), "its check takes more than 0.3 s"),
    ],
    ids=["right", "wrong", "error", "signal", "endless"],
)  # fmt: skip
def test_a_check_in_a_forked_process(check, reason):
    assert amx_probe.in_fork(check, 30.0 if reason != "its check takes more than 0.3 s" else 0.3) == reason


@pytest.mark.skipif(platform.machine() != "x86_64" or amx_probe.has_amx(), reason="needs an x86 CPU without AMX")
def test_a_cpu_without_amx():
    """LLVM compiles the product, and the CPU does not know its instructions."""
    assert amx_probe.refusal.__wrapped__() == "the CPU has none"
    assert amx_probe.in_fork(amx_probe._product_is_right(amx_probe.product_code())) == "its check ends with SIGILL"


@pytest.mark.skipif(not amx_probe.has_amx() or bool(amx_probe.refusal()), reason="AMX does not work here")
def test_a_cpu_with_amx():
    assert amx_probe._product_is_right(amx_probe.product_code())()


def test_a_right_product_is_remembered(unknown, monkeypatch, tmp_path):
    monkeypatch.setattr(amx_probe, "product_code", product_by_numpy)
    assert amx_probe.refusal.__wrapped__() == ""
    assert [path.name[:4] for path in tmp_path.iterdir()] == ["amx-"]
    monkeypatch.setattr(amx_probe, "product_code", fail)
    assert amx_probe.refusal.__wrapped__() == "", "a second process computes nothing"


def test_a_wrong_product_is_not_remembered(unknown, monkeypatch, tmp_path):
    monkeypatch.setattr(amx_probe, "product_code", lambda: product_by_numpy(np.int8))
    assert amx_probe.refusal.__wrapped__() == "it computes a wrong product"
    monkeypatch.setattr(amx_probe, "product_code", fail)
    assert amx_probe.refusal.__wrapped__().startswith("its check fails: ") and not [*tmp_path.iterdir()]


def test_a_cache_folder_that_cannot_be_written(unknown, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FXQ_CACHE", str(tmp_path / "file" / "folder"))
    monkeypatch.setattr(amx_probe, "product_code", product_by_numpy)
    assert amx_probe.refusal.__wrapped__() == ""


def test_permission(unknown, monkeypatch):
    monkeypatch.setattr(amx_probe, "_ask_permission", lambda: "Linux denies permission: Invalid argument")
    assert amx_probe.refusal.__wrapped__() == "Linux denies permission: Invalid argument"
    monkeypatch.setattr(amx_probe.sys, "platform", "win32")
    assert amx_probe.refusal.__wrapped__() == "it is used on Linux only"


@pytest.mark.skipif(amx_probe.has_amx(), reason="the CPU has AMX")
def test_linux_denies_permission_where_there_is_no_amx():
    assert amx_probe._ask_permission().startswith("Linux denies permission: ")
