"""Where compiled loops are kept: in the folder of FXQ_CACHE, which may be read-only; else it is said."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

READ_ONLY = """
import numba.core.caching as caching
def refuse(self):
    raise PermissionError("read-only file system")
caching._CacheLocator.ensure_cache_path = refuse
"""
COMPILE = """
from fxq.backends.loops.code import compiler
@compiler.compiled("i64* i")
def store(x, value):
    x[0] = value
@compiler.compiled("i64* i i")
def add(x, a, b):
    x[0] = a + b
import torch
x = torch.zeros(1, dtype=torch.int64)
add(x.data_ptr(), 3, 4)
print(int(x), store.keeps.cache_hits, add.keeps.cache_hits)
"""


@pytest.fixture
def run(tmp_path):
    """Runs code in a process of its own, from a file: Numba caches by file."""

    def run(code, cache, read_only=False):
        file = tmp_path / "loops.py"
        file.write_text(code)
        start = (READ_ONLY if read_only else "") + f"import runpy\nrunpy.run_path({str(file)!r})\n"
        env = {**os.environ, "FXQ_CACHE": str(cache)}
        return subprocess.run([sys.executable, "-c", start], env=env, capture_output=True, text=True, check=True)

    return run


def test_loops_are_kept_in_the_folder_that_fxq_cache_names_and_read_where_it_is_read_only(run, tmp_path):
    assert run(COMPILE, tmp_path / "cache").stdout.split() == ["7", "0", "0"]
    assert list((tmp_path / "cache" / "numba").rglob("*.nbc"))
    built = run(COMPILE, tmp_path / "cache", read_only=True)
    assert (built.stdout.split(), built.stderr) == (["7", "1", "1"], "")


def test_what_cannot_be_kept_is_said_once_with_the_remedy(run, tmp_path):
    done = run(COMPILE, tmp_path / "none", read_only=True)
    assert done.stdout.split() == ["7", "0", "0"]
    assert done.stderr.count("cannot cache them") == 1
    assert "fxq doctor --compile" in done.stderr and "FXQ_CACHE" in done.stderr
