"""Grids are read from the graph: it lowers and renders the same without metadata, and follows edits of grids."""

import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.kernel import Kernel
from fxq.graph.grid import grid_of
from fxq.graph.query import is_op
from fxq.graph.view import view
from tests.support.graphs import equal, until
from tests.support.helpers import REFERENCE
from tests.support.models import batch, build, call, settled


class Attention(nn.Module):
    """Attention of two heads, written out, in a residual block with a layer norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        scores = torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, -1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


def small_conv():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 3, groups=8), nn.ReLU6(), nn.Flatten(), nn.Linear(288, 5))


NETS = {
    "conv": (lambda: settled(small_conv), lambda: torch.randn(4, 3, 16, 16)),
    "residual": (lambda: build("residual"), lambda: batch("residual")),
    "attention": (lambda: settled(Attention), lambda: torch.randn(4, 6, 16)),
}
BACKENDS = ("reference", "auto")


@dataclass(frozen=True)
class Edit(fxq.Pass):
    """A user's pass that calls a function with the graph's module."""

    function: object = None
    name: ClassVar[str] = "edit"
    needs: ClassVar[fxq.extend.Stage] = fxq.extend.Stage.FUSED
    gives: ClassVar[fxq.extend.Stage] = fxq.extend.Stage.FUSED

    def run(self, rewriter):
        self.function(rewriter.gm)


def forget(gm):
    for node in gm.graph.nodes:
        node.meta.clear()


def rename(gm):
    for i, node in enumerate(n for n in gm.graph.nodes if n.op not in ("placeholder", "output")):
        node._rename(f"value_{i}")


def double(gm):
    """Double the scale of the first grid, in its quantize and dequantize."""
    first = next(n for n in gm.graph.nodes if is_op(n, "quantize"))
    scale = first.kwargs["scale"]
    for node in (first, *first.users):
        node.kwargs = {**node.kwargs, "scale": 2 * scale}


def quantized(net, backend, after, edit):
    """Quantized model, quantized model with the edit after a pass, and an input."""
    model, x = (make() for make in NETS[net])
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage")
    edited = recipe.insert_pass(Edit(edit), after=after)
    return fxq.quantize(model, recipe, data=[x]), fxq.quantize(model, edited, data=[x]), x


def kernels(qmodel):
    called = [qmodel.get_submodule(n.target) for n in qmodel.graph.nodes if n.op == "call_module"]
    return [(type(kernel), kernel.config()) for kernel in called if isinstance(kernel, Kernel)]


def decided(qmodel):
    """Rows of the ledger, without names of nodes."""
    return [(row.name, row.precision, row.fix, re.sub(r"(%|into )\w+", "", row.reason)) for row in qmodel.ledger]


def grids(gm):
    return [(node.scale, node.zero_point) for node in view(gm) if node.kind != "constant"]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("net", NETS)
def test_a_graph_without_metadata_lowers_and_renders_the_same(net, backend):
    original, forgotten, x = quantized(net, backend, "fallback", forget)
    assert kernels(forgotten) == kernels(original)
    assert equal(call(forgotten, x), call(original, x))
    assert grids(forgotten) == grids(original) and len(set(grids(original))) > 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("net", NETS)
def test_the_grids_of_every_stage_are_read_from_the_graph(net):
    model, x = (make() for make in NETS[net])
    for stage in ("insert-qdq", "propagate", "fallback"):
        gm = until(model, x, stage, REFERENCE).gm
        before = grids(gm)
        forget(gm)
        assert grids(gm) == before


@pytest.mark.one_in(6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("net", NETS)
def test_a_scale_that_a_pass_changes_is_the_scale_of_the_model(net, backend, recwarn):
    original, edited, x = quantized(net, backend, "fallback", double)
    assert not [w for w in recwarn if "kernel is wrong" in str(w.message)]
    old, new = (next(g for node in q.graph.nodes if (g := grid_of(q, node)) is not None) for q in (original, edited))
    assert new.s == pytest.approx(2 * old.s) and new.z == old.z
    assert [type_ for type_, _ in kernels(edited)] == [type_ for type_, _ in kernels(original)]
    assert not equal(call(edited, x), call(original, x))


@pytest.mark.one_in(30)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("after", ["annotate", "share-qparams", "insert-observers", "insert-qdq", "fallback"])
@pytest.mark.parametrize("net", NETS)
def test_a_pass_that_renames_loses_nothing(net, after, backend):
    original, renamed, x = quantized(net, backend, after, rename)
    assert kernels(renamed) == kernels(original)
    assert equal(call(renamed, x), call(original, x))
    assert decided(renamed) == decided(original)


ROWS_AND_BLOCKS = """
x: float32[3, 8] = input()
size = abs(x)
most = amax(size, dim=(1,), keepdim=True)
step = mul(most, 0.01)
zero = tensor('zero')
q = quantize(x, scale=step, zero_point=zero, qmin=-127, qmax=127, dtype=torch.int8)
dq = dequantize(q, scale=step, zero_point=zero, qmin=-127, qmax=127)
w = tensor('w')
s = tensor('s')
z = tensor('z')
w_dq = dequantize(w, scale=s, zero_point=z, qmin=-8, qmax=7, axis=1, block=4)
y = linear(dq, w_dq)
return y
"""


def test_scales_that_are_computed_and_scales_of_blocks_are_in_the_graph():
    """The input has per-row dynamic grids, the weight a scale for each block of 4 values of a row."""
    x, w, scale = torch.randn(3, 8), torch.randint(-8, 8, (5, 8), dtype=torch.int8), torch.rand(5, 2) + 0.1
    tensors = {"zero": torch.tensor(0, dtype=torch.int32), "w": w, "s": scale, "z": torch.ones(5, 2, dtype=torch.int32)}
    gm = fxq.extend.read_graph(ROWS_AND_BLOCKS, tensors)
    step = x.abs().amax(1, keepdim=True) * 0.01
    rows = (x / step).round().clamp(-127, 127) * step
    assert torch.allclose(gm(x), rows @ ((w - 1.0) * scale.repeat_interleave(4, 1)).T, rtol=1e-5, atol=1e-6)
    node = {n.name: n for n in gm.graph.nodes}
    assert grid_of(gm, node["q"]) is None
    assert (grid_of(gm, node["w_dq"]).axis, grid_of(gm, node["w_dq"]).block) == (1, 4)
    assert view(gm)["w_dq"].scale.endswith("(axis 1, blocks of 4)")
    again = fxq.extend.read_graph(fxq.extend.write_graph(gm), fxq.extend.graph_tensors(gm))
    assert fxq.extend.write_graph(again) == fxq.extend.write_graph(gm) and torch.equal(again(x), gm(x))
