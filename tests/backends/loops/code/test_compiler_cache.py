"""Where compiled loops are kept: in the folder of FXQ_CACHE, which may be read-only; else it is said."""

import re
from pathlib import Path

import pytest

from fxq.backends.loops.code import compiler
from tests.support.processes import in_new_python

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
        done = in_new_python(start, FXQ_CACHE=str(cache))
        assert done.returncode == 0, done.stderr
        return done

    return run


@pytest.mark.slow
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


AFTER = """
import warnings, torch, fxq
from torch import nn
from fxq.backends.loops.code import code_cache, compiler
warnings.simplefilter("ignore")
loops, compile_cached = [], code_cache.compile_cached
def recorded(*args):
    loop, is_cached = compile_cached(*args)
    loops.append(loop.cache_hits)
    return loop, is_cached
compiler.compile_cached = recorded
torch.set_num_threads(2)  # and the pool of threads
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.Linear(32, 10)).eval()
x = torch.rand(4, 3, 8, 8)
fxq.quantize(net, fxq.Recipe.static(backend="jit", optimize="coverage"), data=[x], progress=False)(x)
for recipe in (fxq.Recipe.dynamic(optimize="coverage"), fxq.Recipe.weight_only(bits=4)):
    fxq.quantize(nn.Linear(64, 64).eval(), recipe, example_inputs=torch.rand(1, 64), progress=False)(torch.rand(1, 64))
fxq.quantize(nn.LSTM(64, 64).eval(), "dynamic", example_inputs=torch.rand(3, 1, 64), progress=False)
print(len(loops), set(loops))
"""


def test_doctor_compiles_every_module_with_compiled_functions():
    folder = Path(compiler.__file__).parent
    own = {path.stem for path in folder.glob("*.py") if re.search(r'\bcompiled\("', path.read_text())}
    assert own == set(compiler.MODULES)


@pytest.mark.slow
def test_after_doctor_compile_nothing_is_compiled():
    """Of all that loads loops: programs, their threads, dynamic and recurrent layers, weights alone."""
    doctor = "from fxq.cli import main; main()"
    assert in_new_python(doctor, "doctor", "--compile").returncode == 0
    count, hits = in_new_python(AFTER).stdout.split()
    assert int(count) > 3 and hits == "{1}"
