"""Layers, products and embeddings in float, in ONNX Runtime and in OpenVINO, against torch."""

from __future__ import annotations

import pytest
import torch

from fxq.onnx.graph import write_onnx
from fxq.onnx.writer import NotInOnnx
from tests.onnx_runs import call, in_both, normal, single, weight

pytestmark = pytest.mark.any_cpu

IDS = torch.tensor([[1, 0, 4], [2, 2, 3]])

CALLS = [
    call("conv1d", normal(2, 4, 9), weight(6, 2, 3), weight(6), stride=(2,), padding=(1,), dilation=(1,), groups=2),
    call("conv2d", normal(2, 4, 8, 7), weight(6, 4, 3, 2), padding=(1, 0), stride=(2, 1)),
    call("conv2d", normal(2, 4, 8, 7), weight(4, 1, 3, 3), weight(4), padding=(2, 1), dilation=(2, 1), groups=4),
    call("conv2d", normal(2, 4, 8, 7), weight(6, 4, 2, 3), weight(6), padding="same"),
    call("conv2d", normal(2, 4, 8, 7), weight(6, 4, 3, 3), padding=(1, 2), padding_mode="circular"),
    call("conv2d", normal(2, 4, 8, 7), weight(6, 4, 3, 3), padding=(1, 2), padding_mode="reflect"),
    call("conv2d", normal(2, 4, 8, 7), weight(6, 4, 3, 3), padding=(1, 2), padding_mode="replicate"),
    call("conv2d", normal(2, 4, 8, 7), normal(6, 4, 3, 3), normal(6)),
    call("conv3d", normal(1, 2, 5, 6, 7), weight(3, 2, 3, 2, 1), weight(3), padding=(1, 0, 1)),
    call("conv_transpose1d", normal(2, 4, 9), weight(4, 3, 4), weight(3), stride=(2,), padding=(1,)),
    call(
        "conv_transpose2d", normal(2, 4, 5, 6), weight(4, 3, 3, 3), weight(6), stride=(2, 3), padding=(1, 0),
        output_padding=(1, 2), groups=2,
    ),
    call("conv_transpose2d", normal(2, 4, 5, 6), weight(4, 3, 3, 2), dilation=(2, 1)),
    call("conv_transpose3d", normal(1, 2, 3, 4, 5), weight(2, 3, 2, 2, 2), stride=(2, 1, 2)),
    *(call("linear", normal(*shape, 5), weight(4, 5), weight(4)) for shape in ((), (3,), (2, 3), (2, 3, 4))),
    call("linear", normal(3, 5), weight(4, 5)),
    call("linear", normal(3, 5), normal(4, 5), normal(4)),
    call("matmul", normal(2, 3, 5), normal(5, 4)),
    call("matmul", normal(5), normal(2, 5, 4)),
    call("addmm", normal(4), normal(3, 5), normal(5, 4), beta=0.5, alpha=2.0),
    call("baddbmm", normal(2, 3, 4), normal(2, 3, 5), normal(2, 5, 4), alpha=0.5),
    call("einsum", [normal(2, 3, 5), normal(2, 5, 4)], equation="bij,bjk->bik"),
    call("einsum", [normal(2, 3, 5), normal(4, 5)], equation="...i,ji->...j"),
    call("einsum", [normal(2, 3, 5)], equation="abc->ca"),
    call("einsum", [normal(2, 3), normal(4, 3)], equation="nC,mC"),
    call("embedding", IDS, weight(5, 3)),
    *(call("embedding_bag", IDS, weight(5, 3), mode=mode) for mode in ("sum", "mean", "max")),
    call("embedding_bag", IDS, weight(5, 3), None, normal(2, 3), mode="sum"),
]  # fmt: skip


@in_both(CALLS)
def test_an_engine_gives_what_torch_gives(call, engine):
    call.check(engine)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (call("conv2d", normal(4, 8, 8), weight(3, 4, 3, 3)), "no batch axis"),
        (call("conv_transpose1d", normal(4, 8), weight(4, 3, 3)), "no batch axis"),
        (call("embedding_bag", IDS, weight(5, 3), padding_idx=2), "it leaves out entries"),
        (call("embedding_bag", IDS.flatten(), weight(5, 3), torch.tensor([0, 2])), "its bags are not of one size"),
    ],
    ids=str,
)
def test_refusals(refused, reason):
    with pytest.raises(NotInOnnx, match=reason):
        write_onnx(single(refused.op, *refused.values, **refused.options), refused.inputs)
