"""Every op of the table in every spelling, through the whole pipeline, between layers that make integers flow."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxq
from fxq.backends.cpu import has_onednn_int8
from fxq.numeric import sqnr
from fxq.ops import OPS
from tests.graphs import after, anonymous
from tests.models import settled

aten = torch.ops.aten


class Call(nn.Module):
    """A function of (values, this module): the module holds the weights under the names that `nn` modules use."""

    def __init__(self, function: Callable[..., Any], **tensors: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in tensors.items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)
            elif name.startswith("running"):
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value) if isinstance(value, Tensor) else None)

    def forward(self, *values):
        return self.function(*values, self)


class Sandwich(nn.Module):
    """Layers that run on integers, before and behind what is tested."""

    def __init__(self, make: Callable[[], nn.Module], layout: str) -> None:
        super().__init__()
        self.before = nn.ModuleList(LAYOUTS[layout].layer() for _ in range(LAYOUTS[layout].values))
        self.relu_first = LAYOUTS[layout].values > 1
        self.middle = make()
        values = self.values(torch.zeros(LAYOUTS[layout].shape))
        self.behind = follower(self.middle.eval()(*values))

    def values(self, x):
        values = [layer(x) for layer in self.before]
        return [F.relu(v) for v in values] if self.relu_first else values

    def forward(self, x):
        return self.behind(self.middle(*self.values(x)))


def follower(value: Tensor) -> nn.Module:
    """A layer that reads `value`."""
    if value.dim() == 4:
        return nn.Conv2d(value.shape[1], 5, 1)
    return nn.Conv1d(value.shape[1], 5, 1) if value.dim() == 3 else nn.Linear(value.shape[-1], 5)


@dataclass(frozen=True)
class Layout:
    shape: tuple[int, ...]
    layer: Callable[[], nn.Module]
    values: int = 1


LAYOUTS = {
    "image": Layout((4, 3, 8, 8), lambda: nn.Conv2d(3, 4, 3, padding=1)),
    "images": Layout((4, 3, 8, 8), lambda: nn.Conv2d(3, 4, 3, padding=1), 2),
    "sequence": Layout((4, 3, 16), lambda: nn.Conv1d(3, 4, 3, padding=1)),
    "rows": Layout((16, 6), lambda: nn.Linear(6, 8)),
}


@dataclass(frozen=True)
class Case:
    """One spelling of an op.

    Attributes:
        op: name of the op.
        spelled: the spelling: what the traced graph must call.
        make: the module under test, or a function for `Call`.
        layout: what stands before and behind.
        group: cases of one group must have the same canonical graph.
        fate: what becomes of the op on x86; None: what `FATES` says.
    """

    op: str
    spelled: Any
    make: Callable[[], nn.Module]
    layout: str = "image"
    group: str = ""
    fate: str | None = None

    def __str__(self) -> str:
        name = self.spelled if isinstance(self.spelled, str) else getattr(self.spelled, "__name__", str(self.spelled))
        where = "" if isinstance(self.spelled, str) else f"{getattr(self.spelled, '__module__', '') or 'torch'}."
        return f"{self.group or self.op}-{where}{name}"

    def build(self) -> tuple[nn.Module, Tensor]:
        """The model and its data."""
        model = settled(lambda: Sandwich(self.make, self.layout))
        generator = torch.Generator().manual_seed(1)
        return model, torch.randn(LAYOUTS[self.layout].shape, generator=generator)


def module(type_: type[nn.Module], *args: Any, **kwargs: Any) -> tuple[Any, Callable[[], nn.Module]]:
    return type_, lambda: type_(*args, **kwargs)


def function(spelled: Any, body: Callable[..., Any] | None = None, **tensors: Any) -> tuple[Any, Any]:
    """A spelling as a function of (values, module). Tensors are made from functions, so that they are seeded."""
    chosen = body or (lambda x, m: spelled(x))
    return spelled, lambda: Call(chosen, **{k: v() if callable(v) else v for k, v in tensors.items()})


def method(name: str, body: Callable[..., Any] | None = None, **tensors: Any) -> tuple[Any, Any]:
    return function(name, body or (lambda x, m: getattr(x, name)()), **tensors)


def cases(op: str, *spellings: tuple[Any, Any], **options: Any) -> list[Case]:
    return [Case(op, spelled, make, **options) for spelled, make in spellings]


def unary(op: str, *modules: tuple[Any, Any], functions: tuple[Any, ...] = (), methods: tuple[str, ...] = ()) -> Any:
    """An op of one tensor without options."""
    return cases(op, *modules, *(function(f) for f in functions), *(method(m) for m in methods))


def normal(*shape: int) -> Callable[[], Tensor]:
    """A weight, made when the model is."""
    return lambda: torch.randn(shape) / 4


def conv_cases(n: int) -> list[Case]:
    kind, layout = (nn.Conv1d, "sequence") if n == 1 else (nn.Conv2d, "image")
    call, overloads = getattr(F, f"conv{n}d"), getattr(aten, f"conv{n}d")
    made = {"weight": normal(6, 4, *(3,) * n), "bias": normal(6)}
    one, two = [1] * n, [2] * n
    return [
        *cases(
            f"conv{n}d",
            module(kind, 4, 6, 3, stride=2, padding=1),
            function(call, lambda x, m: call(x, m.weight, m.bias, 2, 1), **made),
            function(call, lambda x, m: call(input=x, weight=m.weight, bias=m.bias, stride=two, padding=(1,)), **made),
            function(overloads.default, lambda x, m: overloads.default(x, m.weight, m.bias, two, one), **made),
            layout=layout,
        ),
        *cases(
            f"conv{n}d",
            module(kind, 4, 6, 3, padding="same"),
            function(call, lambda x, m: call(x, m.weight, m.bias, padding="same"), **made),
            function(overloads.padding, lambda x, m: overloads.padding(x, m.weight, m.bias, one, "same"), **made),
            layout=layout,
            group=f"conv{n}d_same",
        ),
    ]


TRANSPOSED = {"weight": normal(4, 6, 2, 2), "bias": normal(6)}
STATISTICS = {
    "running_mean": normal(4),
    "running_var": lambda: torch.rand(4) + 0.5,
    "weight": normal(4),
    "bias": normal(4),
}
VOLUME = (4, 4, 2, 4, 8)

LAYERS = [
    *conv_cases(1),
    *conv_cases(2),
    *cases(
        "conv_transpose2d",
        module(nn.ConvTranspose2d, 4, 6, 2, stride=2),
        function(F.conv_transpose2d, lambda x, m: F.conv_transpose2d(x, m.weight, m.bias, 2), **TRANSPOSED),
        function(
            aten.conv_transpose2d.input,
            lambda x, m: aten.conv_transpose2d.input(x, m.weight, m.bias, [2, 2]),
            **TRANSPOSED,
        ),
    ),
    *cases(
        "linear",
        module(nn.Linear, 8, 6),
        function(F.linear, lambda x, m: F.linear(x, m.weight, m.bias), weight=normal(6, 8), bias=normal(6)),
        function(
            aten.linear.default,
            lambda x, m: aten.linear.default(x, m.weight, m.bias),
            weight=normal(6, 8),
            bias=normal(6),
        ),
        layout="rows",
    ),
    *cases(
        "batch_norm",
        module(nn.BatchNorm2d, 4),
        function(
            F.batch_norm,
            lambda x, m: F.batch_norm(x, m.running_mean, m.running_var, m.weight, m.bias),
            **STATISTICS,
        ),
        function(
            torch.batch_norm,
            lambda x, m: torch.batch_norm(
                x, m.weight, m.bias, m.running_mean, m.running_var, False, 0.1, 1e-5, torch.backends.cudnn.enabled
            ),
            **STATISTICS,
        ),
        function(
            aten.batch_norm.default,
            lambda x, m: aten.batch_norm.default(
                x, m.weight, m.bias, m.running_mean, m.running_var, False, 0.1, 1e-5, False
            ),
            **STATISTICS,
        ),
    ),
    *cases("batch_norm", module(nn.BatchNorm1d, 4), layout="sequence", group="batch_norm_1d"),
    *cases(
        "batch_norm",
        (
            nn.BatchNorm3d,
            lambda: Call(lambda x, m: m.norm(x.reshape(VOLUME)).reshape(4, 4, 8, 8), norm=nn.BatchNorm3d(4)),
        ),
        group="batch_norm_3d",
        fate="float",
    ),
    *cases(
        "prelu",
        module(nn.PReLU, 4),
        function(F.prelu, lambda x, m: F.prelu(x, m.weight), weight=lambda: torch.full((4,), 0.25)),
        function(
            aten.prelu.default, lambda x, m: aten.prelu.default(x, m.weight), weight=lambda: torch.full((4,), 0.25)
        ),
        method("prelu", lambda x, m: x.prelu(m.weight), weight=lambda: torch.full((4,), 0.25)),
    ),
]

ACTIVATIONS = [
    *unary(
        "relu",
        module(nn.ReLU),
        module(nn.ReLU, inplace=True),
        functions=(F.relu, torch.relu, torch.relu_, aten.relu.default, aten.relu_.default),
        methods=("relu", "relu_"),
    ),
    *cases("relu", function(F.relu, lambda x, m: F.relu(x, inplace=True))),
    *unary("relu6", module(nn.ReLU6), functions=(F.relu6, aten.relu6.default)),
    *cases(
        "hardtanh",
        module(nn.Hardtanh, -0.5, 0.75),
        *(
            function(f, lambda x, m, f=f: f(x, -0.5, 0.75))
            for f in (
                F.hardtanh,
                F.hardtanh_,
                aten.hardtanh.default,
                aten.hardtanh_.default,
                torch.clamp,
                torch.clip,
                aten.clamp.default,
            )
        ),
        *(method(f, lambda x, m, f=f: getattr(x, f)(-0.5, max=0.75)) for f in ("clamp", "clamp_", "clip")),
    ),
    *cases(
        "hardtanh",
        function(torch.clamp, lambda x, m: torch.clamp(x, max=0.75)),
        method("clamp", lambda x, m: x.clamp(max=0.75)),
        group="hardtanh_one_bound",
    ),
    *unary(
        "hardswish",
        module(nn.Hardswish),
        functions=(F.hardswish, aten.hardswish.default, aten.hardswish_.default),
    ),
    *unary("hardsigmoid", module(nn.Hardsigmoid), functions=(F.hardsigmoid, aten.hardsigmoid.default)),
    *unary("silu", module(nn.SiLU), functions=(F.silu, aten.silu.default, aten.silu_.default)),
    *[
        case
        for layout, fate in (("rows", "int8"), ("image", "float"))
        for case in cases(
            "gelu",
            module(nn.GELU),
            function(F.gelu),
            function(aten.gelu.default),
            layout=layout,
            group=f"gelu_{layout}",
            fate=fate,
        )
    ],
    *cases(
        "leaky_relu",
        module(nn.LeakyReLU, 0.2),
        *(
            function(f, lambda x, m, f=f: f(x, 0.2))
            for f in (F.leaky_relu, F.leaky_relu_, aten.leaky_relu.default, aten.leaky_relu_.default)
        ),
        layout="rows",
    ),
    *unary(
        "sigmoid",
        module(nn.Sigmoid),
        functions=(torch.sigmoid, aten.sigmoid.default),
        methods=("sigmoid", "sigmoid_"),
    ),
    *unary("tanh", module(nn.Tanh), functions=(torch.tanh, aten.tanh.default), methods=("tanh", "tanh_")),
]


def iadd(x: Any, y: Any, m: Any) -> Any:
    x += y
    return x


def imul(x: Any, y: Any, m: Any) -> Any:
    x *= y
    return x


ARITHMETIC = [
    *cases(
        "add",
        function(torch.add, lambda x, y, m: torch.add(x, y)),
        function(operator.add, lambda x, y, m: x + y),
        function(operator.add, iadd),
        method("add", lambda x, y, m: x.add(other=y)),
        method("add_", lambda x, y, m: x.add_(y)),
        function(aten.add.Tensor, lambda x, y, m: aten.add.Tensor(x, y)),
        function(aten.add_.Tensor, lambda x, y, m: aten.add_.Tensor(x, y)),
        layout="images",
    ),
    *cases(
        "mul",
        function(torch.mul, lambda x, y, m: torch.mul(x, y)),
        function(operator.mul, lambda x, y, m: x * y),
        function(operator.mul, imul),
        method("mul", lambda x, y, m: x.mul(y)),
        method("mul_", lambda x, y, m: x.mul_(y)),
        function(aten.mul.Tensor, lambda x, y, m: aten.mul.Tensor(x, y)),
        function(aten.mul_.Tensor, lambda x, y, m: aten.mul_.Tensor(x, y)),
        layout="images",
    ),
    *cases(
        "cat",
        *(
            function(f, lambda x, y, m, f=f: f([x, y], 1))
            for f in (torch.cat, torch.concat, torch.concatenate, aten.cat.default)
        ),
        function(torch.cat, lambda x, y, m: torch.cat(tensors=[x, y], dim=1)),
        layout="images",
    ),
]

MOVEMENT = [
    *cases(
        "flatten",
        module(nn.Flatten),
        function(torch.flatten, lambda x, m: torch.flatten(x, 1)),
        method("flatten", lambda x, m: x.flatten(start_dim=1)),
    ),
    *cases(
        "reshape",
        function(torch.reshape, lambda x, m: torch.reshape(x, (4, 8, 4, 8))),
        method("reshape", lambda x, m: x.reshape(4, 8, 4, 8)),
        method("reshape", lambda x, m: x.reshape((4, 8, 4, 8))),
        method("view", lambda x, m: x.view(4, 8, 4, 8)),
        function(aten.reshape.default, lambda x, m: aten.reshape.default(x, [4, 8, 4, 8])),
        function(aten.view.default, lambda x, m: aten.view.default(x, [4, 8, 4, 8])),
    ),
    *cases(
        "permute",
        function(torch.permute, lambda x, m: torch.permute(x, (0, 3, 1, 2))),
        method("permute", lambda x, m: x.permute(0, 3, 1, 2)),
        method("permute", lambda x, m: x.permute((0, 3, 1, 2))),
        function(aten.permute.default, lambda x, m: aten.permute.default(x, [0, 3, 1, 2])),
    ),
    *cases(
        "transpose",
        function(torch.transpose, lambda x, m: torch.transpose(x, 1, 2)),
        method("transpose", lambda x, m: x.transpose(1, 2)),
        function(torch.swapaxes, lambda x, m: torch.swapaxes(x, 1, 2)),
        function(aten.transpose.int, lambda x, m: aten.transpose.int(x, 1, 2)),
    ),
    *unary("contiguous", methods=("contiguous",)),
    *cases(
        "pixel_shuffle",
        module(nn.PixelShuffle, 2),
        function(F.pixel_shuffle, lambda x, m: F.pixel_shuffle(x, 2)),
        function(aten.pixel_shuffle.default, lambda x, m: aten.pixel_shuffle.default(x, 2)),
    ),
    *cases(
        "pad",
        module(nn.ZeroPad2d, (1, 2, 0, 1)),
        function(F.pad, lambda x, m: F.pad(x, (1, 2, 0, 1))),
        function(F.pad, lambda x, m: F.pad(x, [1, 2, 0, 1], value=None)),
        function(aten.constant_pad_nd.default, lambda x, m: aten.constant_pad_nd.default(x, [1, 2, 0, 1])),
    ),
    *cases(
        "pad",
        module(nn.ConstantPad2d, 1, 0.5),
        function(F.pad, lambda x, m: F.pad(x, (1, 1, 1, 1), value=0.5)),
        group="pad_value",
        fate="float",  # 0.5 is not on the grid
    ),
    *[
        case
        for kind, mode in (
            (nn.ReflectionPad2d, "reflect"),
            (nn.ReplicationPad2d, "replicate"),
            (nn.CircularPad2d, "circular"),
        )
        for case in cases(
            "pad",
            module(kind, (1, 2, 2, 1)),
            function(F.pad, lambda x, m, mode=mode: F.pad(x, (1, 2, 2, 1), mode=mode)),
            group=f"pad_{mode}",
        )
    ],
    *cases(
        "interpolate",
        function(F.interpolate, lambda x, m: F.interpolate(x, scale_factor=2)),
        module(nn.Upsample, scale_factor=2),
        module(nn.UpsamplingNearest2d, scale_factor=2),
    ),
    *cases("dropout", *(module(t) for t in (nn.Dropout, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout))),
    *cases(
        "dropout",
        *(function(f, lambda x, m, f=f: f(x, 0.3, False)) for f in (F.dropout, F.dropout2d)),
        function(F.dropout3d, lambda x, m: F.dropout3d(x, training=False)),
    ),
    *cases(
        "dropout",
        module(nn.Dropout1d),
        function(F.dropout1d, lambda x, m: F.dropout1d(x, training=m.training)),
        layout="sequence",
        group="dropout1d",
    ),
    *cases("identity", module(nn.Identity)),
]

POOLING = [
    *cases(
        "max_pool1d",
        module(nn.MaxPool1d, 3, 2, 1),
        *(function(f, lambda x, m, f=f: f(x, 3, 2, 1)) for f in (F.max_pool1d, torch.max_pool1d)),
        function(aten.max_pool1d.default, lambda x, m: aten.max_pool1d.default(x, [3], [2], [1])),
        layout="sequence",
    ),
    *cases(
        "max_pool2d",
        module(nn.MaxPool2d, 2),
        *(function(f, lambda x, m, f=f: f(x, 2)) for f in (F.max_pool2d, torch.max_pool2d)),
        function(F.max_pool2d, lambda x, m: F.max_pool2d(x, (2, 2), stride=2)),
        function(aten.max_pool2d.default, lambda x, m: aten.max_pool2d.default(x, [2, 2])),
    ),
    *cases(
        "avg_pool1d",
        module(nn.AvgPool1d, 2),
        function(F.avg_pool1d, lambda x, m: F.avg_pool1d(x, 2)),
        function(aten.avg_pool1d.default, lambda x, m: aten.avg_pool1d.default(x, [2])),
        layout="sequence",
    ),
    *cases(
        "avg_pool2d",
        module(nn.AvgPool2d, 3, 2, 1),
        function(F.avg_pool2d, lambda x, m: F.avg_pool2d(x, 3, 2, 1)),
        function(aten.avg_pool2d.default, lambda x, m: aten.avg_pool2d.default(x, [3, 3], [2, 2], [1, 1])),
    ),
    *cases(
        "adaptive_avg_pool2d",
        module(nn.AdaptiveAvgPool2d, 1),
        function(F.adaptive_avg_pool2d, lambda x, m: F.adaptive_avg_pool2d(x, 1)),
        function(aten.adaptive_avg_pool2d.default, lambda x, m: aten.adaptive_avg_pool2d.default(x, [1, 1])),
    ),
    *cases(
        "adaptive_avg_pool2d",
        module(nn.AdaptiveAvgPool2d, (3, 2)),
        function(F.adaptive_avg_pool2d, lambda x, m: F.adaptive_avg_pool2d(x, (3, 2))),
        group="adaptive_avg_pool2d_windows",
        fate="float",
    ),
    *cases(
        "adaptive_max_pool2d",
        module(nn.AdaptiveMaxPool2d, 2),
        function(F.adaptive_max_pool2d, lambda x, m: F.adaptive_max_pool2d(x, 2)),
    ),
    *cases(
        "mean",
        function(torch.mean, lambda x, m: torch.mean(x, (2, 3))),
        method("mean", lambda x, m: x.mean((2, 3))),
        method("mean", lambda x, m: x.mean(dim=[2, 3])),
        function(aten.mean.dim, lambda x, m: aten.mean.dim(x, [2, 3])),
    ),
]

CASES = [*LAYERS, *ACTIVATIONS, *ARITHMETIC, *MOVEMENT, *POOLING]

CONVERSION = "made by the passes; a model that calls it is quantized already"
OTHERWISE = "torch.fx traces it as another spelling, which has a case; only graphs from elsewhere hold it"
UNTESTED = {
    F.sigmoid: OTHERWISE,
    F.tanh: OTHERWISE,
    operator.iadd: OTHERWISE,
    operator.imul: OTHERWISE,
    torch.ops.fxq.quantize.default: CONVERSION,
    torch.ops.fxq.dequantize.default: CONVERSION,
    torch.ops.fxq.dequantize.channel: CONVERSION,
}

FATES = {
    **dict.fromkeys(("conv1d", "conv2d", "conv_transpose2d", "linear"), "int8"),
    **dict.fromkeys(("relu", "relu6", "hardtanh", "hardswish", "silu", "leaky_relu", "gelu"), "int8"),
    **dict.fromkeys(("add", "avg_pool1d", "avg_pool2d", "mean", "adaptive_avg_pool2d"), "int8"),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "pad"), "moves"),
    **dict.fromkeys(
        ("cat", "flatten", "reshape", "permute", "transpose", "contiguous", "pixel_shuffle", "interpolate"), "moves"
    ),
    **dict.fromkeys(("batch_norm", "dropout", "identity"), "folded"),
    **dict.fromkeys(("prelu", "hardsigmoid", "sigmoid", "tanh", "mul", "adaptive_max_pool2d"), "float"),
}


def test_every_spelling_has_a_case():
    tested = {case.spelled for case in CASES}
    missing = [f"{op.name}: {s.target}" for op in OPS for s in op.spellings if s.target not in tested | UNTESTED.keys()]
    assert not missing, "add a case to tests/test_ops.py for each of these spellings"
    known = {s.target for op in OPS for s in op.spellings}
    assert not [case for case in CASES if case.spelled not in known]
    assert UNTESTED.keys() <= known


@pytest.mark.parametrize("case", CASES, ids=str)
def test_traced_graph_has_the_spelling(case):
    """The case tests what it says: tracing leaves the spelling as it was written."""
    model, x = case.build()
    gm = after(model, x, "trace")
    called = {type(gm.get_submodule(n.target)) if n.op == "call_module" else n.target for n in gm.graph.nodes}
    assert case.spelled in called


def groups() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for case in CASES:
        found.setdefault(case.group or case.op, []).append(case)
    return found


@pytest.mark.parametrize("name", [name for name, same in groups().items() if len(same) > 1])
def test_spellings_have_one_canonical_graph(name):
    texts = {}
    for case in groups()[name]:
        texts[anonymous(after(*case.build(), "canonicalize"))] = str(case)
    assert len(texts) == 1, "\n\n".join(f"{case}:\n{graph}" for graph, case in texts.items())
    if FATES[case.op] != "folded" or case.op == "batch_norm":
        assert f" = {case.op}(" in next(iter(texts))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_canonical_op_is_the_original_one(case):
    model, x = case.build()
    gm = after(model, x, "canonicalize")
    with torch.no_grad():
        torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_backend_is_close_to_float(case):
    model, x = case.build()
    quantized = fxq.quantize(model, fxq.Recipe.static(backend="reference"), data=[x])
    with torch.no_grad():
        assert sqnr(model(x), quantized(x)) > 28


@pytest.mark.skipif(not has_onednn_int8(), reason="needs the oneDNN int8 kernels")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_x86_is_its_qdq_reference(case):
    """The kernels against the qdq graph they were made from, and against the reference backend."""
    model, x = case.build()
    recipe = fxq.Recipe.static(backend="x86")
    quantized = fxq.quantize(model, recipe, data=[x])
    qdq = fxq.quantize(model, recipe.without_pass("lower").without_pass("verify-lowering"), data=[x])
    reference = fxq.quantize(model, fxq.Recipe.static(backend="reference"), data=[x])
    with torch.no_grad():
        got, exact = quantized(x), qdq(x)
        assert torch.equal(got, quantized(x))
        assert got.shape == model(x).shape
        # A tie moves one element by a step; the layer behind spreads it over a few outputs.
        assert sqnr(exact, got) > 50
        assert sqnr(reference(x), got) > 30
    entries = quantized.ledger.where(lambda e: e.op == case.op and "behind" not in e.path and "before" not in e.path)
    fates = [e.fate for e in entries]
    expected = case.fate or FATES[case.op]
    assert all(e.reason for e in entries if e.fate == "float")
    assert fates == [expected] or (fates == [] and expected == "folded")
