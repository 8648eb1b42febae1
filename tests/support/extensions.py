"""Ops, a fusion with a kernel and a backend as users write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxq
from fxq.graph.unit import calls_of
from fxq.quant.qparams import quantize

# ---- ops: a function of one element, one that moves values


@torch.library.custom_op("fxq_tests::bump", mutates_args=())
def bump_op(x: Tensor, width: float = 1.0) -> Tensor:
    """A function of one element, in an op of the user's library."""
    return torch.exp(-((x / width) ** 2))


@fxq.extend.register_op(torch.ops.fxq_tests.bump, traits=fxq.extend.OpTraits("computes", pointwise=True))
def bump(x, *, width: float = 1.0):
    return torch.ops.fxq_tests.bump(x, width)


class Swap(nn.Module):
    """Moves values, and is a module with an option."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, self.dim)


@fxq.extend.register_op(Swap, traits=fxq.extend.OpTraits("moves", layout=True), name="own_swap")
def swap(x, *, dim: int):
    return x.roll(1, dim)


@fxq.extend.register_op(traits=fxq.extend.OpTraits("moves", ("xs",), layout=True), name="own_join")
def join(xs, *, dim: int):
    return torch.cat(xs, dim)


# ---- a fusion, and a kernel for its units


@fxq.fusion(everywhere=False)
def linear_tanh_mul(op, x, w, b, s):
    return op.mul(op.tanh(op.linear(x, w, b)), s)


class LinearTanhMul(fxq.extend.Kernel):
    """tanh(linear(x)) * factor: uint8 in, uint8 or float32 out."""

    name = "tests.linear_tanh_mul"
    options = ("x", "out")

    def __init__(self, weight, scale, bias, factor, x, out):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.register_buffer("factor", factor)
        self.x, self.out = x, out

    def forward(self, x):
        weight = self.weight * self.scale.reshape(-1, 1)
        y = torch.tanh(F.linear((x.float() - self.x.z) * self.x.s, weight, self.bias)) * self.factor
        return y if self.out is None else quantize(y, self.out)


@fxq.extend.register_kernel("fbgemm", linear_tanh_mul)
@fxq.extend.register_kernel("x86", linear_tanh_mul)
def make_linear_tanh_mul(unit):
    w, b, s = (unit.captures[name] for name in "wbs")
    return LinearTanhMul(w.values, w.qparams.scale, b, torch.as_tensor(s), unit.captures["x"], unit.out)


@fxq.fusion(everywhere=False)
def conv_relu_and_tanh(op, x, w, b):
    y = op.conv2d(x, w, b)
    return op.relu(y), op.tanh(y)


class ConvReluAndTanh(fxq.extend.Kernel):
    """relu and tanh of one conv2d(x): uint8 in, each uint8 or float32 out."""

    name = "tests.conv_relu_and_tanh"
    options = ("x", "relu", "tanh")

    def __init__(self, weight, scale, bias, x, relu, tanh):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.x, self.relu, self.tanh = x, relu, tanh

    def forward(self, x):
        weight = self.weight * self.scale.reshape(-1, 1, 1, 1)
        y = F.conv2d((x.float() - self.x.z) * self.x.s, weight, self.bias)
        branches = (torch.relu(y), self.relu), (torch.tanh(y), self.tanh)
        return tuple(value if grid is None else quantize(value, grid) for value, grid in branches)


@fxq.extend.register_kernel("x86", conv_relu_and_tanh)
def make_conv_relu_and_tanh(unit):
    w = unit.captures["w"]
    return ConvReluAndTanh(w.values, w.qparams.scale, unit.captures["b"], unit.captures["x"], *unit.outs)


# ---- a backend


class OnlyLinear(fxq.extend.Backend):
    """Quantizes linear layers, and leaves them in q/dq form."""

    name = "only_linear"
    has_kernels = False

    def supports(self, gm: fx.GraphModule, node: fx.Node, calls, config) -> fxq.extend.Support:
        fits = calls[0].op.name == "linear"
        return fxq.extend.Support(1) if fits else fxq.extend.Support(0, "only_linear runs linear layers")

    def lower(self, gm: fx.GraphModule, region) -> None:
        return None


class NamedAsOurs(OnlyLinear):
    """Its name is taken by fxq."""

    name = "x86"


class NamedAsAnother(OnlyLinear):
    """Its name is taken by the one above."""


class Nameless(fxq.extend.Backend):
    """Not all of a backend."""


# ---- an engine


class WholeRegion(fxq.extend.RegionKernel):
    """Kernel of an engine for a region: here, its float ops between conversions."""

    name = "tests.region"


class Engine(fxq.extend.Backend):
    """Runs whole regions, of all ops but two: one has no integer form, the other moves integers as it stands."""

    name = "engine"

    def takes(self, gm, node) -> bool:
        return all(call.op.name not in ("erf", "transpose") for call in calls_of(gm, node))

    def supports(self, gm: fx.GraphModule, node: fx.Node, calls, config) -> fxq.extend.Support:
        return fxq.extend.Support(len(calls))

    def regions(self, gm: fx.GraphModule):
        return fxq.extend.connected_regions(gm, lambda node: self.takes(gm, node))

    def lower(self, gm: fx.GraphModule, region: fxq.extend.Region) -> fxq.extend.Kernel:
        return WholeRegion.of(gm, region)


class PricedEngine(Engine):
    """Engine that prices its own ops: in float they cost 10 s, as integers convolutions 1 s and other ops 30 s."""

    name = "priced_engine"

    def prices(self, gm: fx.GraphModule, example):
        costs = {}
        for node in gm.graph.nodes:
            calls = calls_of(gm, node)
            if calls and calls[0].op.name not in ("quantize", "dequantize", "requantize"):
                costs[node] = fxq.extend.Cost(10.0, 1.0 if calls[0].op.name == "conv2d" else 30.0)
        return fxq.extend.Prices(costs, conversion=0.001)
