"""`RowBackend`: base class of backends with a kernel table, which decides what they support and makes their kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.backends.base import Backend, Support
from fxq.backends.kernel import Kernel, refuse
from fxq.backends.loops.code import compiler
from fxq.backends.plain.bfloat16_linear import BFloat16Linear, bfloat16_refused
from fxq.backends.plain.converters import Dequantize, Quantize, Requantize
from fxq.backends.plain.dynamic_quantize import DynamicQuantize
from fxq.backends.plain.few_rows import MAX_ROWS, chunks_refused
from fxq.backends.plain.few_rows import refused as few_rows_refused
from fxq.backends.plain.stored_weight import StoredWeight
from fxq.backends.plain.weight_only import WeightOnlyEmbedding, WeightOnlyKernel, WeightOnlyLinear
from fxq.backends.plain.weight_only_kernels import KERNELS as WEIGHT_ONLY
from fxq.backends.table.kernel_table import (
    QUANTIZING_KERNELS,
    KernelRequest,
    KernelRow,
    RowMatch,
    matching_rows,
    weight_only_key,
)
from fxq.errors import BackendError, InputError
from fxq.graph.grid import grid_of
from fxq.graph.info import Plan, info
from fxq.graph.query import CONVERSIONS, argument, constant, dynamic_grid_ops, is_op, options_of, values_of
from fxq.graph.region import (
    Region,
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
from fxq.quant.spec import QuantConfig, TensorSpec

_MIN_NOTED_VALUES = 1 << 16
"""Values of a weight from which converting it in each call takes time that the ledger notes."""


class RowBackend(Backend):
    """Backend with a kernel table. The kernels take plain uint8 tensors.

    A backend of your own can extend the table of another. Its class needs a name and the additional rows::

        class MyX86(fxq.extend.X86):
            name = "my_x86"

            @property
            def rows(self):
                return {**super().rows, "linear": fxq.extend.KernelRow(make)}

    `make` is a function of a `fxq.extend.KernelRequest` that returns a `fxq.extend.Kernel`, as for
    `fxq.extend.register_kernel`.
    """

    registered: ClassVar[dict[str, KernelRow]] = {}
    """Rows that `fxq.extend.register_kernel` has added to this class. Subclasses use them, too."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give each subclass its own `registered`."""
        super().__init_subclass__(**kwargs)
        cls.registered = {}

    @property
    @abstractmethod
    def rows(self) -> Mapping[str, KernelRow]:
        """The kernel table, by `kernel_table.rule_key` or name of an op."""

    def matching_rows(self, calls: Calls, dynamic: bool = False) -> list[RowMatch]:
        """Return the rows whose kernels run a unit or its first ops, most ops first. Includes the user's own kernels.

        Args:
            calls: the ops of the unit.
            dynamic: whether its activations have dynamic ranges.
        """
        rows = {**self.rows, **self._registered_rows()}
        if dynamic:
            rows = {key: row.dynamic for key, row in rows.items() if row.dynamic is not None}
        return matching_rows(calls, rows)

    def _registered_rows(self) -> dict[str, KernelRow]:
        classes = [base for base in reversed(type(self).__mro__) if issubclass(base, RowBackend)]
        return {key: row for base in classes for key, row in base.registered.items()}

    def _own_weight_only(self, gm: fx.GraphModule, calls: Calls) -> RowMatch | None:
        """Row of the user's own kernel that runs a weight-only layer; None if there is none."""
        row = self._registered_rows().get(weight_only_key(calls[0].op.name)) if len(calls) == 1 else None
        match = RowMatch(row, calls, calls[0].tensors) if row is not None else None
        return match if match is not None and match.refused(gm) is None else None

    def supports(self, gm: fx.GraphModule, node: fx.Node, calls: Calls, config: QuantConfig) -> Support:
        """Return how many of the first ops a kernel of the table runs."""
        if config.activation is None:
            has_kernel = len(calls) == 1 and calls[0].op.name in WEIGHT_ONLY
            has_kernel = has_kernel or self._own_weight_only(gm, calls) is not None
            unsupported = f"no kernel runs {calls[0].op.name} with integer weights alone"
            return Support(1) if has_kernel else Support(0, unsupported)
        dynamic = config.activation.range == "dynamic"
        matches = self.matching_rows(calls, dynamic)
        if not matches:
            detail = " with dynamic ranges" if dynamic else _advice(calls[0].op)
            return Support(0, f"{self.name} has no int8 kernel for {calls[0].op.name}{detail}")
        if config.activation.signed:
            return Support(0, f"{self.name} kernels take unsigned activations; set signed=False")
        refusal = _weight_refused(matches[0], config.weight)
        if refusal is not None:
            return Support(0, f"{self.name} {refusal}")
        if calls[0].op.traits.recurrence is not None and config.state is None:
            return Support(0, f"{self.name} kernels take an integer hidden state; set state= in the config")
        reasons = []
        for match in matches:
            reason, ops = match.refused(gm), len(match.calls)
            if reason is not None:
                reasons.append(reason)
            elif match.has_slow_post:
                reason = f"{calls[ops - 1].op.name} costs a second {calls[0].op.name} on integers"
                return Support(ops, reason, ops - 1, match.row.emits_float)
            else:
                reasons += [f"no kernel of {self.name} includes the {call.op.name}" for call in calls[ops:]]
                return Support(ops, next(iter(reasons), ""), emits_float=match.row.emits_float)
        return Support(0, reasons[-1])

    def code(self, calls: Calls) -> str:
        """Hash of the code outside of fxq that runs a unit, including the user's own kernel of it."""
        weight_only = self._registered_rows().get(weight_only_key(calls[0].op.name))
        rows = [*(match.row for match in self.matching_rows(calls)[:1]), *([weight_only] if weight_only else [])]
        return super().code(calls) + "".join(row.code for row in rows)

    def regions(self, gm: fx.GraphModule) -> Iterator[Region]:
        """Regions of units and conversions.

        A quantize is one region with the ops that compute its dynamic grid, or with the float function before it if a
        kernel runs both.
        """
        for region in unit_regions(gm):
            is_quantized = region.outputs != (region.node,) and not is_op(region.node, *CONVERSIONS)
            matches = self.matching_rows(region.calls, has_dynamic_range(region)) if is_quantized else []
            if matches and not matches[0].row.emits_integers:
                yield read_region(gm, region.node, emits_float=True) or region
            else:
                yield _quantize_with_function(gm, region.node) or _quantize_with_range(region.node) or region

    def lower(self, gm: fx.GraphModule, region: Region) -> Kernel | None:
        """Return the kernel of a unit or conversion from the table; None if the region needs none."""
        if not region.calls:
            return self._dynamic_quantize(region)
        if is_op(region.node, *CONVERSIONS):
            return _converter(gm, region.node)
        if _quantizes(gm, region):
            (grid,), weight = out_grids(gm, region), constant(gm, argument(region.node, "weight"))
            assert grid is not None and weight is not None  # `_quantizes` has checked them
            return QUANTIZING_KERNELS[region.calls[0].op.name](weight, grid)
        if is_weight_only(region.node, region.calls):
            own = self._own_weight_only(gm, region.calls)
            try:
                return _weight_only(gm, region) if own is None else _own_weight_only_kernel(gm, region, own)
            except BackendError:
                if own is None or region.calls[0].op.name not in WEIGHT_ONLY:
                    raise
                return _weight_only(gm, region)
        return self._unit_kernel(gm, region)

    def _dynamic_quantize(self, region: Region) -> Kernel:
        """Return the kernel of a quantize with the ops that compute its dynamic grid.

        Raises:
            InputError: The region has other nodes.
        """
        measures = dynamic_grid_ops(region.nodes[-1])
        if not measures or region.nodes != (*measures, region.nodes[-1]):
            first, count = region.nodes[0].name, len(region.nodes)
            raise InputError(
                f"the backend {self.name!r} has kernels of single units: to lower a region of {count} nodes, from "
                f"%{first} on, its class must override `lower`, not only `regions`."
            )
        scale, integers = options_of(region.nodes[0]), options_of(region.nodes[-1])
        return DynamicQuantize(integers["qmin"], integers["qmax"], scale["axis"], scale["symmetric"])

    def _unit_kernel(self, gm: fx.GraphModule, region: Region) -> Kernel | None:
        """Return the kernel of the first row that runs the whole unit; None if that row needs none.

        Raises:
            BackendError: All rows refuse the unit; the reason is that of the last one.
        """
        refusal = None
        for match in self.matching_rows(region.calls, has_dynamic_range(region)):
            if len(match.calls) < len(region.calls):
                continue
            if match.row.make is None:
                return None
            try:
                return _kernel(gm, region, match)
            except BackendError as error:
                refusal = error
        if refusal is not None:
            raise refusal
        return None


def _weight_refused(match: RowMatch, weight: TensorSpec | None) -> str | None:
    """Why kernels of a row do not run weights of a spec; None if they do."""
    if weight is None or match.row.any_weight or not any(call.op.traits.weight for call in match.calls):
        return None
    if weight.block is not None:
        return f"has no int8 kernel for {match.calls[0].op.name} with scales per block"
    return None if weight.signed and weight.symmetric else "kernels take signed symmetric weights"


def _advice(op: Op) -> str:
    """Remedy for an op of the user's own without a kernel; empty for fxq's ops."""
    if op.target.__module__.startswith("fxq."):
        return ""
    moves = (
        '; or set traits=fxq.extend.OpTraits("moves", layout=True), if it only moves values'
        if op.traits.kind == "moves"
        else ""
    )
    return f": add one with fxq.extend.register_kernel{moves}"


def _kernel(gm: fx.GraphModule, region: Region, match: RowMatch) -> Kernel:
    """Return the kernel of a unit. Raises `BackendError` if there is none."""
    inputs, captures = match.integers(gm)
    if set(inputs) != set(region.inputs):
        raise BackendError("an input is not on integers")
    indices = [node.args[1] for node in values_of(region.node) if node is not region.node]
    if indices != [*range(match.outputs)][: len(indices)] or len(region.outputs) != match.outputs:
        raise BackendError("one of its outputs is not read, or is read twice")
    assert match.row.make is not None  # otherwise the op runs without a kernel
    kernel = match.row.make(KernelRequest(captures, out_grids(gm, region), region.calls))
    if inputs != region.inputs:  # the kernel reads one of them twice, or in another order
        kernel.reads = tuple(map(region.inputs.index, inputs))
    return kernel


def _weight_only(gm: fx.GraphModule, region: Region) -> Kernel | None:
    """Return the weight-only kernel of a layer; None if its weight is in float."""
    call = region.calls[0]
    traits = call.op.traits
    kind = WEIGHT_ONLY[call.op.name]
    refuse(
        kind.name,
        f"its {call.run_time_option} is a value that can differ from call to call" if call.run_time_option else None,
    )
    weights: dict[str, StoredWeight] = {}
    constants: dict[str, Tensor] = {}
    activations: dict[str, fx.Node] = {}
    for name, read in call.tensors.items():
        value = constant(gm, read)
        if traits.role(name) == "weight" and isinstance(read, fx.Node):
            weight = integer_weight(gm, read)
            if weight is None:
                return None
            grid = (constant(gm, options_of(read)[key]) for key in ("scale", "zero_point"))
            weights[name] = StoredWeight.of(weight, *grid)
        elif value is not None:
            constants[name] = value
        elif isinstance(read, fx.Node):
            activations[name] = read
    kind, note = _with_compute(info(region.node).plan, kind, weights)
    kernel = kind.of(call, tuple(activations), weights, constants)
    kernel.note = note
    inputs = tuple(activations.values())
    if inputs != region.inputs:
        kernel.reads = tuple(map(region.inputs.index, inputs))
    return kernel


def _with_compute(
    plan: Plan | None, kind: type[WeightOnlyKernel], weights: Mapping[str, StoredWeight]
) -> tuple[type[WeightOnlyKernel], str]:
    """Class of the kernel of a weight-only layer, and a note for the ledger if its plan allows bfloat16."""
    if plan is None or plan.compute == "float32" or kind is WeightOnlyEmbedding:
        return kind, _why_converted(weights["weight"]) if kind is WeightOnlyLinear else ""
    if kind is not WeightOnlyLinear:
        return kind, "computes in float32: only linear layers have a kernel in bfloat16"
    weight = weights["weight"]
    if compiler.loops("few_rows_loops") is not None and few_rows_refused(weight) is None:
        return kind, "computes in float32: with Numba's loops, bfloat16 is not faster"
    refusal = bfloat16_refused(weight)
    if refusal is not None:
        return kind, f"computes in float32: {refusal}"
    return BFloat16Linear, f"computes up to {MAX_ROWS} rows in bfloat16, more in float32"


def _why_converted(weight: StoredWeight) -> str:
    """Note for the ledger on a linear layer with an integer weight that is converted to floats in each call, if it is.

    Left out: small weights, which take little time, and float16, for which there are no loops.
    """
    if weight.values.dtype == torch.float16 or weight.numel < _MIN_NOTED_VALUES:
        return ""
    reason, of_many = few_rows_refused(weight), chunks_refused(weight)
    if (reason is None and of_many is None) or compiler.loops("few_rows_loops") is None:
        return ""  # without loops, one warning says so for all layers
    if reason is None:
        return f"more than {MAX_ROWS} rows are multiplied by its weight as floats, converted in each call: {of_many}"
    return f"PyTorch converts its weight to floats in each call: {reason}"


def _own_weight_only_kernel(gm: fx.GraphModule, region: Region, match: RowMatch) -> Kernel:
    """Return the user's own kernel of a weight-only layer."""
    inputs, captures = match.float_inputs(gm)
    assert match.row.make is not None  # rows of the user's own have a kernel
    kernel = match.row.make(KernelRequest(captures, (None,), region.calls))
    if inputs != region.inputs:
        kernel.reads = tuple(map(region.inputs.index, inputs))
    return kernel


def _converter(gm: fx.GraphModule, node: fx.Node) -> Kernel | None:
    """Return the kernel of a conversion of activations; None for weights, and for grids that it does not support."""
    grid, source = grid_of(gm, node), node.args[0]
    if grid is None or not _is_per_tensor_uint8(grid) or (isinstance(source, fx.Node) and source.op == "get_attr"):
        return None
    if is_op(node, "requantize"):
        old = QParams.per_tensor(node.kwargs["from_scale"], node.kwargs["from_zero_point"])  # type: ignore[arg-type]
        return Requantize(old, grid)
    return Quantize(grid) if is_op(node, "quantize") else Dequantize(grid)


def _is_per_tensor_uint8(grid: QParams | None) -> bool:
    return grid is not None and grid.dtype == torch.uint8 and grid.axis is None


def _quantize_with_function(gm: fx.GraphModule, node: fx.Node) -> Region | None:
    """Region of a quantize and the float function before it, if one kernel runs both; else None."""
    source = node.args[0] if is_op(node, "quantize") else None
    region = read_region(gm, source) if isinstance(source, fx.Node) and is_op(source, *QUANTIZING_KERNELS) else None
    return region if region is not None and _quantizes(gm, region) else None


def has_dynamic_range(region: Region) -> bool:
    """Whether an input of a unit has a dynamic range."""
    scales = (options_of(step)["scale"] for step in region.steps if is_op(step, "quantize", "dequantize"))
    return any(isinstance(scale, fx.Node) and scale.op != "get_attr" for scale in scales)


def _quantize_with_range(node: fx.Node) -> Region | None:
    """Region of a quantize with dynamic range and the ops that compute its grid; else None."""
    measures = dynamic_grid_ops(node) if is_op(node, "quantize") else ()
    return region_of((*measures, node)) if measures and options_of(node)["dtype"] == torch.uint8 else None


def _quantizes(gm: fx.GraphModule, region: Region) -> bool:
    """Whether a region is a float function and a quantize after it that one kernel runs together."""
    return (
        is_op(region.node, *QUANTIZING_KERNELS)
        and all(map(_is_per_tensor_uint8, out_grids(gm, region)))
        and constant(gm, argument(region.node, "weight")) is not None
        and not any(is_op(step, "dequantize") for step in region.steps)
    )
