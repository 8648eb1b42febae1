"""Backends with a table of kernels: what it says of a unit, and the kernel that it makes of one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.backends.base import Backend, Support
from fxq.backends.kernel import Kernel, refuse
from fxq.backends.plain.converters import Dequantize, Quantize, Requantize
from fxq.backends.plain.dynamic_quantize import DynamicQuantize
from fxq.backends.plain.stored_weight import StoredWeight
from fxq.backends.plain.weight_only import KERNELS as WEIGHT_ONLY
from fxq.backends.table.kernel_table import QUANTIZING, Fit, FusedUnit, KernelRow, fits
from fxq.errors import BackendError, InputError
from fxq.graph.grid import grid_of
from fxq.graph.query import CONVERSIONS, argument, constant, dynamic_grid_ops, is_op, options_of, values_of
from fxq.graph.region import (
    Region,
    UnitRegion,
    integer_weight,
    is_weight_only,
    out_grids,
    read_region,
    region_of,
    unit_regions,
)
from fxq.graph.unit import Calls
from fxq.ops.table import Op
from fxq.quant.qparams import QParams
from fxq.quant.spec import QuantConfig


class RowBackend(Backend):
    """A backend whose kernels stand in a table: by op, what starts a kernel. The kernels take plain uint8 tensors.

    One of your own extends another's table. Its class needs no more than a name, and these rows::

        class MyX86(fxq.extend.X86):
            name = "my_x86"

            @property
            def rows(self):
                return {**super().rows, "linear": fxq.extend.KernelRow(make)}

    where `make(unit)` takes a `fxq.extend.FusedUnit` and returns a `fxq.extend.Kernel`, as for
    `fxq.extend.register_kernel`.
    """

    registered: ClassVar[dict[str, KernelRow]] = {}
    """The rows that `fxq.extend.register_kernel` has added for this class. Those that extend it have them, too."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give it a table of its own for the user's kernels."""
        super().__init_subclass__(**kwargs)
        cls.registered = {}

    @property
    @abstractmethod
    def rows(self) -> Mapping[str, KernelRow]:
        """The table."""

    def fits(self, calls: Calls, measured: bool = False) -> list[Fit]:
        """The kernels that run a unit or its first ops, the user's own among them; see `kernel_table.fits`.

        Args:
            calls: the ops.
            measured: whether scales of their activations are measured at run time.
        """
        kinds = [kind for kind in reversed(type(self).__mro__) if issubclass(kind, RowBackend)]
        rows = {**self.rows, **{key: row for kind in kinds for key, row in kind.registered.items()}}
        if measured:
            rows = {key: row.measured for key, row in rows.items() if row.measured is not None}
        return fits(calls, rows)

    def supports(self, gm: fx.GraphModule, node: fx.Node, calls: Calls, config: QuantConfig) -> Support:
        """What the table says of the leading ops."""
        if config.activation is None:
            known = len(calls) == 1 and calls[0].op.name in WEIGHT_ONLY
            return Support(1) if known else Support(0, f"no kernel runs {calls[0].op.name} with integer weights alone")
        measured = config.activation.range == "dynamic"
        found = self.fits(calls, measured)
        if not found:
            what = " with ranges measured at run time" if measured else _advice(calls[0].op)
            return Support(0, f"{self.name} has no int8 kernel for {calls[0].op.name}{what}")
        if config.activation.signed:
            return Support(0, f"{self.name} kernels take unsigned activations; set signed=False")
        weight = config.weight
        weighted = any(call.op.traits.weight for call in found[0].calls)
        if weighted and weight is not None and not (weight.signed and weight.symmetric):
            return Support(0, f"{self.name} kernels take signed symmetric weights")
        if calls[0].op.traits.recurrence is not None and config.state is None:
            return Support(0, f"{self.name} kernels take a hidden state on integers; give state a spec")
        reasons = []
        for fit in found:
            reason, ops = fit.refused(gm), len(fit.calls)
            if reason is not None:
                reasons.append(reason)
            elif fit.costs_twice:
                reason = f"{calls[ops - 1].op.name} costs a second {calls[0].op.name} on integers"
                return Support(ops, reason, ops - 1, fit.row.emits_float)
            else:
                rest = [f"no kernel of {self.name} takes {call.op.name} along" for call in calls[ops:]]
                return Support(ops, next(iter([*reasons, *rest]), ""), emits_float=fit.row.emits_float)
        return Support(0, reasons[-1])

    def code(self, calls: Calls) -> str:
        """As in `Backend`; besides, that of a kernel of the user's own."""
        return super().code(calls) + "".join(fit.row.code for fit in self.fits(calls)[:1])

    def regions(self, gm: fx.GraphModule) -> Iterator[Region]:
        """As in `Backend`; a function, or what measures a grid, goes along with the quantize that needs it."""
        for region in unit_regions(gm):
            rounds = region.outputs != (region.node,) and not is_op(region.node, *CONVERSIONS)
            fits = self.fits(region.calls, _is_measured(region)) if rounds else []
            if fits and not fits[0].row.emits_integers:
                yield read_region(gm, region.node, emits_float=True) or region
            else:
                yield _with_its_function(gm, region.node) or _with_its_measures(region.node) or region

    def lower(self, gm: fx.GraphModule, region: Region) -> Kernel | None:
        """The kernel that the table has for a unit or a conversion."""
        if not isinstance(region, UnitRegion):
            measures = dynamic_grid_ops(region.nodes[-1])
            if not measures or region.nodes != (*measures, region.nodes[-1]):
                first, count = region.nodes[0].name, len(region.nodes)
                raise InputError(
                    f"the backend {self.name!r} has kernels of single units: for a region of {count} nodes, from "
                    f"%{first} on, its class needs a `lower` of its own beside its `regions`."
                )
            scale, integers = options_of(region.nodes[0]), options_of(region.nodes[-1])
            return DynamicQuantize(integers["qmin"], integers["qmax"], scale["axis"], scale["symmetric"])
        if is_op(region.node, *CONVERSIONS):
            return _converter(gm, region.node)
        if _quantizes(gm, region):
            (grid,), weight = out_grids(gm, region), constant(gm, argument(region.node, "weight"))
            assert grid is not None and weight is not None  # as was asked
            return QUANTIZING[region.calls[0].op.name](weight, grid)
        if is_weight_only(region.node, region.calls):
            return _weight_only(gm, region)
        refused = None
        for fit in self.fits(region.calls, _is_measured(region)):
            if len(fit.calls) < len(region.calls):
                continue
            if fit.row.make is None:
                return None
            try:
                return _kernel(gm, region, fit)
            except BackendError as error:
                refused = error
        if refused is not None:
            raise refused
        return None


def _advice(op: Op) -> str:
    """What its author can do about an op that has no kernel; nothing for fxq's own."""
    if op.target.__module__.startswith("fxq."):
        return ""
    moves = (
        ', or where it only moves values, traits=fxq.extend.OpTraits("moves", layout=True)'
        if op.traits.kind == "moves"
        else ""
    )
    return f": give it one by fxq.extend.register_kernel{moves}"


def _kernel(gm: fx.GraphModule, region: UnitRegion, fit: Fit) -> Kernel:
    """The kernel of a unit. Raises `BackendError` where there is none."""
    inputs, captures, dynamic = fit.integers(gm)
    if set(inputs) != set(region.inputs):
        raise BackendError("an input is not in integers")
    taken = [node.args[1] for node in values_of(region.node) if node is not region.node]
    if taken != [*range(fit.outputs)][: len(taken)] or len(region.outputs) != fit.outputs:
        raise BackendError("not every one of its outputs is read, or one is taken twice")
    assert fit.row.make is not None  # else it runs as it stands
    kernel = fit.row.make(FusedUnit(captures, out_grids(gm, region), region.calls, dynamic))
    if inputs != region.inputs:  # it reads one of them twice, or in another order
        kernel.reads = tuple(map(region.inputs.index, inputs))
    return kernel


def _weight_only(gm: fx.GraphModule, region: UnitRegion) -> Kernel | None:
    """The kernel of a layer that computes in float; None where the weight is in float, too."""
    call = region.calls[0]
    quant = call.op.traits
    kind = WEIGHT_ONLY[call.op.name]
    refuse(
        kind.name,
        f"its {call.run_time_option} is a value that can differ from call to call" if call.run_time_option else None,
    )
    weights: dict[str, StoredWeight] = {}
    constants: dict[str, Tensor] = {}
    given: dict[str, fx.Node] = {}
    for name, read in call.tensors.items():
        value = constant(gm, read)
        if quant.role(name) == "weight" and isinstance(read, fx.Node):
            weight = integer_weight(gm, read)
            if weight is None:
                return None
            weights[name] = StoredWeight.of(weight, constant(gm, options_of(read)["zero_point"]))
        elif value is not None:
            constants[name] = value
        elif isinstance(read, fx.Node):
            given[name] = read
    kernel = kind.of(call, tuple(given), weights, constants)
    inputs = tuple(given.values())
    if inputs != region.inputs:
        kernel.reads = tuple(map(region.inputs.index, inputs))
    return kernel


def _converter(gm: fx.GraphModule, node: fx.Node) -> Kernel | None:
    """The quick form of a conversion of activations; None for another one."""
    grid, source = grid_of(gm, node), node.args[0]
    if grid is None or not _is_plain(grid) or (isinstance(source, fx.Node) and source.op == "get_attr"):
        return None
    if is_op(node, "requantize"):
        before = QParams.per_tensor(node.kwargs["from_scale"], node.kwargs["from_zero_point"])  # type: ignore[arg-type]
        return Requantize(before, grid)
    return Quantize(grid) if is_op(node, "quantize") else Dequantize(grid)


def _is_plain(grid: QParams | None) -> bool:
    return grid is not None and grid.dtype == torch.uint8 and grid.axis is None


def _with_its_function(gm: fx.GraphModule, node: fx.Node) -> UnitRegion | None:
    """The region of a quantize with the function before it, where one kernel runs both; else None."""
    source = node.args[0] if is_op(node, "quantize") else None
    region = read_region(gm, source) if isinstance(source, fx.Node) and is_op(source, *QUANTIZING) else None
    return region if region is not None and _quantizes(gm, region) else None


def _is_measured(region: UnitRegion) -> bool:
    """Whether the grid of something that a unit reads is measured at run time."""
    scales = (options_of(step)["scale"] for step in region.steps if is_op(step, "quantize", "dequantize"))
    return any(isinstance(scale, fx.Node) and scale.op != "get_attr" for scale in scales)


def _with_its_measures(node: fx.Node) -> Region | None:
    """The region of a quantize with the ops that measure its grid; else None."""
    measures = dynamic_grid_ops(node) if is_op(node, "quantize") else ()
    return region_of((*measures, node)) if measures and options_of(node)["dtype"] == torch.uint8 else None


def _quantizes(gm: fx.GraphModule, region: UnitRegion) -> bool:
    """Whether a region is a function of floats that a kernel computes along with the quantize behind it."""
    return (
        is_op(region.node, *QUANTIZING)
        and all(map(_is_plain, out_grids(gm, region)))
        and constant(gm, argument(region.node, "weight")) is not None
        and not any(is_op(step, "dequantize") for step in region.steps)
    )
