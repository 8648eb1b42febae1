"""The scripts that a person runs: the demo writes what it says, the benchmarks measure what they name."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
PASSES = ("trace", "canonicalize", "fuse", "insert-observers", "insert-qdq", "lower", "cleanup")


def run(script, *arguments):
    """What the script prints."""
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def column(text, first, index):
    """The number in column `index` of the table row that starts with `first`."""
    (row,) = [line for line in text.splitlines() if line.strip("│ ").startswith(first)]
    return float(row.strip("│ ").split("│")[index].split()[0])


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    return run("demo.py", "--quick", "--out", out), out


@pytest.mark.slow
@pytest.mark.parametrize("network", ["fsrcnn", "digits"])
def test_demo_draws_every_pass_and_every_step(demo, network):
    _, out = demo
    names = sorted(p.stem for p in (out / network).glob("[0-9][0-9]-*"))
    drawn = [name.partition("-")[2] for name in names if not name.endswith(".diff")]
    changed = [name.partition("-")[2].removesuffix(".diff") for name in names if name.endswith(".diff")]
    assert set(PASSES) <= set(drawn)
    assert changed == drawn[1:]
    assert all(p.stat().st_size > 500 for p in (out / network).iterdir())


@pytest.mark.slow
def test_demo_reports_quality_within_the_promised_bounds(demo):
    text, _ = demo
    assert column(text, "mean", 4) <= 0.15
    assert column(text, "450", 3) <= 0.5


@pytest.mark.slow
def test_demo_compares_pictures_and_says_where(demo):
    from PIL import Image

    text, out = demo
    assert str(out) in text.replace("\n", "")
    with Image.open(out / "fsrcnn" / "super-resolution.png") as picture:
        assert picture.width > 3 * picture.height  # four pictures side by side


@pytest.mark.slow
def test_demo_without_dot_writes_text(tmp_path):
    start = "import shutil, demo; shutil.which = lambda name: None; demo.main()"
    command = [sys.executable, "-c", start, "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=SCRIPTS)
    assert done.returncode == 0, done.stderr
    assert "not installed" in done.stdout
    assert list(tmp_path.glob("digits/*.diff.dot"))
    assert not list(tmp_path.glob("digits/*.svg"))


@pytest.mark.slow
def test_bench_writes_numbers_with_their_targets(tmp_path):
    text = run("bench.py", "--only", "digits", "--seconds", "0.1", "--json", tmp_path / "numbers.json")
    data = json.loads((tmp_path / "numbers.json").read_text())
    loss = next(n for n in data["numbers"] if n["what"].startswith("accuracy"))
    assert loss["most"] == 0.5
    assert loss["passed"] is True
    assert "targets met" in text


@pytest.mark.slow
def test_bench_passes_has_a_row_for_every_pass():
    text = run("bench_passes.py", "--network", "residual", "--sizes", "50", "100", "--rounds", "1")
    rows = [line.split()[0] for line in text.splitlines() if line]
    assert {*PASSES, "matching", "all"} <= set(rows)


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda p: p.stem)
def test_scripts_use_the_public_api_only(script):
    """A script shows what a user can write: `import fxq`, nothing below it."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("fxq.") for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] != "fxq"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fxq":
            import fxq

            assert node.attr in {*fxq.__all__, "__version__"}
