"""Units of the qdq graph become kernels, one at a time: what every backend with a table of rows does."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxq.backends.base import Backend, Support
from fxq.backends.captures import captures_of
from fxq.backends.kernel import Kernel
from fxq.backends.kernel_table import QUANTIZING, KernelRow, Operands, Parts, row_for, take_apart
from fxq.backends.layer_kernel import LayerKernel, sums_refused
from fxq.backends.layer_spec import slope_refused
from fxq.backends.plain.converters import Dequantize, Quantize, Requantize
from fxq.backends.qdq_form import Form
from fxq.errors import BackendError
from fxq.graph.grid import grid_of
from fxq.graph.info import Decision, Plan, info
from fxq.graph.query import CONVERSIONS, argument, constant, is_op, op_of, submodule
from fxq.graph.region import Region, Weight, integer_input, integer_weight, out_grid, read_region
from fxq.graph.unit import OpCall
from fxq.quant.qparams import QParams
from fxq.quant.spec import QuantConfig
from fxq.rewriting.pattern import Rule
from fxq.rewriting.rewriter import Rewriter


class RowBackend(Backend):
    """A backend whose kernels stand in a table: by op, what starts a kernel. The kernels take plain uint8 tensors."""

    @property
    @abstractmethod
    def rows(self) -> Mapping[str, KernelRow]:
        """The table."""

    def supports(self, gm: fx.GraphModule, node: fx.Node, calls: tuple[OpCall, ...], config: QuantConfig) -> Support:
        """What the table says of the leading ops."""
        parts = take_apart(calls, self.rows)
        if parts is None:
            return Support(0, f"{self.name} has no int8 kernel for {calls[0].op.name}")
        if config.activation is not None and config.activation.signed:
            return Support(0, f"{self.name} kernels take unsigned activations; set signed=False")
        weight = config.weight
        weighted = any(call.op.quant.weight for call in calls[: parts.ops])
        if weighted and weight is not None and not (weight.signed and weight.symmetric):
            return Support(0, f"{self.name} kernels take signed symmetric weights")
        row = row_for(parts, self.rows)
        assert row is not None  # it took the unit apart
        reason = row.refuses(parts, node)
        if reason is not None:
            return Support(0, reason)
        if parts.post is not None and parts.post.name in row.twice:
            return _supports_either(gm, parts)
        rest = calls[parts.ops :]
        reason = f"no kernel of {self.name} takes {rest[0].op.name} along" if rest else ""
        return Support(parts.ops, reason, emits_float=row.emits_float)

    def code(self, calls: tuple[OpCall, ...]) -> str:
        """As in `Backend`; besides, that of a kernel of the user's own."""
        parts = take_apart(calls, self.rows)
        row = row_for(parts, self.rows) if parts is not None else None
        return super().code(calls) + (row.code if row is not None else "")

    def lower(self, rewriter: Rewriter) -> None:
        """Units first, then the conversions that are left; last, which residuals may be overwritten."""
        for node in rewriter.nodes():
            plan = info(node).plan
            if plan.fate in ("int8", "moves") if plan is not None else _has_grids(rewriter.gm, node):
                _lower_unit(rewriter, node, self.rows)
        for node in rewriter.nodes(*CONVERSIONS):
            _lower_conversion(rewriter, node)
        _settle_inplace(rewriter)


def _has_grids(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether an op of which nobody has decided makes integers; or is a layer, whose kernel can make floats."""
    region = read_region(gm, node) if not is_op(node, *CONVERSIONS) else None
    if region is None:
        return False
    return region.out is not None or region.calls[0].op.quant.heavy


def _supports_either(gm: fx.GraphModule, parts: Parts) -> Support:
    """What is supported of a unit whose last op costs as much again: all but that one, or all."""
    assert parts.post is not None
    slope = constant(gm, parts.slope)
    computed = parts.slope is not None and slope is None
    reason = "its slopes are computed at run time" if computed else slope_refused(slope)
    if reason is not None:
        return Support(parts.ops - 1, reason)
    return Support(
        parts.ops - 1, f"{parts.post.name} costs a second {parts.first.op.name} on integers", longer=parts.ops
    )


def _lower_unit(rewriter: Rewriter, node: fx.Node, rows: Mapping[str, KernelRow]) -> None:
    region = read_region(rewriter.gm, node)
    parts = take_apart(region.calls, rows) if region is not None else None
    if region is None or parts is None or parts.ops != len(region.calls):
        return
    row = row_for(parts, rows)
    if row is None or row.make is None:
        return
    if row.fusion is not None:
        operands = _captured(rewriter.gm, region, row.fusion)
    else:
        operands = _operands(rewriter.gm, region, parts)
    try:
        kernel = row.make(parts, operands) if not isinstance(operands, str) else operands
    except BackendError as error:
        kernel = str(error)
    if isinstance(kernel, LayerKernel):
        kernel = sums_refused(kernel) or kernel
    if isinstance(kernel, Kernel) and not isinstance(operands, str):
        _replace(rewriter, region, kernel, operands.inputs)
    elif len(region.calls) > 1:
        _open(rewriter, node, rows)
    else:
        _leave_in_float(rewriter, node, f"stays in qdq form: {kernel}")


def _open(rewriter: Rewriter, node: fx.Node, rows: Mapping[str, KernelRow]) -> None:
    """Run the first op of a unit on integers and the others in float, where no kernel takes the unit whole."""
    plan = info(node).plan
    first, *rest = rewriter.open_unit(node)
    rewriter.describe(first, plan=plan)
    for other in rest:
        _leave_in_float(rewriter, other, "its result is wanted in float")
    _lower_unit(rewriter, first, rows)


def _leave_in_float(rewriter: Rewriter, node: fx.Node, why: str) -> None:
    rewriter.describe(node, plan=Plan(Decision("float", "unsupported", why, decided_by=rewriter.name)))


def _operands(gm: fx.GraphModule, region: Region, parts: Parts) -> Operands | str:
    """The integers that go into the kernel, or the reason why they are not all integers."""
    tensors = parts.first.tensors
    activations = [*parts.first.activations, *([parts.residual] if parts.residual is not None else [])]
    read = [integer_input(gm, v) for v in activations]
    found = [r for r in read if r is not None]
    if len(found) != len(read):
        return "an input is not in integers"
    inputs = tuple(node for node, _ in found)
    if tuple(dict.fromkeys(inputs)) != region.inputs:
        return "its inputs are not those of its float form"
    quant = parts.first.op.quant
    weight, bias = _layer(gm, parts.first)
    slope = constant(gm, parts.slope)
    fixed = {k: v if isinstance(v, (int, float)) else constant(gm, v) for k, v in tensors.items()}
    others = {k: v for k, v in fixed.items() if v is not None and k not in (quant.weight, quant.bias)}
    grids = tuple(qp for _, qp in found)
    layers = tuple(_layer(gm, call) for call in parts.calls if call.op.quant.weight)
    return Operands(inputs, grids, weight, bias, out_grid(gm, region), slope, others, layers)


def _captured(gm: fx.GraphModule, region: Region, fusion: Rule) -> Operands | str:
    """The same for a kernel of the user's own."""
    captures: dict[str, Any] = {}
    inputs: dict[fx.Node, QParams] = {}
    for name, value in (captures_of(fusion, region.calls) or {}).items():
        weight, read = integer_weight(gm, value), integer_input(gm, value)
        if weight is None and read is not None:
            inputs[read[0]] = captures[name] = read[1]
        else:
            captures[name] = weight or (constant(gm, value) if isinstance(value, fx.Node) else value)
    if inputs.keys() != set(region.inputs):
        return "an input is not in integers"
    return Operands(tuple(inputs), tuple(inputs.values()), None, None, out_grid(gm, region), captures=captures)


def _layer(gm: fx.GraphModule, call: OpCall) -> tuple[Weight | None, Tensor | None]:
    """Integer weight and bias of an op; None what it does not have."""
    quant = call.op.quant
    weight = integer_weight(gm, call.tensors.get(quant.weight)) if quant.weight else None
    return weight, constant(gm, call.tensors.get(quant.bias)) if quant.bias else None


def _replace(rewriter: Rewriter, region: Region, kernel: Kernel, inputs: tuple[fx.Node, ...]) -> None:
    """Put a kernel in the place of a region, and remember the region for verification."""
    old, about = region.last, info(region.node)
    kernel.form = Form.of(rewriter.gm, region, kernel, inputs)
    with rewriter.attributed(kernel.name, type(kernel)):
        target = rewriter.module(kernel, region.node.name)
        node = rewriter.node("call_module", target, inputs, like=region.node, before=old)
        rewriter.describe(
            node,
            shape=info(old).shape,
            dtype=info(old).dtype,
            parts=about.parts,
            body=tuple(call.op.name for call in region.calls),
            note=about.note,
        )
        rewriter.replace(old, node)
        if old is not region.node:
            rewriter.erase(region.node)
        rewriter.rename(node, region.node.name)
    rewriter.context.regions[node] = region


def _lower_conversion(rewriter: Rewriter, node: fx.Node) -> None:
    """Replace a conversion of activations by its quick form; what has a kernel together with a quantize goes along."""
    qp, source = grid_of(rewriter.gm, node), node.args[0]
    if (
        qp is None
        or qp.dtype != torch.uint8
        or qp.axis is not None
        or not isinstance(source, fx.Node)
        or source.op == "get_attr"
    ):
        return
    op = op_of(source)
    both = QUANTIZING.get(op.name) if op is not None else None
    region = read_region(rewriter.gm, source) if both is not None else None
    weight = constant(rewriter.gm, argument(source, "weight")) if region is not None else None
    if is_op(node, "dequantize"):
        _convert(rewriter, node, Dequantize(qp), source)
    elif is_op(node, "requantize"):
        before = QParams.per_tensor(node.kwargs["from_scale"], node.kwargs["from_zero_point"])  # type: ignore[arg-type]
        _convert(rewriter, node, Requantize(before, qp), source)
    elif both is not None and len(source.users) == 1 and weight is not None and region is not None:
        _replace(rewriter, region, both(weight, qp), region.inputs)
    else:
        _convert(rewriter, node, Quantize(qp), source)


def _convert(rewriter: Rewriter, node: fx.Node, kernel: Kernel, source: fx.Node) -> None:
    """Put a kernel in the place of a conversion, and remember that one for verification."""
    region = read_region(rewriter.gm, node)
    if region is not None:
        kernel.form = Form.of(rewriter.gm, region, kernel, (source,))
    with rewriter.attributed(kernel.name, type(kernel)):
        target = rewriter.module(kernel, node.name)
        rewriter.update(node, target, (source,), {}, op="call_module")
    if region is not None:
        rewriter.context.regions[node] = region


def _settle_inplace(rewriter: Rewriter) -> None:
    """Let a kernel overwrite its residual where nobody reads that value afterwards.

    The residual must be a kernel's own result: no input, no view of something else. It must not be read by the same
    kernel in another place, nor by anybody later in the graph.
    """
    order = {node: i for i, node in enumerate(rewriter.graph.nodes)}
    ends: dict[fx.Node, float] = {}  # a value may have very many readers: they are asked once
    for node in order:
        kernel = submodule(rewriter.gm, node)
        if not isinstance(kernel, Kernel) or kernel.inplace is None or len(node.args) < 2:
            continue
        residual = node.args[1]
        if not isinstance(residual, fx.Node) or residual is node.args[0] or not _is_fresh(rewriter, residual):
            continue
        if residual not in ends:
            alive = any(_may_alias(rewriter, user) for user in residual.users)
            ends[residual] = math.inf if alive else max(order[user] for user in residual.users)
        kernel.inplace = ends[residual] <= order[node]


def _is_fresh(rewriter: Rewriter, node: fx.Node) -> bool:
    """Whether a node's value is a tensor of its own."""
    module = submodule(rewriter.gm, node)
    return isinstance(module, Kernel) and not module.returns_view


def _may_alias(rewriter: Rewriter, user: fx.Node) -> bool:
    """Whether the result of a reader may share memory with what it read."""
    module = submodule(rewriter.gm, user)
    if isinstance(module, Kernel):
        return module.returns_view
    op = op_of(user)
    return op is None or op.quant.view or user.op == "output"
