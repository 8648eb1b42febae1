"""Values and weights as plans know them."""

import pytest
import torch

from fxq.backends.loops.programs.planned_values import (
    PLANNERS,
    NotPlannedError,
    PlannedWeight,
    dequantized_weight,
    refuse,
)

pytestmark = pytest.mark.any_cpu


@pytest.mark.parametrize("axis", [0, 1])
def test_a_weight_is_what_dequantize_gives(axis):
    q, scale = torch.randint(-127, 128, (3, 3, 2, 2), dtype=torch.int8), torch.tensor([0.5, 2.0, 0.25])
    parts = PlannedWeight(q), PlannedWeight(scale), PlannedWeight(torch.zeros(3, dtype=torch.int32))
    result = dequantized_weight(parts[0], scale=parts[1], zero_point=parts[2], axis=axis, qmin=-127, qmax=127)
    assert torch.equal(result.real, torch.ops.fxq.dequantize.tensor(q, scale, parts[2].values, axis, None))
    assert torch.equal(dequantized_weight(parts[0], scale=0.5, zero_point=0).real, q * 0.5)


def test_weights_that_are_refused():
    q = PlannedWeight(torch.ones(2, 2, dtype=torch.int8))
    with pytest.raises(NotPlannedError, match="zero points"):
        dequantized_weight(q, scale=1.0, zero_point=3)
    with pytest.raises(NotPlannedError, match="not int8"):
        dequantized_weight(q, scale=1.0, zero_point=0, block=32)
    with pytest.raises(NotPlannedError, match="not int8"):
        dequantized_weight(PlannedWeight(q.values.byte()), scale=1.0, zero_point=0)


def test_refusals():
    refuse(None, "never")
    refuse("", "never")
    with pytest.raises(NotPlannedError, match="because"):
        refuse(True, "because")


def test_the_table_has_ops_of_the_op_table_alone():
    from fxq.ops import OPS

    assert [name for name in PLANNERS if name not in OPS] == []
