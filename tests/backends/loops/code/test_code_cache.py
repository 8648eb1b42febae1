"""The cache of machine code, in folders that may be read-only, beside the user's own use of Numba."""

import ctypes
import tempfile

import pytest

numba = pytest.importorskip("numba")
caching = pytest.importorskip("numba.core.caching")
ccallback = pytest.importorskip("numba.core.ccallback")

from fxq.backends.loops.code.code_cache import compile_cached  # noqa: E402


def numbas_own():
    locator, cache = caching._CacheLocator, caching.FunctionCache
    return locator.ensure_cache_path, cache.save_overload, cache._impl_class, numba.config.CACHE_DIR


@pytest.fixture
def seen(monkeypatch):
    """Record Numba's classes and settings each time that fxq compiles."""
    states, compile_ = [], ccallback.CFunc.compile

    def watched(self):
        states.append(numbas_own())
        compile_(self)

    monkeypatch.setattr(ccallback.CFunc, "compile", watched)
    return states


def compiled(factor):
    def scale(values):
        numba.carray(values, 1)[0] = factor

    signature = numba.types.void(numba.types.CPointer(numba.types.float32))
    loop, is_cached = compile_cached(signature, scale, {"error_model": "numpy"})
    value = ctypes.c_float(0)
    loop.ctypes(ctypes.byref(value))
    assert value.value == factor
    return loop, is_cached


def no_file(*args, **kwargs):
    raise OSError("read-only file system")


def test_a_folder_that_is_chosen_is_read_when_it_cannot_be_written(monkeypatch, tmp_path, seen):
    """Numba's classes were replaced meanwhile, for all threads: those of the user lost what they compiled, too."""
    before = numbas_own()
    monkeypatch.setenv("FXQ_CACHE", str(tmp_path))
    loop, is_cached = compiled(3.0)
    assert is_cached and not loop.cache_hits
    assert list(tmp_path.glob("numba/*/*.nbc"))
    monkeypatch.setattr(tempfile, "TemporaryFile", no_file)
    files = sorted(tmp_path.rglob("*"))
    loop, is_cached = compiled(3.0)
    assert is_cached and loop.cache_hits
    loop, is_cached = compiled(4.0)
    assert not is_cached and not loop.cache_hits
    assert sorted(tmp_path.rglob("*")) == files
    assert len(seen) == 3 and set(seen) == {before} and numbas_own() == before


def test_where_numba_has_no_cache_it_compiles(monkeypatch):
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert compiled(5.0)[1] is False
