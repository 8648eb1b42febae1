"""Units of the qdq graph become kernels, one at a time: what every backend with a table of rows does."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import fx

from fxq.backends.base import Backend, Support
from fxq.backends.kernel import Kernel
from fxq.backends.kernel_table import QUANTIZING, Fit, FusedUnit, KernelRow, fits
from fxq.backends.layer_kernel import LayerKernel, sums_refused
from fxq.backends.plain.converters import Dequantize, Quantize, Requantize
from fxq.backends.qdq_form import Form
from fxq.errors import BackendError
from fxq.graph.grid import grid_of
from fxq.graph.info import Decision, Plan, info
from fxq.graph.query import CONVERSIONS, argument, constant, is_op, op_of, submodule
from fxq.graph.region import Region, out_grid, read_region
from fxq.graph.unit import Calls
from fxq.quant.qparams import QParams
from fxq.quant.spec import QuantConfig
from fxq.rewriting.rewriter import Rewriter
from fxq.rewriting.unit_edits import open_unit


class RowBackend(Backend):
    """A backend whose kernels stand in a table: by op, what starts a kernel. The kernels take plain uint8 tensors."""

    @property
    @abstractmethod
    def rows(self) -> Mapping[str, KernelRow]:
        """The table."""

    def supports(self, gm: fx.GraphModule, node: fx.Node, calls: Calls, config: QuantConfig) -> Support:
        """What the table says of the leading ops."""
        found = fits(calls, self.rows)
        if not found:
            return Support(0, f"{self.name} has no int8 kernel for {calls[0].op.name}")
        if config.activation is not None and config.activation.signed:
            return Support(0, f"{self.name} kernels take unsigned activations; set signed=False")
        weight = config.weight
        weighted = any(call.op.quant.weight for call in found[0].calls)
        if weighted and weight is not None and not (weight.signed and weight.symmetric):
            return Support(0, f"{self.name} kernels take signed symmetric weights")
        reasons = [fit.refused(gm) for fit in found]
        able = [fit for fit, reason in zip(found, reasons, strict=True) if reason is None]
        if not able:
            return Support(0, reasons[-1] or "")
        row, ops, last = able[0].row, len(able[0].calls), able[0].calls[-1].op.name
        if last in row.twice and len(able) > 1:
            reason = f"{last} costs a second {calls[0].op.name} on integers"
            return Support(ops, reason, len(able[1].calls), row.emits_float)
        rest = f"no kernel of {self.name} takes {calls[ops].op.name} along" if ops < len(calls) else ""
        return Support(ops, reasons[0] or rest, emits_float=row.emits_float)

    def code(self, calls: Calls) -> str:
        """As in `Backend`; besides, that of a kernel of the user's own."""
        return super().code(calls) + "".join(fit.row.code for fit in fits(calls, self.rows)[:1])

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


def _lower_unit(rewriter: Rewriter, node: fx.Node, rows: Mapping[str, KernelRow]) -> None:
    region = read_region(rewriter.gm, node)
    if region is None:
        return
    whole = [fit for fit in fits(region.calls, rows) if len(fit.calls) == len(region.calls)]
    reason = ""
    for fit in whole:
        if fit.row.make is None:
            return
        try:
            kernel, inputs = _kernel(rewriter.gm, region, fit)
        except BackendError as error:
            reason = str(error)
        else:
            _replace(rewriter, region, kernel, inputs)
            return
    if len(region.calls) > 1 and whole:
        _open(rewriter, node, rows)
    elif whole:
        _leave_in_float(rewriter, node, f"stays in qdq form: {reason}")


def _kernel(gm: fx.GraphModule, region: Region, fit: Fit) -> tuple[Kernel, tuple[fx.Node, ...]]:
    """The kernel of a region, and the nodes that it reads. Raises `BackendError` where there is none."""
    inputs, captures = fit.integers(gm)
    if set(inputs) != set(region.inputs):
        raise BackendError("an input is not in integers")
    assert fit.row.make is not None  # else it runs as it stands
    kernel = fit.row.make(FusedUnit(captures, out_grid(gm, region), region.calls))
    reason = sums_refused(kernel) if isinstance(kernel, LayerKernel) else None
    if reason is not None:
        raise BackendError(reason)
    return kernel, inputs


def _open(rewriter: Rewriter, node: fx.Node, rows: Mapping[str, KernelRow]) -> None:
    """Run the first op of a unit on integers and the others in float, where no kernel takes the unit whole."""
    plan = info(node).plan
    first, *rest = open_unit(rewriter, node)
    rewriter.describe(first, plan=plan)
    for other in rest:
        _leave_in_float(rewriter, other, "its result is wanted in float")
    _lower_unit(rewriter, first, rows)


def _leave_in_float(rewriter: Rewriter, node: fx.Node, why: str) -> None:
    rewriter.describe(node, plan=Plan(Decision("float", "unsupported", why, decided_by=rewriter.name)))


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
