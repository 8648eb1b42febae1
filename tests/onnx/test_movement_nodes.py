"""Slicing, concatenation, reshaping and permutation, in ONNX Runtime and in OpenVINO, against torch."""

from __future__ import annotations

import pytest
import torch

from fxq.onnx.graph import write_onnx
from fxq.onnx.onnx_objects import NotInOnnx
from tests.support.onnx_runs import call, in_both, normal, single

pytestmark = pytest.mark.any_cpu

X = normal(2, 6, 5, 4)
ALL = slice(None)


def calls(x):
    return [
        call("flatten", x, start_dim=1, end_dim=2),
        call("unflatten", x, dim=1, sizes=(2, -1)),
        call("reshape", x, shape=(4, -1, 5)),
        call("squeeze", x[:, :1]),
        call("squeeze", x[:, :1], dim=(1, 2)),
        call("unsqueeze", x, dim=-1),
        call("permute", x, dims=(0, -1, 1, 2)),
        call("transpose", x, dim0=-1, dim1=1),
        call("expand", x[:, :1], sizes=(-1, 3, -1, -1)),
        call("expand", x[:1], sizes=(2, 2, -1, -1, -1)),
        call("expand_as", x[:, :1], x),
        call("reshape_as", x, x.transpose(0, 1)),
        call("repeat", x, repeats=(1, 2, 1, 3)),
        call("repeat_interleave", x, repeats=3, dim=-2),
        call("repeat_interleave", x, repeats=2),
        call("cat", [x, x[:, :2], x], dim=-3),
        call("stack", [x, x.flip(0)], dim=-1),
        call("stack", [x], dim=1),
        call("getitem", x, index=(ALL, slice(1, None, 2))),
        call("getitem", x, index=(-1, None, slice(-3, -1), 2)),
        call("getitem", x, index=(Ellipsis, 0)),
        call("getitem", x, index=(ALL, slice(4, 2))),
        call("chunk", x, chunks=4, dim=1, index=2),
        call("split", x, sizes=4, dim=1, index=1),
        call("split", x, sizes=(1, 3, 2), dim=-3, index=-1),
        call("tensor_split", x, sections=4, dim=2, index=0),
        call("index_select", x, torch.tensor([3, 0, 0]), dim=-1),
        call("flip", x, dims=(1, -1)),
        call("roll", x, shifts=(1, -7), dims=(2, -3)),
        call("contiguous", x),
        call("dropout", x, training=False),
        call("identity", x),
    ]


CALLS = [*calls(X), *calls((20 * X + 100).clamp(0, 255).to(torch.uint8)), call("cat", [normal(0), normal(3)])]


@pytest.mark.one_in(2)
@in_both(CALLS)
def test_an_engine_gives_what_torch_gives(call, engine):
    call.check(engine, rtol=0)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (call("dropout", X, training=True), "it drops values at random"),
        (call("roll", X, shifts=(2,)), "it rolls the flattened tensor"),
        (call("cat", [X, X.int()]), "inputs have different dtypes"),
        (call("stack", [X, X.int()]), "inputs have different dtypes"),
    ],
    ids=str,
)
def test_refusals(refused, reason):
    with pytest.raises(NotInOnnx, match=reason):
        write_onnx(single(refused.op, *refused.values, **refused.options), refused.inputs)
