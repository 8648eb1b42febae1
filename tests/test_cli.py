"""The command line does what the functions do, and says what is wrong in a line."""

import json
import re
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import fxq
from fxq.backends.loops.code import compiler
from fxq.cli import main
from tests.support.processes import in_new_python

pytestmark = pytest.mark.any_cpu

SOURCE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))

model = make()

def batches():
    torch.manual_seed(1)
    return [torch.rand(2, 3, 16, 16) for _ in range(4)]

def broken():
    raise ValueError("not today")

def fewer():
    yield torch.rand(2, 3, 16, 16)
    raise KeyError("image 7")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command in a folder with the module `commanded`."""
    (tmp_path / "commanded.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "commanded", raising=False)
    return lambda *args: CliRunner().invoke(main, list(args))


@pytest.fixture
def recipe(tmp_path):
    fxq.Recipe.static(backend="reference").save(tmp_path / "r.toml")
    return "r.toml"


def quantized(run, recipe, *more):
    result = run("quantize", "commanded:make", "--data", "commanded:batches", "--recipe", recipe, "-o", "m.fxq", *more)
    assert result.exit_code == 0, result.output
    return result


def test_quantize_writes_what_quantize_makes(run, recipe, tmp_path):
    result = quantized(run, recipe, "--report", "r.html")
    assert "3 int8, 0 moves, 0 float, 1 folded" in result.stdout
    assert "<html" in (tmp_path / "r.html").read_text()
    import commanded

    data = commanded.batches()
    own = fxq.quantize(commanded.make().eval(), fxq.Recipe.load(tmp_path / recipe), data=data)
    assert torch.equal(fxq.load(tmp_path / "m.fxq")(data[0]), own(data[0]))


def test_a_module_is_taken_as_it_is_and_weights_are_loaded(run, recipe, tmp_path):
    torch.manual_seed(0)
    weights = {"0.weight": torch.rand(8, 3, 3, 3), "0.bias": torch.rand(8)}
    from commanded import model

    save_file({**model.state_dict(), **weights}, tmp_path / "w.safetensors")
    args = ("--data", "commanded:batches", "--recipe", recipe, "-o", "m.fxq")
    assert run("quantize", "commanded:model", "--weights", "w.safetensors", *args).exit_code == 0
    assert torch.equal(model[0].bias, weights["0.bias"])


def test_what_is_known_of_a_file(run, recipe, tmp_path):
    told = json.loads(quantized(run, recipe, "--json").stdout)
    assert (told["backend"], told["preset"], told["int8_macs"]) == ("reference", "static", 1.0)
    assert [op["precision"] for op in told["layers"]["ops"]] == ["int8", "folded", "int8", "int8"]
    assert json.loads(run("inspect", "m.fxq", "--json").stdout) == told
    assert "100.0% of the multiply-accumulates in int8" in run("inspect", "m.fxq").stdout
    assert {"node", "us"} <= set(json.loads(run("bench", "m.fxq", "--json").stdout)["rows"][0])
    assert run("report", "m.fxq", "page.html").exit_code == 0 and (tmp_path / "page.html").exists()


def test_numbers_that_json_has_not_are_words(run, recipe, tmp_path):
    fxq.Recipe.static(backend="reference").override("*", fxq.FLOAT).without_pass("fold-batch-norm").save(
        tmp_path / recipe
    )
    told = json.loads(quantized(run, recipe, "--json").stdout, parse_constant=pytest.fail)
    assert told["output_sqnr"] == "inf"


def test_the_difference_of_two_files(run, recipe, tmp_path):
    quantized(run, recipe)
    (tmp_path / "m.fxq").rename(tmp_path / "a.fxq")
    fxq.Recipe.static(backend="reference").override("3", fxq.FLOAT).save(tmp_path / recipe)
    quantized(run, recipe)
    assert "The graphs are the same." in run("diff", "a.fxq", "a.fxq").stdout
    same = {"removed": [], "added": [], "rewired": [], "changed": {}}
    assert json.loads(run("diff", "a.fxq", "a.fxq", "--json").stdout) == same
    difference = json.loads(run("diff", "a.fxq", "m.fxq", "--json").stdout)
    assert "_3_q" not in difference["added"] and difference["removed"] and difference != same
    result = run("diff", "a.fxq", "m.fxq", "--svg", "d.svg")
    assert "_3" in result.stdout and (tmp_path / "d.svg").read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("inspect", "commanded.py"), r"^Error: .*commanded\.py"),
        (("inspect", "nothing.fxq"), r"^Error: .*nothing\.fxq"),
        (("inspect", "."), r"^Error: cannot load '\.': it is a folder"),
        (
            ("quantize", "commanded:make", "--data", "commanded:fewer", "-o", "m"),
            r"^Error: KeyError: .?'image 7'.? \(.*commanded\.py:20; for the traceback: fxq --traceback",
        ),
        (("quantize", "make", "--data", "commanded:batches", "-o", "m"), "give the model as package.module:name"),
        (
            ("quantize", "commanded:broken", "--data", "commanded:batches", "-o", "m"),
            "commanded:broken: ValueError: not",
        ),
        (("quantize", "commanded:none", "--data", "commanded:batches", "-o", "m"), "cannot import 'commanded:none'"),
        (("quantize", "commanded:batches", "--data", "commanded:batches", "-o", "m"), "is a list, not an nn.Module"),
        (("quantize", "commanded:make", "--data", "commanded:torch", "-o", "m"), "data"),
        (("quantize", "commanded:make", "--data", "commanded:batches", "--recipe", "statik", "-o", "m"), "statik"),
        (
            ("quantize", "commanded:make", "--data", "commanded:batches", "--weights", "commanded.py", "-o", "m"),
            r"the weights of commanded\.py cannot be loaded",
        ),
    ],
)
def test_what_is_wrong_is_a_line_and_exit_code_1(run, args, says):
    result = run(*args)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert re.search(says, result.stderr), result.stderr
    assert not isinstance(run("--traceback", *args).exception, SystemExit)


def test_wrong_arguments_are_exit_code_2(run):
    assert run("quantize", "commanded:make").exit_code == 2
    assert run("nothing").exit_code == 2
    assert run("inspect", "commanded.py", "--svg").exit_code == 2
    assert run("quantize", "commanded:make", "--data", "commanded:batches", "-o", ".").exit_code == 2


def test_warnings_are_lines(run, recipe, tmp_path):
    fxq.Recipe.static(backend="reference", optimize="coverage").with_min_sqnr(200).save(tmp_path / recipe)
    result = quantized(run, recipe)
    assert result.stderr.startswith("Warning: the output is at ") and "cli.py" not in result.stderr


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["m.onnx", "m.pt2", "m.xml"])
def test_quantize_exports_what_the_suffix_says(run, recipe, tmp_path, name):
    args = ("quantize", "commanded:make", "--data", "commanded:batches", "--recipe", recipe, "-o", f"new/{name}")
    result = run(*args)
    assert result.exit_code == 0, result.output
    import commanded

    data = commanded.batches()
    own = fxq.quantize(commanded.make().eval(), fxq.Recipe.load(tmp_path / recipe), data=data)
    assert own.export(tmp_path / name).read_bytes()[:100] == (tmp_path / "new" / name).read_bytes()[:100]
    result = run("inspect", f"new/{name}")
    assert result.exit_code == 1 and re.search(
        r"it is an? (ONNX|OpenVINO|program).*, but fxq.load reads only", result.stderr
    )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("-o", "m.tflite"), r"m.tflite: unknown suffix '.tflite'.* Known: .fxq, .onnx, .pt2, .xml"),
        (("-o", "commanded.py/m.fxq"), r"cannot write commanded.py/m.fxq: "),
        (("-o", "m.fxq", "--report", "commanded.py/r.html"), r"cannot write commanded.py/r.html: "),
    ],
)
def test_where_to_write_is_looked_at_first(run, tmp_path, more, says):
    """Before the user's code is run: `broken` would raise."""
    result = run("quantize", "commanded:broken", "--data", "commanded:batches", *more)
    assert result.exit_code == 1 and re.search(says, result.stderr), result.stderr
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".pyc"] == ["commanded.py"]


def test_what_an_export_needs_is_looked_at_first(run, monkeypatch):
    monkeypatch.setattr("fxq.cli.find_spec", lambda name: None)
    result = run("quantize", "commanded:broken", "--data", "commanded:batches", "-o", "m.xml")
    assert "openvino is not installed: pip install fxq[openvino]" in result.stderr and result.exit_code == 1


def test_a_model_may_be_an_onnx_file(run, tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"")
    result = run("quantize", "m.onnx", "--data", "commanded:batches", "-o", "m.fxq")
    assert result.exit_code == 1 and "m.onnx: the ONNX model is invalid" in result.stderr
    assert run("quantize", "commanded:make", "--data", "commanded:batches", "-o", "m.onnx").exit_code == 0
    refused = run("quantize", "m.onnx", "--data", "commanded:batches", "-o", "m.fxq")
    assert refused.exit_code == 1 and "the model is quantized already" in refused.stderr
    stored = run("quantize", "m.onnx", "--recipe", "stored", "--data", "commanded:batches", "-o", "m.fxq")
    assert stored.exit_code == 0
    assert fxq.load(tmp_path / "m.fxq").ledger


@pytest.mark.slow
def test_options_in_place_of_the_recipe_s(run, recipe, tmp_path):
    threads = torch.get_num_threads()
    try:
        quantized(run, recipe, "--backend", "auto", "--optimize", "coverage", "--threads", "2")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    loaded = fxq.load(tmp_path / "m.fxq")
    assert (loaded.recipe.backend, loaded.recipe.optimize) == ("auto", "coverage")
    result = run("quantize", "commanded:make", "--data", "commanded:batches", "-o", "m", "--backend", "openvin")
    assert result.exit_code == 1 and "openvin" in result.stderr
    result = run("quantize", "commanded:make", "--data", "commanded:batches", "-o", "m", "--threads", "0")
    assert result.exit_code == 2


def test_help_needs_no_torch():
    code = "import sys\nfrom fxq.cli import main\ntry: main()\nfinally: print(*({'torch', 'numpy'} & set(sys.modules)))"
    for args in (["--help"], ["quantize", "--help"], ["--version"]):
        told = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, cwd="/")
        assert told.returncode == 0 and told.stdout.endswith("\n\n"), told


def test_the_program_is_installed_and_says_its_version():
    told = subprocess.run([sys.executable, "-c", "from fxq.cli import main; main()", "--version"], capture_output=True)
    assert told.returncode == 0 and fxq.__version__ in told.stdout.decode()


@pytest.mark.slow
def test_doctor(run):
    told = json.loads(run("doctor", "--json").stdout)
    assert told["machine"]


def test_doctor_compiles_only(run, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(fxq, "doctor", lambda: pytest.fail("kernels were tried"))
    monkeypatch.setattr(compiler, "MODULES", ("row_loops",))  # other tests compile those that they use
    assert "compiled by Numba" in run("doctor", "--compile").stdout
    monkeypatch.setattr(compiler, "missing", lambda name: "No module named 'numba'")
    assert "pip install fxq[jit]" in run("doctor", "--compile").stderr


@pytest.mark.slow
def test_a_preset_is_known_where_nothing_else_of_fxq_was_imported(tmp_path):
    """The command's own process: presets name passes, which register when `fxq.public` is imported."""
    (tmp_path / "net.py").write_text(SOURCE)
    args = ["quantize", "net:model", "--data", "net:batches", "-o", "net.fxq"]
    done = in_new_python("from fxq.cli import main; main()", *args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "net.fxq").exists()


def test_the_effort_is_an_option(run, recipe):
    quantized(run, recipe, "--effort", "fast")
    assert fxq.load("m.fxq").recipe.optimize == "coverage"
    result = run("quantize", "commanded:make", "--data", "commanded:batches", "-o", "m.fxq", "--effort", "fats")
    assert result.exit_code == 1 and "unknown effort 'fats'" in result.output


PARTS = """
import torch
from torch import nn

class Looping(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x):
        for _ in range(3):
            x = self.inner(x)
            if float(x.sum()) > 1e6:
                break
        return x

def make():
    torch.manual_seed(0)
    return Looping()

def batches():
    return [torch.randn(4, 8) for _ in range(2)]
"""


@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")
def test_a_file_of_parts(run, recipe, tmp_path):
    (tmp_path / "looping.py").write_text(PARTS)
    args = ("--data", "looping:batches", "--recipe", recipe, "-o", "p.fxq")
    assert run("quantize", "looping:make", *args).exit_code == 0
    assert "pass the float model" in run("inspect", "p.fxq").stderr
    told = json.loads(run("inspect", "p.fxq", "--into", "looping:make", "--json").stdout)
    assert [op["op"] for op in told["layers"]["ops"]] == ["linear", "relu", "linear", "python"]
    assert list(json.loads(run("bench", "p.fxq", "--into", "looping:make", "--json").stdout)) == ["inner"]
    assert run("report", "p.fxq", "page.html", "--into", "looping:make").exit_code == 0
    assert "a model in parts runs Python code" in run("export", "p.fxq", "p.onnx", "--into", "looping:make").stderr


def test_a_folder_of_transformers(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    qmodel = fxq.quantize(transformers.LlamaForCausalLM(config).eval(), "weight_only")
    qmodel.save_pretrained(tmp_path / "llama")
    qmodel.programs.save(tmp_path / "programs.fxq")
    names = list(qmodel.programs.programs)
    for model in ("llama", "programs.fxq"):
        told = json.loads(run("inspect", model, "--json", "--import", "transformers").stdout)
        facts = [told[name] for name in names] if len(names) > 1 else [told[names[0]]]
        assert all(fact["layers"]["ops"] and fact["preset"] == "weight_only" for fact in facts)
        assert "weight-only" in run("inspect", model).stdout
        assert set(json.loads(run("bench", model, "--json").stdout)) == set(names)
    assert len(run("report", "llama", "page.html").stdout.split()) == len(names) == len(list(tmp_path.glob("*.html")))
    assert "no module named" in run("inspect", "programs.fxq", "--import", "missing_module").stderr.lower()
