"""scripts/coverage/run.py on models of its own: what it measures, and that no model can stop it."""

import math
import os
import sys
import time

import pytest
import torch
from torch import nn

from scripts.coverage import measure, models, run
from scripts.coverage.models import enliven
from scripts.coverage.others import rounding
from scripts.coverage.outputs import sqnr


def tiny():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


class Broken(nn.Module):
    """Fails in its forward, in one way or another."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        return self.how(x)


def subject(name, make):
    def image(model, generator):
        return torch.randn(2, 3, 12, 12, generator=generator)

    return run.Subject("torchvision", name, make, image)


@pytest.fixture
def measured(monkeypatch):
    """Measure a model in a process of its own, as the script does; no package is needed."""
    import multiprocessing

    def measure(make, timeout=120.0):
        first = subject("model", make)
        monkeypatch.setattr(models, "load", lambda suite: None)
        monkeypatch.setattr(run, "SUBJECTS", (first,))
        options = {"backend": "auto", "optimize": "coverage"}
        return run.run(first, options, ("dynamic", "weight_only"), timeout, multiprocessing.get_context("fork"))

    return measure


def test_a_model_that_works(measured):
    result = measured(tiny)
    assert (result.stage, result.error, result.verdict) == ("done", "", "ok")
    assert result.sqnr > 25
    assert result.kernels > 40
    assert result.plain > 25
    assert result.ops["int8"] == 3
    assert result.macs == 1.0 and result.heavy == {"static": {}, "dynamic": {}, "weight_only": {}}
    assert not result.leaves and not result.put_back
    assert 0 < sum(result.slowest.values()) < result.seconds


class Twice(nn.Module):
    """A layer, what torch.fx does not know, and a layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        return self.second(torch.asinh(self.first(x)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("engine", ["jit", "openvino", "onnxruntime"])
@pytest.mark.any_cpu
def test_an_engine_and_what_it_leaves(monkeypatch, engine):
    """In this process: threads of an engine that ran before would not be in another one that is forked."""
    pytest.importorskip("numba" if engine == "jit" else engine)
    monkeypatch.setattr("scripts.coverage.models.load", lambda suite: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    def measured(make):
        reports = []
        options = {"backend": engine, "optimize": "coverage"}
        measure.measure(subject("model", make), options, (), reports.append)
        return reports[-1]

    whole, parts = measured(tiny), measured(Twice)
    assert (whole.verdict, whole.regions, whole.outside, whole.whole) == ("ok", 1, {}, True)
    assert (parts.verdict, parts.regions, parts.whole) == ("ok", 2, False)
    assert parts.outside == {"asinh: asinh is not in the op table": 1}
    assert whole.dynamic is None and whole.weight_only is None


def test_an_error_is_a_row(measured):
    def refuse(x):
        raise ValueError("not today")

    result = measured(lambda: Broken(refuse))
    assert (result.stage, result.verdict) == ("float", "fails to float")
    assert result.error == "ValueError: not today"
    assert "refuse" in result.trace


def test_a_crash_is_a_row(measured):
    result = measured(lambda: Broken(lambda x: os._exit(7)))
    assert result.stage == "float"
    assert result.error == "Crash: the process ended with exit code 7"


def test_a_model_that_hangs_is_a_row(measured):
    start = time.monotonic()
    result = measured(lambda: Broken(lambda x: time.sleep(60)), timeout=2.0)
    assert result.error == "Timeout: after 2 s"
    assert time.monotonic() - start < 20


def test_sqnr_is_that_of_the_worst_output():
    x, y = torch.tensor([3.0, 4.0]), torch.tensor([10.0])
    near = {"a": torch.tensor([3.0, 4.5]), "b": [torch.tensor([11.0]), torch.tensor([1])]}
    assert sqnr({"a": x, "b": [y, torch.tensor([2])]}, near) == pytest.approx(20.0)  # 25 / 0.25; the other 100 / 1
    assert sqnr(x, x) == math.inf
    assert math.isnan(sqnr(x, x / 0))


def test_rounding_rounds_inputs_and_weights():
    torch.manual_seed(0)
    model = nn.Linear(16, 8).eval().requires_grad_(False)
    data, fresh = [torch.rand(32, 16)], torch.rand(32, 16)
    before = model.weight.clone()
    got = rounding(model, data, [fresh], [model(fresh).flatten()])
    scale_w = before.abs().amax(1, keepdim=True) / 127
    scale_x = float(data[0].max()) / 255
    x = (fresh / scale_x).round().clamp(0, 255) * scale_x
    by_hand = x @ ((before / scale_w).round() * scale_w).T + model.bias
    assert got == pytest.approx(sqnr(model(fresh), by_hand), abs=1e-3)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("sqnr", "torch_ao", "rounding", "verdict"),
    [
        (20.0, None, None, "ok"),
        (9.0, 3.4, 15.0, "ill-conditioned"),  # rounding alone loses it, and torch.ao has less
        (9.0, 3.4, 25.0, "inaccurate"),  # that torch.ao fails too does not excuse it
        (9.0, None, 14.9, "ill-conditioned"),
        (9.0, None, 15.1, "inaccurate"),  # sums and activations are rounded too, but not that badly
        (9.0, 10.1, 12.0, "inaccurate"),
        (9.0, 9.9, 12.0, "ill-conditioned"),
        (9.0, None, None, "inaccurate"),
        (math.nan, None, None, "not finite"),
    ],
)
def test_verdict(sqnr, torch_ao, rounding, verdict):
    result = run.Result("m", "timm", "done", sqnr=sqnr, kernels=50.0, torch_ao=torch_ao, rounding=rounding)
    assert result.verdict == verdict


def test_a_wrong_kernel_is_never_ok():
    result = run.Result("m", "timm", "done", sqnr=40.0, kernels=50.0, put_back=["conv"])
    assert result.verdict == "1 wrong kernels"


def test_what_begins_at_nothing_is_given_a_size():
    torch.manual_seed(0)
    model = nn.Module()
    model.layer_scale = nn.Parameter(torch.full((8, 1, 1), 1e-6))
    model.norm, model.linear = nn.LayerNorm(8), nn.Linear(8, 8)
    nn.init.zeros_(model.norm.weight)
    model.cls_token = nn.Parameter(torch.randn(1, 1, 64) * 0.02)
    kept = model.linear.weight.clone()
    with torch.no_grad():
        enliven(model, torch.Generator().manual_seed(0))
    for scale in (model.layer_scale, model.norm.weight):
        assert 0.05 < float(scale.detach().min()) < float(scale.detach().max()) < 0.6
    assert 0.2 < float(model.cls_token.detach().std()) < 0.4
    assert abs(float(model.cls_token.detach().mean())) < 0.2
    assert float(model.norm.bias.detach().abs().max()) == 0.0  # a bias of 0 is what it looks like
    assert torch.equal(model.linear.weight, kept)


def test_models_are_chosen_by_suite_and_glob():
    names = [str(s) for s in run.SUBJECTS]
    assert len(names) == len(set(names))
    assert [str(s) for s in run.selected(("torchvision",), ["resnet*"])] == [
        "torchvision/resnet18",
        "torchvision/resnet50",
    ]
    assert [s.suite for s in run.selected(run.SUITES, ["*/densenet121"])] == ["torchvision", "timm"]
    assert len(run.selected(("timm",), [])) >= 60
    assert len(run.selected(("transformers",), [])) >= 12


def test_a_missing_package_is_said_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setattr("scripts.coverage.models.import_torchvision", lambda: None)
    with pytest.raises(SystemExit, match=r"timm cannot be loaded .*\n +pip install --no-deps timm"):
        run.installed(["timm"], demanded=True)
    assert run.installed(["timm"], demanded=False) == []


def test_summary_counts():
    def done(**numbers):
        return run.Result("m", "timm", "done", **{"sqnr": 30.0, "kernels": 50.0, "seconds": 2.0, **numbers})

    results = [
        done(plain=28.0, dynamic=25.0, weight_only=9.0),
        done(plain=10.0, sqnr=9.0, rounding=9.0, leaves={"a": "b"}),
        run.Result("m", "timm", "quantize", "E: x"),
    ]
    cells = [cell.strip() for cell in run.summary(results).splitlines()[2].strip("|").split("|")]
    assert cells == ["timm", "3", "2", "1", "", "0", "1", "19.5", "19", "1", "1", "0", "1", "0", "2"]
