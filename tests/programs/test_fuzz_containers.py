"""Each change of a state in containers: as in the float model, call after call; random ones are in a fuzz test.

The vocabulary is that of `tests/test_fuzz_programs.py`.
"""

import pytest

import fxq
from tests.support.fuzz_containers import STATE_OPS, Box, Leafed, Named, Pair, StatePlan, Table
from tests.support.fuzz_programs import ProgramPlan, Statement
from tests.support.fuzz_streams import ALL_FLOAT, calibration_data, check_float, quantized

LAYERS = Statement("linear"), Statement("linear")
TREES = [Box([[0, {"a": 0}]]), [[0], Table(first=0)], ({"a": [0, 0]}, 0), Pair([0], 0), Named(Leafed(0, 0), 0)]


@pytest.mark.one_in(11)
@pytest.mark.parametrize("place", range(len(STATE_OPS)), ids=STATE_OPS)
def test_changes_are_right_rather_than_refused(place):
    for number, tree in enumerate(TREES[place % 2 :: 2]):
        state = StatePlan(tree, (STATE_OPS[place],) * 4, number % 2 == 0)
        optional = number == 0 or STATE_OPS[place] == "keep"  # else, one graph, which cannot assign to a container
        assert check_float(ProgramPlan(LAYERS, state=state, optional=optional)) == "right"


def test_a_view_of_a_written_tensor_in_the_state_is_refused():
    plan = ProgramPlan(LAYERS, state=StatePlan([0, 0], ("part", "alias") * 2, False))
    with pytest.raises(fxq.InputError, match=r"stores a view of state_0.*as new_state_1.*view.clone"):
        quantized(plan, plan.build(), ALL_FLOAT, calibration_data(plan, 1))
