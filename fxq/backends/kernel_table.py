"""Which op starts a kernel, what the kernel takes along, and how it is made; with the rows of the plain kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from fxq.backends.captures import captures_of
from fxq.backends.kernel import Kernel, Post, bounds
from fxq.backends.plain.clamp_and_pad import Clamp, Pad
from fxq.backends.plain.converters import PReLUQuantize
from fxq.backends.plain.lookup import Lookup
from fxq.backends.plain.pool import AdaptiveMaxPool, MaxPool2d, MaxPool3d, Mean
from fxq.backends.whole_units import whole_unit
from fxq.errors import BackendError
from fxq.graph.info import info
from fxq.graph.region import Weight
from fxq.graph.unit import Inner, OpCall
from fxq.ops import OPS
from fxq.quant.qparams import QParams
from fxq.rewriting.pattern import Rule

CLAMPS = ("relu", "relu6", "hardtanh")
"""Activation functions that the integers of any kernel's result can be clamped to."""


@dataclass(frozen=True)
class Parts:
    """What a kernel is made of: the leading ops of a unit, taken apart.

    Attributes:
        first: the op that starts the kernel.
        residual: what the add takes besides the first op's result; None without an add.
        post: the activation function at the end; None without one.
        ops: how many ops of the unit this is.
        slope: the slopes of a prelu at the end; None without one.
        whole: the key of the row, where one kernel takes all ops of the unit; else None: the row is that of `first`.
        calls: all ops, there.
    """

    first: OpCall
    residual: Any
    post: Post | None
    ops: int
    slope: Any = None
    whole: str | None = None
    calls: tuple[OpCall, ...] = ()


@dataclass(frozen=True)
class Operands:
    """The integers that go into a kernel.

    Attributes:
        inputs: the integer activations, in the order in which the kernel takes them.
        grids: their parameters.
        weight, bias: of the first op, where it has them.
        out: parameters of the result; None: the kernel emits float.
        slope: of a prelu, where there is one.
        fixed: the first op's other arguments that are constants of the model or numbers, by name.
        layers: where one kernel takes all ops of a unit: weight and bias of those that have them.
        captures: where it is a kernel of the user's own, see `FusedUnit`.
    """

    inputs: tuple[fx.Node, ...]
    grids: tuple[QParams, ...]
    weight: Weight | None
    bias: Tensor | None
    out: QParams | None
    slope: Tensor | None = None
    fixed: Mapping[str, Tensor | float] = field(default_factory=dict)
    layers: tuple[tuple[Weight | None, Tensor | None], ...] = ()
    captures: Mapping[str, Any] = field(default_factory=dict)


def row_for(parts: Parts, rows: Mapping[str, KernelRow]) -> KernelRow | None:
    """The row of a unit that was taken apart."""
    return row_of(parts.first, rows) if parts.whole is None else rows[parts.whole]


def row_of(call: OpCall, rows: Mapping[str, KernelRow]) -> KernelRow | None:
    """The row of an op. Where the table has none: what only moves runs as it stands, a function of one is looked up."""
    found = rows.get(call.op.name)
    if found is None and call.op.quant.layout:
        return NATIVE
    by_a_constant = len(call.op.quant.inputs) == 2  # the row is for two tensors
    return LOOKED_UP if call.pointwise and (found is None or by_a_constant) else found


def take_apart(calls: tuple[OpCall, ...], rows: Mapping[str, KernelRow]) -> Parts | None:
    """The leading ops of a unit that one kernel runs: the first op, an add to it, an activation function.

    Of these, the ops behind the kernel may read the last value only: it is the one that the kernel hands out. Or all
    ops of the unit, where the table has a kernel for them together.
    """
    fusions = ((key, row.fusion) for key, row in rows.items() if row.fusion is not None)
    own = next((key for key, fusion in fusions if captures_of(fusion, calls) is not None), None)
    whole = own or whole_unit(calls)
    if whole is not None and whole in rows:
        return Parts(calls[0], None, None, len(calls), whole=whole, calls=calls)
    row = row_of(calls[0], rows)
    if row is None:
        return None
    parts = [Parts(calls[0], None, None, 1)]
    if len(calls) > 1 and row.adds and calls[1].op.name == "add":
        residual = _other_operand(calls[1], Inner(0))
        if residual is not None:
            parts.append(Parts(calls[0], residual, None, 2))
    last = parts[-1]
    allowed = row.posts if last.residual is None else CLAMPS
    after = calls[last.ops] if last.ops < len(calls) else None
    fits = after is not None and after.op.name in allowed and after.computed is None
    if after is not None and fits and after.tensors["x"] == Inner(last.ops - 1):
        parts.append(replace(last, post=post_of(after), ops=last.ops + 1, slope=after.tensors.get("weight")))
    return next(p for p in reversed(parts) if p.ops == 1 or not _reads_inside(calls, p.ops))


def _reads_inside(calls: tuple[OpCall, ...], ops: int) -> bool:
    """Whether an op behind the first `ops` reads a value that they make, other than the last."""
    read = {value for call in calls[ops:] for value in call.tensors.values() if isinstance(value, Inner)}
    return any(value.index < ops - 1 for value in read)


def _other_operand(add: OpCall, own: Inner) -> fx.Node | None:
    """What an add takes besides `own`: a value from outside the unit, or None when it is a number or a constant."""
    operands = [add.tensors["x"], add.tensors["other"]]
    if own not in operands or add.options["alpha"] != 1:
        return None
    operands.remove(own)
    other = operands[0]
    return other if isinstance(other, fx.Node) and other.op != "get_attr" else None


Make = Callable[[Parts, Operands], Kernel]
Judge = Callable[[Parts, fx.Node], "str | None"]


@dataclass(frozen=True)
class KernelRow:
    """How ops become kernels.

    Attributes:
        posts: the activation functions that the kernel applies itself.
        twice: those of them that cost as much again as the kernel without them.
        adds: whether the kernel adds a residual itself.
        make: builds the kernel, or None where the op runs on integers as it stands.
        refuses: why a unit cannot have this kernel, before its parameters are known.
        emits_float: whether the kernel can also emit float32.
        fusion: of a kernel of the user's own: whose units it takes whole.
        code: of such a kernel: a hash of the code that makes it.
    """

    make: Make | None
    refuses: Judge
    posts: tuple[str, ...] = ()
    adds: bool = False
    twice: tuple[str, ...] = ()
    emits_float: bool = True
    fusion: Rule | None = None
    code: str = ""


def post_of(call: OpCall) -> Post:
    """An activation function as a kernel takes it."""
    options = call.options
    if call.op.name == "hardtanh":
        return Post("hardtanh", (options["min_val"], options["max_val"]))
    if call.op.name == "leaky_relu":
        return Post("leaky_relu", (options["negative_slope"],))
    return Post(call.op.name, algorithm=options.get("approximate", ""))


def never(parts: Parts, node: fx.Node) -> str | None:
    """No reason to refuse."""
    return None


def _max_pool(parts: Parts, operands: Operands) -> Kernel:
    options = parts.first.options
    same_grid(operands)
    dims = len(options["kernel_size"])
    return MaxPool3d(**options) if dims == 3 else MaxPool2d(**options, dims=dims)


def _adaptive_max(parts: Parts, operands: Operands) -> Kernel:
    same_grid(operands)
    return AdaptiveMaxPool(**parts.first.options)


def _adaptive_max_refuses(parts: Parts, node: fx.Node) -> str | None:
    return AdaptiveMaxPool.refuses(**parts.first.options)


def same_grid(operands: Operands) -> QParams:
    """The grid that input and output share. Raises `BackendError` when they do not."""
    if operands.out is None or not operands.grids[0].same_as(operands.out):
        raise BackendError("its input and output have different scales")
    return operands.grids[0]


def wanted(operands: Operands) -> QParams:
    """The grid of the result. Raises `BackendError` when it is wanted in float."""
    if operands.out is None:
        raise BackendError("its result is wanted in float")
    return operands.out


def _adaptive_refuses(parts: Parts, node: fx.Node) -> str | None:
    return None if all(n == 1 for n in parts.first.options["output_size"]) else "its windows depend on the input's size"


def global_mean(parts: Parts, operands: Operands) -> Kernel:
    """An adaptive pooling to one value is a mean, whatever the size of its input."""
    axes = len(parts.first.options["output_size"])
    return Mean(operands.grids[0], operands.out, range(-axes, 0), keepdim=True)


def _mean(parts: Parts, operands: Operands) -> Kernel:
    options = parts.first.options
    return Mean(operands.grids[0], operands.out, options["dim"], options["keepdim"], parts.first.op.name == "sum")


def _clamp(parts: Parts, operands: Operands) -> Kernel:
    return Clamp(same_grid(operands), post_of(parts.first))


def _pad_refuses(parts: Parts, node: fx.Node) -> str | None:
    return Pad.refuses(mode=parts.first.options["mode"])


def _pad(parts: Parts, operands: Operands) -> Kernel:
    options = parts.first.options
    return Pad(same_grid(operands), options["pad"], options["mode"], options["value"] or 0.0)


def _table_refuses(parts: Parts, node: fx.Node) -> str | None:
    call = parts.first
    (x,) = call.activations
    shape = (info(x).shape or ()) if isinstance(x, fx.Node) else ()
    constants = {n: info(v).shape or () for n, v in call.tensors.items() if v is not x and isinstance(v, fx.Node)}
    wide = [n for n, s in constants.items() if math.prod(s) != 1 and not _per_channel(call, n, s, shape)]
    if wide or (info(node).shape or ()) != shape:
        return f"{call.op.name} with a constant that differs along other axes than the channels"
    return None


def _per_channel(call: OpCall, name: str, constant: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a constant has one value per channel (axis 1) of an activation of this shape."""
    if len(shape) < 2:
        return False
    if name not in call.op.quant.inputs:  # slopes and statistics: one value per channel by what they are
        return constant == (shape[1],)
    return (1,) * (len(shape) - len(constant)) + constant == (1, shape[1], *[1] * (len(shape) - 2))


def looked_up(parts: Parts, operands: Operands) -> Kernel:
    """The table of the op with its constants, and of the clamp behind it."""
    op, tensors = parts.first.op, parts.first.tensors
    (name,) = (n for n in op.quant.inputs if tensors.get(n) is parts.first.activations[0])
    low, high = bounds(parts.post) or (-math.inf, math.inf)
    # One value per integer and channel stands along the last axis.
    fixed = {n: v.float().reshape(-1) if isinstance(v, Tensor) else v for n, v in operands.fixed.items()}
    channels = max((v.numel() for v in fixed.values() if isinstance(v, Tensor)), default=0)

    def function(x: Tensor) -> Tensor:
        given = {name: x, **fixed}
        y: Tensor = op.target(*(given.get(n) for n in op.tensors), **parts.first.options)
        return y.clamp(low, high)

    return Lookup.of(function, op.name, operands.grids[0], operands.out, channels)


NATIVE = KernelRow(None, never)
"""An op that runs on integers as it stands."""
LOOKED_UP = KernelRow(looked_up, _table_refuses, CLAMPS)
"""A function of one tensor: see `Lookup`."""
PLAIN: dict[str, KernelRow] = {
    **dict.fromkeys(OPS.family("max_pool"), KernelRow(_max_pool, never)),
    **dict.fromkeys(OPS.family("adaptive_max_pool"), KernelRow(_adaptive_max, _adaptive_max_refuses)),
    **dict.fromkeys(OPS.family("adaptive_avg_pool"), KernelRow(global_mean, _adaptive_refuses)),
    "mean": KernelRow(_mean, never),
    "sum": KernelRow(_mean, never),
    "relu": KernelRow(_clamp, never),
    "relu6": KernelRow(_clamp, never),
    "hardtanh": KernelRow(_clamp, never),
    "pad": KernelRow(_pad, _pad_refuses),
}
"""What runs on plain uint8 tensors without an engine, on any CPU, besides what `row_of` knows from the op's row."""
QUANTIZING: dict[str, Callable[[Tensor, QParams], Kernel]] = {"prelu": PReLUQuantize}
"""Functions of a tensor and a weight that a quantize behind them is computed along with."""
