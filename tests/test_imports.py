"""The folder table: who may import whom. Walks the imports of every file; nothing is imported for it."""

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]


def _names():
    """Every source file by the name it is imported under, tests by their path."""
    found = {}
    for folder, package in (("fxq", "fxq"), ("passes", "fxq.passes"), ("patterns", "fxq.patterns")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    for folder in ("tests", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    return found


MODULES = _names()
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}


@dataclass(frozen=True)
class Import:
    """One imported module. `later`: inside a function or for the type checker only, so not at import time."""

    module: str
    line: int
    later: bool


def imports_of(tree, known):
    """Every import of a file; `from a import b` is an import of `a.b` where that is a module."""
    found = []

    def visit(node, later):
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, later) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.append(Import(inner if inner in known else node.module, node.lineno, later))
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.iter_child_nodes(node):
            visit(child, later or inside or typing)

    visit(tree, False)
    return found


TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
IMPORTS = {name: imports_of(tree, MODULES) for name, tree in TREES.items()}


def folder(name):
    """The row of the table that a module belongs to."""
    for prefix, row in (("fxq.passes", "passes"), ("fxq.patterns", "patterns"), ("fxq", "engine")):
        if name == prefix or name.startswith(prefix + "."):
            return row
    return name.partition(".")[0]


def breaches(allowed):
    """`file:line imports module` for every import of ours that `allowed(importer, imported)` does not allow."""
    return [
        f"{name}:{i.line} imports {i.module}" for name, found in IMPORTS.items() for i in found if not allowed(name, i)
    ]


def within(module, package):
    return module == package or module.startswith(package + ".")


def test_the_walk_sees_what_is_there():
    assert {"fxq.api", "fxq.ops.layers", "fxq.passes.fuse", "fxq.patterns.conv", "fxq.backends.x86"} <= set(MODULES)
    assert "fxq.passes" in {i.module for i in IMPORTS["fxq.api"]}
    code = "import a\nif TYPE_CHECKING:\n    import b\ndef f():\n    from c import d\nfrom e import g\n"
    assert imports_of(ast.parse(code), {"c.d"}) == [
        Import("a", 1, False),
        Import("b", 3, True),
        Import("c.d", 5, True),
        Import("e", 6, False),
    ]


def test_only_the_api_imports_passes_and_patterns():
    def allowed(name, i):
        return folder(name) != "engine" or folder(i.module) == "engine" or name in ("fxq", "fxq.api") or not ours(i)

    assert breaches(allowed) == []


def ours(i):
    return within(i.module, "fxq")


def test_patterns_import_the_engine_only():
    def allowed(name, i):
        inside_package = name == "fxq.patterns" and within(i.module, "fxq.patterns")
        return (
            folder(name) != "patterns"
            or not ours(i)
            or inside_package
            or (folder(i.module) == "engine" and i.module not in ("fxq", "fxq.api"))
        )

    assert breaches(allowed) == []


def test_passes_import_the_engine_and_patterns_never_each_other():
    def allowed(name, i):
        if folder(name) != "passes" or not ours(i) or name == "fxq.passes":
            return True
        return folder(i.module) in ("engine", "patterns") and i.module not in ("fxq", "fxq.api")

    assert breaches(allowed) == []


def test_the_engine_does_not_import_itself_from_the_top():
    """`import fxq` inside the engine would be an import of everything, upwards."""

    def allowed(name, i):
        return folder(name) not in ("engine", "passes", "patterns") or i.module != "fxq"

    assert breaches(allowed) == []


def test_imports_go_downwards():
    """No cycle among what is imported at import time, and a package counts as importing what is in it."""
    edges = nx.DiGraph()
    for name, found in IMPORTS.items():
        if name not in PACKAGES and folder(name) in ("engine", "passes", "patterns"):
            edges.add_edges_from((name, i.module) for i in found if not i.later and i.module in MODULES)
    for package in PACKAGES - {"fxq"}:
        edges.add_edges_from((package, i.module) for i in IMPORTS[package] if not i.later and i.module in MODULES)
    assert list(nx.simple_cycles(edges)) == []


def test_nothing_is_imported_under_a_second_name():
    """With the root on the path, `import passes` would load every pass twice."""

    def allowed(name, i):
        return not within(i.module, "passes") and not within(i.module, "patterns")

    assert breaches(allowed) == []


def test_torch_ao_is_not_used():
    assert breaches(lambda name, i: folder(name) in ("tests", "scripts") or not within(i.module, "torch.ao")) == []
    dotted = {
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        if folder(name) not in ("tests", "scripts")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("torch.ao", "torch.quantization"))
    }
    assert dotted == set()


KERNELS = (
    "torch.ops.onednn",
    "torch.ops.quantized",
    "torch.ops.mkldnn",
    "torch.quantize_per",
    "torch.quint8",
    "torch.qint8",
)


@pytest.mark.parametrize("kernels", KERNELS)
def test_only_backends_name_kernels(kernels):
    named = {
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        if within(name, "fxq") and not within(name, "fxq.backends")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(kernels)
    }
    assert named == set()


QUANTIZED = ("quint8", "qint8", "qint32", "quantize_per_", "per_tensor_quantized", "per_channel_quantized", "qengine")


def test_one_module_touches_quantized_dtypes():
    """PyTorch announces their removal: what goes with them is to be in one place."""
    named = {
        name
        for name, tree in TREES.items()
        if within(name, "fxq")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (any(part in node.attr for part in QUANTIZED) or ast.unparse(node).endswith("backends.quantized"))
    }
    assert named == {"fxq.backends.packed"}
    kernels = {
        (name, node.attr)
        for name, tree in TREES.items()
        if within(name, "fxq")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.ops.quantized.")
    }
    assert kernels == {("fxq.backends.pool", "max_pool2d")}  # on plain uint8


def test_scripts_use_the_public_api():
    def allowed(name, i):
        return folder(name) != "scripts" or not ours(i) or i.module == "fxq"

    assert breaches(allowed) == []


def test_backends_stand_on_their_own():
    """A backend imports the engine and what backends share, never another backend."""

    def allowed(name, i):
        if not name.startswith("fxq.backends.") or not within(i.module, "fxq.backends"):
            return True
        family = name.rpartition(".")[2].partition("_")[0]
        other = i.module.rpartition(".")[2].partition("_")[0]
        shared = (
            "arithmetic", "base", "cpu", "convert", "elementwise", "form", "kernel",
            "lowering", "packed", "pool", "rows", "table", "whole",
        )  # fmt: skip
        return i.module == "fxq.backends" or other in (family, *shared)

    assert breaches(allowed) == []


def test_every_package_is_installed():
    from fxq.recipe import tomllib  # tomli before Python 3.11

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert set(settings["packages"]) == PACKAGES


def test_every_pass_is_in_a_file_of_its_name():
    from fxq.passes import STATIC

    for step in STATIC:
        assert type(step).__module__ == f"fxq.passes.{step.name.replace('-', '_')}"


def test_importing_fxq_calls_nothing_deprecated():
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", "import fxq"], cwd="/", capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
