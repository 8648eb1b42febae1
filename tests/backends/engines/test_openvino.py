"""The openvino backend alone."""

import warnings

import pytest
import torch
from torch import nn

import fxq
from fxq.backends import cpu
from fxq.backends.engines.openvino import Openvino, OpenvinoKernel, compile_model, read_model
from fxq.common.metrics import sqnr
from fxq.onnx.graph import write_onnx

pytestmark = pytest.mark.any_cpu


def test_the_profile_names_the_nodes_of_the_graph():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    x = torch.randn(1, 3, 16, 16)
    q = fxq.quantize(model, fxq.Recipe.static(backend="reference"), data=[x])
    written = write_onnx(q, [x], integer_bias=False)
    scopes = {name.partition("/")[0] for layer in OpenvinoKernel.profile(written.model, [x]) for name in layer.nodes}
    assert {"_0_relu", "_2"} <= scopes


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:with all possible ops on integers:fxq.FxqWarning")
@pytest.mark.parametrize("layer", [nn.Conv2d(64, 32, 3), nn.Conv2d(64, 64, 3, groups=64), nn.Linear(64, 32)])
def test_sums_of_the_largest_products_do_not_saturate(layer):
    """All inputs, and all weights, at the end of their grids."""
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.zero_()
    shape = (2, 64) if isinstance(layer, nn.Linear) else (2, 64, 8, 8)
    x = torch.ones(shape)
    q = fxq.quantize(layer.eval(), fxq.Recipe.static(backend="openvino", optimize="coverage"), data=[x])
    with torch.no_grad():
        assert torch.allclose(q(x), layer(x), rtol=1e-2)


@pytest.mark.filterwarnings("ignore:with all possible ops on integers:fxq.FxqWarning")
def test_one_role_has_7_bits_where_there_is_no_vnni(monkeypatch):
    monkeypatch.setattr(cpu, "has_vnni", lambda: False)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    q = fxq.quantize(model, fxq.Recipe.static(backend="openvino", optimize="coverage"), data=[torch.randn(8, 8)])
    assert q.ledger.reduced_range is not None


@pytest.mark.skipif(not cpu.has_vnni(), reason="int8 activations overflow without VNNI")
@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")
def test_a_transposed_convolution_after_negative_values_runs_on_integers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.PReLU(), nn.ConvTranspose2d(16, 8, 3)).eval()
    x = torch.randn(2, 3, 16, 16)
    q = fxq.quantize(model, fxq.Recipe.static(backend="openvino", optimize="coverage"), data=[x])
    with torch.no_grad():
        assert sqnr(model(x), q(x)) > 25
    kernel = next(module for module in q.modules() if isinstance(module, OpenvinoKernel))
    written = write_onnx(kernel.graph_inside(), [x], integer_bias=False)
    ops = compile_model(read_model(written.model), 1).get_runtime_model().get_ordered_ops()
    about = [op.get_rt_info() for op in ops]
    kinds = [a["primitiveType"].astype(str) for a in about if "ConvTranspose" in a["originalLayersNames"].astype(str)]
    assert any(kind.lower().endswith("i8") and not kind.startswith("reorder") for kind in kinds), kinds


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_it_is_not_there_where_onednn_may_not_use_all_instructions(monkeypatch, name):
    """Parts of OpenVINO ask the CPU itself, and read what oneDNN has not written."""
    monkeypatch.setenv(name, "AVX2")
    assert "limited to AVX2: unset" in Openvino().available()
    monkeypatch.setenv(name, "default")
    assert Openvino().available() is None


@pytest.mark.filterwarnings("ignore:with all possible ops on integers:fxq.FxqWarning")
def test_integers_of_64_bits_stay_outside():
    """It makes 32 of them, so that a sum of large ones is another. Floats are made of them as they are."""

    class Stamps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, stamps, zero):
            return self.linear((stamps - zero).float()), stamps + 1, (stamps + 1_294_967_296).bool()

    torch.manual_seed(0)
    zero = torch.tensor(3_000_000_000)
    inputs = zero + torch.randint(0, 10, (4, 8)), zero
    model = Stamps().eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*kernel is wrong", fxq.FxqWarning)
        q = fxq.quantize(model, fxq.Recipe.static(backend="openvino", optimize="coverage"), data=[inputs])
    assert any(isinstance(module, OpenvinoKernel) for module in q.modules())
    with torch.no_grad():
        (want, *exact), (got, *others) = model(*inputs), q(*inputs)
    assert all(map(torch.equal, others, exact)) and sqnr(want, got) > 25


@pytest.mark.filterwarnings("ignore:nothing runs on integers:fxq.FxqWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_floats_of_other_types_stay_outside(dtype):
    """It would compute them in float32, or refuse the region that they are in."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4)).eval().to(dtype)
    x = torch.randn(4, 8).to(dtype)
    q = fxq.quantize(model, fxq.Recipe.static(backend="openvino"), data=[x])
    assert not any(isinstance(module, OpenvinoKernel) for module in q.modules())
    assert torch.equal(q(x), model(x))


@pytest.mark.filterwarnings("ignore:nothing runs on integers:fxq.FxqWarning")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_both_directions_of_a_recurrent_layer_are_right(kind):
    """No kernel is replaced by its qdq form, of which a warning would tell."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(8, 12, 2, batch_first=True, bidirectional=True)

        def forward(self, x):
            return self.layer(x)[0]

    model, x = Layer().eval(), torch.randn(3, 7, 8)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*kernel is wrong", fxq.FxqWarning)
        q = fxq.quantize(model, fxq.Recipe.static(backend="openvino", optimize="coverage"), data=[x])
    assert any(isinstance(module, OpenvinoKernel) for module in q.modules())
    with torch.no_grad():
        torch.testing.assert_close(q(x), model(x), rtol=0, atol=1e-4)
        torch.testing.assert_close(q(x[:2]), model(x[:2]), rtol=0, atol=1e-4)
