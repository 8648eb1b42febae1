"""Layers of the jit backend that are no steps of a program: recurrent ones, and linear ones with dynamic ranges."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.backends.base import Support
from fxq.backends.kernel import refuse
from fxq.backends.loops.code.compiler import loops_for, missing
from fxq.backends.plain.many_rows import many_rows_refused
from fxq.backends.plain.stored_weight import StoredWeight
from fxq.backends.table.dynamic_linear import DynamicLinear
from fxq.backends.table.kernel_table import CLAMPS, KernelRequest, KernelRow
from fxq.backends.table.lowering import RowBackend, has_dynamic_range
from fxq.backends.table.recurrent_kernel import CompiledSteps, RecurrentKernel, recurrent_rows
from fxq.errors import BackendError
from fxq.graph.query import CONVERSIONS, constant, dynamic_grid_ops, is_op
from fxq.graph.region import Region, is_weight_only
from fxq.graph.unit import Calls
from fxq.quant.packing import Packing
from fxq.quant.spec import QuantConfig, TensorSpec


class JitLinear(DynamicLinear):
    """Linear layer with dynamic activations and a weight of 2 to 8 bits, which compiled loops run."""

    name: ClassVar[str] = "jit.dynamic_linear"
    arranges: ClassVar[bool] = True

    @classmethod
    def of_request(cls, request: KernelRequest) -> JitLinear:
        """Return the kernel of a layer whose input has a dynamic grid.

        Raises:
            BackendError: the loops do not support the weight.
        """
        kernel = super().of_request(request)
        assert isinstance(kernel, JitLinear)
        refuse(cls.name, many_rows_refused(kernel.stored_weight()))
        return kernel


class JitRecurrent(RecurrentKernel):
    """Recurrent layer without projection: its time steps are a compiled loop, whose sums are exact on any CPU.

    The product of the input is a compiled loop, too, unless it is small.

    Args: see `RecurrentKernel`.
    """

    name: ClassVar[str] = "jit.recurrent"

    def __init__(self, *tensors: Any, **arguments: Any) -> None:
        super().__init__(*tensors, **arguments)
        refuse(self.name, None if self.weight_hr is None else "its hidden state is projected")

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """Run the layer, or its q/dq form for tensors that PyTorch traces or that have no memory of their own."""
        if self.form is None or loops_for("recurrent_loops", 0, x, *others) is not None:
            return super().forward(x, *others)
        return self.form.runner(self)(x, *others)

    def bind(self, x: Tensor, *others: Tensor) -> Callable[..., Tensor]:
        """Return the function for inputs like these, see `RecurrentKernel.bind`; `forward` if no loop can run them."""
        return super().bind(x, *others)

    def run(self, x: Tensor, grid: tuple[Tensor, ...], h: Tensor, c: Tensor | None) -> Tensor:
        """Run all time steps, see `RecurrentKernel.run`."""
        compiled = self.compiled_steps(x, h, c, *grid)
        if compiled is None:
            raise BackendError(
                f"{self.name}: no loops are compiled: {missing('recurrent_loops')} (pip install fxq[jit])"
            )
        return compiled.run(x, grid, h, c)

    def compiled_steps(self, x: Tensor, *others: Tensor | None) -> CompiledSteps | None:
        """Compiled time steps of the layer; None where Numba is missing or an input has no memory of its own."""
        loops = loops_for("recurrent_loops", 0, x, *others)
        if loops is None:
            return None
        compiled: CompiledSteps = self._cached(
            "steps", lambda: CompiledSteps(self, loops, self._input_product, takes_scale=True)
        )
        return compiled

    def _input_product(self, weight: Tensor, scale: Tensor, bias: Tensor) -> JitLinear:
        """Product of the input, whose scale is an argument, also if it is static."""
        return JitLinear(op="linear", settings={}, axis=0, zero=self.x.z, weight=weight, weight_scale=scale, bias=bias)


class JitUnits(RowBackend):
    """Units of the jit backend that are kernels of their own, and no steps of a program."""

    name: ClassVar[str] = "jit"

    def has_kernel(self, calls: Calls, dynamic: bool) -> bool:
        """Whether a kernel of this table runs a unit of these ops, or its first ops.

        It runs no static linear layer, since those are steps of programs.

        Args:
            calls: the ops of the unit.
            dynamic: whether its activations have dynamic ranges.
        """
        return calls[0].op.name in _ROWS and (dynamic or calls[0].op.name != "linear")

    def supports(self, gm: fx.GraphModule, node: fx.Node, calls: Calls, config: QuantConfig) -> Support:
        """How many of the first ops a kernel runs.

        Linear layers whose stored weight the loops cannot read are not supported.
        """
        support, spec = super().supports(gm, node, calls, config), config.weight
        if support.ops and calls[0].op.name == "linear" and config.activation is not None and spec is not None:
            weight = calls[0].tensors["weight"]
            value = constant(gm, weight) if isinstance(weight, fx.Node) else None
            reason = None if value is None else many_rows_refused(_stored_like(value.shape[1:], spec))
            if reason is not None:
                return Support(0, f"{self.name} has no kernel for it: {reason}")
        return support

    def is_own(self, region: Region) -> bool:
        """Whether a region is such a unit, a quantize with the ops that compute its dynamic grid, or a conversion."""
        if region.calls:
            is_kernel = self.has_kernel(region.calls, has_dynamic_range(region))
            return is_kernel or is_weight_only(region.node, region.calls)
        return _is_conversion(region) or _has_dynamic_grid(region)

    def regions(self, gm: fx.GraphModule) -> Iterator[Region]:
        """Regions of such units, and of quantize with dynamic grids."""
        return (region for region in super().regions(gm) if self.is_own(region) and not _is_conversion(region))

    def conversions(self, gm: fx.GraphModule, planned: Collection[fx.Node]) -> Iterator[Region]:
        """Regions of single conversions, but those that programs run: `planned` are the nodes of programs."""
        for region in super().regions(gm):
            if _is_conversion(region) and region.nodes[0] not in planned:
                yield region

    @property
    def rows(self) -> Mapping[str, KernelRow]:
        return _ROWS


def _stored_like(row: Sequence[int], spec: TensorSpec) -> StoredWeight:
    """Placeholder weight of one row of this shape, in the form in which a spec stores it."""
    values = torch.zeros((1, *row), dtype=spec.dtype, device="cpu")
    packing = Packing.of_grid(spec.qmin, spec.qmax, tuple(row))
    blocks = 1 if spec.block is None else -(-values.shape[1] // spec.block)
    scale = torch.ones((1,) if spec.block is None else (1, blocks), device="cpu")
    zero_point = None if spec.symmetric and spec.signed else torch.zeros_like(scale)
    axis = 0 if spec.block is None else 1
    return StoredWeight(
        values if packing is None else packing.pack(values), scale, zero_point, axis, spec.block, packing
    )


def _is_conversion(region: Region) -> bool:
    """Whether a region is one conversion to or from a static grid."""
    return len(region.nodes) == 1 and is_op(region.nodes[0], *CONVERSIONS) and not dynamic_grid_ops(region.nodes[0])


def _has_dynamic_grid(region: Region) -> bool:
    """Whether a region is a quantize with the ops that compute its dynamic grid."""
    return is_op(region.nodes[-1], "quantize") and bool(dynamic_grid_ops(region.nodes[-1]))


_ROWS = {
    **recurrent_rows(JitRecurrent),
    "linear": KernelRow(
        JitLinear.of_request,
        dynamic=KernelRow(JitLinear.of_request, posts=(*CLAMPS, "gelu"), emits_integers=False, any_weight=True),
    ),
}
