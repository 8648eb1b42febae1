"""Recurrent layers in float, in ONNX Runtime and in OpenVINO, against torch."""

from __future__ import annotations

import pytest

from fxq.onnx.graph import write_onnx
from fxq.onnx.writer import NotInOnnx
from tests.onnx_runs import call, in_both, normal, single, weight

pytestmark = pytest.mark.any_cpu

N, H = 2, 4
X = normal(5, N, 3)


def weights(gates: int):
    return weight(gates * H, 3), weight(gates * H, H, seed=6), weight(gates * H, seed=7), weight(gates * H, seed=8)


STATE = normal(N, H, seed=3)
CELL = normal(N, H, seed=4)

CALLS = [
    *(call("lstm", X, *weights(4), reverse=reverse, cell=cell) for reverse in (False, True) for cell in (False, True)),
    call("lstm", X, *weights(4), STATE, CELL, cell=True),
    call("lstm", X, *weights(4)[:2]),
    call("lstm", X[:1], *weights(4)),
    *(call("gru", X, *weights(3), reverse=reverse) for reverse in (False, True)),
    call("gru", X, *weights(3), STATE),
    call("gru", X, *weights(3)[:2]),
    *(call("rnn", X, *weights(1), STATE, nonlinearity=kind, reverse=True) for kind in ("tanh", "relu")),
    call("rnn", X, *weights(1)[:2]),
]


@in_both(CALLS)
def test_an_engine_gives_what_torch_gives(call, engine):
    call.check(engine, rtol=2e-6)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (call("gru", X, *weights(3), state_qmax=127), "its hidden state is on a grid"),
        (call("gru", X, normal(12, 3), normal(12, 4)), "its weights are computed"),
        (
            call("lstm", X, weight(16, 3), weight(16, 2), None, None, None, None, weight(2, 4)),
            "its hidden state is projected",
        ),
    ],
    ids=str,
)
def test_refusals(refused, reason):
    with pytest.raises(NotInOnnx, match=reason):
        write_onnx(single(refused.op, *refused.values, **refused.options), refused.inputs)
