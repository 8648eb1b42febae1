"""The jit backend alone. All numbers are compared with the qdq form of its regions, or the reference backend."""

import copy
import pickle
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fxq
from fxq.backends import engine
from fxq.backends.engine import EngineBackend
from fxq.backends.loops import jit_engine
from fxq.backends.loops.jit_engine import JitKernel
from fxq.common.metrics import sqnr
from fxq.graph.query import submodule
from fxq.ops import OPS
from tests.support.graphs import equal
from tests.support.machine import quiet
from tests.support.models import settled

pytestmark = pytest.mark.any_cpu

pytest.importorskip("numba")


@pytest.fixture(autouse=True)
def free(monkeypatch):
    """Integers cost nothing, so that no test depends on how fast the machine is."""
    monkeypatch.setattr(EngineBackend, "prices", lambda self, gm, example: fxq.extend.Prices({}, 0.0))


def quantized(model, *inputs, backend="jit"):
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage").with_min_sqnr(None)
    return fxq.quantize(model.eval(), recipe, data=[inputs if len(inputs) > 1 else inputs[0]], progress=False)


def kernels(q):
    return [module for node in q.graph.nodes if isinstance(module := submodule(q, node), JitKernel)]


def form(kernel):
    """The q/dq form of the only region of a model."""
    return kernel.form.module(kernel)


def image(n=2, c=3, size=10):
    return torch.randn(n, c, size, size)


class Residual(nn.Module):
    """Sums before and after functions, and one of three values."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(3, 16, 3)

    def forward(self, x):
        y = torch.relu(self.a(x))
        return torch.relu(self.b(y) + y) + self.c(x)


class SqueezeExcite(nn.Module):
    """Each channel times a value that is computed of all pixels."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 32, 3, bias=False), nn.Conv2d(32, 8, 1)
        self.c, self.d = nn.Conv2d(8, 32, 1), nn.Conv2d(32, 5, 1)

    def forward(self, x):
        y = F.silu(self.a(x))
        by = torch.relu(self.b(y.mean((2, 3), keepdim=True)))
        return self.d(y * torch.sigmoid(self.c(by)))


class Dense(nn.Module):
    """Values that are joined and read again, also twice in one, of `growth` channels each."""

    def __init__(self, growth):
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3)
        self.layers = nn.ModuleList(nn.Conv2d(16 + k * growth, growth, 3, padding=1) for k in range(3))
        self.last = nn.Conv2d(16 + 4 * growth, 5, 1)

    def forward(self, x):
        y = torch.relu(self.first(x))
        for layer in self.layers:
            new = torch.relu(layer(y))
            y = torch.cat([y, new], 1)
        return self.last(torch.cat([y, new], 1))


class ConvNext(nn.Module):
    """Pixels as rows of channels, which are normed."""

    def __init__(self):
        super().__init__()
        self.first, self.by_channel = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 7, padding=3, groups=32)
        self.norm, self.wide, self.narrow = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        x = self.first(x)
        y = self.narrow(F.gelu(self.wide(self.norm(self.by_channel(x).permute(0, 2, 3, 1)))))
        return x + y.permute(0, 3, 1, 2)


class UNet(nn.Module):
    """An image that is pooled, brought back to its size and joined with what it was."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 16, 3, padding=1), nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.middle, self.last = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x):
        y = torch.relu(self.down(x))
        z = torch.relu(self.up(F.leaky_relu(self.middle(F.max_pool2d(y, 2)), 0.1)))
        return self.last(torch.cat([z, y], 1))


class Several(nn.Module):
    """Returns values that are also read, one of them twice, and its input; reads one value twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        y = self.b(self.b(torch.relu(self.a(x))))
        return {"sum": y + y, "pixels": y.flatten(1), "again": y, "input": x}


def convs(*layers):
    return lambda: nn.Sequential(nn.Conv2d(3, 20, 3), *layers, nn.Conv2d(20, 5, 1))


NETWORKS = {
    "residual": Residual,
    "squeeze_excite": SqueezeExcite,
    "dense_16": lambda: Dense(16),
    "dense_12": lambda: Dense(12),
    "convnext": ConvNext,
    "unet": UNet,
    "several": Several,
    "pools": convs(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, 1, 1, count_include_pad=False)),
    "depthwise": convs(nn.ReLU(), nn.Conv2d(20, 20, 3, padding=1, groups=20), nn.PReLU(20)),
    "dilated": convs(nn.Hardswish(), nn.Conv2d(20, 20, 3, padding=4, dilation=4, stride=2), nn.ReLU6()),
    "kernel_larger_than_image": convs(nn.Conv2d(20, 20, 11, padding=6), nn.Hardtanh(-0.2, 0.3)),
    "stride_larger_than_kernel": convs(nn.Conv2d(20, 20, 2, stride=5), nn.Sigmoid()),
    "head": lambda: nn.Sequential(nn.Conv2d(3, 20, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1280, 7)),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("network", NETWORKS)
def test_what_runs_as_one_region(network):
    x = image()
    q = quantized(settled(NETWORKS[network]), x)
    (kernel,) = kernels(q)
    assert [node.op for node in q.graph.nodes].count("call_module") == 1
    assert kernel.name == "jit.region" and q.backend == "jit"
    for batch in (x, image(1), 3 * image(5)):
        want, got = (list(torch.utils._pytree.tree_leaves(run(batch))) for run in (form(kernel), kernel))
        assert [(y.shape, y.dtype) for y in got] == [(y.shape, y.dtype) for y in want]
        assert sqnr(want, got) > 40  # they round ties, and what lies next to them, differently


def test_it_has_the_numbers_of_the_reference():
    """One layer: nothing is rounded after its sums."""
    model, x = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 16, 3)), image()
    q, r = (quantized(model, x, backend=backend) for backend in ("jit", "reference"))
    assert len(kernels(q)) == 1
    assert torch.allclose(q(x), r(x), rtol=0, atol=1e-5)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e-45])
def test_inputs_without_an_end(value):
    model, x = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 1)), image()
    q, r = (quantized(model, x, backend=backend) for backend in ("jit", "reference"))
    x[0, 1, 4, 4] = x[1, :, 2, 7] = value
    assert sqnr(r(x), q(x)) > 40


REFUSED = {
    "groups": (nn.Conv2d(20, 20, 3, groups=4), "conv2d", "it has groups of several channels"),
    "windows_with_gaps": (nn.MaxPool2d(3, 2, dilation=2), "max_pool2d", "its windows have gaps"),
    "size": (
        nn.ConvTranspose2d(20, 20, 3, 2, 1),
        "conv_transpose2d",
        "the size of its result is no multiple of its stride",
    ),
    "windows_of_several_sizes": (nn.AdaptiveAvgPool2d(3), "adaptive_avg_pool2d", "its windows differ in size"),
    "mish": (nn.Mish(), "mish", "jit has no integer kernel for mish"),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("which", REFUSED)
def test_refusals_have_reasons(which):
    """PyTorch computes refused ops; ops before and after them still run as regions."""
    layer, op, reason = REFUSED[which]
    model, x = convs(layer)(), image()
    q = quantized(model, x)
    (entry,) = [entry for entry in q.ledger.where(op=op) if entry.precision == "float"]
    assert reason in entry.reason
    assert len(kernels(q)) == 2 and sqnr(model(x), q(x)) > 20


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        (nn.Conv3d(8, 8, 3), (2, 8, 5, 5, 5), "jit has no integer kernel for conv3d"),
        (nn.Linear(8, 8), (8,), "it has 1 axes"),
        (nn.Conv2d(8, 8, 3), (8, 5, 5), "its input is no image"),
    ],
    ids=["conv3d", "one_axis", "no_batch"],
)
def test_where_nothing_is_left_it_says_so(model, shape, reason):
    x = torch.randn(shape)
    with pytest.warns(fxq.FxqWarning, match=f"nothing runs on integers.*{reason}"):
        q = quantized(model, x)
    assert q.ledger.coverage == 0.0 and torch.allclose(q(x), model(x), rtol=0, atol=1e-5)


class Vocoder(nn.Module):
    """Upsampling and a residual block with dilation, as in HiFi-GAN, then a depthwise layer."""

    def __init__(self):
        super().__init__()
        self.up, self.dilated = nn.ConvTranspose1d(12, 16, 8, 4, 2), nn.Conv1d(16, 16, 3, padding=3, dilation=3)
        self.depthwise, self.last = nn.Conv1d(16, 16, 5, padding=2, groups=16), nn.Conv1d(16, 1, 7, padding="same")

    def forward(self, x):
        y = self.up(F.leaky_relu(x, 0.1))
        y = y + self.dilated(F.leaky_relu(y, 0.1))
        return torch.tanh(self.last(F.leaky_relu(self.depthwise(y), 0.1)))


@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")
def test_sequences_with_their_channels_first():
    x = torch.randn(2, 12, 9)
    q = quantized(settled(Vocoder), x)
    assert {entry.precision for entry in q.ledger.where(op="conv1d")} == {"int8"}
    assert {entry.precision for entry in q.ledger.where(op="conv_transpose1d")} == {"int8"}
    (kernel,) = kernels(q)
    for batch in (x, torch.randn(1, 9, 12).mT, torch.randn(3, 12, 40)[..., ::2], torch.randn(2, 12, 31)):
        assert q(batch).is_contiguous() and sqnr(form(kernel)(batch.contiguous()), q(batch)) > 40


def test_what_it_runs():
    model, x = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 4, 1)), image()
    q = quantized(model, x)
    layers = kernels(q)[0].layers(x)
    assert [(layer.op, layer.kind, layer.dtype) for layer in layers][:2] == [
        ("Quantize", "convert", "uint8"),
        ("Product", "int8", "uint8"),
    ]
    assert {"Pool", "Product"} <= {layer.op for layer in layers[2:]}
    names = {node.name for node in form(kernels(q)[0]).graph.nodes}
    assert all(len(layer.nodes) == 1 and layer.nodes[0] in names and layer.us >= 0 for layer in layers)
    text = str(q.profile(example_inputs=x))
    assert all(layer.nodes[0] in text and layer.op in text for layer in layers)


def test_the_program_that_runs_is_the_one_that_is_timed(monkeypatch):
    x = image()
    q, programs, program = quantized(nn.Conv2d(3, 16, 3), x), [], jit_engine._program
    monkeypatch.setattr(jit_engine, "_program", lambda *args: programs.append(args) or program(*args))
    (kernel,) = kernels(q)
    wanted = q(x)
    count = len(programs)
    assert kernel.layers(x) and kernel.layers(x) and len(programs) == count
    assert torch.equal(q(x), wanted)
    assert kernel.layers(image(5)) and len(programs) == count + 1


def test_without_numba(monkeypatch):
    monkeypatch.setattr(engine, "find_spec", lambda package: None)
    with pytest.raises(fxq.BackendError, match=r"numba is not installed: pip install fxq\[jit\]"):
        quantized(nn.Linear(4, 4), torch.randn(2, 4))


def test_where_numba_compiles_nothing(monkeypatch, tmp_path):
    """Neither there nor in a model that comes from a file."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    q = quantized(model, x)
    q.save(tmp_path / "q.fxq")
    monkeypatch.setattr(jit_engine, "loops", lambda name: None)
    monkeypatch.setattr(jit_engine, "missing", lambda name: "broken")
    with pytest.raises(fxq.BackendError, match=r'does not compile its loops here: broken\. Use backend="auto"'):
        quantized(model, x)
    loaded = fxq.load(tmp_path / "q.fxq")
    with pytest.raises(
        fxq.BackendError, match=r"jit\.region.*no loops are compiled: broken \(pip install fxq\[jit\]\)"
    ):
        loaded(x)


def test_files_copies_and_pickles(tmp_path):
    x = image()
    q = quantized(settled(Residual), x)
    want = q(x)
    q.save(tmp_path / "q.fxq")
    torch.save(q, tmp_path / "q.pt")
    for second in (
        fxq.load(tmp_path / "q.fxq"),
        torch.load(tmp_path / "q.pt", weights_only=False),
        pickle.loads(pickle.dumps(q)),
        copy.deepcopy(q),
    ):
        assert len(kernels(second)) == 1 and equal(second(x), want)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
def test_what_is_written_to_its_tensors_counts(dtype):
    x = image()
    q = quantized(settled(Residual), x)
    (kernel,) = kernels(q)
    before = q(x)
    (tensor,) = [tensor for tensor in q.buffers() if tensor.dtype == dtype]
    tensor.copy_(tensor // 2 if dtype == torch.int8 else tensor * 1.25)
    assert sqnr(before, q(x)) < 20
    assert sqnr(form(kernel)(x), q(x)) > 40


@pytest.mark.slow
def test_inputs_that_lie_otherwise():
    x = image(2, 3, 12)
    q = quantized(settled(UNet), x)
    (kernel,) = kernels(q)
    many = torch.randn(2, 3, 24, 24)
    for batch in (
        many[..., ::2, 1::2],
        many[:, :, :12, :12].transpose(2, 3),
        many[:1, :, :12, :12].expand(3, -1, -1, -1),
        torch.randn(12, 12, 3, 2).permute(3, 2, 0, 1),
        x.contiguous(memory_format=torch.channels_last),
        torch._neg_view(x),
        x.clone().requires_grad_(),
    ):
        assert sqnr(form(kernel)(batch.contiguous()), q(batch)) > 40
    with torch.inference_mode():
        assert sqnr(form(kernel)(x), q(x + 0)) > 40


def test_sizes_change_from_call_to_call():
    q = quantized(settled(UNet), image(2, 3, 12))
    (kernel,) = kernels(q)
    with warnings.catch_warnings(action="ignore"):
        for shape in [(1, 3, 2, 2), (3, 3, 8, 14), (1, 3, 2, 130), (2, 3, 12, 12), (1, 3, 66, 4), (0, 3, 12, 12)] * 2:
            x = torch.randn(shape)
            got, want = q(x), form(kernel)(x)
            assert got.shape == want.shape
            assert not x.numel() or sqnr(want, got) > 40


def test_threads():
    """Each has memory of its own; the loops run at once. Sizes differ, so that programs are made meanwhile."""
    q = quantized(settled(SqueezeExcite), image())
    xs = [image(n, size=size) for n, size in ((1, 10), (2, 10), (3, 7), (1, 16))]
    want = [q(x) for x in xs]
    second, wrong = copy.deepcopy(q), []

    def work(first):
        for k in range(200):
            i = (first + k) % len(xs)
            if not torch.equal(second(xs[i]), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_short_lived_threads():
    """Memory that a thread frees is not written to afterwards."""
    x = image()
    q = quantized(nn.Sequential(nn.Conv2d(3, 64, 1), nn.MaxPool2d(2), nn.Conv2d(64, 8, 1)), x)
    want, wrong = q(x), []

    def work():
        if not torch.equal(q(x), want):
            wrong.append(1)

    for _ in range(200):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_another_number_of_threads():
    x = image()
    q = quantized(settled(Residual), x)
    want = q(x)
    try:
        torch.set_num_threads(2)
        assert torch.equal(q(x), want)
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
def test_who_watches_sees_the_ops():
    """The q/dq form is recorded: loops are opaque to PyTorch."""

    class Counts(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen += 1
            return function(*args, **(kwargs or {}))

    x = image()
    q = quantized(settled(Residual), x)
    want = q(x)
    with Counts() as mode:
        got = q(x)
    assert mode.seen > 5 and sqnr(want, got) > 40
    traced, second = make_fx(q)(x), image()
    assert sqnr(q(second), traced(second)) > 40
    with pytest.raises(fxq.InputError, match="on the meta device, so it has no values"):
        q(x.to("meta"))


def test_tools_that_cannot_look_inside_are_refused():
    x = image()
    q = quantized(settled(Residual), x)
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(fxq.InputError, match=r"torch\.jit\.trace cannot run.*backend=\"reference\""),
    ):
        torch.jit.trace(q, x)
    with pytest.raises(fxq.InputError, match=r"torch\.func.*cannot run"):
        torch.func.vmap(q)(x[None])


@pytest.mark.slow
def test_two_hundred_layers():
    model = nn.Sequential(*[m for _ in range(100) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())])
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.mul_(2.0)  # else the values vanish
    x = image(1, 8, 5)
    with quiet():
        q = quantized(model, x)
    (kernel,) = kernels(q)
    assert sqnr(form(kernel)(x), q(x)) > 20  # one step of a grid more or less goes through all the others


def test_that_a_layer_with_a_dynamic_range_is_no_step_says_nothing_about_one_with_a_static_range():
    recipe = fxq.Recipe.static(backend="reference", optimize="coverage")
    dynamic = fxq.Recipe.dynamic().config
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)).eval()
    q = fxq.quantize(model, recipe.override("0", dynamic), data=[torch.randn(4, 16)])
    first, second = (node for node in q.graph.nodes if node.target is OPS["linear"].target)
    backend = jit_engine.Jit()
    assert (backend.takes(q, first), backend.takes(q, second)) == (False, True)
