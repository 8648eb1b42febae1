"""Helpers of kernel tests: grids, random integers, an independent comparison, copies."""

from __future__ import annotations

import copy
import io
import json
import pickle
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.kernel import Kernel, PostOp
from fxq.backends.table.layer_spec import LayerSpec
from fxq.quant.qparams import QParams
from tests.support.machine import QMAX

CHANNELS_LAST = torch.channels_last
POSTS = {
    "relu": (PostOp("relu"), F.relu),
    "relu6": (PostOp("relu6"), F.relu6),
    "hardtanh": (PostOp("hardtanh", (-0.5, 2.0)), lambda y: y.clamp(-0.5, 2.0)),
    "hardswish": (PostOp("hardswish"), F.hardswish),
    "silu": (PostOp("silu"), F.silu),
    "leaky_relu": (PostOp("leaky_relu", (0.1,)), lambda y: F.leaky_relu(y, 0.1)),
    "tanh": (PostOp("tanh"), torch.tanh),
    "gelu": (PostOp("gelu", algorithm="none"), F.gelu),
    "gelu_tanh": (PostOp("gelu", algorithm="tanh"), partial(F.gelu, approximate="tanh")),
}
X = QParams.per_tensor(0.0217, 101, 0, QMAX)
"""Grid of the input of convolutions and linear layers, see `activations`."""
ZERO_POINTS = (0, 1, (QMAX + 1) // 2, QMAX)
BYTE = QParams.per_tensor(0.0217, 101)
"""Grid of all 256 integers, for kernels that do not multiply activations and weights, see `bytes_`."""
# No sum of multiples of these scales is a tie on the grids of OUTS.
RESIDUAL = QParams.per_tensor(0.0313, 77)
OUTS = [
    QParams.per_tensor(0.0471, 119),
    QParams.per_tensor(0.0931, 60, 0, 127),
    QParams.per_tensor(0.0513, 99, 20, 180),
]


def real(q: Tensor, qp: QParams) -> Tensor:
    return (q.double() - qp.z) * qp.s


def activations(*shape: int) -> Tensor:
    """Random integers on the grid `X`, uint8."""
    return torch.randint(0, QMAX + 1, shape, dtype=torch.uint8)


def bytes_(*shape: int) -> Tensor:
    """Random integers on the grid `BYTE`, uint8."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def weight(*shape: int, axis: int | None = 0) -> tuple[Tensor, QParams, Tensor]:
    """Random int8 weight, its grid, and its real values in float64."""
    q = torch.randint(-127, 128, shape, dtype=torch.int8)
    fan_in = max(q[0].numel(), 1)
    scale = (torch.rand(()) if axis is None else torch.rand(shape[axis])) * 0.04 / fan_in**0.5 + 1e-4
    qp = QParams(scale, torch.zeros_like(scale, dtype=torch.int32), -127, 127, torch.int8, axis)
    along = scale if axis is None else scale.view([-1 if d == axis else 1 for d in range(q.dim())])
    return q, qp, q.double() * along.double()


def layer(*shape: int, axis: int | None = 0, **options: object) -> LayerSpec:
    """Layer with a random weight, with input grid `X` and output grid `OUTS[0]`."""
    return LayerSpec(*weight(*shape, axis=axis)[:2], None, X, **{"out": OUTS[0], **options})  # type: ignore[arg-type]


def agree(got: Tensor, y: Tensor, out: QParams | None) -> None:
    """Check that `got` is `y` on the grid `out`, up to one step on at most 0.1 % of the elements.

    Elements within 1/1000 step of a tie do not count, since float32 arithmetic may round them to either side.
    """
    assert got.shape == y.shape
    if out is None:
        torch.testing.assert_close(got.double(), y, rtol=1e-4, atol=1e-4)
        return
    assert got.dtype == torch.uint8
    steps = y / out.s
    off = (got.double() - (torch.round(steps) + out.z).clamp(out.qmin, out.qmax)).abs()
    clear = ((steps - steps.floor()) - 0.5).abs() > 1e-3
    assert off.numel() == 0 or (off.max() <= 1 and off[clear].sum() <= max(1, 0.001 * off.numel()))


def copies(kernel: Kernel) -> list[Kernel]:
    saved = io.BytesIO()
    torch.save(kernel, saved)
    config = json.loads(json.dumps(kernel.config()))
    return [
        copy.deepcopy(kernel),
        pickle.loads(pickle.dumps(kernel)),
        torch.load(io.BytesIO(saved.getvalue()), weights_only=False),
        type(kernel).from_config(config, dict(kernel.named_buffers())),
    ]


def planted(monkeypatch, kernel, change):
    """Make a kernel's forward return `change(result)`."""
    forward = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda self, *args: change(forward(self, *args)))
