"""Random programs with changes in place, state and containers: right on a stream of calls, or refused by an FxqError.

A failure prints its `ProgramPlan`, which builds the program again.
"""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.fuzz_containers import OUTPUTS, STATE_OPS, Box, Layers, Leafed, Named, Pair, StatePlan, Table
from tests.support.fuzz_programs import (
    CHANGES,
    FRESH,
    KINDS,
    LAYERS,
    OWN_STATES,
    PARTS,
    RESHAPES,
    STATES,
    VIEWS,
    ProgramPlan,
    Statement,
)
from tests.support.fuzz_streams import INT8, MIN_SQNR_DB, RECIPES, USES, check, check_float

NUMBER = st.integers(0, 60)
OPTIONS = st.tuples(NUMBER, NUMBER, NUMBER, NUMBER)
WORDS = st.sampled_from([*LAYERS[:5] * 2, *LAYERS, "add", *["change"] * 12, *["loop"] * 3, *["reshape"] * 3])
CONTAINERS = st.sampled_from(["plain", *OUTPUTS])
TENSOR = st.just(0)
TREES = st.recursive(
    TENSOR,
    lambda part: st.one_of(
        st.lists(part, min_size=1, max_size=2),
        st.tuples(part, part),
        st.dictionaries(st.sampled_from(["a", "b"]), part, min_size=1, max_size=2),
        st.builds(Pair, part, part),
        st.builds(lambda items: Box([items]), part),
        st.builds(Leafed, part, part),
        st.builds(Named, part, part),
        st.builds(lambda first: Table(first=first), part),
        st.builds(lambda *items: Layers(items), part, part),
        st.builds(lambda first: OrderedDict(first=first), part),
    ),
    max_leaves=4,
)
STATE_PLANS = st.builds(
    StatePlan,
    st.one_of(TREES, st.builds(lambda items: Box([items]), TREES)),
    st.tuples(*[st.sampled_from(STATE_OPS)] * 4),
    st.booleans(),
)
EITHER, NEVER, NO_STATE = st.booleans(), st.just(False), st.none()


def plans(words, most=6, state=STATE_PLANS, optional=EITHER):
    """Strategy of program plans with up to `most` statements of the kinds `words`."""
    statement = st.builds(Statement, words, st.tuples(st.integers(0, 3), st.integers(0, 3)), OPTIONS)
    statements = st.lists(statement, min_size=1, max_size=most)
    layers = statements.map(lambda drawn: (Statement("linear"), *drawn, Statement("linear")))
    return st.builds(ProgramPlan, layers, CONTAINERS, st.integers(0, 3), state, optional)


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plan=plans(WORDS, state=NO_STATE, optional=NEVER))
def test_random_programs(plan):
    check_float(plan)


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plan=plans(WORDS, state=NO_STATE, optional=NEVER))
def test_random_programs_on_integers(plan):
    check(plan, INT8, 12.0)


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plan=plans(st.sampled_from([*STATES * 2, *LAYERS[:4], "change"]), most=4, state=NO_STATE, optional=NEVER))
def test_random_programs_with_state(plan):
    check_float(plan)


@pytest.mark.slow
@settings(max_examples=7, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plan=plans(WORDS, most=2), recipe=st.sampled_from(list(RECIPES)), use=st.sampled_from(list(USES)))
def test_random_programs_with_state_in_containers(plan, recipe, use):
    check(plan, RECIPES[recipe], MIN_SQNR_DB.get(recipe, 12.0), use)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", range(len(CHANGES)), ids=list(CHANGES))
def test_every_change_of_a_clone_is_right(change):
    """Of the whole clone or of a part: these are ordinary PyTorch, so a refusal is a failure, too."""
    options = (0, (0, 1, 5)[change % 3], change, 0)
    plan = ProgramPlan((Statement("linear"), Statement("change", (0, 1), options), Statement("linear")))
    assert check_float(plan) == "right"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fresh", range(len(FRESH)), ids=list(FRESH))
def test_every_fresh_tensor_is_fresh_at_each_call(fresh):
    for kind, change in (("change", list(CHANGES).index("add_")), ("loop", fresh % 2)):
        options = (fresh, change, change, 0) if kind == "change" else (fresh, change, 0, 0)
        plan = ProgramPlan((Statement("linear"), Statement(kind, (0, 1), options), Statement("linear")))
        assert check_float(plan) == "right"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("view", range(len(VIEWS)), ids=list(VIEWS))
def test_every_part_of_a_fresh_tensor_can_be_changed(view):
    plan = ProgramPlan((Statement("linear"), Statement("change", (0, 1), (0, view, 3, 0)), Statement("linear")))
    assert check_float(plan) == "right"


@pytest.mark.parametrize("view", range(len(VIEWS), len(PARTS)), ids=list(PARTS)[len(VIEWS) :])
def test_a_part_with_elements_that_share_memory_is_right_or_refused(view):
    for change in map(list(CHANGES).index, ("add_", "mask", "index_put_")):
        options = (0, view, change, 0)
        check_float(ProgramPlan((Statement("linear"), Statement("change", (0, 1), options), Statement("linear"))))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("first", range(len(RESHAPES)), ids=list(RESHAPES))
def test_a_tensor_that_is_given_another_shape_in_place_is_right(first):
    for distance in range(1 + first % 2, 3):  # the slow test below draws all pairs
        options = (0, first, (first + distance) % len(RESHAPES), (first + 2) % len(RESHAPES))
        plan = ProgramPlan((Statement("linear"), Statement("reshape", (0, 0), options), Statement("linear")))
        assert check_float(plan) == "right"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", STATES)
def test_every_kind_of_state_is_refused_or_right_in_a_leaf(kind):
    plan = ProgramPlan((Statement("linear"), Statement(kind), Statement("linear")))
    assert check_float(plan) == ("right" if kind in OWN_STATES else "refused")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("round_", range(4))
def test_many_random_programs(recipe, round_):
    words = WORDS if round_ % 2 else st.sampled_from(KINDS)
    plan = plans(words, most=8, state=NO_STATE) if round_ // 2 else plans(words, most=4)

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None, print_blob=True)
    @given(plan=plan, use=st.sampled_from(["", *USES]))
    def many(plan, use):
        check(plan, RECIPES[recipe], MIN_SQNR_DB.get(recipe, 12.0), use)

    many()
