"""The builder of steps: values are settled once, and inputs are read in their format."""

import pytest
import torch

from fxq.backends.loops.programs.areas import EXTERNAL
from fxq.backends.loops.programs.planned_values import NotPlannedError, PlannedHeads
from fxq.backends.loops.programs.program_steps import Function, PointwiseStep
from fxq.backends.loops.programs.step_builder import StepBuilder
from fxq.graph.unit import Unit
from fxq.quant.qparams import QParams
from tests.support.programs import Draft, check, kinds, plan_of, program

pytestmark = pytest.mark.any_cpu

GRID = QParams.per_tensor(0.1, 100)


def builder(*inputs):
    return StepBuilder(inputs, [x.dim() - 1 for x in inputs], False)


def computed(plan, i=0):
    """An input, and a sum that is not decided yet."""
    x = plan.input_as(i, True)
    return x, plan.add(PointwiseStep, x, x=x.area, x_grid=None)


def test_inputs():
    plan = builder(torch.zeros(2, 3, 4), torch.zeros(5, 6, dtype=torch.bool))
    x, mask = plan.input_as(0, True), plan.input_as(1, False)
    assert (x.shape, x.area.base, x.area.is_float, x.area.pixel_stride) == ((2, 3, 4), EXTERNAL, True, 4)
    assert (mask.shape, mask.area.base, mask.area.size) == ((5, 6), EXTERNAL + 1, 1)


def test_a_value_is_decided_once():
    plan = builder(torch.zeros(2, 3, 4))
    _, y = computed(plan)
    plan.settle(plan.settle(y, GRID), None)
    assert y.step is None and y.area.is_float is False and plan.steps[0].grid == GRID


def test_what_is_not_decided_is_not_read():
    plan = builder(torch.zeros(2, 3, 4))
    _, y = computed(plan)
    with pytest.raises(NotPlannedError, match="it reads a value that is neither float nor integer yet"):
        plan.add(PointwiseStep, y, x=y.area, x_grid=None)
    assert plan.read(y).area.is_float


def test_a_function_goes_to_the_step_that_computes_none():
    plan = builder(torch.zeros(2, 3, 4))
    _, y = computed(plan)
    assert plan.apply(y, Function("silu")) is y and len(plan.steps) == 1
    assert plan.apply(y, Function("tanh")) is not y and [step.function.name for step in plan.steps] == ["silu", "tanh"]


def test_values_that_are_split_into_heads_are_not_computed_with():
    plan = builder(torch.zeros(2, 3, 4))
    heads = PlannedHeads(plan.input_as(0, True), 2)
    for compute in (plan.read, lambda x: plan.apply(x, Function("silu"))):
        with pytest.raises(NotPlannedError, match="it reads values that are split into heads"):
            compute(heads)


def test_what_a_unit_reads_twice_is_decided_before():
    """Else the function of one reader would be that of the other as well."""
    draft = Draft()
    y = draft.conv(draft.image(1, 3, 4, 4), 16)
    inside = torch.fx.Graph()
    x = inside.placeholder("x")
    ops = [draft.op(name, y).target for name in ("sigmoid", "relu")]
    both = [inside.call_function(op, (x,)) for op in ops]
    product = inside.call_function(draft.op("mul", y, y).target, tuple(both))
    inside.output(product)
    draft.root.unit = Unit(torch.nn.Module(), inside)
    node = draft.graph.call_module("unit", (y,))
    draft.values[node] = torch.sigmoid(draft.values[y]) * torch.relu(draft.values[y])
    assert kinds(plan_of(draft, node)).count("ProductStep") == 1
    check(draft, node)
    assert program(draft.form(node), draft.inputs)(*draft.inputs).dtype == torch.float32
