"""A region of the qdq graph becomes the steps of a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from fxq.backends.loops.programs.areas import GIVEN, Area
from fxq.backends.loops.programs.planned_values import (
    RAW,
    ROWS,
    NotPlannedError,
    OtherInput,
    PlannedHeads,
    PlannedValue,
    PlannedWeight,
    dequantized_weight,
    refuse,
)
from fxq.backends.loops.programs.program_steps import PointwiseStep
from fxq.backends.loops.programs.step_builder import StepBuilder
from fxq.errors import words_of
from fxq.graph.query import arguments_of, is_size, op_of, read_attribute
from fxq.graph.region import is_weight
from fxq.graph.unit import Unit, unit_of


def planned(gm: fx.GraphModule, inputs: Sequence[Any], trial: bool = False) -> ProgramPlan:
    """The steps of a region. Inputs of four axes are images (N, C, H, W), or if it cannot be so (N, H, W, C).

    Raises:
        NotPlannedError: as `ProgramPlan`.
    """
    refuse(not all(isinstance(x, Tensor) for x in inputs), "it takes a value that is no tensor")
    last = [x.dim() - 1 for x in inputs]
    try:
        return ProgramPlan(gm, inputs, [1 if axis == 3 else axis for axis in last], trial)
    except NotPlannedError as error:
        if 3 in last:
            with suppress(NotPlannedError):
                return ProgramPlan(gm, inputs, last, trial)
        raise error


class ProgramPlan(StepBuilder):
    """The steps of a region, for inputs of one kind.

    Args:
        gm: the region in qdq form.
        inputs, axes, trial: as of `StepBuilder`.

    Attributes:
        outputs: what it returns.
        several: whether that is a tuple.

    Raises:
        NotPlannedError: no step computes a node.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Tensor], axes: Sequence[int], trial: bool = False) -> None:
        super().__init__(inputs, axes, trial)
        self._inside = False
        known: dict[fx.Node, Any] = {}
        for i, (node, x) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)):
            known[node] = self._input(i, x)
        self._run(gm, gm.graph, known)
        returned = arguments_of(gm.graph.output_node(), known)[0][0]
        self.several = isinstance(returned, (tuple, list))
        values = list(returned) if self.several else [returned]
        self.outputs = [self._output(i, value) for i, value in enumerate(values)]
        refuse(any(area.shape[0] * area.sample >= 2**31 for area in self.areas), "its values are too many for 32 bits")

    @property
    def areas(self) -> list[Area]:
        """What steps read and write."""
        return list(dict.fromkeys(area for step in self.steps for area in (*step.reads, step.out)))

    def _input(self, i: int, x: Tensor) -> PlannedValue | OtherInput:
        if x.dtype not in (torch.float32, torch.uint8):
            return OtherInput(i, tuple(x.shape), x.dtype)
        return self.given_as(i, x.dtype == torch.float32)

    def _output(self, i: int, value: Any) -> PlannedValue | PlannedHeads:
        """A value as it is returned; of heads, the tensor that they are a view of."""
        if isinstance(value, PlannedHeads):
            return replace(value, joined=self._written(i, value.joined))
        refuse(not isinstance(value, PlannedValue), "it returns what is no tensor that it computes")
        return self._written(i, value)

    def _written(self, i: int, value: PlannedValue) -> PlannedValue:
        area = Area(value.area.shape, None, room=value.area.shape[3], base=GIVEN + len(self._given) + i)
        step = value.step
        if step is not None and step.dense:
            step.out = area
            self.settle(value, None)
            area.is_float = True
            return replace(value, area=area)
        self.settle(value, None)
        grid = RAW if not value.area.is_float and value.grid is None else None
        area.is_float = grid is None
        self.steps.append(PointwiseStep("copy", area, grid=grid, x=value.area, x_grid=value.grid or grid))
        self.reads(value.area)
        return replace(value, area=area)

    def _run(self, gm: fx.GraphModule, graph: fx.Graph, known: dict[fx.Node, Any]) -> None:
        for node in graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            try:
                known[node] = self._node(gm, node, known)
            except NotPlannedError as error:
                error.node = node.name  # that of the region is the last to say so
                raise
            except (
                ArithmeticError,
                LookupError,
                RuntimeError,
                TypeError,
                ValueError,
            ) as error:  # what PyTorch, too, does not compute
                refused = NotPlannedError(words_of(error))
                refused.node = node.name
                raise refused from error

    def _node(self, gm: fx.GraphModule, node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            return PlannedWeight(read_attribute(gm, str(node.target)).detach())
        args, kwargs = arguments_of(node, known)
        if is_size(node):
            return _size(node, args, kwargs)
        unit = unit_of(gm, node)
        if unit is not None:
            value = self._unit(node.name, unit, args)
        else:
            op = op_of(node)
            refuse(op is None or op.name not in ROWS, f"no step computes {op.name if op is not None else node.target}")
            assert op is not None
            if not self._inside:
                self.scope = node.name
            if is_weight(node):
                return dequantized_weight(*args, **kwargs)
            value = ROWS[op.name](self, *args, **{**op.options, **kwargs})
        self._settle_shared(node, value)
        return value

    def _settle_shared(self, node: fx.Node, value: Any) -> None:
        """Decide that a value is float, unless a single node reads more than its sizes."""
        value = value.joined if isinstance(value, PlannedHeads) else value
        if isinstance(value, PlannedValue) and sum(not is_size(user) for user in node.users) != 1:
            self.settle(value, None)

    def _unit(self, name: str, unit: Unit, args: Sequence[Any]) -> Any:
        self.scope, self._inside = name, True
        known = dict(zip(unit.graph.find_nodes(op="placeholder"), args, strict=True))
        for node, value in known.items():
            self._settle_shared(node, value)
        self._run(unit, unit.graph, known)
        self._inside = False
        return arguments_of(unit.graph.output_node(), known)[0][0]


def _size(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Sizes of values, and what is computed with sizes."""
    read = node.args[1] if node.target is getattr else node.target
    refuse(read in ("stride", "device"), "it asks where values lie")
    args, kwargs = map_aggregate((args, kwargs), _without_values)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _without_values(x: Any) -> Any:
    is_value = isinstance(x, (PlannedValue, PlannedHeads, PlannedWeight, OtherInput))
    return torch.empty(x.shape, device="meta") if is_value else x
