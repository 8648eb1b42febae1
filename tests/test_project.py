"""Files of the project that no other test reads: what they name exists, and what they repeat agrees."""

import re
from pathlib import Path

import pytest

from fxq.recipe.recipe_file import tomllib

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.any_cpu

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONSTRAINTS = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8")


def load(path):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def pinned(package):
    return re.search(rf"^{package}==(\S+)$", CONSTRAINTS, re.MULTILINE)[1]


def test_ci_runs_every_python_that_the_classifiers_name():
    matrix = load(".github/workflows/ci.yml")["jobs"]["tests"]["strategy"]["matrix"]
    prefix = "Programming Language :: Python :: 3."
    named = [c.removeprefix(prefix) for c in SETTINGS["project"]["classifiers"] if c.startswith(prefix)]
    assert matrix["python"] == [f"3.{minor}" for minor in named]
    assert SETTINGS["project"]["requires-python"] == f">={matrix['python'][0]}"
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos", "windows"}


def test_the_pinned_torch_is_the_oldest_that_is_supported():
    """CI calls it so: a newer pin needs a job of its own for the oldest."""
    (bounds,) = [d for d in SETTINGS["project"]["dependencies"] if re.match(r"torch\b", d)]
    assert re.match(r"torch>=([\d.]+),", bounds)[1] == ".".join(pinned("torch").split(".")[:2])


def test_ci_calls_scripts_of_the_project():
    jobs = load(".github/workflows/ci.yml")["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if step.get("run", "").startswith("bash ")]
    assert commands == ["bash .ci/run", "bash scripts/test"]
    assert all((ROOT / command.split()[1]).exists() for command in commands)


def test_hooks_use_the_pinned_formatter_and_scripts_that_exist():
    ruff, local = load(".pre-commit-config.yaml")["repos"]
    assert ruff["rev"] == f"v{pinned('ruff')}"
    assert [(ROOT / hook["entry"].split()[1]).exists() for hook in local["hooks"]] == [True]


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_forms_have_what_github_wants(name):
    form = load(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert form["name"] and form["description"]
    fields = form["body"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["type"] == "textarea" and field["attributes"]["label"] for field in fields)


def test_paths_that_contributors_are_told_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"(?<![\w/])((?:fxq|passes|patterns|scripts|tests|\.ci)/[\w./*-]*)", text)
    modules = [name.replace(".", "/") + ".py" for name in re.findall(r"-m (scripts[.\w]+)", text) if "NAME" not in name]
    assert len(paths) > 20 and len(modules) >= 3
    missing = {path for path in (*paths, *modules) if not any(ROOT.glob(path))}
    assert missing == set()


def test_the_glossary_is_short_and_sorted():
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", (ROOT / "scripts" / "docs" / "glossary.md").read_text(), re.MULTILINE)
    terms = [term.casefold() for term, _ in rows[1:]]
    assert terms == sorted(terms) and 30 <= len(terms) <= 50
