"""SharedGridGroups: which values share a grid, against brute force over the data that they have seen."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxq.errors import CalibrationError
from fxq.quant.observers import observer_for
from fxq.quant.shared_grids import MAX_CONSTANT_RATIO, SharedGridGroup, group_around, group_of, joined_observer
from fxq.quant.spec import TensorSpec

pytestmark = pytest.mark.any_cpu

MINMAX = TensorSpec(observer="minmax")
values = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=5).map(torch.tensor)


def grid_group(data):
    observer = observer_for(MINMAX, name="x")
    observer(data)
    return group_of(observer)


def covers(grid, data):
    """Whether the grid holds the data to half a step."""
    low, high = (grid.qmin - grid.z) * grid.s, (grid.qmax - grid.z) * grid.s
    return low - grid.s <= float(data.min()) and float(data.max()) <= high + grid.s


@given(st.lists(values, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_joined_in_any_order_they_are_one_and_its_grid_holds_all(data, order):
    shared_grids = [grid_group(x) for x in data]
    while len(shared_grids) > 1:
        a, b = order.sample(range(len(shared_grids)), 2)
        joined = shared_grids[a].join(shared_grids[b])
        assert shared_grids[a].root() is shared_grids[b].root() is joined
        shared_grids = [s for i, s in enumerate(shared_grids) if i not in (a, b)] + [joined]
    (group,) = shared_grids
    everything = torch.cat(data)
    assert group.low == min(0.0, float(everything.min())) and group.high == max(0.0, float(everything.max()))
    assert len(group.observers) == len(data)
    assert covers(group.qparams(), everything)


def test_a_group_joined_with_itself_stays():
    group = grid_group(torch.tensor([1.0]))
    assert group.join(group) is group and len(group.observers) == 1


@given(values, values)
def test_a_grid_may_cover_what_keeps_its_own(a, b):
    group, covered = grid_group(a), grid_group(b)
    alone = covered.qparams()
    group.cover(covered)
    assert group.root() is not covered.root()
    assert covers(group.qparams(), torch.cat([a, b]))
    assert covered.qparams().same_as(alone)


@pytest.mark.parametrize(
    ("constant", "reached"),
    [(0.0, True), (-1.0, True), (2.0, True), (-2.0, True), (4.1, False), (-3.1, False), (math.inf, False)],
)
def test_a_constant_is_reached_where_the_grid_gets_at_most_so_much_coarser(constant, reached):
    group = grid_group(torch.tensor([-1.0, 1.0]))
    wider = max(1.0, constant) - min(-1.0, constant)
    assert group.can_hold(constant) is reached is (wider <= MAX_CONSTANT_RATIO * group.span)


def test_constants_are_on_the_grid():
    group = grid_group(torch.tensor([-1.0, 1.0]))
    group.constants.add(-2.0)
    assert covers(group.qparams(), torch.tensor([-2.0, 1.0]))


def test_the_finest_reader_counts_and_nothing_is_no_reader():
    group = SharedGridGroup(-4.0, 4.0)
    for span in (3.0, 0.0, 2.0, 5.0):
        group.note_span(span)
    assert group.smallest_span == 2.0


def test_around_is_as_wide_as_all_and_has_seen_nothing():
    around = group_around([SharedGridGroup(-1.0, 2.0), SharedGridGroup(-3.0, 1.0, constants={7.0})])
    assert (around.low, around.high, around.constants, around.observers) == (-3.0, 2.0, {7.0}, [])


def test_observers_that_are_joined_stay_as_they_are():
    first, second = (grid_group(torch.tensor([x])).observers[0] for x in (1.0, 5.0))
    both = joined_observer([first, second])
    assert [float(end) for end in both.range()] == [1.0, 5.0]
    assert [float(end) for end in first.range()] == [1.0, 1.0] and joined_observer([first]) is first


def test_what_has_seen_no_data_is_refused():
    with pytest.raises(CalibrationError):
        group_of(observer_for(MINMAX, name="x"))
