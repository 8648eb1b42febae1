"""Tuning of OpenVINO models: the kernels of convolutions, and snippets."""

import copy

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.engines import openvino, openvino_tuning
from fxq.backends.engines.openvino import OpenvinoKernel, _core, compile_model, read_model
from fxq.backends.engines.openvino_tuning import faster_in_jit, faster_without_snippets, in_jit, layer_times
from fxq.graph.query import submodule

pytestmark = [
    pytest.mark.any_cpu,
    pytest.mark.filterwarnings("ignore:with all possible ops on integers:fxq.FxqWarning"),
]


def net():
    layers = (nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.ReLU(), nn.Conv2d(16, 8, 1))
    return nn.Sequential(*layers).eval()


def kernel_of(q):
    (kernel,) = [k for n in q.graph.nodes if isinstance(k := submodule(q, n), OpenvinoKernel)]
    return kernel


@pytest.fixture(scope="module")
def quantized_conv():
    """A quantized network, its input, and its kernel's model with what that reads."""
    x = torch.randn(1, 3, 20, 20).contiguous(memory_format=torch.channels_last)
    q = fxq.quantize(net(), fxq.Recipe.static(backend="openvino", optimize="coverage"), data=[x])
    kernel = kernel_of(q)
    return q, x, kernel.model_for(kernel.form.module(kernel), [x])


def names(model):
    return [op.friendly_name for op in read_model(model).get_ordered_ops() if "Convolution" in op.get_type_name()]


def kinds(compiled):
    """Kinds of the kernels of the convolutions, as the first word of the kernel's name."""
    about = [{k: v.astype(str) for k, v in op.get_rt_info().items()} for op in compiled.get_runtime_model().get_ops()]
    return [entry["primitiveType"].partition("_")[0] for entry in about if entry["layerType"] == "Convolution"]


@pytest.mark.slow
def test_layers_run_in_the_kernels_that_they_prefer_with_the_same_numbers(quantized_conv):
    q, x, (model, _) = quantized_conv
    result = names(model)
    assert len(result) == 3
    if "brgconv" not in kinds(compile_model(read_model(model), 1)):
        pytest.skip("this CPU has one kind of kernels")
    assert set(kinds(compile_model(read_model(model), 1, jit=result))) == {"jit"}
    assert kinds(compile_model(read_model(model), 1, jit=result[:1])).count("jit") == 1
    copied, want = copy.deepcopy(q), q(x)
    kernel_of(copied).adopt({"jit": tuple(result)})
    assert torch.equal(copied(x), want)


def test_names_that_the_model_has_not_are_passed_over(quantized_conv):
    model = quantized_conv[2][0]
    result, core = kinds(compile_model(read_model(model), 1)), _core()
    assert kinds(core.compile_model(in_jit(core, read_model(model), ["no such layer"]), "CPU")) == result


def test_a_copy_a_pickle_and_a_file_keep_the_choice(quantized_conv, tmp_path):
    q, x, (model, _) = copy.deepcopy(quantized_conv[0]), quantized_conv[1], quantized_conv[2]
    kernel_of(q).adopt({"jit": tuple(names(model)[:2])})
    for again in (copy.deepcopy(q), fxq.load(q.save(tmp_path / "m.fxq"))):
        assert kernel_of(again).jit == tuple(names(model)[:2])
        assert torch.equal(again(x), q(x))


@pytest.mark.parametrize(("jit_us", "chosen"), [(5.0, True), (9.9, False), (20.0, False)])
def test_what_is_faster_by_more_than_times_vary_is_chosen(quantized_conv, jit_us, chosen, monkeypatch):
    model = quantized_conv[2][0]
    (first, *others), asked = names(model), []

    def times(compiled, inputs, kind):
        asked.append(compiled)
        return {first: 10.0, others[0]: 10.0, "relu": 1.0} if kind == "brg" else {first: jit_us, others[0]: 30.0}

    monkeypatch.setattr(openvino_tuning, "_kernel_times", times)
    assert faster_in_jit(read_model(model), lambda jit=(): jit, []) == ((first,) if chosen else ())
    assert asked[:2] == [(), (first, others[0])]


def test_without_two_kinds_of_kernels_nothing_is_chosen(quantized_conv, monkeypatch):
    monkeypatch.setattr(openvino_tuning, "_kernel_times", lambda compiled, inputs, kind: {})
    assert faster_in_jit(read_model(quantized_conv[2][0]), lambda jit=(): jit, []) == ()


class Sum(nn.Module):
    """A convolution and what it is added to, which another layer reads, too."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.last(torch.relu(x + self.second(x)))


def layer_types(compiled):
    return [node.get_rt_info()["layerType"].astype(str) for node in compiled.get_runtime_model().get_ordered_ops()]


def test_without_snippets_a_convolution_adds_and_the_numbers_are_the_same(tmp_path):
    x = torch.randn(1, 8, 12, 12)
    q = fxq.quantize(Sum().eval(), fxq.Recipe.static(backend="openvino", optimize="coverage"), data=[x])
    kernel, want = kernel_of(q), q(x)
    model, _ = kernel.model_for(kernel.form.module(kernel), [x])
    assert "Subgraph" in layer_types(compile_model(read_model(model), 1))
    assert "Subgraph" not in layer_types(compile_model(read_model(model), 1, snippets=False))
    kernel.adopt({"snippets": False})
    step = float(q.qparams()["last"].input_scale) * float(q.qparams()["last"].weight.abs().sum(1).max())
    assert float((q(x) - want).abs().max()) <= step  # sums near a tie may be on its other side
    for again in (copy.deepcopy(q), fxq.load(q.save(tmp_path / "m.fxq"))):
        assert not kernel_of(again).snippets and torch.equal(again(x), q(x))


class Compiled:
    """A model of one layer whose requests take so many of a clock's seconds."""

    def __init__(self, clock, seconds, layer="Subgraph", keeps=False):
        self.clock, self.seconds, self.layer = clock, seconds, layer if keeps or seconds == 1.0 else "Convolution"

    def get_runtime_model(self):
        text = type("Text", (), {"astype": lambda _, kind: self.layer})()
        node = type("Node", (), {"get_rt_info": lambda _: {"layerType": text}})()
        return type("Model", (), {"get_ordered_ops": lambda _: [node]})()

    def create_infer_request(self):
        return self

    def infer(self):
        self.clock[0] += self.seconds


@pytest.mark.parametrize(
    ("layer", "without", "chosen"),
    [("Subgraph", 0.9, True), ("Subgraph", 0.98, False), ("Subgraph", 1.2, False), ("Convolution", 0.5, False)],
)
def test_snippets_go_where_the_whole_model_is_faster_without(layer, without, chosen, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(openvino_tuning.time, "perf_counter", lambda: clock[0])
    result = faster_without_snippets(lambda snippets=True: Compiled(clock, 1.0 if snippets else without, layer), [])
    assert result == chosen


def test_a_version_that_keeps_its_snippets_is_not_timed():
    assert not faster_without_snippets(lambda snippets=True: Compiled([0.0], 1.0 if snippets else 0.1, keeps=True), [])


def test_a_version_that_does_not_know_snippets_compiles_as_it_does(quantized_conv, monkeypatch):
    monkeypatch.setattr(openvino, "NO_SNIPPETS", {"NO_SUCH_ENTRY": "DISABLE"})
    model = quantized_conv[2][0]
    assert layer_types(compile_model(read_model(model), 1, snippets=False)) == layer_types(
        compile_model(read_model(model), 1)
    )


@pytest.mark.slow
def test_speed_measures_and_coverage_does_not(monkeypatch):
    told = []
    monkeypatch.setattr(OpenvinoKernel, "tune", lambda self, *inputs: told.append([x.shape for x in inputs]))
    x = torch.randn(1, 3, 20, 20)
    for optimize in ("coverage", "speed"):
        q = fxq.quantize(net(), fxq.Recipe.static(backend="openvino", optimize=optimize), data=[x])
        assert len(told) == (0 if optimize == "coverage" else sum(isinstance(m, OpenvinoKernel) for m in q.modules()))
    assert all(shapes == [x.shape] for shapes in told)


class Request:
    """Takes 1000 us in its first run, and `us` in each later one; tells the average in whole microseconds."""

    def __init__(self, us):
        self.runs, self.us = 0, us

    def infer(self):
        self.runs += 1

    def get_profiling_info(self):
        part = type("Part", (), {"node_name": "layer", "Status": type("Status", (), {"EXECUTED": 1}), "status": 1})()
        average = int((1000 + self.us * (self.runs - 1)) / self.runs)
        part.real_time = type("Time", (), {"total_seconds": lambda self: average * 1e-6})()
        return [part]


@pytest.mark.parametrize("us", [0.9, 1.0, 3.2, 8.0, 50.0, 400.7])
def test_the_first_run_of_a_layer_does_not_count(us):
    assert layer_times(Request(us))["layer"] == pytest.approx(us, abs=0.55)  # half of a microsecond, and the first run
