"""Norms, softmax and attention, in ONNX Runtime and in OpenVINO, against torch."""

from __future__ import annotations

import pytest
import torch

from fxq.onnx.graph import write_onnx
from fxq.onnx.onnx_objects import NotInOnnx
from tests.support.onnx_runs import call, in_both, normal, single, weight

pytestmark = pytest.mark.any_cpu

X = normal(2, 6, 5, 4)
Q, K, V = normal(2, 3, 4, 8), normal(2, 3, 5, 8, seed=2), normal(2, 3, 5, 6, seed=3)
SEEN = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]).bool()
LEFT_OUT = torch.tensor([[False, False, True], [False, True, True]])

CALLS = [
    *(call(name, X, dim=dim) for name in ("softmax", "softmin", "log_softmax") for dim in (1, -1)),
    *(call("normalize", X, p=p, dim=dim) for p in (1.0, 2.0) for dim in (1, (2, 3))),
    call("normalize", torch.zeros(2, 3), dim=-1, eps=1e-3),
    call("cosine_similarity", X, normal(2, 6, 5, 4, seed=4), dim=1),
    call("cosine_similarity", normal(3, 6), normal(6, seed=4), dim=1),
    call("batch_norm", X, weight(6), weight(6).abs() + 0.1, weight(6), weight(6, seed=7), eps=1e-3),
    call("batch_norm", normal(5, 3), weight(3), weight(3).abs() + 0.1),
    call("layer_norm", X, weight(5, 4), weight(5, 4, seed=7), normalized_shape=(5, 4)),
    call("layer_norm", X, normalized_shape=(4,), eps=1e-2),
    call("rms_norm", X, weight(4), normalized_shape=(4,)),
    call("rms_norm", X, normalized_shape=(5, 4), eps=1e-2),
    call("group_norm", X, weight(6), weight(6, seed=7), num_groups=3),
    call("group_norm", normal(4, 6), num_groups=2),
    call("instance_norm", X, weight(6), weight(6, seed=7)),
    call("instance_norm", normal(2, 3, 9)),
    *(call("local_response_norm", X, size=size, alpha=0.5, beta=0.6, k=2.0) for size in (2, 3, 5)),
    call("local_response_norm", normal(2, 6, 5), size=4, alpha=1.0),
    call("scaled_dot_product_attention", Q, K, V),
    call("scaled_dot_product_attention", Q, K, V, SEEN, scale=0.7),
    call("scaled_dot_product_attention", Q, K, V, torch.zeros(4, 5).masked_fill(~SEEN, -torch.inf)),
    call("scaled_dot_product_attention", Q, K, V, normal(2, 1, 4, 5)),
    call("scaled_dot_product_attention", Q, K, V, is_causal=True),
    call("attention_mask", LEFT_OUT, None, heads=2),
    call("attention_mask", None, torch.triu(torch.ones(4, 4, dtype=torch.bool), 1), heads=2),
    call("attention_mask", LEFT_OUT, normal(4, 4, 3), heads=2),
]


@pytest.mark.one_in(3)
@in_both(CALLS)
def test_an_engine_gives_what_torch_gives(call, engine):
    call.check(engine, rtol=5e-6)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (call("normalize", X, p=3.0), "its norm is of order 3.0"),
        (call("instance_norm", normal(3, 9), batched=False), "no batch axis"),
        (call("scaled_dot_product_attention", Q, K, V, dropout_p=0.5), "it drops values at random"),
        (call("scaled_dot_product_attention", Q, K, V, enable_gqa=True), "it has grouped queries"),
    ],
    ids=str,
)
def test_refusals(refused, reason):
    with pytest.raises(NotInOnnx, match=reason):
        write_onnx(single(refused.op, *refused.values, **refused.options), refused.inputs)
