"""The folder table: which folders may import which. Reads the imports of every file without importing it."""

import ast
import functools
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import pytest

from tests.support.processes import in_new_python

ROOT = Path(__file__).parents[1]


def _names():
    """Every source file by the name it is imported under, tests by their path."""
    paths = {}
    for folder, package in (("fxq", "fxq"), ("passes", "fxq.passes"), ("patterns", "fxq.patterns")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            paths[".".join(parts).removesuffix(".__init__")] = path
    for folder in ("tests", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            paths[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    return paths


MODULES = _names()
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py" and name.partition(".")[0] == "fxq"}


@dataclass(frozen=True)
class Import:
    """One imported module. `later`: inside a function or for the type checker only, so not at import time."""

    module: str
    line: int
    later: bool


def imports_of(tree, modules):
    """Every import of a file; `from a import b` is an import of `a.b` where that is a module."""
    imports = []

    def visit(node, later):
        if isinstance(node, ast.Import):
            imports.extend(Import(alias.name, node.lineno, later) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                imports.append(Import(inner if inner in modules else node.module, node.lineno, later))
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.iter_child_nodes(node):
            visit(child, later or inside or typing)

    visit(tree, False)
    return imports


@dataclass(frozen=True)
class Source:
    """Imports of one file, the names of its classes, and for a file of fxq each dotted name with its line."""

    imports: list
    classes: list
    dotted: list


def _dotted(node):
    """Dotted name of an attribute, `?` for an object that has no name: much faster than `ast.unparse`."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "?", *reversed(parts)])


@functools.cache
def sources():
    """Source of every module by its name; read by the first test that asks, as every process collects this file."""

    def read(name, path):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [n.name for n in tree.body if isinstance(n, ast.ClassDef)]
        attributes = (n for n in ast.walk(tree) if ours(name) and isinstance(n, ast.Attribute))
        return Source(imports_of(tree, MODULES), classes, [(n.lineno, _dotted(n)) for n in attributes])

    return {name: read(name, path) for name, path in MODULES.items()}


LEVELS = (
    {"errors"},
    {"common"},
    {"display", "quant"},
    {"ops", "checkpoints"},
    {"graph"},
    {"rewriting", "tracing", "runtime", "picture", "onnx"},
    {"backends"},
    {"patterns", "recipe"},
    {"pipeline"},
    {"calibration", "training", "paired"},
    {"ledger", "cost"},
    {"passes", "report", "saved"},
    {"model"},
    {"programs"},
    {"workflow"},
    {"parts"},
    {"tuning", "integrations"},
    {"dispatch"},
    {"api"},
    {"diagnosis"},
    {"extend", "task_metrics", "results"},
    {"public"},
    {"fxq"},
    {"cli"},
)
"""Levels of folders: a folder imports only from levels further up. Folders of one level do not import each other."""

LEVEL = {name: i for i, names in enumerate(LEVELS) for name in names}


def folder(name):
    """The folder or file of fxq that a module belongs to; the folder of a test or script."""
    package, _, rest = name.partition(".")
    return rest.partition(".")[0] or package if package == "fxq" else package


def breaches(allowed):
    """`file:line imports module` for every import of ours that `allowed(importer, imported)` does not allow."""
    return [
        f"{name}:{i.line} imports {i.module}"
        for name, source in sources().items()
        for i in source.imports
        if not allowed(name, i)
    ]


def modules_that_name(prefixes):
    """Modules of fxq with a dotted name that begins so, and the lines where."""
    lines = {n: [line for line, dotted in s.dotted if dotted.startswith(prefixes)] for n, s in sources().items()}
    return {name: at for name, at in lines.items() if at}


def within(module, package):
    return module == package or module.startswith(package + ".")


def ours(module):
    return within(module, "fxq")


@pytest.mark.slow
def test_the_walk_sees_what_is_there():
    assert {"fxq.api", "fxq.ops.layers", "fxq.passes.fuse", "fxq.patterns.fusions.conv", "fxq.backends.x86.x86"} <= set(
        MODULES
    )
    assert "fxq.passes" in {i.module for i in sources()["fxq.workflow.steps"].imports}
    code = "import a\nif TYPE_CHECKING:\n    import b\ndef f():\n    from c import d\nfrom e import g\n"
    assert imports_of(ast.parse(code), {"c.d"}) == [
        Import("a", 1, False),
        Import("b", 3, True),
        Import("c.d", 5, True),
        Import("e", 6, False),
    ]
    assert {folder(name) for name in MODULES if ours(name)} == set(LEVEL)


def test_imports_go_downwards():
    """Also those inside functions and for the type checker."""

    def allowed(name, i):
        below = LEVEL.get(folder(i.module), -1) < LEVEL.get(folder(name), len(LEVELS))
        return not ours(name) or not ours(i.module) or folder(i.module) == folder(name) or below

    assert breaches(allowed) == []


def test_no_circles():
    """Nor inside of a folder."""
    edges = nx.DiGraph()
    for name, source in sources().items():
        if ours(name) and name not in PACKAGES:
            edges.add_edges_from((name, i.module) for i in source.imports if not i.later and i.module in MODULES)
    for package in PACKAGES - {"fxq"}:
        imports = sources()[package].imports
        edges.add_edges_from((package, i.module) for i in imports if not i.later and i.module in MODULES)
    assert list(nx.simple_cycles(edges)) == []


def test_passes_do_not_import_each_other():
    def allowed(name, i):
        return folder(name) != "passes" or name == "fxq.passes" or folder(i.module) != "passes"

    assert breaches(allowed) == []


def test_patterns_do_not_import_each_other():
    def allowed(name, i):
        return folder(name) != "patterns" or name == "fxq.patterns" or folder(i.module) != "patterns"

    assert breaches(allowed) == []


def test_no_two_files_have_one_name():
    names = Counter(path.name for name, path in MODULES.items() if ours(name) and path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_public_classes_have_one_name():
    classes = [name for module, source in sources().items() if ours(module) for name in source.classes]
    names = Counter(name for name in classes if not name.startswith("_"))
    assert [name for name, count in names.items() if count > 1] == []


def test_nothing_is_imported_under_a_second_name():
    """With the root on the path, `import passes` would load every pass twice."""

    def allowed(name, i):
        return not within(i.module, "passes") and not within(i.module, "patterns")

    assert breaches(allowed) == []


def test_torch_ao_is_not_used():
    assert breaches(lambda name, i: folder(name) in ("tests", "scripts") or not within(i.module, "torch.ao")) == []
    assert modules_that_name(("torch.ao", "torch.quantization")) == {}


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
    named = modules_that_name(kernels)
    assert {name: lines for name, lines in named.items() if not within(name, "fxq.backends")} == {}


QUANTIZED = ("quint8", "qint8", "qint32", "quantize_per_", "per_tensor_quantized", "per_channel_quantized", "qengine")


def test_one_module_touches_quantized_dtypes():
    """PyTorch announces their removal: what goes with them is to be in one place."""
    named = {
        name
        for name, source in sources().items()
        for _, dotted in source.dotted
        if any(part in dotted.rpartition(".")[2] for part in QUANTIZED) or dotted.endswith("backends.quantized")
    }
    assert named == {"fxq.backends.packed.quantized_tensors"}
    assert set(modules_that_name("torch.ops.quantized")) == {"fxq.backends.packed.quantized_tensors"}


def test_scripts_use_the_public_api():
    """Exceptions: kernels alone, which no public call reaches, the clock, the pages of ops, scripts for developers."""

    def allowed(name, i):
        if name == "scripts.bench.kernels" and (within(i.module, "fxq.backends") or i.module == "fxq.quant.qparams"):
            return True
        if name == "scripts.bench.few_rows" and (within(i.module, "fxq.backends") or i.module == "fxq.quant.packing"):
            return True
        if name == "scripts.bench.timing" and i.module == "fxq.common.timed_calls":
            return True
        if within(name, "scripts.dev"):
            return True
        if name == "scripts.docs.generated_pages" and within(i.module, "fxq.ops"):
            return True
        return folder(name) != "scripts" or not ours(i.module) or i.module == "fxq"

    assert breaches(allowed) == []


SHARED = ("plain", "table", "loops")


def test_backends_stand_on_their_own():
    """Code that backends share imports none of them, except by name, and they do not import each other."""

    def backend(module):
        parts = module.split(".")
        return parts[2] if within(module, "fxq.backends") and len(parts) > 3 and parts[2] not in SHARED else None

    def allowed(name, i):
        return not within(name, "fxq.backends") or backend(i.module) in (None, backend(name))

    assert breaches(allowed) == []


def test_every_package_is_installed():
    from fxq.recipe.recipe_file import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert set(settings["packages"]) == PACKAGES


def test_every_pass_is_in_a_file_of_its_name():
    from fxq.passes import PASSES

    for step in PASSES:
        assert type(step).__module__ == f"fxq.passes.{step.name.replace('-', '_')}"


@pytest.mark.slow
def test_importing_fxq_calls_nothing_deprecated():
    done = in_new_python(
        "import warnings; warnings.simplefilter('error', DeprecationWarning); import fxq.public", cwd="/"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_fxq_imports_nothing_that_it_may_never_use():
    code = (
        "import sys, torch; before = set(sys.modules); import fxq.public; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}), 'torch._dynamo' in sys.modules)"
    )
    done = in_new_python(code)
    assert done.returncode == 0, done.stderr
    *packages, compiler = done.stdout.split()
    light = {"fxq", "platformdirs", "rich", "safetensors", "tabulate", "tomli", "tomli_w", "wcwidth"}  # all are small
    assert set(packages) - light - set(sys.stdlib_module_names) == set() and compiler == "False"


def test_quantizing_imports_no_compiler():
    """`torch._dynamo` takes as long to import as the rest of PyTorch; kernels for the meta device import it."""
    code = """
import sys, torch, fxq
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.down, self.linear = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Linear(8, 10)
    def forward(self, x):
        y = self.conv(x)
        y += self.down(x)
        return self.linear(nn.functional.adaptive_avg_pool2d(nn.functional.relu(y, inplace=True), 1).flatten(1)).relu()
for optimize in ("speed", "coverage"):
    fxq.quantize(Net().eval(), fxq.Recipe.static(optimize=optimize), data=[torch.rand(4, 3, 8, 8)])
lstm = nn.LSTM(8, 8).eval()
fxq.quantize(lstm, "dynamic", example_inputs=torch.rand(3, 2, 8))
print("torch._dynamo" in sys.modules)
"""
    done = in_new_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "False"


def test_tests_have_the_folders_of_the_code():
    """A file may be split or renamed without its tests moving; a folder may not."""

    def folders(root, pattern, at=""):
        parts = (path.parent.relative_to(root) for path in root.rglob(pattern) if path.name != "__init__.py")
        return {(Path(at) / part).as_posix() for part in parts}

    code = folders(ROOT / "fxq", "*.py") | folders(ROOT / "passes", "*.py", "passes")
    code |= folders(ROOT / "patterns", "*.py", "patterns")
    tests = folders(ROOT / "tests", "test_*.py")
    assert sorted(tests - code) == [], "tests of folders that do not exist"
    assert sorted(code - tests) == [], "folders without tests"
