"""Functions written out as arithmetic, and other long spellings that canonicalize simplifies."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.graph.info import info
from tests.support.graphs import graph, text
from tests.support.helpers import REFERENCE, module
from tests.support.models import call, settled

X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))


def canonical(forward, **children):
    """The canonical graph of a function of x (and of a module), checked against it; without input and return."""
    model = module((lambda self, x: forward(self, x)) if children else (lambda self, x: forward(x)), **children)
    gm = graph(model, X, "canonicalize")
    torch.testing.assert_close(call(gm, X), call(model, X), rtol=1e-5, atol=1e-6)
    return text(gm).splitlines()[1:-1]


FUNCTIONS = {
    "silu": [lambda x: x * torch.sigmoid(x), lambda x: x.sigmoid() * x, lambda x: x.mul(F.sigmoid(x))],
    "mish": [lambda x: x * torch.tanh(F.softplus(x)), lambda x: F.softplus(x).tanh().mul(x)],
    "hardsigmoid": [
        lambda x: F.relu6(x + 3) / 6,
        lambda x: F.relu6(3 + x) * (1 / 6),
        lambda x: (x + 3).clamp(0, 6) / 6,
        lambda x: F.hardtanh(x + 3, 0.0, 6.0).div(6),
    ],
    "hardswish": [
        lambda x: x * F.relu6(x + 3) / 6,
        lambda x: x * (F.relu6(x + 3) / 6),
        lambda x: x * F.hardsigmoid(x),
        lambda x: x * F.relu6(x + 3) * (1 / 6),
        lambda x: x * (torch.clamp(x + 3, min=0, max=6) / 6),
    ],
    "gelu": [
        lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
        lambda x: 0.5 * x * (1.0 + torch.erf(x * 0.7071067811865475)),
        lambda x: x * (torch.erf(x / 2**0.5) + 1) * 0.5,
        lambda x: x * (0.5 * (1 + torch.erf(x * 2**-0.5))),
    ],
    "relu": [lambda x: x.clamp(min=0), lambda x: torch.clamp_min(x, 0.0)],
    "relu6": [lambda x: x.clamp(0, 6), lambda x: F.hardtanh(x, 0, 6)],
}


@pytest.mark.parametrize(("name", "forward"), [(name, f) for name, forms in FUNCTIONS.items() for f in forms])
def test_a_function_written_out(name, forward):
    (line,) = canonical(forward)
    assert line.endswith(f" = {name}(x)")


def test_the_tanh_gelu():
    def forward(x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

    assert canonical(forward) == ["gelu = gelu(x, approximate='tanh')"]


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x * torch.sigmoid(x + 1),
        lambda x: x * torch.sigmoid(1.702 * x),
        lambda x: x * F.relu6(x + 3) / 5,
        lambda x: x * F.relu6(x + 2) / 6,
        lambda x: x * 0.5 * (1.0 + torch.erf(x / 1.5)),
        lambda x: x * 0.25 * (1.0 + torch.erf(x / math.sqrt(2.0))),
        lambda x: x * torch.tanh(F.softplus(x, beta=2)),
        lambda x: (lambda s: x * s + s)(torch.sigmoid(x)),
    ],
)
def test_what_only_looks_like_one(forward):
    assert not any(name in line for line in canonical(forward) for name in ("silu", "mish", "gelu", "hardswish"))


# ---- norms


def moments(x, axis=-1, square=torch.square):
    centred = x - x.mean(axis, keepdim=True)
    return centred, square(centred).mean(axis, keepdim=True)


@pytest.mark.parametrize("square", [lambda x: x**2, lambda x: x * x, lambda x: torch.pow(x, 2.0)])
@pytest.mark.parametrize("axis", [-1, 3, [-1]])
def test_a_layer_norm_written_out(square, axis):
    def forward(self, x):
        centred, variance = moments(x, axis, square)
        return self.g * (centred / torch.sqrt(variance + 1e-6)) + self.b

    assert canonical(forward, g=torch.randn(6), b=torch.randn(6))[-1].endswith(
        "layer_norm(x, @g, @b, normalized_shape=(6,), eps=1e-06)"
    )


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: (lambda c, v: c / (v + 1e-5).sqrt() * self.g + self.b)(*moments(x, 2)),
        lambda self, x: (lambda c, v: c / (v + 1e-5).sqrt() * self.g[0] + self.b)(*moments(x)),
        lambda self, x: (lambda c, v: c / (v + 1e-5).sqrt() * self.g + x)(*moments(x)),
        lambda self, x: (lambda c, v: x / (v + 1e-5).sqrt() * self.g + self.b)(*moments(x)),
        lambda self, x: (lambda c, v: c / (v + 1e-5).sqrt() * self.g + self.b + c)(*moments(x)),
        lambda self, x: (lambda c, v: c / (v + v).sqrt() * self.g + self.b)(*moments(x)),
    ],
    ids=["other axis", "one factor", "no constant", "not centred", "read elsewhere", "no number"],
)
def test_what_only_looks_like_a_layer_norm(forward):
    assert not any("layer_norm" in line for line in canonical(forward, g=torch.randn(6), b=torch.randn(6)))


# ---- linear layers


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x @ self.w,
        lambda self, x: torch.matmul(x, self.w),
        lambda self, x: F.linear(x, self.w.t()),
        lambda self, x: F.linear(x, self.w.T),
        lambda self, x: torch.addmm(self.b, x.reshape(-1, 6), self.w),
        lambda self, x: F.linear(x, self.w.transpose(0, 1), self.b),
        lambda self, x: x @ self.w + self.b,
        lambda self, x: self.b + F.linear(x, self.w.t()),
    ],
)
def test_a_product_with_a_weight_is_a_linear(forward):
    lines = canonical(forward, w=torch.randn(6, 3), b=torch.randn(3))
    assert " = linear(" in lines[-1] and len(lines) <= 2


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x @ x.mT,
        lambda self, x: x @ self.w.reshape(1, 6, 3),
        lambda self, x: torch.addmm(self.b, x[0, 0], self.w, alpha=2),
        lambda self, x: torch.addmm(x[0, 0, :, :3], x[0, 0], self.w),
    ],
)
def test_products_that_are_no_linear(forward):
    assert not any("linear" in line for line in canonical(forward, w=torch.randn(6, 3), b=torch.randn(3)))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x @ self.w + 2,
        lambda self, x: x @ self.w + self.b[:1],
        lambda self, x: x @ self.w + x[..., :3],
        lambda self, x: F.linear(x, self.w.t(), self.b) + self.b,
        lambda self, x: torch.add(x @ self.w, self.b, alpha=2),
        lambda self, x: (x @ self.w).mul_(2) + self.b,
    ],
)
def test_sums_that_are_no_bias(forward):
    lines = canonical(forward, w=torch.randn(6, 3), b=torch.randn(3))
    assert sum(" = linear(" in line for line in lines) == 1 and " = add(" in lines[-1]


# ---- values taken from tuples, indices, types


def test_parts_are_ops_of_their_own():
    def forward(x):
        a, b = x.chunk(2, 1)
        c = torch.split(x, [1, 3], dim=1)[1]
        return a + b, c, x.unbind(1)[2], x.max(dim=1).values

    assert [line.partition(" = ")[2] for line in canonical(forward)] == [
        "chunk(x, chunks=2, dim=1)",
        "chunk(x, chunks=2, dim=1, index=1)",
        "split(x, sizes=(1, 3), dim=1, index=1)",
        "add(getitem, getitem_1)",
        "getitem(x, index=(slice(None, None, None), 2))",
        "amax(x, dim=1)",
    ]


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda x: x.chunk(2, 1), "is used as a whole"),
        (lambda x: x.max(dim=1)[1] + 1, "returns indices or statistics that are read"),
        (lambda x: x[x > 0], "is indexed with a tensor"),
        (lambda x: x[:, [0, 2]], "is indexed with a list"),
        (lambda x: x.to(x.device) + 1, "may change the device"),
        (lambda x: x.to(torch.float64, memory_format=torch.channels_last), "changes the dtype and the layout"),
    ],
)
def test_leaves_say_why(forward, reason):
    model = module(lambda self, x: forward(x))
    gm = graph(model, X, "canonicalize")
    assert any(about.traced.kept and reason in about.traced.kept.text for about in map(info, gm.graph.nodes))
    call(gm, X)


def test_slices_of_several_axes_are_one():
    assert [line.partition(" = ")[2] for line in canonical(lambda x: x[:, 1:][:, :, 2:])] == [
        line.partition(" = ")[2] for line in canonical(lambda x: x[:, 1:, 2:])
    ]
    assert len(canonical(lambda x: x[:, 1:][:, 1:])) == 2
    assert len(canonical(lambda x: x[:, 0][:, 1:])) == 2


def test_a_type_that_is_read_is_that_of_the_float_model():
    """The dtype of a value that becomes integers must not be copied to others."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            y = torch.relu(self.a(x))
            shift = y.new_ones(y.shape[1], 1, 1) + torch.zeros_like(y)[0] + torch.ones(4, 1, 1, dtype=y.dtype)
            return self.b(F.max_pool2d(y, 1)) + shift

    model = settled(Model)
    assert not any("dtype')" in line for line in text(graph(model, X, "canonicalize")).splitlines())
    quantized = fxq.quantize(model, REFERENCE, data=[X])
    assert call(quantized, X).dtype == torch.float32
    assert sqnr(call(model, X), call(quantized, X)) > 30


# ---- one network, written four ways


class Modules(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()
        self.pool, self.flat, self.fc = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)

    def forward(self, x):
        x = self.act(self.norm(self.conv(x)))
        return self.fc(self.flat(self.pool(x + x)))


class Functions(Modules):
    def forward(self, x):
        conv, norm = self.conv, self.norm
        x = F.conv2d(x, conv.weight, None, (1, 1), 1)
        x = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.1, 1e-5)
        x = F.hardtanh(x, 0.0, 6.0, inplace=True)
        x = torch.flatten(F.adaptive_avg_pool2d(torch.add(x, x), (1, 1)), 1)
        return F.linear(x, self.fc.weight, self.fc.bias)


class Methods(Modules):
    def forward(self, x):
        x = self.norm(self.conv(x)).clamp_(min=0, max=6)
        return torch.addmm(self.fc.bias, self.pool(x.add(x)).flatten(1), self.fc.weight.t())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [Functions, Methods, "exported"])
def test_every_spelling_gives_the_same_integers(kind):
    torch.manual_seed(0)
    plain = Modules().eval()
    if kind == "exported":
        respelled = torch.export.export(plain, (X,))
    else:
        respelled = kind().eval()
        respelled.load_state_dict(plain.state_dict())
    wanted, got = (fxq.quantize(model, REFERENCE, data=[X]) for model in (plain, respelled))
    assert torch.equal(call(wanted, X), call(got, X))
    kinds = [
        [n.label for n in model.history["fuse"].graph if n.kind == "op" and not n.label.startswith("check")]
        for model in (wanted, got)
    ]
    assert kinds[0] == kinds[1]
