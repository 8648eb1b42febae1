"""All tests of the loops, in a process for each kind of CPU that this machine plays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.any_cpu, pytest.mark.slow]

emitted = pytest.importorskip("tests.support.emitted", reason="needs Numba", exc_type=ImportError)
KINDS = [kind.name for kind in emitted.PLAYED[1:]]
FOLDER = "tests/backends/loops"


def run_on(kind, *arguments):
    """Run pytest in a process that plays this kind; returns the last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "FXQ_CPU_KIND": kind}
    root = Path(__file__).parents[3]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_loops_on_a_kind(kind):
    run_on(kind, FOLDER)


@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_calls_from_eight_threads_on_a_kind(kind):
    last = run_on(kind, f"{FOLDER}/code/test_thread_pool.py", "-m", "slow", "-k", "eight_callers")
    assert " passed" in last and "skipped" not in last
