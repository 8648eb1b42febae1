"""Functions with a slope for negative values, which the steps that read their results compute themselves."""

from __future__ import annotations

from collections.abc import Sequence

from fxq.backends.loops.programs.areas import ARENA, Area
from fxq.backends.loops.programs.program_steps import CLAMP, PointwiseStep, ProgramStep


def fold_functions(steps: Sequence[ProgramStep]) -> list[ProgramStep]:
    """Leave out steps that write floats max(0, x) + slope * min(0, x), which take less time to compute than to read.

    A step is left out if all steps that read its result can apply the function to x: those that convert the result, or
    add another value to it.
    """
    readers: dict[Area, list[ProgramStep]] = {}
    for step in steps:
        for area in dict.fromkeys(read.root for read in step.reads):
            readers.setdefault(area, []).append(step)
    kept = list[ProgramStep]()
    for step in steps:
        of_result = readers.get(step.out.root, [])
        if _is_sloped_relu(step) and of_result and all(_can_apply(reader, step.out) for reader in of_result):
            for reader in of_result:
                assert isinstance(step, PointwiseStep) and isinstance(reader, PointwiseStep)
                reader.x, reader.x_grid, reader.function = step.x, step.x_grid, step.function
                reader.applies_first = reader.y is not None
                readers.setdefault(step.x.root, []).append(reader)
        else:
            kept.append(step)
    return kept


def _is_sloped_relu(step: ProgramStep) -> bool:
    """Whether a step computes nothing but the function, for floats that stay in the program."""
    is_alone = isinstance(step, PointwiseStep) and step.y is None and step.out.base == ARENA and step.out.parent is None
    return is_alone and step.grid is None and step.function.name == "prelu"


def _can_apply(reader: ProgramStep, area: Area) -> bool:
    """Whether a step reads `area` as its first value, and has no function yet."""
    if not isinstance(reader, PointwiseStep) or reader.function != CLAMP or reader.multiplies:
        return False
    return reader.x is area and (reader.y is None or reader.y.root is not area.root)
