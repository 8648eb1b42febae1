"""The scripts that a person runs: the demo writes what it says, the benchmarks measure what they name."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.networks import mobile, resnet
from scripts.networks.realistic import realistic
from tests.support.machine import needs_x86

pytestmark = pytest.mark.any_cpu

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
PASSES = ("trace", "canonicalize", "fuse", "insert-observers", "insert-qdq", "lower", "cleanup")


def run(script, *arguments):
    """Output that the script prints."""
    command = [sys.executable, "-m", f"scripts.{script}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def column(text, first, index):
    """The number in column `index` of the table row that starts with `first`."""
    (row,) = [line for line in text.splitlines() if line.strip("│ ").startswith(first)]
    return float(row.strip("│ ").split("│")[index].split()[0])


@pytest.mark.slow
def test_demo_of_calibration_finds_the_same_scales_in_any_number_of_processes():
    text = run("demo.calibration", "--size", 32, "--batches", 5, "--processes", 2, 3)
    rows = [line.split() for line in text.splitlines() if line.endswith("bit for bit")]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert "64 machines, on paper: " in text


@pytest.mark.slow
def test_demo_of_training_has_a_row_for_every_kind_of_integers(tmp_path):
    text = run("demo.qat", "--only", "digits", "--seeds", 1, "--quick", "--folder", tmp_path)
    rows = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")}
    kinds = {"int8 trained", "W4A8 trained", "W4A4 trained", "W4A8 after training, adaround", "float"}
    assert kinds <= rows
    assert {"digits.svg", "digits.json", "digits_W4A4_seed0.html"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
def test_benchmark_of_training_has_all_contenders():
    text = run("bench.qat", "--only", "fsrcnn", "--seconds", 0.1)
    assert [line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| fsrcnn")] == [
        "float",
        "fxq",
        "fxq, ranges frozen",
        "fxq, learned scales",
        "torch.ao",
    ]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    return run("demo.quickstart", "--quick", "--out", out), out


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
def test_demo_shows_how_a_bias_becomes_an_integer(demo):
    text, _ = demo
    if "the layer runs in float here" in text:
        pytest.skip("on this machine float is faster")
    bias, step = column(text, "float bias b", 1), column(text, "a step of the accumulator", 1)
    assert step == pytest.approx(column(text, "scale of the input", 1) * column(text, "scale of the weight", 1), 1e-4)
    assert column(text, "integer bias", 1) == pytest.approx(bias / step, abs=0.6)
    assert column(text, "what that stands for", 1) == pytest.approx(bias, abs=step)


@pytest.mark.slow
def test_demo_compares_pictures_and_says_where(demo):
    from PIL import Image

    text, out = demo
    assert str(out) in text.replace("\n", "")
    with Image.open(out / "fsrcnn" / "super-resolution.png") as picture:
        assert picture.width > 3 * picture.height  # four pictures side by side


@pytest.mark.slow
@pytest.mark.parametrize("network", ["fsrcnn", "digits"])
def test_demo_writes_a_report_and_says_so(demo, network):
    text, out = demo
    assert "<network>/report.html" in text
    assert '"kind":"model"' in (out / network / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_demo_without_dot_writes_text(tmp_path):
    start = "import shutil; from scripts.demo import quickstart; shutil.which = lambda name: None; quickstart.main()"
    command = [sys.executable, "-c", start, "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "not installed" in done.stdout
    assert list(tmp_path.glob("digits/*.diff.dot"))
    assert not list(tmp_path.glob("digits/*.svg"))


@pytest.mark.slow
def test_bench_writes_numbers_with_their_targets(tmp_path):
    text = run("bench.networks", "--only", "digits", "--seconds", "0.1", "--json", tmp_path / "numbers.json")
    data = json.loads((tmp_path / "numbers.json").read_text())
    loss = next(n for n in data["numbers"] if n["what"].startswith("accuracy"))
    assert loss["most"] == 0.5
    assert loss["passed"] is True
    assert "targets met" in text


@pytest.mark.slow
def test_bench_compares_with_torch_ao_where_it_is_right(tmp_path):
    names = ("--network", "resnet18", "--network", "fsrcnn")
    run("bench.networks", "--only", "torch-ao", *names, "--seconds", "0.1", "--json", tmp_path / "numbers.json")
    numbers = json.loads((tmp_path / "numbers.json").read_text())["numbers"]
    by_subject = {(n["subject"], n["what"]): n for n in numbers}
    against = "times faster than torch.ao"
    assert by_subject["resnet18", against]["detail"] in torch.backends.quantized.supported_engines
    assert by_subject["geometric mean", against]["detail"] == "resnet18"
    assert ("fsrcnn", against) not in by_subject  # PReLU comes out wrong on every engine
    assert by_subject["fsrcnn", "torch.ao onednn, ms"]["value"] is None
    assert by_subject["fsrcnn", "torch.ao onednn, ms"]["detail"].startswith("fails")
    assert by_subject["fsrcnn", "torch.ao x86, ms"]["detail"].endswith("wrong")


@pytest.mark.slow
def test_bench_report_measures_the_file_and_what_it_costs():
    command = [sys.executable, "-m", "scripts.bench.report", "--network", "resnet18"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode in (0, 1), done.stderr  # 1: a target is missed, as on a busy machine
    for row in ("history, % of quantize", "history and evidence, %", "time to write, s", "file, MB"):
        assert re.search(rf"resnet18 +{row} +\d+\.\d+", done.stdout), row
    assert "targets missed" in done.stdout


@pytest.mark.slow
def test_bench_passes_has_a_row_for_every_pass():
    text = run("bench.passes", "--network", "residual", "--sizes", "50", "100", "--rounds", "1")
    rows = [line.split()[0] for line in text.splitlines() if line]
    assert {*PASSES, "matching", "all"} <= set(rows)


@pytest.mark.slow
@needs_x86
def test_bench_kernels_has_a_row_for_every_other_way():
    rows = run("bench.kernels", "--only", "add", "--only", "linear", "--seconds", "0.01").splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["add"] * 8 + ["linear"] * 3
    assert all(float(row.split()[-1]) > 0 for row in rows)


@pytest.mark.slow
def test_bench_few_rows_has_a_row_for_every_form_of_weight():
    options = ("--layers", "1", "--outputs", "64", "--columns", "128", "--seconds", "0.01")
    rows = run("bench.few_rows", *options).splitlines()[-16:]
    names = ["int8", *["int4"] * 4, "int2", "int3", "int6"]
    assert [row.split()[0] for row in rows] == [name for name in names for _ in range(2)]
    assert all(row.split()[-2].endswith("%") and float(row.split()[-1]) > 0 for row in rows)


@pytest.mark.slow
def test_bench_quantize_time_counts_passes():
    (row,) = run("bench.quantize_time", "--samples", "4", "--sizes", "32").splitlines()[2:]
    least, cold, first, again, passes = map(float, row.split()[-5:])
    assert 0 < least < again < min(cold, first) and passes > 1


INTERNAL = (
    "bench/few_rows.py",
    "bench/kernels.py",
    "bench/timing.py",
    "docs/generated_pages.py",
)
PUBLIC = [
    path
    for path in sorted(SCRIPTS.rglob("*.py"))
    if path.relative_to(SCRIPTS).as_posix() not in INTERNAL and path.parent.name != "dev"
]
"""All scripts but those that measure single kernels or describe ops, the clock, and those for developers of fxq."""


@pytest.mark.parametrize("script", PUBLIC, ids=lambda p: p.relative_to(SCRIPTS).as_posix())
def test_scripts_use_the_public_api_only(script):
    """A script shows what a user can write: `import fxq`, nothing below it."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("fxq.") for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] != "fxq"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fxq":
            import fxq

            assert node.attr in {*fxq.__all__, "__version__", "passes"}


def test_torch_ao_is_imported_by_the_comparisons_only():
    imports = re.compile(r"(from|import) torch\.(ao|quantization)")
    users = {p.relative_to(SCRIPTS).as_posix() for p in SCRIPTS.rglob("*.py") if imports.search(p.read_text())}
    assert users == {
        "bench/decode_contenders.py", "bench/qat.py", "bench/rivals.py", "bench/torch_ao.py", "coverage/others.py"
    }  # fmt: skip


# as published with torchvision's checkpoints; InsightFace's r18 has 24.03 M
PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "mobilenet_v2": 3_504_872,
    "mobilenet_v3_large": 5_483_032,
    "efficientnet_b0": 5_288_548,
    "iresnet18": 24_025_600,
}
# the names of a few entries of those checkpoints, with their shapes
ENTRIES = {
    "resnet18": {"layer2.0.downsample.1.running_var": (128,), "fc.weight": (1000, 512)},
    "resnet50": {"layer4.2.conv3.weight": (2048, 512, 1, 1), "layer1.0.downsample.0.weight": (256, 64, 1, 1)},
    "mobilenet_v2": {"features.1.conv.1.weight": (16, 32, 1, 1), "features.18.0.weight": (1280, 320, 1, 1)},
    "mobilenet_v3_large": {
        "features.4.block.2.fc1.weight": (24, 72, 1, 1),
        "features.1.block.1.1.running_mean": (16,),
        "features.16.0.weight": (960, 160, 1, 1),
        "classifier.3.bias": (1000,),
    },
    "efficientnet_b0": {
        "features.1.0.block.1.fc2.weight": (32, 8, 1, 1),
        "features.6.3.block.3.0.weight": (192, 1152, 1, 1),
        "classifier.1.weight": (1000, 1280),
    },
    "iresnet18": {"layer1.0.prelu.weight": (64,), "fc.weight": (512, 25088), "features.running_mean": (512,)},
}


@pytest.fixture
def networks():
    """The functions of the scripts that make a network, by name."""
    return {name: getattr(m, name) for m in (mobile, resnet) for name in PARAMETERS if hasattr(m, name)}


@pytest.mark.parametrize("name", PARAMETERS)
def test_networks_fit_the_published_checkpoints(networks, name):
    model = networks[name]().eval()
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert {key: shapes.get(key) for key in ENTRIES[name]} == ENTRIES[name]
    side, outputs = (112, 512) if name == "iresnet18" else (224, 1000)
    with torch.no_grad():
        assert model(torch.rand(1, 3, side, side)).shape == (1, outputs)


@pytest.mark.slow
def test_realistic_settles_every_batch_norm(networks):
    """Without it a random network's activations fade; with it the running statistics are those of the data."""
    torch.manual_seed(0)
    model = realistic(networks["iresnet18"](), (1, 3, 112, 112), batches=2)
    assert not model.training
    torch.manual_seed(1)
    with torch.no_grad():
        y = model(torch.randn(8, 3, 112, 112))
    assert y.mean(0).abs().mean() < 0.5
    assert 0.5 < y.std() < 2


@pytest.mark.slow
def test_bench_files_names_what_it_measures():
    text = run("bench.files", "--network", "resnet18", "--size", 64, "--images", 2, "--repeats", 1)
    rows = [line.split() for line in text.splitlines() if line.endswith((" s", " MB"))]
    values = {row[0]: float(row[1]) for row in rows}
    assert values["quantize"] > 0 and values["save"] > 0 and values["load"] > 0
    assert 0.2 < values["file"] / values["float"] < 0.35
    assert "computes the same, bit for bit" in text
