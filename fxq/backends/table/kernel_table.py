"""Which op starts a kernel, what the kernel takes along, and how it is made; with the rows of the plain kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxq.backends.kernel import Kernel, Post, bounds
from fxq.backends.plain.clamp_and_pad import Clamp, Pad
from fxq.backends.plain.converters import PReLUQuantize
from fxq.backends.plain.lookup import Lookup
from fxq.backends.plain.pool import AdaptiveMaxPool, MaxPool2d, MaxPool3d, Mean
from fxq.errors import BackendError
from fxq.graph.info import info
from fxq.graph.query import constant
from fxq.graph.region import Weight, integer_input, integer_weight
from fxq.graph.unit import Calls, InnerValue, OpCall, inputs_of
from fxq.ops import OPS
from fxq.quant.qparams import QParams
from fxq.quant.spec import Role

CLAMPS = ("relu", "relu6", "hardtanh")
"""Activation functions that the integers of any kernel's result can be clamped to."""


@dataclass(frozen=True)
class FusedUnit:
    """What a kernel is made of: the ops of a unit, or one op.

    Attributes:
        captures: by the names in the fusion's pattern: of an activation its grid, a `QParams`; of a weight its int8
            `values` and their `qparams`; of a constant, such as a bias, the tensor; of a state its node; a number; None
            what is not given.
            For the kernels that take an op with what stands behind it: by the names of its tensors in the op table,
            with what an add behind it adds, `residual`, and the weight of a function behind it, `slope`.
        outs: the grid of each output, in the order of the fusion's; None: it is wanted in float32.
        calls: the ops, in order, with their options.
        dynamic: by the name of an activation, how many inputs follow its integers: 1, its scale measured at run time,
            or 2, its zero point as well. Static ones are left out.

    An activation whose scale is measured at run time is on a grid of steps of 1, and the kernel gets the scale behind
    its integers.
    """

    captures: Mapping[str, Any]
    outs: tuple[QParams | None, ...]
    calls: tuple[OpCall, ...]
    dynamic: Mapping[str, int] = field(default_factory=dict)

    @property
    def out(self) -> QParams | None:
        """The grid of the result, the first one where there are several."""
        return self.outs[0]

    @property
    def grids(self) -> tuple[QParams, ...]:
        """Those of the activations, in the order in which the kernel takes their integers."""
        return tuple(value for value in self.captures.values() if isinstance(value, QParams))

    @property
    def options(self) -> Mapping[str, Any]:
        """Those of the first op."""
        return self.calls[0].options

    @property
    def post(self) -> Post | None:
        """The activation function behind the first op, or behind the sum; None without one."""
        last = self.calls[-1]
        return post_of(last) if len(self.calls) > 1 and last.op.name != "add" else None


@dataclass(frozen=True)
class KernelRow:
    """How ops become kernels.

    Attributes:
        make: builds the kernel, or None where the op runs on integers as it stands.
        refuses: why a unit cannot have this kernel, before its grids and the values of its weights are known.
        posts: the activation functions that the kernel of an op applies itself.
        adds: whether it adds a residual itself.
        twice: those of its activation functions that cost as much again as the kernel without them.
        emits_float: whether the kernel can also emit float32.
        emits_integers: whether it can emit integers.
        code: of a kernel of the user's own: a hash of the code that makes it.
        measured: the row for activations whose scale is measured at run time; None: there is no such kernel.
    """

    make: Callable[[FusedUnit], Kernel] | None
    refuses: Callable[[FusedUnit], str | None] = lambda unit: None
    posts: tuple[str, ...] = ()
    adds: bool = False
    twice: tuple[str, ...] = ()
    emits_float: bool = True
    emits_integers: bool = True
    code: str = ""
    measured: KernelRow | None = None


@dataclass(frozen=True)
class Fit:
    """A row of the table, with the ops of a unit that its kernel runs, from the first on, and what it asks of them.

    Attributes:
        row: the row.
        calls: the ops.
        captures: as in `FusedUnit`, but with the nodes of the graph.
        outputs: how many values it returns.
    """

    row: KernelRow
    calls: tuple[OpCall, ...]
    captures: Mapping[str, Any]
    outputs: int = 1

    @property
    def costs_twice(self) -> bool:
        """Whether it costs as much again as the kernel that runs all ops but the last."""
        return self.calls[-1].op.name in self.row.twice

    def refused(self, gm: fx.GraphModule) -> str | None:
        """Why the kernel cannot run the ops, as far as that is known before calibration."""
        if self.row.make is None:
            return None
        roles, known = {read.node: read.role for read in inputs_of(self.calls)}, dict(self.captures)
        for name, value in self.captures.items():
            if isinstance(value, fx.Node) and self._role(name) != "state":
                known[name] = _planned(gm, value, roles.get(value))
                if known[name] is None:
                    return f"its {name} is computed at run time"
        return self.row.refuses(FusedUnit(known, (_GRID,) * self.outputs, self.calls))

    def _role(self, name: str) -> Role | None:
        return self.calls[0].op.traits.role(name)

    def integers(self, gm: fx.GraphModule) -> tuple[tuple[fx.Node, ...], dict[str, Any], dict[str, int]]:
        """The integer activations and the states that the kernel takes, in the order of the captures; and the captures.

        Those, and how many inputs follow the integers of each dynamic activation, are as in `FusedUnit`.
        """
        inputs, found, dynamic = list[fx.Node](), dict(self.captures), dict[str, int]()
        for name, value in self.captures.items():
            weight, read = integer_weight(gm, value), integer_input(gm, value)
            if weight is None and read is not None:
                inputs += read.nodes
                found[name] = read.grid
                if read.dynamic_nodes:
                    dynamic[name] = len(read.dynamic_nodes)
            elif isinstance(value, fx.Node):
                found[name] = weight or constant(gm, value)
                if found[name] is None and self._role(name) == "state":
                    inputs.append(value)
                    found[name] = value
        return tuple(inputs), found, dynamic


_GRID = QParams.per_tensor(1.0, 0)
_WEIGHT_GRID = QParams.per_tensor(1.0, 0, -127, 127, torch.int8)


def _planned(gm: fx.GraphModule, value: fx.Node, role: Role | None) -> Any:
    """What a kernel is told of a value before calibration: grids, and weights, that any kernel takes."""
    if role == "weight":
        return Weight(torch.empty(info(value).shape or (0, 0), dtype=torch.int8, device="meta"), _WEIGHT_GRID)
    return _GRID if role == "activation" and value.op != "get_attr" else constant(gm, value)


def rule_key(rule: str, captures: Iterable[str]) -> str:
    """What the row of a fusion's units stands under; a single op's stands under its name."""
    return f"{rule}({', '.join(captures)})"


def fits(calls: Calls, rows: Mapping[str, KernelRow]) -> list[Fit]:
    """The kernels that run a unit, or its first ops, the one that runs most of them first.

    The row of its fusion runs it whole. The row of its first op runs that one, an add to it and an activation function
    behind, as far as the unit has them. Of such a kernel, only the last value may be read: it hands out no other.
    """
    found = [Fit(row, calls[:ops], captures) for row, ops, captures in _leading(calls, rows)]
    found = [fit for fit in found if not _reads_inside(calls, len(fit.calls))]
    whole = rows.get(rule_key(calls.rule, calls.captures))
    return [*([Fit(whole, calls, calls.captures, len(calls.outputs))] if whole is not None else []), *reversed(found)]


def _leading(calls: Calls, rows: Mapping[str, KernelRow]) -> Iterator[tuple[KernelRow, int, dict[str, Any]]]:
    """The row of the first op, with how many ops its kernel may run, and what they read."""
    row = _row_of(calls[0], rows)
    if row is None:
        return
    ops, captures, posts = 1, calls[0].tensors, row.posts
    yield row, ops, captures
    residual = _residual(calls[1]) if row.adds and len(calls) > 1 else None
    if residual is not None:
        ops, captures, posts = 2, {**captures, "residual": residual}, CLAMPS
        yield row, ops, captures
    after = calls[ops] if ops < len(calls) else None
    if (
        after is not None
        and after.op.name in posts
        and after.run_time_option is None
        and after.tensors["x"] == InnerValue(ops - 1)
    ):
        yield row, ops + 1, {**captures, "slope": after.tensors.get("weight")}


def _row_of(call: OpCall, rows: Mapping[str, KernelRow]) -> KernelRow | None:
    """The row of an op. Where the table has none: what only moves runs as it stands, a function of one is looked up."""
    found = rows.get(call.op.name)
    if found is None and call.op.traits.layout:
        return NATIVE
    by_a_constant = len(call.op.traits.inputs) == 2  # the row is for two tensors
    return LOOKED_UP if call.pointwise and (found is None or by_a_constant) else found


def _reads_inside(calls: Calls, ops: int) -> bool:
    """Whether a later op, or a reader of the unit, reads a value of the first `ops` other than their last.

    A unit that returns its last value twice is no single value, either.
    """
    read = [v.index for call in calls[ops:] for v in call.tensors.values() if isinstance(v, InnerValue)]
    return any(i < ops - 1 for i in (*read, *calls.outputs)) or calls.outputs.count(ops - 1) > 1


def _residual(call: OpCall) -> fx.Node | None:
    """What an add takes besides the first op's result: a value from outside, or None where it adds something else."""
    if call.op.name != "add" or call.options["alpha"] != 1 or InnerValue(0) not in call.tensors.values():
        return None
    other = call.tensors["other" if call.tensors["x"] == InnerValue(0) else "x"]
    return other if isinstance(other, fx.Node) and other.op != "get_attr" else None


def post_of(call: OpCall) -> Post:
    """An activation function as a kernel takes it."""
    options = call.options
    if call.op.name == "hardtanh":
        return Post("hardtanh", (options["min_val"], options["max_val"]))
    if call.op.name == "leaky_relu":
        return Post("leaky_relu", (options["negative_slope"],))
    return Post(call.op.name, algorithm=options.get("approximate", ""))


def _max_pool(unit: FusedUnit) -> Kernel:
    same_grid(unit)
    dims = len(unit.options["kernel_size"])
    return MaxPool3d(**unit.options) if dims == 3 else MaxPool2d(**unit.options, dims=dims)


def _adaptive_max(unit: FusedUnit) -> Kernel:
    same_grid(unit)
    return AdaptiveMaxPool(**unit.options)


def same_grid(unit: FusedUnit) -> QParams:
    """The grid that input and output share. Raises `BackendError` when they do not."""
    if unit.out is None or not unit.grids[0].same_as(unit.out):
        raise BackendError("its input and output have different scales")
    return unit.grids[0]


def of_two(kernel: Callable[..., Kernel], **options: Any) -> Callable[[FusedUnit], Kernel]:
    """Makes kernels of two activations. Raises `BackendError` when the result is wanted in float."""

    def make(unit: FusedUnit) -> Kernel:
        if unit.out is None:
            raise BackendError("its result is wanted in float")
        return kernel(*unit.grids, unit.out, post=unit.post, **options)

    return make


def _adaptive_refuses(unit: FusedUnit) -> str | None:
    return None if all(n == 1 for n in unit.options["output_size"]) else "its windows depend on the input's size"


def global_mean(unit: FusedUnit) -> Kernel:
    """An adaptive pooling to one value is a mean, whatever the size of its input."""
    axes = len(unit.options["output_size"])
    return Mean(unit.grids[0], unit.out, range(-axes, 0), keepdim=True)


def _mean(unit: FusedUnit) -> Kernel:
    options, adds_up = unit.options, unit.calls[0].op.name == "sum"
    return Mean(unit.grids[0], unit.out, options["dim"], options["keepdim"], adds_up)


def _clamp(unit: FusedUnit) -> Kernel:
    return Clamp(same_grid(unit), post_of(unit.calls[0]))


def _pad(unit: FusedUnit) -> Kernel:
    options = unit.options
    return Pad(same_grid(unit), options["pad"], options["mode"], options["value"] or 0.0)


def _table_refuses(unit: FusedUnit) -> str | None:
    call = unit.calls[0]
    (x,) = call.activations
    shape = (info(x).shape or ()) if isinstance(x, fx.Node) else ()
    constants = {n: info(v).shape or () for n, v in call.tensors.items() if v is not x and isinstance(v, fx.Node)}
    wide = [n for n, s in constants.items() if math.prod(s) != 1 and not _per_channel(call, n, s, shape)]
    if wide or max(map(len, (shape, *constants.values()))) > len(shape):
        return f"{call.op.name} with a constant that differs along other axes than the channels"
    return None


def _per_channel(call: OpCall, name: str, constant: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a constant has one value per channel (axis 1) of an activation of this shape."""
    if len(shape) < 2:
        return False
    if name not in call.op.traits.inputs:  # slopes and statistics: one value per channel by what they are
        return constant == (shape[1],)
    return (1,) * (len(shape) - len(constant)) + constant == (1, shape[1], *[1] * (len(shape) - 2))


def looked_up(unit: FusedUnit) -> Kernel:
    """The table of the op with its constants, and of the clamp behind it."""
    op, (grid,) = unit.calls[0].op, unit.grids
    read = {name: value for name, value in unit.captures.items() if name in op.tensors}
    (name,) = (name for name, value in read.items() if value is grid)
    low, high = bounds(unit.post) or (-math.inf, math.inf)
    # One value per integer and channel stands along the last axis.
    fixed = {n: v.float().reshape(-1) if isinstance(v, Tensor) else v for n, v in read.items() if n != name}
    channels = max((v.numel() for v in fixed.values() if isinstance(v, Tensor)), default=0)

    def function(x: Tensor) -> Tensor:
        given = {name: x, **fixed}
        y: Tensor = op.target(*(given.get(n) for n in op.tensors), **unit.options)
        return y.clamp(low, high)

    return Lookup.of(function, op.name, grid, unit.out, channels)


NATIVE = KernelRow(None)
"""An op that runs on integers as it stands."""
LOOKED_UP = KernelRow(looked_up, _table_refuses, CLAMPS)
"""A function of one tensor: see `Lookup`."""
PLAIN: dict[str, KernelRow] = {
    **dict.fromkeys(OPS.family("max_pool"), KernelRow(_max_pool)),
    **dict.fromkeys(
        OPS.family("adaptive_max_pool"), KernelRow(_adaptive_max, lambda unit: AdaptiveMaxPool.refuses(**unit.options))
    ),
    **dict.fromkeys(OPS.family("adaptive_avg_pool"), KernelRow(global_mean, _adaptive_refuses)),
    "mean": KernelRow(_mean),
    "sum": KernelRow(_mean),
    "relu": KernelRow(_clamp),
    "relu6": KernelRow(_clamp),
    "hardtanh": KernelRow(_clamp),
    "pad": KernelRow(_pad),
}
"""What runs on plain uint8 tensors without an engine, on any CPU, besides what `_row_of` knows from the op's row."""
QUANTIZING: dict[str, Callable[[Tensor, QParams], Kernel]] = {"prelu": PReLUQuantize}
"""Functions of a tensor and a weight that a quantize behind them is computed along with."""
