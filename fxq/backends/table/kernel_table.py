"""Kernel tables: which op starts a kernel, which following ops it includes, and how it is made. Has the plain rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxq.backends.kernel import Kernel, PostOp, bounds
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
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.qparams import QParams
from fxq.quant.spec import Role

CLAMPS = ("relu", "relu6", "hardtanh")
"""Activation functions that are clamps, so that they can be applied to the integer result of any kernel."""


@dataclass(frozen=True)
class KernelRequest:
    """Request for the kernel of a unit, or of its first ops: the ops, their inputs and their grids.

    Attributes:
        captures: the inputs by name. An activation is its grid: a `QParams`, a `DynamicGrid` in a row for dynamic
            ranges, or `FLOAT_INPUT` in a weight-only layer; a weight has its int8 `values` and their `qparams`; a
            constant, such as a bias, is its tensor; a state is its node; a number is itself; an omitted input is None.
            The names are those of the fusion's pattern. For the row of an op they are its tensors in the op table, with
            `residual`, the other input of a fused add, and `slope`, the weight of a fused activation function. After
            the integers of an activation with a `DynamicGrid`, the kernel takes its scale, and its zero point if it is
            affine.
        outs: the grid of each output, in the order of the fusion's outputs; None: float32.
        calls: the ops, in order, with their options.
    """

    captures: Mapping[str, Any]
    outs: tuple[QParams | None, ...]
    calls: tuple[OpCall, ...]

    @property
    def out(self) -> QParams | None:
        """Grid of the first output."""
        return self.outs[0]

    @property
    def grids(self) -> tuple[QParams, ...]:
        """Static grids of the activations, in the order in which the kernel takes their integers."""
        return tuple(value for value in self.captures.values() if isinstance(value, QParams))

    @property
    def with_unit_scales(self) -> KernelRequest:
        """Request for the static kernel that runs with scale 1 for dynamic inputs, see `DynamicGrid.unit_grid`."""
        captures = {
            name: value.unit_grid if isinstance(value, DynamicGrid) else value for name, value in self.captures.items()
        }
        return replace(self, captures=captures)

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the first op."""
        return self.calls[0].options

    @property
    def post(self) -> PostOp | None:
        """Activation function after the first op or after the fused add; None if there is none."""
        last = self.calls[-1]
        return post_of(last) if len(self.calls) > 1 and last.op.name != "add" else None


@dataclass(frozen=True)
class KernelRow:
    """Row of a kernel table: how to make a kernel, and what it can run.

    Attributes:
        make: function that makes the kernel; None: the op itself runs on integers, such as reshape.
        refuses: function that returns why a unit cannot have this kernel, or None. It is called before calibration, so
            grids and values of weights are placeholders.
        posts: names of the activation functions that the kernel of an op can apply.
        adds: whether the kernel of an op can add a residual.
        slow_posts: names of those in `posts` that double the time of the kernel.
        emits_float: whether the kernel can emit float32.
        emits_integers: whether the kernel can emit integers.
        code: hash of the code of a kernel of the user's own; otherwise empty.
        any_weight: whether the kernel takes weights with zero points, and with scales per block.
        dynamic: the row for activations with dynamic range; None: there is no such kernel.
    """

    make: Callable[[KernelRequest], Kernel] | None
    refuses: Callable[[KernelRequest], str | None] = lambda request: None
    posts: tuple[str, ...] = ()
    adds: bool = False
    slow_posts: tuple[str, ...] = ()
    emits_float: bool = True
    emits_integers: bool = True
    code: str = ""
    any_weight: bool = False
    dynamic: KernelRow | None = None


@dataclass(frozen=True)
class RowMatch:
    """Row of a kernel table that matches a unit or its first ops.

    Attributes:
        row: the row.
        calls: the ops that its kernel runs.
        captures: inputs of the kernel as in `KernelRequest.captures`, but as nodes of the graph.
        outputs: number of outputs.
    """

    row: KernelRow
    calls: tuple[OpCall, ...]
    captures: Mapping[str, Any]
    outputs: int = 1

    @property
    def has_slow_post(self) -> bool:
        """Whether the last op is an activation function that doubles the time of the kernel."""
        return self.calls[-1].op.name in self.row.slow_posts

    def refused(self, gm: fx.GraphModule) -> str | None:
        """Why the kernel cannot run the ops, as far as it is known before calibration; None if it can."""
        if self.row.make is None:
            return None
        roles, captures = {read.node: read.role for read in inputs_of(self.calls)}, dict(self.captures)
        for name, value in self.captures.items():
            if isinstance(value, fx.Node) and self._role(name) != "state":
                captures[name] = _placeholder(gm, value, roles.get(value))
                if captures[name] is None:
                    return f"its {name} is computed at run time"
        return self.row.refuses(KernelRequest(captures, (_GRID,) * self.outputs, self.calls))

    def _role(self, name: str) -> Role | None:
        return self.calls[0].op.traits.role(name)

    def float_inputs(self, gm: fx.GraphModule) -> tuple[tuple[fx.Node, ...], dict[str, Any]]:
        """Inputs of a weight-only kernel: the nodes of the float activations, and `captures` of `KernelRequest`."""
        inputs, captures = list[fx.Node](), dict(self.captures)
        for name, value in self.captures.items():
            if isinstance(value, fx.Node):
                weight, fixed = integer_weight(gm, value), constant(gm, value)
                is_input = weight is None and fixed is None
                captures[name] = FLOAT_INPUT if is_input else weight or fixed
                inputs += [value] if is_input else []
        return tuple(inputs), captures

    def integers(self, gm: fx.GraphModule) -> tuple[tuple[fx.Node, ...], dict[str, Any]]:
        """Inputs of the kernel after calibration.

        Returns:
            The nodes of the integer activations and states, in the order of the captures; and `captures` of
            `KernelRequest`.
        """
        inputs, captures = list[fx.Node](), dict(self.captures)
        for name, value in self.captures.items():
            weight, read = integer_weight(gm, value), integer_input(gm, value)
            if weight is None and read is not None:
                inputs += read.nodes
                captures[name] = read.grid
            elif isinstance(value, fx.Node):
                captures[name] = weight or constant(gm, value)
                if captures[name] is None and self._role(name) == "state":
                    inputs.append(value)
                    captures[name] = value
        return tuple(inputs), captures


FLOAT_INPUT = torch.float32
"""Capture of a float activation of a weight-only layer."""
_GRID = QParams.per_tensor(1.0, 0)
_WEIGHT_GRID = QParams.per_tensor(1.0, 0, -127, 127, torch.int8)


def _placeholder(gm: fx.GraphModule, value: fx.Node, role: Role | None) -> Any:
    """Capture of a node before calibration: a grid or weight that every kernel accepts, or the constant, or None."""
    if role == "weight":
        return Weight(torch.empty(info(value).shape or (0, 0), dtype=torch.int8, device="meta"), _WEIGHT_GRID)
    return _GRID if role == "activation" and value.op != "get_attr" else constant(gm, value)


def rule_key(rule: str, captures: Iterable[str]) -> str:
    """Key of the row for units of a fusion. The key of the row for a single op is the op's name."""
    return f"{rule}({', '.join(captures)})"


def weight_only_key(op: str) -> str:
    """Key of the user's own row for weight-only layers of an op."""
    return f"weight-only {op}"


def matching_rows(calls: Calls, rows: Mapping[str, KernelRow]) -> list[RowMatch]:
    """Return the rows whose kernels run a unit or its first ops, most ops first.

    The row of the unit's fusion runs all ops. The row of the first op runs this op, and possibly a following add and a
    following activation function. Such a kernel returns the last value only, so no other value may be read.
    """
    matches = [RowMatch(row, calls[:ops], captures) for row, ops, captures in _leading(calls, rows)]
    matches = [match for match in matches if not _reads_inside(calls, len(match.calls))]
    whole = rows.get(rule_key(calls.rule, calls.captures))
    return [
        *([RowMatch(whole, calls, calls.captures, len(calls.outputs))] if whole is not None else []),
        *reversed(matches),
    ]


def _leading(calls: Calls, rows: Mapping[str, KernelRow]) -> Iterator[tuple[KernelRow, int, dict[str, Any]]]:
    """Yield the row of the first op with each number of ops that its kernel can run, and their captures."""
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
    """Return the row of an op. Ops that are not in the table may run natively (moves) or by a lookup table."""
    row = rows.get(call.op.name)
    if row is None and call.op.traits.layout:
        return NATIVE_ROW
    has_constant_operand = len(call.op.traits.inputs) == 2  # a row in the table is for two activations
    return LOOKUP_ROW if call.pointwise and (row is None or has_constant_operand) else row


def _reads_inside(calls: Calls, ops: int) -> bool:
    """Whether a later op or a reader of the unit reads a value of the first `ops` ops other than the last one.

    Also true if the unit returns the last value twice, since a kernel has one output.
    """
    read = [v.index for call in calls[ops:] for v in call.tensors.values() if isinstance(v, InnerValue)]
    return any(i < ops - 1 for i in (*read, *calls.outputs)) or calls.outputs.count(ops - 1) > 1


def _residual(call: OpCall) -> fx.Node | None:
    """Residual that an add adds to the result of the first op: a node outside of the unit. None for other ops."""
    if call.op.name != "add" or call.options["alpha"] != 1 or InnerValue(0) not in call.tensors.values():
        return None
    residual = call.tensors["other" if call.tensors["x"] == InnerValue(0) else "x"]
    return residual if isinstance(residual, fx.Node) and residual.op != "get_attr" else None


def post_of(call: OpCall) -> PostOp:
    """Return the post-op of a call of an activation function."""
    options = call.options
    if call.op.name == "hardtanh":
        return PostOp("hardtanh", (options["min_val"], options["max_val"]))
    slope = call.op.traits.slopes
    if slope is not None and slope in options:
        return PostOp(call.op.name, (options[slope],))
    return PostOp(call.op.name, algorithm=options.get("approximate", ""))


def _max_pool(request: KernelRequest) -> Kernel:
    same_grid(request)
    dims = len(request.options["kernel_size"])
    return MaxPool3d(**request.options) if dims == 3 else MaxPool2d(**request.options, dims=dims)


def _adaptive_max(request: KernelRequest) -> Kernel:
    same_grid(request)
    return AdaptiveMaxPool(**request.options)


def same_grid(request: KernelRequest) -> QParams:
    """Return the grid of input and output. Raises `BackendError` if their grids differ."""
    if request.out is None or not request.grids[0].same_as(request.out):
        raise BackendError("its input and output have different scales")
    return request.grids[0]


def binary_kernel(kernel: Callable[..., Kernel], **options: Any) -> Callable[[KernelRequest], Kernel]:
    """Return a function that makes kernels of two activations. It raises `BackendError` if the output is float."""

    def make(request: KernelRequest) -> Kernel:
        if request.out is None:
            raise BackendError("its result is float, the kernel emits uint8")
        return kernel(*request.grids, request.out, post=request.post, **options)

    return make


def _adaptive_refuses(request: KernelRequest) -> str | None:
    return None if all(n == 1 for n in request.options["output_size"]) else "its windows depend on the input's size"


def global_mean(request: KernelRequest) -> Kernel:
    """Return the kernel of an adaptive average pooling to one value, which is a mean for every input size."""
    axes = len(request.options["output_size"])
    return Mean(request.grids[0], request.out, range(-axes, 0), keepdim=True)


def _mean(request: KernelRequest) -> Kernel:
    options, is_sum = request.options, request.calls[0].op.name == "sum"
    return Mean(request.grids[0], request.out, options["dim"], options["keepdim"], is_sum)


def _clamp(request: KernelRequest) -> Kernel:
    return Clamp(same_grid(request), post_of(request.calls[0]))


def _pad(request: KernelRequest) -> Kernel:
    options = request.options
    return Pad(same_grid(request), options["pad"], options["mode"], options["value"] or 0.0)


def _lookup_refuses(request: KernelRequest) -> str | None:
    call = request.calls[0]
    (x,) = call.activations
    shape = (info(x).shape or ()) if isinstance(x, fx.Node) else ()
    constants = {n: info(v).shape or () for n, v in call.tensors.items() if v is not x and isinstance(v, fx.Node)}
    unsupported = [n for n, s in constants.items() if math.prod(s) != 1 and not _per_channel(call, n, s, shape)]
    if unsupported or max(map(len, (shape, *constants.values()))) > len(shape):
        return f"{call.op.name} with a constant that is neither one number nor per channel"
    return None


def _per_channel(call: OpCall, name: str, constant: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a constant has one value per channel (axis 1) of an activation of this shape."""
    if len(shape) < 2:
        return False
    if name not in call.op.traits.inputs:  # slopes and statistics, which are per channel by definition
        return constant == (shape[1],)
    return (1,) * (len(shape) - len(constant)) + constant == (1, shape[1], *[1] * (len(shape) - 2))


def lookup_kernel(request: KernelRequest) -> Kernel:
    """Return the lookup-table kernel of an op with its constants and of a following clamp."""
    op, (grid,) = request.calls[0].op, request.grids
    read = {name: value for name, value in request.captures.items() if name in op.tensors}
    (name,) = (name for name, value in read.items() if value is grid)
    low, high = bounds(request.post) or (-math.inf, math.inf)
    # `Lookup.of` calls the function with channels along the last axis, so constants must broadcast along it.
    fixed = {n: v.float().reshape(-1) if isinstance(v, Tensor) else v for n, v in read.items() if n != name}
    channels = max((v.numel() for v in fixed.values() if isinstance(v, Tensor)), default=0)

    def function(x: Tensor) -> Tensor:
        tensors = {name: x, **fixed}
        y: Tensor = op.target(*(tensors.get(n) for n in op.tensors), **request.options)
        return y.clamp(low, high)

    return Lookup.of(function, op.name, grid, request.out, channels)


NATIVE_ROW = KernelRow(None)
"""Row of ops that run on integers without a kernel."""
LOOKUP_ROW = KernelRow(lookup_kernel, _lookup_refuses, CLAMPS)
"""Row of pointwise functions of one tensor, see `Lookup`."""
PLAIN_ROWS: dict[str, KernelRow] = {
    **dict.fromkeys(OPS.family("max_pool"), KernelRow(_max_pool)),
    **dict.fromkeys(
        OPS.family("adaptive_max_pool"),
        KernelRow(_adaptive_max, lambda request: AdaptiveMaxPool.refuses(**request.options)),
    ),
    **dict.fromkeys(OPS.family("adaptive_avg_pool"), KernelRow(global_mean, _adaptive_refuses)),
    "mean": KernelRow(_mean),
    "sum": KernelRow(_mean),
    "relu": KernelRow(_clamp),
    "relu6": KernelRow(_clamp),
    "hardtanh": KernelRow(_clamp),
    "pad": KernelRow(_pad),
}
"""Rows of the kernels on plain uint8 tensors, which run on any CPU. `_row_of` adds moves and lookup tables."""
QUANTIZING_KERNELS: dict[str, Callable[[Tensor, QParams], Kernel]] = {"prelu": PReLUQuantize}
"""Kernels that compute a float function of a tensor and a weight together with the quantize after it, by op name."""
