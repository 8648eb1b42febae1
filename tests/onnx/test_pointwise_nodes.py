"""Elementwise ops, in ONNX Runtime and in OpenVINO, against torch."""

from __future__ import annotations

import math

import pytest
import torch

from fxq.onnx.graph import write_onnx
from fxq.onnx.onnx_objects import NotInOnnx
from tests.support.onnx_runs import call, in_both, normal, single, weight

pytestmark = pytest.mark.any_cpu

X = torch.cat([normal(3, 4, 7), torch.tensor([0.0, -0.5, 0.5, 3.0, -3.0, 30.0, -30.0]).expand(1, 4, 7)])
POSITIVE = X.abs() + 0.1
INTS = torch.tensor([[3, -2, 0], [7, 1, -9]])
FLAGS = torch.tensor([[True, False, True], [False, False, True]])
PLAIN = (
    "relu relu6 hardswish hardsigmoid silu mish softplus elu celu selu leaky_relu sigmoid tanh log_sigmoid softsign "
    "tanhshrink hardshrink softshrink neg abs gelu sin cos erf"
)

CALLS = [
    *(call(name, X) for name in PLAIN.split()),
    *(call(name, POSITIVE) for name in ("log", "sqrt", "rsqrt")),
    call("exp", X.clamp(max=5)),
    call("gelu", X, approximate="tanh"),
    call("softplus", X, beta=2.5, threshold=3),
    call("softplus", X, threshold=1),
    call("elu", X, alpha=0.3),
    call("celu", X, alpha=2.0),
    call("leaky_relu", X, negative_slope=0.3),
    call("hardshrink", X, lambd=1.0),
    call("softshrink", X, lambd=1.0),
    call("hardtanh", X),
    call("hardtanh", X, min_val=-0.5, max_val=math.inf),
    call("hardtanh", X, min_val=-math.inf, max_val=1.5),
    call("hardtanh", X, min_val=0.0, max_val=math.inf),
    call("threshold", X, threshold=0.5, value=-3.0),
    call("prelu", X, weight(4)),
    call("prelu", X, weight(1)),
    call("prelu", normal(5, 3), weight(3)),
    call("prelu", normal(2, 3, 4, 5), weight(3)),
    call("prelu", normal(2, 1, 4, 4), weight(1)),
    call("prelu", normal(2, 3, 4, 5), normal(3, seed=2)),
    *(call("cast", INTS, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.bool)),
    *(call("cast", X, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.bool)),
    *(call("cast", FLAGS, dtype=dtype) for dtype in (torch.float32, torch.int64, torch.uint8)),
    call("cast", torch.tensor([0, 1, 128, 255], dtype=torch.uint8), dtype=torch.float32),
    call("pow", X, exponent=2),
    call("pow", X, exponent=3.0),
    call("pow", POSITIVE, exponent=-0.5),
    call("pow", INTS, exponent=2),
    call("pow", INTS.abs() + 1, exponent=0.5),
    call("add", X, normal(4, 1)),
    call("add", X, normal(4, 1), alpha=2.5),
    call("add", X, 3),
    call("add", INTS, 0.5),
    call("add", INTS, normal(3)),
    call("add", FLAGS, FLAGS.flip(0)),
    call("sub", 1, FLAGS.to(torch.int64)),
    call("sub", X, normal(7), alpha=0.5),
    call("sub", 2.5, X),
    call("mul", X, INTS[:, :1, None].expand(2, 4, 1)[:1]),
    call("mul", FLAGS, normal(2, 3)),
    call("mul", FLAGS, FLAGS.flip(0)),
    call("div", X, POSITIVE),
    call("div", INTS, 4.0),
    call("div", INTS, 3),
    call("hardtanh", INTS, min_val=-1, max_val=2),
    call("hardtanh", INTS, min_val=-1.5, max_val=2),
    call("maximum", X, normal(1, 1, 7)),
    call("minimum", X, normal(1, 1, 7)),
    call("maximum", INTS, INTS.flip(0)),
    call("maximum", (X * 4).to(torch.uint8), (X.flip(0) * 4).to(torch.uint8)),
    call("minimum", FLAGS, FLAGS.flip(0)),
    call("where", FLAGS, normal(2, 3), normal(3, seed=2)),
    call("where", FLAGS, INTS, 0.5),
    call("where", FLAGS, 1.0, normal(2, 3)),
    call("masked_fill", normal(2, 3), FLAGS, -math.inf),
    call("masked_fill", INTS, FLAGS, 4),
    call("masked_fill", normal(2, 3), FLAGS, torch.tensor(7)),
    call("relu", INTS),
    call("exp", INTS.clamp(max=3)),
    call("sigmoid", INTS),
    call("abs", INTS),
]


@pytest.mark.one_in(2)
@in_both(CALLS)
def test_an_engine_gives_what_torch_gives(call, engine):
    call.check(engine, rtol=3e-6)


@pytest.mark.parametrize(
    ("gm", "inputs", "reason"),
    [
        (single("div", X, 2.0, rounding_mode="floor"), [X], "its quotient is rounded"),
        (single("cast", X, dtype=torch.uint8), [X], "engines disagree on values of torch.uint8"),
        (single("cast", X, dtype=torch.float64), [X], "engines disagree on values of torch.float64"),
    ],
)
def test_refusals(gm, inputs, reason):
    with pytest.raises(NotInOnnx, match=reason):
        write_onnx(gm, inputs)
