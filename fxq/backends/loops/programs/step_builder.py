"""Builder of the steps of a program: inputs, new steps, and the choice of integers or floats for each value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.loops.programs.areas import ABSOLUTE, ARENA, EXTERNAL, LANES, Area
from fxq.backends.loops.programs.layer_steps import ProductStep
from fxq.backends.loops.programs.planned_values import (
    RAW,
    OtherInput,
    PlannedHeads,
    PlannedValue,
    PlannedWeight,
    as_images,
    refuse,
)
from fxq.backends.loops.programs.program_steps import (
    CLAMP,
    Function,
    MoveStep,
    PointwiseStep,
    ProgramStep,
    QuantizeStep,
)
from fxq.quant.qparams import QParams


class StepBuilder:
    """Builder of the steps of a program.

    Args:
        inputs: Example inputs: shapes, dtypes and channels-last formats count, not values.
        axes: Channel axis of each input.
        trial: Whether float layers are planned as integer layers, to try a node out before it is quantized. Such a
            program cannot run.

    Attributes:
        steps: Steps in order.
        constants: Tensors that steps read by address.
        scope: Name of the node that new steps compute.
    """

    def __init__(self, inputs: Sequence[Tensor], axes: Sequence[int], trial: bool) -> None:
        self.steps: list[ProgramStep] = []
        self.constants: list[Tensor] = []
        self.scope = ""
        self._inputs, self._axes, self._trial = inputs, axes, trial
        self._in_pixel_order: set[int] = set()  # inputs that steps read pixel by pixel

    # ---- inputs

    def input_as(self, i: int, is_float: bool) -> PlannedValue:
        """Return input `i` as floats or as bytes."""
        rank, axis = self._inputs[i].dim(), self._axes[i]
        shape = as_images(self._inputs[i].shape, axis)
        return PlannedValue(Area(shape, is_float, room=shape[3], base=EXTERNAL + i), rank, axis)

    def mask(self, x: Any) -> PlannedValue | None:
        """Return a mask of attention: float32, or bytes that are 0 where it is False; None where there is none."""
        if x is None or (isinstance(x, PlannedValue) and self.read(x).area.is_float):
            return x
        if isinstance(x, OtherInput) and x.dtype == torch.bool:
            return self.input_as(x.index, False)
        refuse(not isinstance(x, PlannedWeight), "its mask is neither bool nor float32")
        values = x.values
        if values.dtype == torch.bool:
            values = torch.zeros(values.shape, dtype=torch.float32).masked_fill(~values, -math.inf)
        refuse(values.dtype != torch.float32, "its mask is neither bool nor float32")
        self.constants.append(values.contiguous())
        shape = as_images(values.shape, values.dim() - 1)
        area = Area(shape, True, room=shape[3], base=ABSOLUTE, offset=self.constants[-1].data_ptr())
        return PlannedValue(area, values.dim(), values.dim() - 1)

    def note_read(self, area: Area) -> None:
        """Note that a step reads an area by pixel: in an input, the channels of a pixel must be side by side then."""
        if area.base >= EXTERNAL:
            self._in_pixel_order.add(area.base - EXTERNAL)

    def format(self, i: int) -> torch.memory_format:
        """Memory format that steps read an input in: by pixel, or that of the example."""
        example = self._inputs[i]
        last = self._axes[i] == 1 if i in self._in_pixel_order else not example.is_contiguous()
        return torch.channels_last if last and example.dim() == 4 else torch.contiguous_format

    def is_transposed(self, i: int) -> bool:
        """Whether steps read an input of three axes by pixel, but its channels are axis 1, so that it is transposed."""
        return self._inputs[i].dim() == 3 and self._axes[i] == 1 and i in self._in_pixel_order

    def _strides(self, i: int) -> Sequence[int]:
        """Strides of an input, sample, channel, row and pixel, in elements."""
        example, is_first = self._inputs[i], self._axes[i] == 1
        if self.is_transposed(i):
            return (example.shape[1] * example.shape[2], 1, 0, example.shape[1])
        strides = example.contiguous(memory_format=self.format(i)).stride()
        if len(strides) == 4:
            return strides if is_first else (strides[0], strides[3], strides[1], strides[2])
        if len(strides) == 3:
            return (strides[0], strides[1], 0, strides[2]) if is_first else (strides[0], strides[2], 0, strides[1])
        return (strides[0], strides[1], 0, 0)

    # ---- steps

    def add(
        self,
        kind: type[ProgramStep],
        like: PlannedValue,
        shape: tuple[int, int, int, int] | None = None,
        **attributes: Any,
    ) -> PlannedValue:
        """Add a step, and return the value that it computes, with the axes of `like`."""
        area = Area(shape or like.area.shape)
        step = kind(self.scope, area, **attributes)
        self.steps.append(step)
        for read in step.reads:
            refuse(read.is_float is None, "it reads a value that is neither float nor integer yet")
            if kind is not QuantizeStep:
                self.note_read(read)
        return PlannedValue(area, like.rank, like.axis, None, step)

    def settle(self, value: PlannedValue, grid: QParams | None) -> PlannedValue:
        """Decide once how a value is written: as integers on a grid, or as floats if `grid` is None."""
        if value.step is not None:
            value.step.grid, value.area = grid, value.step.out
            value.area.is_float = grid is None
            value.step = None
        return value

    def read(self, value: Any) -> PlannedValue:
        """Return a value that a step reads as floats, or as integers with a grid."""
        refuse(isinstance(value, PlannedHeads), "it reads values that are split into heads")
        refuse(not isinstance(value, PlannedValue), "it reads a value that the region does not compute")
        self.settle(value, None)
        refuse(not value.area.is_float and value.grid is None, "it computes with integers")
        return value

    def integers(self, x: Any) -> PlannedValue:
        """Return a value as integers, which may represent floats on a grid."""
        refuse(
            not isinstance(x, PlannedValue) or x.step is not None,
            "it reads no tensor, or a value that is neither float nor integer yet",
        )
        if self._trial and x.area.is_float:
            return self.quantize(x, RAW)
        refuse(bool(x.area.is_float), "it reads no integers")
        return self.in_arena(x)

    def layer_inputs(self, x: Any, weight: Any) -> tuple[PlannedValue, PlannedWeight]:
        """Return input and weight of a layer: integers and an int8 weight with its scale, or floats and any weight."""
        refuse(not isinstance(weight, PlannedWeight), "its weight is no constant")
        x = self.read(x)
        if self._trial:
            x = x if not x.area.is_float else replace(self.quantize(x, RAW), grid=RAW)
            weight = (
                weight if weight.scale is not None else PlannedWeight(weight.values.to(torch.int8), torch.tensor(1.0))
            )
        refuse(not x.area.is_float and weight.scale is None, "its weight is float")
        return x, weight

    def in_arena(self, value: PlannedValue) -> PlannedValue:
        """Return the value in the memory of the program; an input is copied."""
        if value.area.base < EXTERNAL:
            return value
        raw = None if value.area.is_float else RAW
        copied = self.settle(self.add(PointwiseStep, value, x=value.area, x_grid=raw), raw)
        copied.grid = value.grid
        return copied

    def per_channel(self, weight: PlannedWeight, like: PlannedValue) -> Tensor:
        """Return a constant with one number for each channel of a value, or one for all, as float32 (C,)."""
        real = weight.real
        refuse(weight.scale is None and weight.values.dtype != torch.float32, "its constant is not float32")
        shape = [1] * (like.rank - real.dim()) + list(real.shape)
        refuse(
            len(shape) != like.rank or any(n != 1 for k, n in enumerate(shape) if k != like.axis),
            "its constant varies along other axes than the channels",
        )
        refuse(real.numel() not in (1, like.area.shape[3]), "its constant has more channels")
        return real.reshape(-1).expand(like.area.shape[3])

    def constant(self, weight: PlannedWeight, like: PlannedValue) -> Area:
        """Area of a constant with one number for each channel of a value, stored as one pixel of each sample."""
        numbers = self.per_channel(weight, like)
        self.constants.append(F.pad(numbers, (0, -len(numbers) % LANES)).contiguous())
        samples = like.area.shape[0]
        return Area((samples, 1, 1, len(numbers)), True, base=ABSOLUTE, offset=self.constants[-1].data_ptr())

    def apply(self, value: Any, function: Function) -> PlannedValue:
        """Apply a function to each element, in the step that computes the value if that has no function yet."""
        refuse(isinstance(value, PlannedHeads), "it reads values that are split into heads")
        refuse(not isinstance(value, PlannedValue), "it reads a value that the region does not compute")
        per_channel = function.slope is not None and function.slope.numel() > 1
        step = value.step
        if (
            step is not None
            and step.function == CLAMP
            and step.takes_function
            and (isinstance(step, ProductStep) or not per_channel)
        ):
            step.function = function
            return value
        refuse(per_channel, "its slopes differ, and no layer is before it")
        x = self.read(value)
        applied = self.add(PointwiseStep, x, x=x.area, x_grid=x.grid)
        assert applied.step is not None
        applied.step.function = function
        return applied

    def add_integers(self, value: Any, residual: Any) -> bool:
        """Add integers in the step of the layer that computes a value, if that can, and they exist before it runs."""
        if not _have_same_form(value, residual) or residual.step is not None or residual.grid is None:
            return False
        step, area = value.step, residual.area
        if not isinstance(step, ProductStep) or not step.can_fold_scale or area.base != ARENA:
            return False
        if self._is_written_from(step, area):
            return False
        step.residual, step.residual_grid = area, residual.grid
        return True

    def add_floats(self, value: Any, residual: Any) -> bool:
        """Add floats in the step of the layer that computes a value, if that can, and they exist before it runs."""
        if not _have_same_form(value, residual):
            return False
        step, area = value.step, residual.area if residual.step is None else residual.step.out
        is_float = residual.step is not None or (residual.area.is_float and area.base == ARENA)
        if not isinstance(step, ProductStep) or not step.can_add_floats or not is_float:
            return False
        if self._is_written_from(step, area):
            return False
        step.residual, step.residual_grid = self.settle(residual, None).area, None
        return True

    def _is_written_from(self, step: ProgramStep, area: Area) -> bool:
        """Whether a step, or one after it, writes an area."""
        return any(later.out.root is area.root for later in self.steps[self.steps.index(step) :])

    def move(
        self,
        x: PlannedValue,
        rank: int,
        shape: tuple[int, int, int, int],
        out_strides: Callable[[Area], tuple[int, int, int]],
        heads: int = 1,
    ) -> PlannedValue:
        """Copy values to a new order with their channels last; see `MoveStep`."""
        self.settle(x, None)
        moved = self.add(
            MoveStep, replace(x, rank=rank, axis=rank - 1), shape, x=x.area, out_strides=out_strides, heads=heads
        )
        if not x.area.is_float:
            self.settle(moved, RAW).grid = x.grid
        return moved

    def copy(self, area: Area, to: Area) -> None:
        """Add a step that copies integers to another area."""
        self.steps.append(PointwiseStep(self.scope, to, grid=RAW, x=area, x_grid=RAW))

    def quantize(self, value: Any, grid: QParams) -> PlannedValue:
        """Quantize a value to a grid, in the step that computes it if that can."""
        refuse(not isinstance(value, PlannedValue), "it reads a value that the region does not compute")
        if value.step is not None and value.step.takes_grid:
            return self.settle(value, grid)
        self.settle(value, None)
        area = value.area
        if value.grid is not None and value.grid.same_as(grid):  # its integers are those of the grid
            return PlannedValue(area, value.rank, value.axis)
        if area.base >= EXTERNAL and area.is_float:
            quantized = self.add(QuantizeStep, value, x=area, strides=partial(self._strides, area.base - EXTERNAL))
            if area.shape[3] < LANES:
                quantized.area.room = area.shape[3]  # without gaps, windows of few channels are runs
            return self.settle(quantized, grid)
        x = self.read(value)
        return self.settle(self.add(PointwiseStep, x, x=x.area, x_grid=x.grid), grid)


def _have_same_form(value: Any, other: Any) -> bool:
    """Whether two values of the region have equal shapes and axes."""
    if not isinstance(value, PlannedValue) or not isinstance(other, PlannedValue):
        return False
    return value.area.shape == other.area.shape and (value.rank, value.axis) == (other.rank, other.axis)
