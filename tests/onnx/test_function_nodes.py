"""Functions that are not ops of fxq, in ONNX Runtime against torch."""

import pytest
import torch
from torch import nn

from fxq.common.data import Batch
from fxq.graph.run import inputs_for
from fxq.onnx.function_nodes import CALL_WRITERS, CREATION_FUNCTIONS
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.onnx.whole_model import write_model
from tests.support.graphs import graph
from tests.support.helpers import module
from tests.support.onnx_runs import normal, onnx, run_onnxruntime

pytestmark = pytest.mark.any_cpu

X, Y = normal(3, 4), normal(3, 4, seed=2)
MODELS = {
    "comparisons": module(lambda self, x, y: ((x > y), (x < 0.5), x >= y, x <= 0, x == x, x != y)),
    "methods": module(lambda self, x, y: (x.gt(y), torch.lt(x, 0.5), x.eq(y), torch.ne(x, y))),
    "logic": module(lambda self, x, y: ((x > 0) & (y > 0), (x > 0) | (y > 0), (x > 0) ^ (y > 0), ~(x > 0))),
    "masks": module(lambda self, x, y: torch.where(torch.logical_and(x > 0, torch.logical_not(y > 0)), x, y)),
    "places": module(lambda self, x, y: (x.argmax(1), torch.argmin(y, 0, keepdim=True))),
    "filled": module(lambda self, x, y: (torch.zeros_like(x) + y, torch.full_like(x, 2.5) * y)),
    "made": module(lambda self, x, y: x + torch.ones(x.size(0), 1) + torch.full((x.size(0), x.size(1)), 3.0)),
    "numbers": module(lambda self, x, y: x * torch.tensor(x.size(0), dtype=torch.float32) + torch.tensor(x.size(1))),
    "counted": module(
        lambda self, x, y: x + torch.arange(x.size(0))[:, None] + torch.arange(1, x.size(0) + 1)[:, None]
    ),
    "entries": module(
        lambda self, x, y: (
            x[torch.arange(x.size(0)).flip(0)[:, None, None], torch.arange(-2, 3)],
            (x > 0)[torch.arange(x.size(0))[:, None]],
        )
    ),
    "listed entries": module(lambda self, x, y: (x[..., [-2, 0]], x[[0, -1, 0]], y[0:1, [3]], y[:, [1], ...])),
    "shares": module(lambda self, x, y: torch.arange(x.size(0))[:, None] / 3 + x),
    "how many": module(lambda self, x, y: ((x > 0).sum(1), (y > 0).sum(), (x > 0).sum(0, keepdim=True))),
    "extremes": module(lambda self, x, y: (x.max(), torch.min(y), x.amax(), y.amin())),
    "sums": module(lambda self, x, y: (x > 0).cumsum(0, dtype=torch.float32)),
}


def written(model, *inputs, dynamic=True):
    gm = graph(model, inputs)
    return gm, write_model(gm, inputs_for(gm.graph, Batch(inputs)), dynamic).model


@pytest.mark.parametrize("name", MODELS)
def test_numbers(name):
    gm, model = written(MODELS[name], X, Y)
    onnx.checker.check_model(model, full_check=True)
    for x, y in ((X, Y), (normal(7, 4), normal(7, 4, seed=2)), (X[:1], Y[:1])):
        wanted = gm(x, y)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for got, expected in zip(run_onnxruntime(model, [x, y]), wanted, strict=True):
            assert torch.equal(got, expected)


def test_means_and_sums_of_all():
    gm, model = written(module(lambda self, x: (x.mean(), torch.sum(x))), X)
    for got, wanted in zip(run_onnxruntime(model, [Y]), gm(Y), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


ROUNDED_MODELS = {
    "curves": module(
        lambda self, x, y: (x.sigmoid().asin(), torch.atan(y), x.sinh(), y.asinh(), (x.tanh() / 2).atanh())
    ),
    "logarithms": module(lambda self, x, y: (torch.log1p(x.abs()), torch.expm1(y), x.logsumexp(1))),
    "cut": module(lambda self, x, y: ((10 * x).trunc(), (-10 * y).trunc())),
    "products": module(lambda self, x, y: (torch.addcmul(x, y, x, value=0.5), x.addcmul(x, y))),
    "between": module(lambda self, x, y: (torch.lerp(x, y, 0.3), x.lerp(y, y.sigmoid()))),
    "gates": module(lambda self, x, y: torch.nn.functional.glu(torch.cat([x, y], 1)) + x),
    "triangles": module(lambda self, x, y: (torch.tril(x[:, :, None] * y[:, None]), torch.triu(x, 1) + y)),
    "parts": module(lambda self, x, y: (torch.stack(x.unbind(1), -1), y.unbind(-1)[1], torch.cat(x[None].unbind(), 1))),
    "put": module(
        lambda self, x, y: (
            x.scatter(1, y.argmax(1, keepdim=True), y[:, :1]),
            torch.zeros_like(x).scatter(1, y.argmax(1, keepdim=True), 2.0),
        )
    ),
}


@pytest.mark.parametrize("name", ROUNDED_MODELS)
def test_numbers_to_rounding(name):
    gm, model = written(ROUNDED_MODELS[name], X, Y)
    onnx.checker.check_model(model, full_check=True)
    for x, y in ((X, Y), (normal(7, 4), normal(7, 4, seed=2)), (X[:1], Y[:1])):
        wanted = gm(x, y)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for got, expected in zip(run_onnxruntime(model, [x, y]), wanted, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_what_is_not_finite():
    model = module(lambda self, x: (x.isnan(), x.isinf(), torch.nan_to_num(x), x.nan_to_num(2.0)))
    x = torch.tensor([[1.0, torch.nan, torch.inf, -torch.inf]])
    gm, model = written(model, X)
    for got, expected in zip(run_onnxruntime(model, [x]), gm(x), strict=True):
        assert torch.equal(got, expected)


def test_creation_functions_are_written():
    assert CALL_WRITERS.keys() >= CREATION_FUNCTIONS


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (module(lambda self, x: x.to(torch.int64) & 3), "it is a bitwise operation on integers"),
        (module(lambda self, x: x.argmax()), "it reduces all axes"),
        (module(lambda self, x: x.sum(dtype=torch.float64)), "it changes the dtype"),
        (module(lambda self, x: torch.nan_to_num(x, posinf=1.0)), "it replaces infinity by a given number"),
        (module(lambda self, x: torch.stack(x.unbind(0))), "the number of its results is dynamic"),
        (
            module(lambda self, x: x.scatter(1, x.argmax(1)[:, None], 1.0, reduce="add")),
            "it reduces the scattered values",
        ),
        (module(lambda self, x: x.scatter(1, x.argmax(1)[:, None], x)), "its source is larger than its index"),
        (module(lambda self, x: x[x > 0]), "its index holds more than integer tensors"),
        (module(lambda self, x: x + torch.arange(0.5, x.size(0), 1.0)[:, None]), "its bounds are floats"),
    ],
)
def test_refusals(model, reason):
    with pytest.raises(NotInOnnx, match=reason):
        written(model, X)


def test_outputs_of_a_class_are_called_by_their_fields():
    class Named(nn.Module):
        def forward(self, x):
            return {"first": x + 1, "second": (x * 2, x * 3)}

    _, model = written(Named(), X)
    assert [out.name for out in model.graph.output] == ["first", "second_0", "second_1"]
