"""Check of an exported file in the runtime that will read it, at two batch sizes."""

import copy
from functools import cache

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import ExportError, FxqWarning
from fxq.onnx import model_check
from fxq.saved import export_check, program_export
from tests.support.helpers import REFERENCE

pytestmark = pytest.mark.any_cpu


def upsampling():
    torch.manual_seed(0)
    layers = nn.Conv1d(3, 4, 3, padding=1), nn.ConvTranspose1d(4, 8, 4, 2, 1), nn.SiLU(), nn.Conv1d(8, 4, 3)
    return nn.Sequential(*layers).eval()


def quantized(batch=2):
    """A copy of a model that is quantized once."""
    return copy.deepcopy(quantized_once(batch))


@cache
def quantized_once(batch):
    return fxq.quantize(upsampling(), REFERENCE, data=[torch.randn(batch, 3, 32, generator=generator(batch))])


def generator(seed):
    return torch.Generator().manual_seed(seed)


class FixedSize(nn.Module):
    """A model whose head has a branch on the batch size, as those of detectors have on that of the image."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return y.reshape(int(y.shape[0]) // 2, 16) if y.shape[0] == 4 else y


class WrongKernel:
    """OpenVINO, with a transposed convolution that is wrong for one batch size."""

    def __init__(self, batch, in_float32=True):
        self.batch, self.in_float32, self.seen = batch, in_float32, []
        self.original = export_check._Compiled.__call__

    def __call__(self, compiled, inputs, outputs):
        outputs_of_kernel = self.original(compiled, inputs, outputs)
        size = len(inputs["input"])
        self.seen.append(size)
        if size == self.batch and (self.in_float32 or not compiled.config):
            for name, value in outputs_of_kernel.items():
                if name == "output" or "conv_transpose" in name or "silu" in name:
                    outputs_of_kernel[name] = value.flip(-1)
        return outputs_of_kernel


def with_wrong_kernel(monkeypatch, *args, **options):
    pytest.importorskip("openvino")
    kernel = WrongKernel(*args, **options)
    monkeypatch.setattr(export_check._Compiled, "__call__", lambda self, *arguments: kernel(self, *arguments))
    return kernel


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("example", "sizes"), [(1, [1, 2]), (2, [2, 1]), (5, [5, 1])])
def test_a_file_for_openvino_runs_there_at_two_batch_sizes(example, sizes, tmp_path, monkeypatch):
    kernel = with_wrong_kernel(monkeypatch, batch=-1)
    assert quantized(example).export(tmp_path / "m.xml").exists()
    assert kernel.seen == sizes


@pytest.mark.one_in(4)
@pytest.mark.parametrize("example", [1, 2])
@pytest.mark.parametrize("wrong", [1, 2])
def test_a_wrong_kernel_of_openvino_is_named(example, wrong, tmp_path, monkeypatch):
    with_wrong_kernel(monkeypatch, wrong)
    qmodel = quantized(example)
    said = r"OpenVINO on this CPU computes something else .*'output' .* dB .*float32\[{}, 3, 32\].*override\(\"\d\""
    with pytest.raises(ExportError, match=said.format(wrong)):
        qmodel.export(tmp_path / "m.xml")
    assert not list(tmp_path.iterdir())
    assert qmodel.export(tmp_path / "m.xml", check=False).exists()


def test_a_batch_size_that_cannot_come_is_not_tried(tmp_path, monkeypatch):
    kernel = with_wrong_kernel(monkeypatch, batch=1)
    assert quantized().export(tmp_path / "m.xml", dynamic=False).exists()
    assert kernel.seen == [2]


def test_an_engine_that_is_right_in_float32_alone_is_told(tmp_path, monkeypatch):
    with_wrong_kernel(monkeypatch, 1, in_float32=False)
    with pytest.warns(FxqWarning, match=r'default precision .* \{"INFERENCE_PRECISION_HINT": "f32"\}'):
        assert quantized().export(tmp_path / "m.xml").exists()


def test_an_engine_that_cannot_run_here_is_told(tmp_path, monkeypatch):
    pytest.importorskip("openvino")
    monkeypatch.setattr(export_check.Openvino, "available", lambda self: "it crashes on this CPU.")
    with pytest.warns(FxqWarning, match="was not checked in OpenVINO: it crashes"):
        assert quantized().export(tmp_path / "m.xml").exists()


def test_onnx_is_checked_at_two_batch_sizes(tmp_path, monkeypatch):
    """ONNX Runtime is wrong for one sample alone, at the last layer."""
    original, seen = model_check._run, []

    def run(model, inputs, outputs, **options):
        checked = original(model, inputs, outputs, **options)
        seen.append(len(inputs["input"]))
        return {**checked, "output": checked["output"] + 1} if seen[-1] == 1 else checked

    monkeypatch.setattr(model_check, "_run", run)
    with pytest.raises(ExportError, match=r"output 0 differs by .* steps.*float32\[1, 3, 32\]"):
        quantized().export(tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir()) and set(seen) == {1, 2}


def test_programs_are_checked_at_two_batch_sizes(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(program_export, "identical", lambda got, wanted: seen.append(len(got)) or len(got) != 1)
    with pytest.raises(ExportError, match=r"the program computes something else .*float32\[1, 3, 32\]"):
        quantized().export(tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir()) and seen == [2, 1]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("suffix", ["onnx", "xml", "pt2"])
def test_where_sizes_cannot_vary_the_file_has_those_of_the_example(suffix, tmp_path):
    recipe = REFERENCE
    if suffix == "xml":
        pytest.importorskip("openvino")
        recipe = fxq.Recipe.static(backend="openvino", optimize="coverage")  # weights in 7 bits where sums have 16
    x = torch.randn(4, 8, generator=generator(0))
    qmodel = fxq.quantize(FixedSize().eval(), recipe, data=[x])
    with pytest.warns(FxqWarning, match=r"takes inputs of the example's sizes only, \(float32\[4, 8\]\): .*batch"):
        path = qmodel.export(tmp_path / f"m.{suffix}")
    if suffix == "onnx":
        from tests.support.onnx_runs import exact_session  # skips without the engines

        (y,) = exact_session(path).run(None, {"x": x.numpy()})
        assert y.shape == (2, 16)
        torch.testing.assert_close(torch.from_numpy(y), qmodel(x), rtol=1e-4, atol=1e-4)  # sums in another order
    if suffix == "pt2":
        run = torch.export.load(path).module()
        assert torch.equal(run(x), qmodel(x))
        with pytest.raises(AssertionError, match="Guard failed"):  # the model does not take it, so the program may not
            run(x[:2])
    with pytest.raises(ExportError, match="batch"):  # asked for, it is not given up
        qmodel.export(tmp_path / f"n.{suffix}", dynamic={"x": {0: "batch"}})
