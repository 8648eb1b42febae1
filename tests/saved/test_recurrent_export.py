"""Exported recurrent layers, in the runtime that reads the file, against the quantized model at two sizes."""

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.qdq_graph import qdq_graph
from fxq.common.metrics import sqnr
from tests.support.helpers import REFERENCE
from tests.support.onnx_runs import exact_session, openvino

pytestmark = [
    pytest.mark.any_cpu,
    pytest.mark.filterwarnings("ignore:nothing runs on integers:fxq.FxqWarning"),
    pytest.mark.filterwarnings("ignore:.*with default options does not compute:fxq.FxqWarning"),
    pytest.mark.filterwarnings("ignore:.*the model is right for sizes with:fxq.FxqWarning"),
]

RECIPES = {"integer": REFERENCE, "float": REFERENCE.override("layers.*", fxq.FLOAT)}
KINDS = [nn.LSTM, nn.GRU, nn.RNN]
N_AND_T = {"x": {0: "n", 1: "t"}}


class Recurrent(nn.Module):
    """Recurrent layers that read the same value; returns all their outputs and last states."""

    def __init__(self, *layers):
        super().__init__()
        self.before, self.layers = nn.Linear(6, 8), nn.ModuleList(layers)

    def forward(self, x, *states):
        x, results = self.before(x), []
        for layer in self.layers:
            y, last = layer(x, states if len(states) == 2 else states[0] if states else None)
            results += [y, *(last if isinstance(last, tuple) else [last])]
        return tuple(results)


def quantized(recipe, *layers, states=()):
    x = draw(3, 7, 6)
    return fxq.quantize(Recurrent(*layers).eval(), RECIPES[recipe], data=[(x, *states)] * 2), x


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_openvino(path):
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(*inputs):
        results = compiled([x.numpy() for x in inputs])
        return [torch.from_numpy(results[port].copy()) for port in compiled.outputs]

    return run


def check(qmodel, run, *inputs):
    """States near a tie may be rounded the other way, which later steps amplify."""
    with torch.no_grad():
        wanted = qdq_graph(qmodel)(*inputs)
    for want, got in zip(wanted, run(*inputs), strict=True):
        assert want.shape == got.shape and sqnr(want, got) > 35  # dB


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dynamic", [{"x": {0: "n"}}, {"x": {1: "t"}}, N_AND_T], ids=["n", "t", "n,t"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_both_directions_in_openvino(kind, recipe, dynamic, tmp_path):
    qmodel, x = quantized(recipe, kind(8, 12, 2, batch_first=True, bidirectional=True))
    run = in_openvino(qmodel.export(tmp_path / "m.xml", example_inputs=x, dynamic=dynamic))
    check(qmodel, run, x)
    sizes = dynamic["x"].values()
    check(qmodel, run, draw(5 if "n" in sizes else 3, 9 if "t" in sizes else 7, 6, seed=1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_both_directions_from_states_in_openvino(kind, tmp_path):
    states = [draw(2, 3, 12, seed=i) for i in range(2 if kind is nn.LSTM else 1)]
    qmodel, x = quantized("float", kind(8, 12, batch_first=True, bidirectional=True), states=states)
    dynamic = {"x": {0: "n"}, **{f"states_{i}": {1: "n"} for i in range(len(states))}}
    run = in_openvino(qmodel.export(tmp_path / "m.xml", example_inputs=(x, *states), dynamic=dynamic))
    check(qmodel, run, x, *states)
    check(qmodel, run, draw(2, 7, 6, seed=1), *(draw(2, 2, 12, seed=2 + i) for i in range(len(states))))


@pytest.mark.parametrize("kind", KINDS)
def test_four_layers_that_read_one_value_in_openvino(kind, tmp_path):
    qmodel, x = quantized("float", *(kind(8, 12, batch_first=True) for _ in range(4)))
    run = in_openvino(qmodel.export(tmp_path / "m.xml", example_inputs=x))
    check(qmodel, run, x)
    check(qmodel, run, draw(5, 7, 6, seed=1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_steps_in_onnx_runtime(kind, recipe, tmp_path):
    qmodel, x = quantized(recipe, kind(8, 12, batch_first=True, bidirectional=True))
    session = exact_session(qmodel.export(tmp_path / "m.onnx", example_inputs=x, dynamic=N_AND_T))
    for inputs in (x, draw(2, 11, 6, seed=1)):
        check(qmodel, lambda x: map(torch.from_numpy, session.run(None, {"x": x.numpy()})), inputs)
