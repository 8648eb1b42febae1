"""Assignments to parts of tensors, in ONNX Runtime and in OpenVINO, against torch, also with dynamic sizes."""

from __future__ import annotations

import pytest
import torch

from fxq.common.data import Batch
from fxq.graph.run import inputs_for
from fxq.onnx.onnx_objects import NotInOnnx
from fxq.onnx.whole_model import write_model
from tests.support.graphs import graph
from tests.support.helpers import module
from tests.support.onnx_runs import call, in_both, normal, run_onnxruntime

pytestmark = pytest.mark.any_cpu

X, ALL = normal(2, 6, 5), slice(None)
INDICES = [
    (0,),
    (-1, ALL, -1),
    (ALL, slice(1, 3)),
    (ALL, slice(-3, None), slice(None, -1)),
    (ALL, slice(1, None, 2), slice(0, 4, 3)),
    (None, 1, slice(2, 4), None),
    (),
]


@pytest.mark.one_in(3)
@in_both([call("assign", X, value, index=index) for index in INDICES for value in (7.0, normal(*X[index].shape))])
def test_an_engine_gives_what_torch_gives(call, engine):
    call.check(engine, rtol=0)


def several(self, x):
    y = x * 2
    y[:, 1:3] = 0.0
    y[..., 2] += 1
    y[-1] = y[0]
    y[x > 1] = 5.0
    y[torch.tensor([0, 1]), torch.tensor([3, 3])] = x[0, 0]
    left, right = y.chunk(2, 1)
    left.mul_(right)
    return y


def test_sizes_that_vary():
    x = normal(3, 4)
    gm = graph(module(several), x)
    model = write_model(gm, inputs_for(gm.graph, Batch((x,))), True).model
    for example in (x, normal(7, 4, seed=3), normal(2, 4, seed=4)):
        (got,) = run_onnxruntime(model, [example])
        assert torch.equal(got, several(None, example))


def test_refusals():
    def by_every_second(self, x):
        y = x * 2
        y[::2] = 0.0
        return y

    def by_places_of_columns(self, x):
        y = x * 2
        y[:, torch.tensor([0, 2])] = 0.0
        return y

    x = normal(3, 4)
    for forward, why in (
        (by_every_second, "with a step to an axis"),
        (by_places_of_columns, "integer tensors"),
    ):
        gm = graph(module(forward), x)
        with pytest.raises(NotInOnnx, match=why):
            write_model(gm, inputs_for(gm.graph, Batch((x,))), True)
