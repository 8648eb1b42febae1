"""The public names: all there, whichever is asked for first, and imported only when one is."""

import subprocess
import sys

import pytest

import fxq
from fxq import public
from tests.support.processes import in_new_python

pytestmark = pytest.mark.any_cpu


def run(code):
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_every_public_name_is_one_of_the_package():
    assert len(set(public.__all__)) == len(public.__all__) > 30
    assert all(getattr(fxq, name) is getattr(public, name) for name in fxq.__all__) and fxq.__all__ is public.__all__
    with pytest.raises(AttributeError, match="module 'fxq' has no attribute 'nothing'"):
        _ = fxq.nothing


def test_importing_fxq_imports_torch_when_it_is_used():
    assert run(
        "import sys, fxq; print('torch' in sys.modules, fxq.__version__); fxq.FLOAT; print('torch' in sys.modules)"
    ) == ["False", fxq.__version__, "True"]


FIRST = (
    "import fxq.diagnosis",
    "from fxq.ops import OPS",
    "from fxq.model import QuantizedModel",
    "from fxq import *",
    "import fxq; hasattr(fxq, 'nothing'); hasattr(fxq, '__wrapped__')",
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("first", FIRST)
def test_whatever_is_imported_first(first):
    kinds = "import fxq; print(*(type(value).__name__ for value in (fxq.doctor, fxq.cost_cache, fxq.backends)))"
    done = in_new_python(f"import sys; assert 'fxq' not in sys.modules; {first}; {kinds}", cwd="/")
    assert done.stdout.split() == ["function", "module", "module"], done.stderr
