"""The benchmark of engines: its networks, what it says of a contender, and one network with what is installed."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.machine import needs_x86

pytestmark = pytest.mark.any_cpu

ROOT = Path(__file__).resolve().parents[1]


def cells(bench, batch=1):
    """Of a network that everyone runs, and one that goes wrong elsewhere."""
    return [
        bench.Cell("a", batch, "float eager", 8.0),
        bench.Cell("a", batch, "nncf", 2.0, sqnr=20.0),
        bench.Cell("a", batch, "torch.ao", 1.0, sqnr=-0.1),
        bench.Cell("a", batch, "fxq x86", 0.5, sqnr=20.0),
        bench.Cell("a", batch, "fxq fastest", 1.0, sqnr=20.0, note="x86"),
        bench.Cell("b", batch, "float eager", 1.0),
        bench.Cell("b", batch, "nncf", note="RuntimeError: no"),
        bench.Cell("b", batch, "fxq fastest", 2.0, sqnr=20.0, note="openvino"),
    ]


@pytest.mark.parametrize("name", ["UNet", "ConvNeXt"])
def test_small_networks_have_the_outputs_they_say(script, name):
    model = getattr(script("networks.small"), name)().eval()
    with torch.no_grad():
        assert model(torch.randn(2, 3, 64, 32)).shape == {"UNet": (2, 4, 64, 32), "ConvNeXt": (2, 1000)}[name]


@pytest.mark.parametrize("batch", [1, 8])
def test_a_case_is_timed_at_any_batch_size_and_calibrated_alike(script, batch):
    cases = script("bench.engine_cases")
    data = [torch.arange(3.0)[:, None], torch.arange(3.0, 20.0)[:, None]]
    case = cases.EngineCase(torch.nn.Identity(), data, torch.tensor([[7.0], [8.0], [9.0]]), data[0]).timed_at(batch)
    assert case.timed.flatten().tolist() == [7.0, 8.0, 9.0, 7.0, 8.0, 9.0, 7.0, 8.0][:batch]
    seen = case.calibration()
    assert all(len(part) == batch for part in seen)
    assert torch.cat(seen).flatten().tolist() == list(range(20 - 20 % batch))


def test_fxq_is_compared_with_the_fastest_other_that_is_right(script):
    bench = script("bench.engines")
    assert bench.best_other(cells(bench)[:5]).contender == "nncf"
    lines = bench.summary(cells(bench)).splitlines()
    assert lines[2].split() == ["a", "1", "1.000", "x86", "2.000", "nncf", "0.50"]
    assert lines[3].split()[-1] == "2.00"
    assert lines[4].split() == ["geometric", "mean", "of", "2", "1", "1.00"]


def test_a_contender_that_is_wrong_or_fails_says_so(script):
    bench = script("bench.engines")
    rows = {line.partition("  ")[0]: line for line in bench.table(cells(bench)[:5]).splitlines()}
    assert rows["torch.ao"].endswith("wrong")
    assert not rows["nncf"].endswith("wrong")
    assert "RuntimeError: no" in bench.table(cells(bench)[5:])


def test_numbers_of_another_machine_are_not_mixed_in(script, tmp_path):
    bench = script("bench.engines")
    path = tmp_path / "numbers.json"
    assert bench.read(path, {"CPU": "this"}) == {}
    path.write_text(json.dumps({"machine": {"CPU": "other"}, "cells": []}))
    with pytest.raises(SystemExit, match="measured otherwise"):
        bench.read(path, {"CPU": "this"})


@pytest.mark.slow
@needs_x86
def test_bench_engines_measures_what_is_installed_and_adds_to_a_file(tmp_path):
    path = tmp_path / "numbers.json"
    for names in (("float eager", "nncf", "fxq x86"), ("float onnxruntime", "onnxruntime", "fxq onnxruntime")):
        chosen = [part for name in names for part in ("--contender", name)]
        command = [sys.executable, "-m", "scripts.bench.engines", "--only", "digits", "--cpu-time", *chosen]
        done = subprocess.run(
            [*command, "--seconds", "0.1", "--json", str(path)], capture_output=True, text=True, timeout=300, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
    cells_by_contender = {cell["contender"]: cell for cell in json.loads(path.read_text())["cells"]}
    assert cells_by_contender["float eager"]["ms"] > 0
    assert cells_by_contender["fxq x86"]["sqnr"] > 20
    assert (cells_by_contender["nncf"]["ms"] is None) == (find_spec("nncf") is None)
    assert cells_by_contender["nncf"]["ms"] is not None or "nncf" in cells_by_contender["nncf"]["note"]
    if find_spec("onnxruntime") and find_spec("onnx"):
        assert cells_by_contender["fxq onnxruntime"]["sqnr"] > 20
        assert cells_by_contender["onnxruntime quantizer"]["sqnr"] > 20
        assert cells_by_contender["float onnxruntime"]["ms"] > 0
    assert "CPU: " in done.stdout
