"""All tests of the loops, in a process for each kind of CPU that this machine plays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.any_cpu, pytest.mark.slow]

emitted = pytest.importorskip("tests.support.emitted", reason="needs Numba", exc_type=ImportError)


@pytest.mark.parametrize("kind", [kind.name for kind in emitted.PLAYED[1:]])
def test_loops_on_a_kind(kind):
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/backends/loops"]
    environment = {**os.environ, "FXQ_CPU_KIND": kind}
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
