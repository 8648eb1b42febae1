"""Helpers for tests of fusion patterns: a function of a layer becomes a model, which is checked after each pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fxq
from fxq.backends.cpu import has_onednn_int8
from fxq.common.metrics import sqnr
from tests.support.graphs import equal, graph, text
from tests.support.helpers import REFERENCE
from tests.support.models import call, settled

BACKENDS = ["reference"] + (["x86"] if has_onednn_int8() else [])


class Fused(nn.Module):
    """`forward(self, x)` with a layer `layer`, a residual branch `branch` and PReLU slopes `slope`."""

    def __init__(self, layer: Callable[[], nn.Module], forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.branch, self.other = layer(), layer(), layer()
        self.slope = nn.Parameter(torch.full((6,), 0.25))
        self.body = forward

    def forward(self, x):
        return self.body(self, x)


def fused(layer: Callable[[], nn.Module], shape: tuple[int, ...], forward: Callable[..., Any]) -> Any:
    """The model, its input, and the graphs before and after fuse, for a backend that runs any unit."""
    model, x = settled(lambda: Fused(layer, forward)), data(shape)
    return model, x, graph(model, x, "fold-batch-norm", REFERENCE), graph(model, x, "fuse", REFERENCE)


def data(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def lines(graph: Any) -> list[str]:
    """The ops of a graph as text, without the inputs and the return."""
    return text(graph).splitlines()[1:-1]


def check_numbers(model: nn.Module, x: Tensor, before: Any, after: Any) -> None:
    """Check that the unit computes the values of its ops, int8 is close to float, and kernels to their reference."""
    assert equal(call(after, x), call(before, x))
    for backend in BACKENDS:
        recipe = fxq.Recipe.static(backend=backend)
        observed = fxq.calibrate(fxq.prepare(model, recipe, example_inputs=x), [x])
        quantized = fxq.convert(observed)
        qdq = fxq.convert(observed, recipe.without_pass("lower").without_pass("verify-lowering"))
        assert sqnr(call(model, x), call(quantized, x)) > 25
        assert sqnr(call(qdq, x), call(quantized, x)) > 50


def check_refused(rule: str, node: str, reason: str, model: nn.Module, x: Tensor, before: Any, after: Any) -> None:
    """Check that the rule makes no unit and gives a reason, and that the model is still quantized."""
    assert all(f" = {rule}(" not in line for line in lines(after)), lines(after)
    assert reason in fxq.extend.explain(rule, before, node)
    check_numbers(model, x, before, after)
