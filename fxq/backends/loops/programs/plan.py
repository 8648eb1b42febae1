"""Planning of a region of the qdq graph: each node becomes a step of a program, or only reshapes a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from fxq.backends.loops.programs.areas import EXTERNAL, Area
from fxq.backends.loops.programs.folded_functions import fold_functions
from fxq.backends.loops.programs.planned_values import (
    PLANNERS,
    RAW,
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
    """Plan the steps of a region.

    Inputs of four axes are (N, C, H, W), and those of three (N, L, C). If that cannot be planned, they are (N, H, W, C)
    or (N, C, L).

    Raises:
        NotPlannedError: No step computes a node. Of several plans, the error is that of the one that went furthest.
    """
    refuse(not all(isinstance(x, Tensor) for x in inputs), "an input is no tensor")
    ranks, errors = {x.dim() for x in inputs}, list[NotPlannedError]()
    for axes in _AXES:
        if errors and not any(rank in ranks and axis != _AXES[0].get(rank) for rank, axis in axes.items()):
            continue
        try:
            return ProgramPlan(gm, inputs, [axes.get(x.dim(), x.dim() - 1) for x in inputs], trial)
        except NotPlannedError as error:
            errors.append(error)
    places = {node.name: i for i, node in enumerate(gm.graph.nodes)}
    raise max(errors, key=lambda error: places.get(error.node, len(places)))


_AXES: tuple[dict[int, int], ...] = ({4: 1, 3: 2}, {4: 3, 3: 2}, {4: 1, 3: 1})
"""Channel axis of inputs with four and three axes, in the order in which they are tried."""


class ProgramPlan(StepBuilder):
    """Steps of a region, for inputs of one kind.

    Args:
        gm: Region in qdq form.
        inputs: Example inputs, see `StepBuilder`.
        axes: Channel axis of each input.
        trial: See `StepBuilder`.

    Attributes:
        outputs: Values that the region returns.
        returns_tuple: Whether it returns a tuple.

    Raises:
        NotPlannedError: No step computes a node.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Tensor], axes: Sequence[int], trial: bool = False) -> None:
        super().__init__(inputs, axes, trial)
        self._in_unit = False
        values_of: dict[fx.Node, Any] = {}
        for i, (node, x) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)):
            values_of[node] = self._input(i, x)
        self._run(gm, gm.graph, values_of)
        returned = arguments_of(gm.graph.output_node(), values_of)[0][0]
        self.returns_tuple = isinstance(returned, (tuple, list))
        results = list(returned) if self.returns_tuple else [returned]
        self.outputs = [self._output(i, value) for i, value in enumerate(results)]
        self.steps = fold_functions(self.steps)
        refuse(
            any(area.shape[0] * area.sample_stride >= 2**31 for area in self.areas),
            "its values have 2**31 elements or more",
        )

    @property
    def areas(self) -> list[Area]:
        """Areas that steps read and write."""
        return list(dict.fromkeys(area for step in self.steps for area in (*step.reads, step.out)))

    def _input(self, i: int, x: Tensor) -> PlannedValue | OtherInput:
        if x.dtype not in (torch.float32, torch.uint8):
            return OtherInput(i, tuple(x.shape), x.dtype)
        return self.input_as(i, x.dtype == torch.float32)

    def _output(self, i: int, value: Any) -> PlannedValue | PlannedHeads:
        """Plan a returned value. Heads are returned as a view of their joined tensor."""
        if isinstance(value, PlannedHeads):
            return replace(value, joined=self._write_output(i, value.joined))
        refuse(not isinstance(value, PlannedValue), "it returns a value that it does not compute")
        return self._write_output(i, value)

    def _write_output(self, i: int, value: PlannedValue) -> PlannedValue:
        """Plan the writing of a value to the memory of output `i`, by its own step or a copy."""
        area = Area(value.area.shape, None, room=value.area.shape[3], base=EXTERNAL + len(self._inputs) + i)
        step = value.step
        if step is not None and step.writes_dense:
            step.out = area
            self.settle(value, None)
            area.is_float = True
            return replace(value, area=area)
        self.settle(value, None)
        grid = RAW if not value.area.is_float and value.grid is None else None
        area.is_float = grid is None
        self.steps.append(PointwiseStep("copy", area, grid=grid, x=value.area, x_grid=value.grid or grid))
        self.note_read(value.area)
        return replace(value, area=area)

    def _run(self, gm: fx.GraphModule, graph: fx.Graph, values_of: dict[fx.Node, Any]) -> None:
        """Plan the nodes of a graph in order, and add their values to `values_of`."""
        for node in graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            try:
                values_of[node] = self._node(gm, node, values_of)
            except NotPlannedError as error:
                error.node = node.name  # the outermost node, that of the region, is set last
                raise
            except (
                ArithmeticError,
                LookupError,
                RuntimeError,
                TypeError,
                ValueError,
            ) as error:  # arguments that PyTorch refuses, too
                refused = NotPlannedError(words_of(error))
                refused.node = node.name
                raise refused from error

    def _node(self, gm: fx.GraphModule, node: fx.Node, values_of: Mapping[fx.Node, Any]) -> Any:
        """Plan one node and return its value."""
        if node.op == "get_attr":
            return PlannedWeight(read_attribute(gm, str(node.target)).detach())
        args, kwargs = arguments_of(node, values_of)
        if is_size(node):
            return _size(node, args, kwargs)
        unit = unit_of(gm, node)
        if unit is not None:
            value = self._unit(node.name, unit, args)
        else:
            op = op_of(node)
            refuse(
                op is None or op.name not in PLANNERS, f"no step computes {op.name if op is not None else node.target}"
            )
            assert op is not None
            if not self._in_unit:
                self.scope = node.name
            if is_weight(node):
                return dequantized_weight(*args, **kwargs)
            value = PLANNERS[op.name](self, *args, **{**op.options, **kwargs})
        self._settle_shared(node, value)
        return value

    def _settle_shared(self, node: fx.Node, value: Any) -> None:
        """Settle a value as float unless exactly one node reads more of it than its sizes."""
        value = value.joined if isinstance(value, PlannedHeads) else value
        if isinstance(value, PlannedValue) and sum(not is_size(user) for user in node.users) != 1:
            self.settle(value, None)

    def _unit(self, name: str, unit: Unit, args: Sequence[Any]) -> Any:
        """Plan the body of a unit and return its value."""
        self.scope, self._in_unit = name, True
        values_of = dict(zip(unit.graph.find_nodes(op="placeholder"), args, strict=True))
        for node, value in values_of.items():
            self._settle_shared(node, value)
        self._run(unit, unit.graph, values_of)
        self._in_unit = False
        return arguments_of(unit.graph.output_node(), values_of)[0][0]


def _size(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute the size of a value, or a number from sizes."""
    read = node.args[1] if node.target is getattr else node.target
    refuse(read in ("stride", "device"), "it reads strides or a device")
    args, kwargs = map_aggregate((args, kwargs), _without_values)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _without_values(x: Any) -> Any:
    """Meta tensor of the shape of a planned value; other arguments stay."""
    is_value = isinstance(x, (PlannedValue, PlannedHeads, PlannedWeight, OtherInput))
    return torch.empty(x.shape, device="meta") if is_value else x
