"""Recurrent kernels with random weights, and their results in float64."""

from __future__ import annotations

import torch

from fxq.backends.plain.time_steps import GATES
from fxq.quant.qparams import QParams
from tests.support.kernels import weight
from tests.support.machine import BITS, QMAX

X = QParams.per_tensor(0.0217, 51, 0, QMAX)
UNIT = QParams.per_tensor(1.0, 2 ** (BITS - 1), 0, QMAX)
OUT = QParams.per_tensor(2 / QMAX, 2 ** (BITS - 1), 0, QMAX)
STATE = QMAX // 2


def kernel(kind, op, inputs, hidden, width=None, bias=True, **options):
    """A kernel of a class with random weights, and the weights in float64."""
    rows = GATES[op] * hidden
    shapes = {"weight_ih": (rows, inputs), "weight_hh": (rows, width or hidden)}
    if width:
        shapes["weight_hr"] = (width, hidden)
    tensors, real = {}, {}
    for name, shape in shapes.items():
        values, qp, real[name] = weight(*shape)
        tensors |= {name: values, f"{name}_scale": qp.scale}
    for name in ("bias_ih", "bias_hh"):
        tensors[name] = torch.randn(rows) / 2 if bias else None
        real[name] = torch.zeros(rows).double() if tensors[name] is None else tensors[name].double()
    return kind(**tensors, op=op, **{"x": X, "state_qmax": STATE, **options}), real


def rounded(h, layer, scale):
    """A state on its grid, in float64."""
    steps = h.abs().amax(1, keepdim=True).clamp(min=1e-30) / layer.state_qmax if scale is None else scale
    return torch.round(h / steps).clamp(-layer.state_qmax, layer.state_qmax) * steps


def exact(layer, real, x, h, c):
    """Result of the kernel in float64: x is (T, N, I), h and c are the initial states."""
    rows = []
    width = layer.weight_hh.shape[1]
    for t in range(len(x))[:: -1 if layer.reverse else 1]:
        ih = x[t] @ real["weight_ih"].T + real["bias_ih"]
        hh = rounded(h, layer, layer.state_scale) @ real["weight_hh"].T + real["bias_hh"]
        if layer.op == "lstm":
            i, f, g, o = (ih + hh).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            if layer.weight_hr is not None:
                scale = 1 / layer.state_qmax if layer.state_scale is not None else None
                h = rounded(h, layer, scale) @ real["weight_hr"].T
        elif layer.op == "gru":
            (r, z, n), (hr, hz, hn) = ih.chunk(3, 1), hh.chunk(3, 1)
            update = (z + hz).sigmoid()
            h = (1 - update) * (n + (r + hr).sigmoid() * hn).tanh() + update * h
        else:
            h = (ih + hh).tanh() if layer.nonlinearity == "tanh" else (ih + hh).relu()
        rows.append(h)
    y = torch.stack(rows[:: -1 if layer.reverse else 1])
    if not layer.cell:
        return y
    filled = torch.cat([c, c.new_zeros(len(c), -c.shape[1] % width)], 1)
    return torch.cat([y, torch.stack(filled.split(width, 1))])
