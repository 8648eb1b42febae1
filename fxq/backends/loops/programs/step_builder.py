"""What computes ops makes steps with: values that become steps, inputs, and what is decided of values once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.loops.programs.areas import ABSOLUTE, ARENA, GIVEN, LANES, Area, ByteGrid
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


class StepBuilder:
    """The steps of a program, and its inputs.

    Args:
        inputs: what it takes, of which shapes and dtypes count, and whether an image lies channels-last.
        axes: of each input, which axis has the channels.
        trial: whether layers count as layers on integers that are none yet: it cannot run then.

    Attributes:
        steps: in order.
        constants: what steps read where it lies.
        scope: the node that further steps compute.
    """

    def __init__(self, inputs: Sequence[Tensor], axes: Sequence[int], trial: bool) -> None:
        self.steps: list[ProgramStep] = []
        self.constants: list[Tensor] = []
        self.scope = ""
        self._given, self._axes, self._trial = inputs, axes, trial
        self._read: set[int] = set()  # inputs that steps read as they are

    # ---- inputs

    def given_as(self, i: int, is_float: bool) -> PlannedValue:
        """An input as floats, or as bytes."""
        rank, axis = self._given[i].dim(), self._axes[i]
        shape = as_images(self._given[i].shape, axis)
        return PlannedValue(Area(shape, is_float, room=shape[3], base=GIVEN + i), rank, axis)

    def mask(self, x: Any) -> PlannedValue | None:
        """A mask of attention: float32, or bytes that are 0 where it is False; None where there is none."""
        if x is None or (isinstance(x, PlannedValue) and self.read(x).area.is_float):
            return x
        if isinstance(x, OtherInput) and x.dtype == torch.bool:
            return self.given_as(x.index, False)
        refuse(not isinstance(x, PlannedWeight), "its mask is neither bool nor float32")
        values = x.values
        if values.dtype == torch.bool:
            values = torch.zeros(values.shape, dtype=torch.float32).masked_fill(~values, -math.inf)
        refuse(values.dtype != torch.float32, "its mask is neither bool nor float32")
        self.constants.append(values.contiguous())
        shape = as_images(values.shape, values.dim() - 1)
        area = Area(shape, True, room=shape[3], base=ABSOLUTE, offset=self.constants[-1].data_ptr())
        return PlannedValue(area, values.dim(), values.dim() - 1)

    def reads(self, area: Area) -> None:
        """A step reads an area; of an input, the channels of a pixel lie side by side then."""
        if area.base >= GIVEN:
            self._read.add(area.base - GIVEN)

    def format(self, i: int) -> torch.memory_format:
        """How steps read an input: an image in the order of its pixels, or as that lies which this was made for."""
        given = self._given[i]
        last = self._axes[i] == 1 if i in self._read else not given.is_contiguous()
        return torch.channels_last if last and given.dim() == 4 else torch.contiguous_format

    def _strides(self, i: int) -> Sequence[int]:
        """Elements of an input from a sample, channel, row and pixel to the next."""
        by = self._given[i].contiguous(memory_format=self.format(i)).stride()
        if len(by) == 4:
            return by if self._axes[i] == 1 else (by[0], by[3], by[1], by[2])
        return (by[0], by[2], 0, by[1]) if len(by) == 3 else (by[0], by[1], 0, 0)

    # ---- steps

    def add(
        self, kind: type[ProgramStep], like: PlannedValue, shape: tuple[int, int, int, int] | None = None, **about: Any
    ) -> PlannedValue:
        """A further step, and the value that it makes, of the axes of another one."""
        area = Area(shape or like.area.shape)
        step = kind(self.scope, area, **about)
        self.steps.append(step)
        for read in step.reads:
            refuse(read.is_float is None, "it reads what is not decided")
            if kind is not QuantizeStep:
                self.reads(read)
        return PlannedValue(area, like.rank, like.axis, None, step)

    def settle(self, value: PlannedValue, grid: ByteGrid | None) -> PlannedValue:
        """Decide how a value is written: as integers on a grid, or as floats; once."""
        if value.step is not None:
            value.step.grid, value.area = grid, value.step.out
            value.area.is_float = grid is None
            value.step = None
        return value

    def read(self, value: Any) -> PlannedValue:
        """A value that a step reads, as integers with a grid or floats."""
        refuse(isinstance(value, PlannedHeads), "it reads values that are split into heads")
        refuse(not isinstance(value, PlannedValue), "it reads what is no tensor that it computes")
        self.settle(value, None)
        refuse(not value.area.is_float and value.grid is None, "it computes with integers")
        return value

    def integers(self, x: Any) -> PlannedValue:
        """A value that counts as the integers that it is, or that stands for floats on a grid."""
        refuse(not isinstance(x, PlannedValue) or x.step is not None, "it reads what is no tensor, or not decided")
        if self._trial and x.area.is_float:
            return self.quantize(x, RAW)
        refuse(bool(x.area.is_float), "it reads no integers")
        return self.inside(x)

    def layer(self, x: Any, weight: Any) -> tuple[PlannedValue, PlannedWeight]:
        """What a layer reads: integers and an int8 weight with its scale; or floats, and its weight in any form."""
        refuse(not isinstance(weight, PlannedWeight), "its weight is no constant")
        x = self.read(x)
        if self._trial:
            x = x if not x.area.is_float else replace(self.quantize(x, RAW), grid=RAW)
            weight = (
                weight if weight.scale is not None else PlannedWeight(weight.values.to(torch.int8), torch.tensor(1.0))
            )
        refuse(not x.area.is_float and weight.scale is None, "its weight is in float")
        return x, weight

    def inside(self, value: PlannedValue) -> PlannedValue:
        """The same in the memory of the program, if it was given."""
        if value.area.base < GIVEN:
            return value
        raw = None if value.area.is_float else RAW
        made = self.settle(self.add(PointwiseStep, value, x=value.area, x_grid=raw), raw)
        made.grid = value.grid
        return made

    def per_channel(self, weight: PlannedWeight, like: PlannedValue) -> Tensor:
        """A constant of a number for each channel of a value, or of one for all: float32 (C,)."""
        real = weight.real
        refuse(weight.scale is None and weight.values.dtype != torch.float32, "a constant of it is not in float32")
        shape = [1] * (like.rank - real.dim()) + list(real.shape)
        refuse(len(shape) != like.rank or any(n != 1 for k, n in enumerate(shape) if k != like.axis), "it varies")
        refuse(real.numel() not in (1, like.area.shape[3]), "its shape is larger")
        return real.reshape(-1).expand(like.area.shape[3])

    def constant(self, weight: PlannedWeight, like: PlannedValue) -> Area:
        """The same as a pixel of each sample."""
        made = self.per_channel(weight, like)
        self.constants.append(F.pad(made, (0, -len(made) % LANES)).contiguous())
        samples = like.area.shape[0]
        return Area((samples, 1, 1, len(made)), True, base=ABSOLUTE, offset=self.constants[-1].data_ptr())

    def apply(self, value: Any, function: Function) -> PlannedValue:
        """A function of each element: by the step that makes it, where that computes none yet."""
        refuse(isinstance(value, PlannedHeads), "it reads values that are split into heads")
        refuse(not isinstance(value, PlannedValue), "it reads what is no tensor that it computes")
        per_channel = function.slope is not None and function.slope.numel() > 1
        step = value.step
        if (
            step is not None
            and step.function == CLAMP
            and step.bends
            and (isinstance(step, ProductStep) or not per_channel)
        ):
            step.function = function
            return value
        refuse(per_channel, "its slopes differ, and no layer is before it")
        x = self.read(value)
        made = self.add(PointwiseStep, x, x=x.area, x_grid=x.grid)
        assert made.step is not None
        made.step.function = function
        return made

    def adds(self, value: Any, residual: Any) -> bool:
        """Whether the layer that makes a value can add integers: they are there before it runs."""
        if not isinstance(value, PlannedValue) or not isinstance(residual, PlannedValue) or value.step is None:
            return False
        step, area = value.step, residual.area
        alike = value.area.shape == area.shape and (value.rank, value.axis) == (residual.rank, residual.axis)
        known = residual.step is None and residual.grid is not None and area.base == ARENA
        later = self.steps[self.steps.index(step) :]
        free = isinstance(step, ProductStep) and step.folds and not any(other.out.root is area.root for other in later)
        return alike and known and free

    def moved(
        self,
        x: PlannedValue,
        rank: int,
        shape: tuple[int, int, int, int],
        by: Callable[[Area], tuple[int, int, int]],
        heads: int = 1,
    ) -> PlannedValue:
        """The same values elsewhere, their channels last; see `MoveStep`."""
        self.settle(x, None)
        made = self.add(MoveStep, replace(x, rank=rank, axis=rank - 1), shape, x=x.area, by=by, heads=heads)
        if not x.area.is_float:
            self.settle(made, RAW).grid = x.grid
        return made

    def copy(self, area: Area, to: Area) -> None:
        """Write integers to another place, too."""
        self.steps.append(PointwiseStep(self.scope, to, grid=RAW, x=area, x_grid=RAW))

    def quantize(self, value: Any, grid: ByteGrid) -> PlannedValue:
        """A value rounded to a grid."""
        refuse(not isinstance(value, PlannedValue), "it reads what is no tensor that it computes")
        if value.step is not None and value.step.rounds:
            return self.settle(value, grid)
        self.settle(value, None)
        area = value.area
        if area.base >= GIVEN and area.is_float:
            made = self.add(QuantizeStep, value, x=area, strides=partial(self._strides, area.base - GIVEN))
            if area.shape[3] < LANES:
                made.area.room = area.shape[3]  # so that windows of few channels are runs
            return self.settle(made, grid)
        x = self.read(value)
        return self.settle(self.add(PointwiseStep, x, x=x.area, x_grid=x.grid), grid)
