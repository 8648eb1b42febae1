"""The documentation is true: its code runs, and every public name is in the reference."""

import importlib
import linecache
import re
import shlex
import sys
import types
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import fxq
from fxq import diagnosis
from fxq.cli import main
from tests.support.processes import apart

pytestmark = pytest.mark.any_cpu

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "scripts" / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page):
    """The language, the first line's number and the text of each code block."""
    text = page.read_text()
    for block in BLOCK.finditer(text):
        yield block[1], text[: block.start()].count("\n") + 2, block[2]


def named(page):
    return str(page.relative_to(ROOT))


def run(page, folder):
    """Python in one module; a block that begins with a file's name is that file; lines of a console are commands."""
    torch.manual_seed(0)
    module = sys.modules["page_of_fxq"] = types.ModuleType("page_of_fxq")
    for language, line, text in blocks(page):
        if language == "console":
            for command in re.findall(r"^\$ fxq (.*)$", text, re.MULTILINE):
                result = CliRunner().invoke(main, shlex.split(command))
                assert result.exit_code == 0, f"{command}: {result.output}"
        name = re.match(r"# (\w+)\.py\n", text)
        if language == "python" and name:
            (folder / f"{name[1]}.py").write_text(text)
            importlib.invalidate_caches()
        elif language == "python":
            place = f"{page}, block at line {line}"
            linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
            exec(compile(text, place, "exec"), vars(module))


def pages_with_code():
    """Pages whose features other tests try at length are slow."""
    for page in PAGES:
        if "```" in page.read_text():
            slow = page.stem in ("transformers", "parts", "production", "accuracy", "serving", "engines")
            yield pytest.param(page, id=named(page), marks=[pytest.mark.slow] if slow else [])


@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")
@pytest.mark.parametrize("page", pages_with_code())
def test_the_code_of_a_page_runs_from_top_to_end(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(diagnosis, "PROBES", diagnosis.PROBES[:2])  # tests/test_diagnosis.py tries all
    if page.stem.startswith("own-"):  # these pages register ops, fusions and backends
        apart(lambda: run(page, tmp_path))
    else:
        run(page, tmp_path)


def test_there_is_code():
    assert sum(language == "python" for page in PAGES for language, _, _ in blocks(page)) > 40


def test_every_public_name_is_in_the_reference():
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    there = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)$", text, re.MULTILINE))
    wanted = {f"fxq.{name}" for name in fxq.__all__ if name not in ("extend", "results", "task_metrics")}
    wanted |= {f"fxq.extend.{name}" for name in fxq.extend.__all__ if name not in fxq.__all__}
    wanted |= {f"fxq.results.{name}" for name in fxq.results.__all__}
    wanted |= {f"fxq.task_metrics.{name}" for name in fxq.task_metrics.__all__}
    wanted |= {f"fxq.passes.{name}" for name in fxq.passes.__all__ if not name.isupper() and "_" not in name}
    assert wanted - there - {"fxq.passes.PASSES", "fxq.passes.TRAINING_PASSES"} == set()
    assert all(name.startswith("fxq.") for name in there)


def test_every_command_is_in_the_reference():
    text = (DOCS / "reference" / "command-line.md").read_text()
    assert {name for name in main.commands if f"fxq {name}" not in text} == set()


def test_every_pass_of_a_preset_is_told_of_in_its_stage():
    text = (DOCS / "how-it-works.md").read_text()
    assert {step.name for step in fxq.passes.PASSES if step.name not in text} == set()


def test_links_lead_to_pages():
    generated = {"passes/index.md", "reference/ops.md", "CONTRIBUTING.md", "CHANGELOG.md"}  # by scripts/docs/build
    for page in DOCS.rglob("*.md"):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            place = (page.parent / link).resolve()
            assert place.exists() or str(place.relative_to(DOCS)) in generated, f"{page}: {link}"
