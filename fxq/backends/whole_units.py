"""Units that have a kernel as a whole, by the ops that they are made of.

The kernels of `rows.py` take a first op and what they can take along; these are known by all of their ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fxq.graph.info import info
from fxq.graph.unit import Inner, OpCall

EXCITE = "squeeze_excite"
EXCITE_FUNCTIONS = ("relu", "silu", "hardswish")
EXCITE_GATES = ("sigmoid", "hardsigmoid")


def whole_unit(calls: tuple[OpCall, ...]) -> str | None:
    """What the ops of a unit are together: the key of its row, or None."""
    return EXCITE if _excites(calls) else None


def _excites(calls: tuple[OpCall, ...]) -> bool:
    """Whether ops are x * gate(conv(function(conv(mean of the pixels of x)))), with kernels of one pixel."""
    if len(calls) != 6:
        return False
    pool, squeeze, function, excite, gate, product = calls
    chain = all(call.tensors.get("x") == Inner(i) for i, call in enumerate(calls[1:5]))
    x = pool.tensors["x"]
    shape = info(x).shape if not isinstance(x, Inner) else None
    return (
        chain
        and product.op.name == "mul"
        and product.tensors["x"] != product.tensors["other"]
        and all(value in (Inner(4), x) for value in product.tensors.values())
        and function.op.name in EXCITE_FUNCTIONS
        and gate.op.name in EXCITE_GATES
        and shape is not None
        and len(shape) == 4
        and _averages(pool)
        and _multiplies(squeeze, inputs=shape[1])
        and _multiplies(excite, outputs=shape[1])
    )


def is_over_image(dim: Any) -> bool:
    """Whether axes of (N, C, H, W) are H and W, whatever the call."""
    dims = dim if isinstance(dim, Sequence) else (dim,)
    return all(isinstance(d, int) for d in dims) and {d % 4 for d in dims} == {2, 3}


def _averages(call: OpCall) -> bool:
    """Whether an op turns (N, C, H, W) into (N, C, 1, 1) means."""
    options = call.options
    if call.op.name == "mean":
        return options["keepdim"] and is_over_image(options["dim"])
    return call.op.name == "adaptive_avg_pool2d" and tuple(options["output_size"]) == (1, 1)


def _multiplies(call: OpCall, **channels: int) -> bool:
    """Whether an op is a convolution with a kernel of one pixel that sees no padding, with so many channels."""
    weight = call.tensors.get("weight")
    shape = info(weight).shape if isinstance(weight, fx.Node) else None
    if call.op.name != "conv2d" or shape is None or shape[2:] != (1, 1):
        return False
    found = {"outputs": shape[0], "inputs": shape[1]}
    return (
        call.options["groups"] == 1
        and tuple(call.options["padding"]) == (0, 0)
        and all(found[name] == count for name, count in channels.items())
    )
