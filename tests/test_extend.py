"""The module `fxq.extend`: its names, and the pages that use them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fxq

pytestmark = pytest.mark.any_cpu

DOCS = Path(__file__).parents[1] / "scripts" / "docs"


def test_a_name_that_is_public_twice_is_one_object():
    for name in fxq.extend.__all__:
        value = getattr(fxq.extend, name)
        assert value is getattr(fxq, name, value), name


def test_every_name_is_in_the_reference():
    text = (DOCS / "reference" / "extensions.md").read_text() + (DOCS / "reference" / "recipes.md").read_text()
    text += (DOCS / "reference" / "functions.md").read_text() + (DOCS / "reference" / "results.md").read_text()
    there = set(re.findall(r"^\.\. auto\w+:: fxq\.(?:extend\.)?(\w+)$", text, re.MULTILINE))
    assert set(fxq.extend.__all__) - there == set()


@pytest.mark.slow
def test_it_is_imported_when_it_is_asked_for():
    code = "import sys, fxq; assert 'torch' not in sys.modules; fxq.extend.kernel; from fxq.extend import QTensor"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_documents_import_exported_names_alone():
    """Pages import `fxq` and its public modules; what else they reach for is missing there."""
    deep = re.compile(r"^\s*(?:from|import) fxq\.(?!extend\b|passes\b|integrations import\b)\S+.*$", re.MULTILINE)
    dotted = re.compile(r"\bfxq\.(?:backends|quant|graph|common|rewriting|ops|ledger|pipeline|recipe)\.\w+[\w.]*")
    pages = [*DOCS.rglob("*.md"), DOCS.parents[1] / "README.md"]
    code = {page: "\n".join(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)) for page in pages}
    assert {page.name: [*deep.findall(text), *dotted.findall(text)] for page, text in code.items() if text} == {
        page.name: [] for page, text in code.items() if text
    }
