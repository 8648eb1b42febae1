"""fxq.doctor: the machine's profile, layer by layer."""

import json
import warnings

import pytest
import torch
from torch import nn

import fxq
from fxq import diagnosis
from fxq.backends import by_name as backends
from fxq.backends import cpu
from fxq.backends.packed import quantized_tensors as packed
from fxq.backends.packed.fbgemm import FbgemmLinear
from fxq.backends.packed.quantized_tensors import has_engine
from fxq.common.metrics import sqnr
from fxq.errors import BackendError

FEW_PROBES = (
    diagnosis.Probe("conv2d", lambda: nn.Conv2d(4, 8, 3), ((1, 4, 6, 6),)),
    diagnosis.Probe("linear", lambda: nn.Linear(8, 4), ((2, 8),)),
    diagnosis.Probe("tanh", nn.Tanh, ((2, 8),)),
)
needs_fbgemm = pytest.mark.skipif(not has_engine("fbgemm"), reason="PyTorch is built without fbgemm")


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(diagnosis, "PROBES", FEW_PROBES)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_backend_runs_what_it_says(step, monkeypatch):
    """Every backend is there, what it runs was timed, and fxq's own loops are right.

    Every third probe is tried; all with the slow tests.

    A kernel of an engine may be wrong on this CPU. Then fxq has noticed: the row says how far it is off, and who
    quantizes such a layer is warned, and gets the right numbers.
    """
    monkeypatch.setattr(diagnosis, "PROBES", diagnosis.PROBES[::step])
    report = fxq.doctor(progress=False)
    assert {row.backend for row in report.rows} == set(backends.builtin_names()) - {"reference", "tensorrt"}
    wrong = [row for row in report.rows if row.verdict == "wrong"]
    assert [row for row in wrong if row.backend == "jit"] == []
    for row in wrong:
        check_that_it_is_put_back(row)
    ran = [row for row in report.rows if row.kernels]
    assert ran
    assert all(row.int8_us > 0 and row.float_us > 0 for row in ran)
    assert json.loads(json.dumps(report.to_dict()))["auto"] == report.auto
    for said in (report.auto, *(probe.name for probe in diagnosis.PROBES), torch.__version__, "VNNI"):
        assert said in str(report)


def check_that_it_is_put_back(row):
    """Quantizing the layer of a row warns of the wrong kernel, and the result is the float layer's, within 20 dB."""
    assert "failed verification" in row.why
    probe = next(probe for probe in diagnosis.PROBES if probe.name == row.probe)
    torch.manual_seed(0)
    model, inputs = probe.make().eval(), tuple(torch.randn(shape) + 0.1 for shape in probe.shapes)
    with pytest.warns(fxq.FxqWarning, match="kernel is wrong on this machine"):
        q = fxq.quantize(model, fxq.Recipe.static(backend=row.backend, optimize="coverage"), data=[inputs])
    with torch.no_grad():
        assert sqnr(model(*inputs), q(*inputs)) > 20


@needs_fbgemm
def test_a_wrong_kernel_is_noticed_and_put_back(few, monkeypatch):
    """A kernel that is wrong on every CPU: the row says so, and `quantize` replaces it with a warning."""
    forward = FbgemmLinear.forward
    monkeypatch.setattr(FbgemmLinear, "forward", lambda self, x: forward(self, x) + 9)
    row = next(row for row in fxq.doctor(["fbgemm"]).rows if row.probe == "linear")
    assert row.verdict == "wrong"
    check_that_it_is_put_back(row)


@needs_fbgemm
def test_rows(few):
    rows = fxq.doctor(["fbgemm"]).rows
    assert [(r.probe, r.verdict, r.kernels) for r in rows[:3]] == [
        ("conv2d", "right", ("fbgemm.conv",)),
        ("linear", "right", ("fbgemm.linear",)),
        ("tanh", "float", ()),
    ]
    assert rows[2].why
    assert rows[3].probe.startswith("quantized::conv_transpose2d")
    assert rows[3].verdict in ("avoided", "right")


@needs_fbgemm
def test_a_wrong_kernel_is_reported(few, monkeypatch):
    forward = FbgemmLinear.forward
    monkeypatch.setattr(FbgemmLinear, "forward", lambda self, x: forward(self, x) * 1.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        conv, linear, *_ = fxq.doctor(["fbgemm"]).rows
    assert conv.verdict == "right"
    assert linear.verdict == "wrong"
    assert "off by" in linear.why


@needs_fbgemm
def test_a_faulty_kernel_that_raises_or_is_right(few, monkeypatch):
    def raises():
        raise RuntimeError("no kernel")

    monkeypatch.setattr(packed, "transposed_2_high_is_right", raises)
    assert "raises RuntimeError" in fxq.doctor(["fbgemm"]).rows[-1].why
    monkeypatch.setattr(packed, "transposed_2_high_is_right", lambda: True)
    assert fxq.doctor(["fbgemm"]).rows[-1].verdict == "right"
    monkeypatch.setattr(packed, "transposed_2_high_is_right", lambda: False)
    assert fxq.doctor(["fbgemm"]).rows[-1].verdict == "avoided"


def test_auto_and_why(few, monkeypatch):
    monkeypatch.setattr(cpu, "is_x86", lambda: True)
    monkeypatch.setattr(cpu, "has_onednn_int8", lambda: False)
    monkeypatch.setattr(packed, "has_engine", lambda name: name == "fbgemm")
    monkeypatch.setattr("fxq.backends.packed.packed_kernels.has_engine", lambda name: name == "fbgemm")
    report = fxq.doctor(["x86", "qnnpack"])
    assert report.auto == "fbgemm"
    assert report.why.startswith(
        "the first of x86, fbgemm, jit, openvino, onnxruntime, reference that runs here; x86: "
    )
    assert [(r.probe, r.verdict) for r in report.rows] == [("(all)", "float")] * 2
    assert "needs an x86-64 CPU" in report.rows[0].why
    monkeypatch.setattr(cpu, "is_x86", lambda: False)
    assert backends.auto_order() == ("qnnpack", "jit", "openvino", "onnxruntime", "reference")
    for name in backends.auto_order()[1:-1]:
        monkeypatch.setattr(backends.backend_type(name), "available", lambda self: "not here")
    assert fxq.doctor([]).auto == "reference"


def test_an_unknown_backend():
    with pytest.raises(BackendError, match="fbgemm"):
        fxq.doctor(["fbgem"])


def test_random_numbers_of_the_user_stay(few):
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    fxq.doctor(["reference"])
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("busy", [False, True])
def test_a_busy_machine_is_said_once(few, monkeypatch, busy, recwarn):
    monkeypatch.setattr(diagnosis, "is_contended", lambda: busy)
    report = fxq.doctor(["reference"], progress=False)
    assert report.busy is busy and str(report).count("The machine was busy") == busy
    assert "Times are CPU time, on one thread." in str(report) and not recwarn.list
