"""verify-lowering after a pass of the user that has changed the lowered graph."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.backends.x86.onednn_linear import OnednnLinear
from fxq.graph.info import info
from fxq.graph.query import submodule
from tests.support.graphs import kinds
from tests.support.kernels import planted
from tests.support.machine import X86, needs_x86


@dataclass(frozen=True)
class After(fxq.Pass):
    """Pass after lower that calls a function."""

    edit: Any = None
    name: ClassVar[str] = "after-lower"
    needs: ClassVar[fxq.extend.Stage] = fxq.extend.Stage.LOWERED
    gives: ClassVar[fxq.extend.Stage] = fxq.extend.Stage.LOWERED

    def run(self, rewriter):
        self.edit(rewriter)


def rename_all(rewriter):
    for i, node in enumerate(n for n in rewriter.nodes() if n.op == "call_module"):
        rewriter.rename(node, f"k{i}")


def merge_equal(rewriter):
    first, second = (n for n in rewriter.nodes() if "max_pool" in str(n.target))
    rewriter.replace(second, first)


def make_anew(rewriter):
    for old in rewriter.nodes():
        if isinstance(submodule(rewriter.gm, old), OnednnLinear):
            new = rewriter.node("call_module", old.target, old.args, like=old, before=old)
            rewriter.describe(new, shape=info(old).shape, dtype=info(old).dtype)
            rewriter.replace(old, new)


class Pools(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        y = self.conv(x)
        return torch.add(F.max_pool2d(y, 2), F.max_pool2d(y, 2))


def with_pass(edit):
    return X86.with_optimize("coverage").insert_pass(After(edit), after="lower")


@needs_x86
def test_a_kernel_with_another_name_is_verified(monkeypatch):
    planted(monkeypatch, OnednnLinear, lambda result: result + 3)
    x = torch.rand(4, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    with pytest.warns(fxq.FxqWarning, match="x86.linear kernel is wrong"):
        quantized = fxq.quantize(model, with_pass(rename_all), data=[x])
    assert [e.precision for e in quantized.ledger if e.op == "linear"] == ["float", "float"]
    assert (quantized(x) - model(x)).abs().max() < 0.1  # a few steps of 1/100


@needs_x86
def test_a_kernel_whose_inputs_became_one_is_verified(monkeypatch):
    x = torch.rand(2, 3, 9, 9)
    model = Pools().eval()
    quantized = fxq.quantize(model, with_pass(merge_equal), data=[x])
    assert sum("max_pool" in kind for kind in kinds(quantized)) == 1
    assert (quantized(x) - model(x)).abs().max() < 0.1  # a few steps of 1/100


@needs_x86
def test_a_kernel_that_a_pass_has_made_is_said_not_to_be_verified():
    x = torch.rand(4, 8)
    with pytest.warns(fxq.FxqWarning, match="x86.linear kernel was added after lower.* not verified"):
        fxq.quantize(nn.Sequential(nn.Linear(8, 8)).eval(), with_pass(make_anew), data=[x])


@needs_x86
def test_a_kernel_that_reads_more_than_before_is_refused():
    def read_more(rewriter):
        node = next(n for n in rewriter.nodes() if isinstance(submodule(rewriter.gm, n), OnednnLinear))
        rewriter.update(node, args=(*node.args, next(iter(rewriter.graph.nodes))))

    with pytest.raises(fxq.PassError, match="made for 1 inputs and reads 2; a pass after lower has changed it"):
        fxq.quantize(nn.Sequential(nn.Linear(8, 8)).eval(), with_pass(read_more), data=[torch.rand(4, 8)])
