"""Plans of whole regions: inputs, outputs, when values are settled, and refusals with their reasons."""

import pytest
import torch
from torch import nn

from fxq.backends.loops.programs.areas import EXTERNAL
from fxq.backends.loops.programs.layer_steps import ProductStep
from fxq.backends.loops.programs.plan import ProgramPlan, planned
from fxq.backends.loops.programs.planned_values import (
    PLANNERS,
    NotPlannedError,
    PlannedWeight,
    as_images,
    plans,
    refuse,
)
from fxq.backends.loops.programs.program_steps import PointwiseStep, PoolStep
from fxq.ops import OPS
from fxq.quant.qparams import QParams
from tests.support.programs import (
    LAST,
    Draft,
    check,
    compare,
    kinds,
    plan_of,
    program,
    refused,
    regions,
    steps_of,
    whole,
)

pytestmark = pytest.mark.any_cpu


def test_refusals():
    refuse(False, "no reason")
    with pytest.raises(NotPlannedError, match=r"^a reason$"):
        refuse(True, "a reason")


def test_every_row_is_of_an_op():
    assert [name for name in PLANNERS if OPS[name].name != name] == []


def test_rows_are_registered_by_name(monkeypatch):
    monkeypatch.setattr("fxq.backends.loops.programs.planned_values.PLANNERS", rows := {})

    @plans("one", "other")
    def row(plan, x):
        return x

    assert rows == {"one": row, "other": row}


@pytest.mark.parametrize(
    ("shape", "axis", "wanted"),
    [
        ((2, 3, 4, 5), 1, (2, 4, 5, 3)),
        ((2, 3, 4, 5), 3, (2, 3, 4, 5)),
        ((2, 3, 4), 2, (2, 1, 3, 4)),
        ((2, 3), 1, (2, 1, 1, 3)),
    ],
)
def test_shapes_as_images_and_back(shape, axis, wanted):
    assert as_images(shape, axis) == wanted
    draft = Draft()
    x = draft.input(draft.normal(*shape))
    plan = ProgramPlan(draft.form(draft.op("relu", x)), draft.inputs, [axis])
    assert plan.outputs[0].shape == shape and plan.outputs[0].area.shape == wanted


@pytest.mark.parametrize("shape", [(), (3,), (1, 2, 3, 4, 5)])
def test_values_of_other_ranks_are_refused(shape):
    draft = Draft()
    x = draft.input(draft.normal(*shape))
    assert refused(draft, draft.op("relu", x)) == f"it has {len(shape)} axes"


def test_a_weight_in_float32():
    values = torch.tensor([[1, 2], [3, 4]], dtype=torch.int8)
    scale = torch.tensor([0.5, 2.0])
    assert PlannedWeight(values, scale, 0).real.tolist() == [[0.5, 1], [6, 8]]
    assert PlannedWeight(values, scale, 1).real.tolist() == [[0.5, 4], [1.5, 8]]
    assert PlannedWeight(values, torch.tensor(3.0)).real.tolist() == [[3, 6], [9, 12]]
    assert PlannedWeight(values).real.dtype == torch.float32


# ---- inputs


def test_inputs_that_are_no_tensors_are_refused():
    draft = Draft()
    y = draft.op("relu", draft.input(draft.normal(2, 3)))
    with pytest.raises(NotPlannedError, match="an input is no tensor"):
        planned(draft.form(y), [3])


def test_of_two_refusals_the_first_is_told():
    """It is tried as images (N, C, H, W), then as (N, H, W, C): what is wrong with these says little."""
    draft = Draft()
    y = draft.op("exp", draft.conv(draft.image(2, 3, 4, 5), 8))
    assert refused(draft, y) == "no step computes exp"


def test_how_inputs_are_read():
    """An input that is quantized is read in its format; one that another step reads is channels-last."""
    draft = Draft()
    x, y = draft.input(draft.normal(2, 3, 4, 5)), draft.input(draft.normal(2, 3, 4, 5))
    form = draft.form(draft.quantize(x), draft.op("relu", y))
    for of, wanted in ((torch.contiguous_format, torch.contiguous_format), (LAST, LAST)):
        plan = planned(form, [t.contiguous(memory_format=of) for t in draft.inputs])
        assert [plan.format(0), plan.format(1)] == [wanted, LAST]


def test_an_input_that_is_read_in_two_ways():
    draft = Draft()
    x = draft.input(draft.normal(2, 16, 4, 5))
    y = draft.conv(draft.qdq(x), 16, 3)
    check(draft, draft.quantize(draft.op("add", draft.op("relu", x), y)))
    check(draft, draft.quantize(x, (0.02, 100)), draft.quantize(x, (0.05, 60)))


def test_several_inputs_of_several_ranks():
    draft = Draft()
    image, vector = draft.image(2, 3, 4, 5), draft.image(2, 16)
    pooled = draft.op("mean", draft.conv(image, 16, 3), dim=(2, 3))
    y = draft.op("add", pooled, draft.op("linear", vector, draft.weight(16, 16)))
    check(draft, draft.quantize(y))


def test_an_unread_input():
    draft = Draft()
    draft.input(draft.normal(2, 3))
    check(draft, draft.op("relu", draft.input(draft.normal(2, 3))))


def test_a_constant_is_no_result():
    draft = Draft()
    draft.input(draft.normal(2, 3))
    assert refused(draft, draft.vector(3)) == "it returns a value that it does not compute"


# ---- outputs


def test_a_layer_writes_to_the_output():
    draft = Draft()
    plan = plan_of(draft, draft.conv(draft.image(2, 3, 4, 5), 17))
    assert kinds(plan) == ["QuantizeStep", "ProductStep"]
    assert plan.steps[1].out is plan.outputs[0].area and plan.outputs[0].area.base == EXTERNAL + 1
    assert plan.outputs[0].area.pixel_stride == 17 and not plan.returns_tuple


def test_integers_are_copied_to_the_output():
    draft = Draft()
    plan = plan_of(draft, draft.quantize(draft.conv(draft.image(2, 3, 4, 5), 17)))
    assert kinds(plan) == ["QuantizeStep", "ProductStep", "PointwiseStep"]
    assert plan.outputs[0].area.is_float is False and plan.steps[2].is_conversion


def test_several_outputs():
    draft = Draft()
    x = draft.image(2, 3, 4, 5)
    a, b = draft.conv(x, 17, 3), draft.quantize(draft.op("mean", x, dim=(2, 3)))
    compiled = check(draft, a, b, draft.op("relu", a))
    assert compiled.plan.returns_tuple and len(compiled.plan.outputs) == 3
    check(draft, b, b, x, a)


def test_an_output_that_is_read_inside():
    draft = Draft()
    x = draft.conv(draft.image(2, 3, 4, 5), 16, 3)
    y = draft.quantize(draft.op("relu", x))
    z = draft.conv(draft.dequantize(y), 16, 3)
    check(draft, draft.quantize(z), y, x)
    check(draft, y, draft.dequantize(y), draft.quantize(z))
    compiled = check(draft, z, draft.op("tanh", z))
    assert kinds(compiled) == ["QuantizeStep", "ProductStep", "ProductStep", "PointwiseStep", "PointwiseStep"]


def test_inputs_that_are_returned():
    draft = Draft()
    x, y = draft.input(draft.normal(2, 3, 4, 5)), draft.input(torch.randint(0, 256, (2, 3), dtype=torch.uint8))
    check(draft, x, y, draft.quantize(x))


# ---- what is decided when


def test_a_value_is_written_as_what_reads_it():
    """One reader that rounds: integers. Two readers, of which one computes: floats."""
    draft = Draft()
    x = draft.conv(draft.image(2, 16, 4, 5), 16, 3)
    plan = plan_of(draft, draft.quantize(draft.conv(draft.qdq(x, (0.02, 100)), 16)))
    assert steps_of(plan, ProductStep)[0].grid.same_as(QParams.per_tensor(0.02, 100))
    plan = plan_of(draft, draft.qdq(x), draft.op("silu", x))
    assert [step.out.is_float for step in steps_of(plan, ProductStep)] == [True]


def test_two_grids_of_one_value():
    draft = Draft()
    x = draft.conv(draft.image(2, 3, 4, 5), 16, 3)
    y = draft.conv(draft.qdq(x, (0.02, 100)), 16, 3), draft.conv(draft.qdq(x, (0.05, 60)), 16, 5)
    compiled = check(draft, *map(draft.quantize, y))
    assert [step.out.zero for step in steps_of(compiled, PointwiseStep)[:2]] == [100, 60]


def test_a_second_use_keeps_a_function_out_of_the_layer():
    draft = Draft()
    x = draft.conv(draft.image(2, 3, 4, 5), 16)
    plan = plan_of(draft, draft.op("relu", x), x)
    assert kinds(plan)[:3] == ["QuantizeStep", "ProductStep", "PointwiseStep"]
    plan = plan_of(draft, draft.op("relu", draft.op("mul", draft.op("relu", x), draft.vector(1))))
    assert kinds(plan) == ["QuantizeStep", "ProductStep", "PointwiseStep"]


def test_integers_with_no_grid_are_not_computed_with():
    draft = Draft()
    x = draft.input(torch.randint(0, 256, (2, 3), dtype=torch.uint8))
    assert refused(draft, draft.op("add", x, x)) == "it computes with integers"


def test_steps_are_named_after_nodes():
    draft = Draft()
    x = draft.image(2, 3, 4, 5)
    y = draft.op("avg_pool2d", draft.qdq(draft.conv(x, 8)), kernel_size=(2, 2), stride=(2, 2))
    names = [step.name for step in plan_of(draft, y).steps]
    assert names == ["quantize", "conv2d", "avg_pool2d"]


def test_a_unit_is_planned_op_by_op():
    """Its steps have its name."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()
    x = torch.randn(2, 3, 9, 9)
    q, form = whole(model, x)
    compiled = program(form, [x])
    assert kinds(compiled) == ["QuantizeStep", "ProductStep", "ProductStep"]
    assert compiled.plan.steps[1].name.endswith("relu") and compiled.plan.steps[1].function.low == 0
    compare(compiled(x), form(x))
    assert torch.equal(q(x), compiled(x)) and len(regions(q)) == 1


# ---- what could run


def test_a_trial_takes_floats_for_integers():
    """Before anything is rounded, each op is asked for alone: its weight is a float yet."""
    draft = Draft()
    x = draft.input(draft.normal(2, 16, 4, 5))
    layer = draft.op("conv2d", x, draft.constant(draft.normal(8, 16, 3, 3)), draft.vector(8))
    grouped = draft.op("conv2d", x, draft.constant(draft.normal(8, 4, 3, 3)), groups=4)
    pool = draft.op("max_pool2d", x, kernel_size=(2, 2), stride=(2, 2))
    assert kinds(planned(draft.form(layer), draft.inputs, trial=True)) == ["QuantizeStep", "ProductStep"]
    assert isinstance(planned(draft.form(pool), draft.inputs, trial=True).steps[1], PoolStep)
    with pytest.raises(NotPlannedError, match="it has groups of several channels"):
        planned(draft.form(grouped), draft.inputs, trial=True)
    for y in (layer, pool):
        assert refused(draft, y)
