"""Layers of the jit backend that are no steps of a program: recurrent ones, and linear ones with dynamic ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.backends.kernel import refuse
from fxq.backends.loops.code.compiler import loops_for, missing
from fxq.backends.table.dynamic_linear import DynamicLinear
from fxq.backends.table.kernel_table import CLAMPS, KernelRow
from fxq.backends.table.lowering import RowBackend, has_dynamic_range
from fxq.backends.table.recurrent_kernel import CompiledSteps, RecurrentKernel, recurrent_rows
from fxq.errors import BackendError
from fxq.graph.query import dynamic_grid_ops, is_op
from fxq.graph.region import Region, is_weight_only
from fxq.graph.unit import Calls


class JitLinear(DynamicLinear):
    """Linear layer with dynamic activations, also of int8 weights with scales per channel: a compiled loop."""

    name: ClassVar[str] = "jit.dynamic_linear"
    arranges: ClassVar[bool] = True


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

    def run(self, x: Tensor, grid: tuple[Tensor, ...], h: Tensor, c: Tensor | None) -> Tensor:
        """Run all time steps, see `RecurrentKernel.run`."""
        loops = loops_for("recurrent_loops", 0, x, h, c, *grid)
        if loops is None:
            raise BackendError(
                f"{self.name}: no loops are compiled: {missing('recurrent_loops')} (pip install fxq[jit])"
            )
        compiled: CompiledSteps = self._cached("steps", lambda: CompiledSteps(self, loops, self._input_product))
        scale = () if grid else (torch.tensor(self.x.s, dtype=torch.float32, device="cpu"),)
        return compiled.run(x, (*scale, *grid), h, c)

    def _input_product(self, weight: Tensor, scale: Tensor, bias: Tensor) -> JitLinear:
        """Product of the input, whose scale is an argument, also if it is static."""
        return JitLinear(op="linear", settings={}, axis=0, zero=self.x.z, weight=weight, weight_scale=scale, bias=bias)


class JitUnits(RowBackend):
    """Units of the jit backend that are kernels of their own, and no steps of a program."""

    name: ClassVar[str] = "jit"

    def has_kernel(self, calls: Calls, dynamic: bool) -> bool:
        """Whether a kernel runs a unit of these ops, or its first ops. Steps of programs run static linear layers.

        Args:
            calls: the ops of the unit.
            dynamic: whether its activations have dynamic ranges.
        """
        return calls[0].op.name in _ROWS and (dynamic or calls[0].op.name != "linear")

    def is_own(self, region: Region) -> bool:
        """Whether a region is such a unit, or a quantize with the ops that compute its dynamic grid."""
        if region.calls:
            is_kernel = self.has_kernel(region.calls, has_dynamic_range(region))
            return is_kernel or is_weight_only(region.node, region.calls)
        return is_op(region.nodes[-1], "quantize") and bool(dynamic_grid_ops(region.nodes[-1]))

    def regions(self, gm: fx.GraphModule) -> Iterator[Region]:
        """Regions of such units, and of quantize with dynamic grids."""
        return filter(self.is_own, super().regions(gm))

    @property
    def rows(self) -> Mapping[str, KernelRow]:
        return _ROWS


_ROWS = {
    **recurrent_rows(JitRecurrent),
    "linear": KernelRow(
        JitLinear.of_request,
        dynamic=KernelRow(JitLinear.of_request, posts=(*CLAMPS, "gelu"), emits_integers=False, any_weight=True),
    ),
}
