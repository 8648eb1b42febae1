"""fxq as a user installs it: from a folder, into an environment that has nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.any_cpu, pytest.mark.slow]

ROOT = Path(__file__).parents[1]

USE = """
import sys
import torch
from torch import nn
import fxq

model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.PReLU(), nn.Conv2d(8, 4, 3)).eval()
data = [torch.rand(2, 3, 16, 16) for _ in range(4)]
recipe = fxq.Recipe.static(optimize="coverage")
qmodel = fxq.quantize(model, recipe, data=data)
assert qmodel.ledger.coverage == 1.0
qmodel.save("m.fxq")
assert torch.equal(fxq.load("m.fxq")(data[0]), qmodel(data[0]))
qmodel.report("r.html")
qmodel.qparams().save("p.npz")
fxq.search(model, recipe, data, target=20)
trained = fxq.prepare(model, fxq.Recipe.qat(), example_inputs=data[0])
trained(data[0]).sum().backward()
fxq.convert(trained)
for engine in ("openvino", "onnxruntime"):
    try:
        fxq.quantize(model, recipe.with_backend(engine), data=data)
        print(engine, "runs")
    except fxq.BackendError as error:
        assert f"pip install fxq[{engine}]" in str(error)
        print(engine, "is missed")
"""


@pytest.mark.parametrize("extra", ["", "openvino", "onnxruntime"])
def test_an_installation_runs(extra, tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "scripts" / "constraints.txt"]
    subprocess.run([*pip, f"{ROOT}[{extra}]" if extra else ROOT], check=True)
    done = subprocess.run([python, "-c", USE], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wanted = [f"{engine} {'runs' if engine == extra else 'is missed'}" for engine in ("openvino", "onnxruntime")]
    assert done.stdout.splitlines() == wanted
    command = subprocess.run([tmp_path / "venv" / "bin" / "fxq", "inspect", "m.fxq"], cwd=tmp_path, capture_output=True)
    assert command.returncode == 0, command.stderr
