"""Behaviour that all engines share. Each test runs with each engine."""

import copy
import pickle
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.backends import engine
from fxq.backends.engine import EngineBackend
from fxq.common.metrics import sqnr
from tests.support.engine_models import kernels
from tests.support.graphs import equal
from tests.support.machine import OF_THE_MACHINE, quiet, told
from tests.support.models import NETWORKS, batch, build, call

pytestmark = pytest.mark.any_cpu

PACKAGES = {"openvino": ("openvino", "onnx"), "onnxruntime": ("onnxruntime", "onnx"), "jit": ("numba",)}
"""Packages that each engine needs."""


@pytest.fixture(params=PACKAGES)
def name(request):
    if request.param == "jit":
        pytest.importorskip("numba")
    return request.param


@pytest.fixture(autouse=True)
def free(request, monkeypatch):
    """Set the price of integers to 0, so that only the test of prices depends on the speed of the machine."""
    if "prices" not in request.node.name:
        monkeypatch.setattr(EngineBackend, "prices", lambda self, gm, example: fxq.extend.Prices({}, 0.0))


def recipe(name, **options):
    return fxq.Recipe.static(backend=name, optimize="coverage", **options).with_min_sqnr(None)


class Net(nn.Module):
    """Model that is one region: two outputs, a residual sum, a slope of each channel, a pool, a layer after a mean."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, padding=1)
        self.slope, self.head = nn.PReLU(16), nn.Linear(16, 10)

    def forward(self, x):
        y = torch.relu(self.norm(self.a(x)))
        y = self.slope(self.b(y)) + y
        return self.head(F.max_pool2d(y, 2).mean((2, 3))), y.flatten(1)


@pytest.fixture(scope="module")
def quantized_nets():
    """Quantized model, input and float model by engine, which no test changes."""
    return {}


@pytest.fixture
def net(name, quantized_nets):
    """A copy of the quantized model for this test, its input and the float model."""
    if name not in quantized_nets:
        model, x = Net().eval(), torch.randn(4, 3, 16, 16)
        with quiet():
            quantized_nets[name] = fxq.quantize(model, recipe(name), data=[x]), x, model
    q, x, model = quantized_nets[name]
    return copy.deepcopy(q), x, model


@pytest.mark.one_in(12)
@pytest.mark.parametrize("network", NETWORKS)
def test_networks_are_what_the_reference_says(name, network):
    """verify-lowering compares each region; this test compares the outputs of the model."""
    model, x = build(network), batch(network)
    with quiet():
        q = fxq.quantize(model, recipe(name), data=[x])
    assert kernels(q)
    want, got = (list(torch.utils._pytree.tree_leaves(call(m, batch(network, seed=2)))) for m in (model, q))
    assert sqnr(want, got) > 14  # of 8 bits, and of 7 without VNNI


def test_one_region_runs_all(net):
    q, x, model = net
    (kernel,) = kernels(q)
    assert kernel.name == f"{q.backend}.region"
    assert [n.op for n in q.graph.nodes].count("call_module") == 1
    assert q.ledger.coverage == 1.0
    assert sqnr(model(x), q(x)) > 25


@pytest.mark.one_in(3)
def test_other_sizes(net):
    q, _, model = net
    for shape in ((1, 3, 16, 16), (7, 3, 16, 16), (2, 3, 32, 8), (4, 3, 16, 16)):
        x = torch.randn(shape)
        assert sqnr(model(x), q(x)) > 20
        assert [t.shape for t in q(x)] == [t.shape for t in model(x)]


@pytest.mark.one_in(3)
def test_only_the_last_few_sizes_are_kept(net):
    q, _, _ = net
    (kernel,) = kernels(q)
    with warnings.catch_warnings(action="error"):
        for n in range(1, 9):
            q(torch.randn(n, 3, 16, 16))
    with pytest.warns(fxq.FxqWarning, match="inputs have more than 8 sizes.*compiled again when their size returns"):
        q(torch.randn(9, 3, 16, 16))
    with warnings.catch_warnings(action="error"):
        q(torch.randn(10, 3, 16, 16))
    assert len(kernel._derived.values_by_size) == kernel.max_cached_sizes


@pytest.mark.one_in(3)
def test_a_linear_layer_that_reads_a_vector(name):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(16, 8)
    with quiet():
        q = fxq.quantize(model, recipe(name), data=[x])
    for i in range(3):
        assert torch.allclose(q(x[i]), q(x[i : i + 1])[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8, torch.complex64])
def test_inputs_of_another_type_are_refused(net, dtype):
    q, x, _ = net
    with pytest.raises(fxq.InputError, match=f"an input is {dtype}; it takes torch.float32"):
        q(x.to(dtype))


def test_a_copy_has_compiled_nothing(net, name, monkeypatch):
    """Without its engine, a kernel says so at its first call."""
    q, x, _ = net
    q(x)
    (kernel,) = kernels(pickle.loads(pickle.dumps(q)))
    assert kernels(q)[0]._was_compiled and not kernel._was_compiled


def test_a_batch_of_no_samples(name):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
    q = fxq.quantize(model, recipe(name), data=[torch.randn(2, 3, 8, 8)])
    assert q(torch.empty(0, 3, 8, 8)).shape == (0, 2, 4, 4)


@pytest.mark.one_in(3)
def test_images_channels_last(name):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    x = torch.randn(2, 3, 12, 12)
    q = fxq.quantize(model, recipe(name), data=[x])
    plain, last = q(x), q(x.contiguous(memory_format=torch.channels_last))
    assert plain.is_contiguous() and last.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(plain, last, rtol=0, atol=1e-6)
    strided = torch.randn(2, 3, 12, 24)[..., ::2]
    assert torch.allclose(q(strided), q(strided.contiguous()), rtol=0, atol=1e-6)


def test_results_are_the_callers(net):
    q, x, _ = net
    first = q(x)
    kept = [t.clone() for t in first]
    q(torch.randn_like(x))
    assert equal(list(first), kept)


def test_copies_and_pickles(net, tmp_path):
    q, x, _ = net
    want = q(x)
    torch.save(q, tmp_path / "q.pt")
    for copied in (copy.deepcopy(q), pickle.loads(pickle.dumps(q)), torch.load(tmp_path / "q.pt", weights_only=False)):
        assert equal(copied(x), want)
    state = q.state_dict()
    for tensor in q.buffers():
        if tensor.dtype == torch.int8:
            tensor.zero_()
    assert not equal(q(x), want)  # it is compiled anew
    q.load_state_dict(state)
    assert not equal(q(x), want)  # the state dict shares its memory


@pytest.mark.slow
def test_state_dict_of_another_model(net, name):
    q, x, model = net
    other_qmodel = fxq.quantize(model, recipe(name), data=[x])
    for tensor in other_qmodel.buffers():
        if tensor.dtype == torch.int8:
            tensor.zero_()
    assert not equal(other_qmodel(x), q(x))
    other_qmodel.load_state_dict(q.state_dict())
    assert equal(other_qmodel(x), q(x))


def test_threads(net):
    q, _, _ = net
    xs = [torch.randn(2, 3, 16, 16) for _ in range(8)]
    want = [q(x) for x in xs]
    wrong = []

    def work(first):
        for k in range(40):
            i = (first + k) % len(xs)
            if not equal(q(xs[i]), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.one_in(3)
def test_what_it_cannot_run_stays_in_torch(name):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            return self.b(torch.special.bessel_j0(self.a(x)))

    model, x = Odd().eval(), torch.randn(2, 3, 8, 8)
    q = fxq.quantize(model, recipe(name), data=[x])
    assert len(kernels(q)) == 2
    (entry,) = q.ledger.where(lambda e: "bessel_j0" in e.op)
    assert entry.precision == "float" and "not in the op table" in entry.reason
    assert sqnr(model(x), q(x)) > 20


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
def test_it_has_no_kernels_for_weights_alone(name):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    with pytest.warns(fxq.FxqWarning, match="nothing runs on integers"):
        q = fxq.quantize(model, fxq.Recipe.weight_only(backend=name), example_inputs=torch.randn(2, 8))
    assert all(name in entry.reason for entry in q.ledger if entry.op == "linear")


@pytest.mark.parametrize(("name", "package"), [(name, package) for name in PACKAGES for package in PACKAGES[name]])
def test_without_the_package(name, package, monkeypatch):
    monkeypatch.setattr(engine, "find_spec", lambda wanted: None if wanted == package else object())
    with pytest.raises(fxq.BackendError, match=rf"{package} is not installed: pip install fxq\[{name}\]"):
        fxq.quantize(nn.Linear(4, 4).eval(), recipe(name), data=[torch.randn(2, 4)])


@pytest.mark.slow
def test_prices_come_from_the_engines_own_profiler(name):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(nn.Conv2d(32, 32, 3, padding=1) for _ in range(3)))

        def forward(self, x):
            return torch.sigmoid(self.layers(x))

    model, x = Deep().eval(), torch.randn(1, 32, 28, 28)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        q = fxq.quantize(model, fxq.Recipe.static(backend=name), data=[x])
    of_the_machine = (OF_THE_MACHINE, "nothing runs on integers")  # as a busy one may be faster in float
    assert not [message for message in told(heard) if not message.startswith(of_the_machine)]
    convs = q.ledger.where(op="conv2d")
    assert len(convs) == 3 and all(entry.float_us > 0 and entry.int8_us > 0 for entry in convs)


@pytest.mark.one_in(3)
def test_text_form(net):
    q, x, _ = net
    text = fxq.extend.write_graph(q)
    assert f"{q.backend}.region" in text
    again = fxq.extend.read_graph(text, fxq.extend.graph_tensors(q))
    assert equal(again(x), tuple(q(x)))
