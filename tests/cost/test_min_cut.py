"""The choice between float and integers, against all choices there are."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.cost import min_cut as pricing
from fxq.cost.min_cut import PricedOp, PricedValue, cheapest, conversions_of, seconds_of
from tests.support.helpers import steps

pytestmark = pytest.mark.any_cpu


def best(ops, values):
    """The least seconds of any choice, by trying all."""
    keys = [op.key for op in ops]
    subsets = itertools.chain.from_iterable(itertools.combinations(keys, n) for n in range(len(keys) + 1))
    return min(seconds_of(set(subset), ops, values) for subset in subsets)


@st.composite
def graphs(draw):
    """Up to seven ops; each value is read by later ops, and perhaps by float."""
    n = draw(st.integers(0, 7))
    price = st.integers(0, 20).map(float)
    ops = [PricedOp(i, draw(price), draw(price)) for i in range(n)]
    values = []
    for producer in [None, *range(n)]:
        later = [*range(0 if producer is None else producer + 1, n), None]
        readers = draw(st.lists(st.sampled_from(later), min_size=1, max_size=3))
        values.append(
            PricedValue(
                producer, tuple(readers), draw(price), draw(price), producer is not None and draw(st.booleans())
            )
        )
    return ops, values


@given(graphs())
@settings(max_examples=28, deadline=None)
def test_no_choice_is_cheaper(graph):
    ops, values = graph
    chosen = cheapest(ops, values)
    assert chosen <= {op.key for op in ops}
    assert seconds_of(chosen, ops, values) == pytest.approx(best(ops, values), abs=1e-9)


@given(graphs())
@settings(max_examples=22, deadline=None)
def test_conversions_of_an_op_are_those_that_it_makes_the_difference_for(graph):
    ops, values = graph
    chosen = cheapest(ops, values)
    free = [PricedOp(op.key, 0.0, 0.0) for op in ops]
    conversions = conversions_of(chosen, values)
    for op in ops:
        int8, real = (seconds_of(some, free, values) for some in (chosen | {op.key}, chosen - {op.key}))
        assert conversions.get(op.key, 0.0) == pytest.approx(int8 - real)


def test_an_island_that_costs_more_than_it_saves_is_left_in_float():
    ops = [PricedOp("conv", 3.0, 5.0)]
    dear = [PricedValue(None, ("conv",), 2.0, 0.0), PricedValue("conv", (None,), 0.0, 1.0)]
    cheap = [PricedValue(None, ("conv",), 1.0, 0.0), PricedValue("conv", (None,), 0.0, 0.5)]
    assert cheapest(ops, dear) == set()
    assert cheapest(ops, cheap) == {"conv"}


def test_neighbours_carry_an_op_that_loses_alone():
    """The pool between two convolutions costs more as integers, but less than the conversions around it."""
    ops = [PricedOp("a", 1.0, 9.0), PricedOp("pool", 2.0, 1.0), PricedOp("b", 1.0, 9.0)]
    values = [
        PricedValue(None, ("a",), 1.0, 0.0),
        PricedValue("a", ("pool",), 3.0, 3.0),
        PricedValue("pool", ("b",), 3.0, 3.0),
        PricedValue("b", (None,), 0.0, 1.0),
    ]
    assert cheapest(ops, values) == {"a", "pool", "b"}


def test_a_kernel_that_emits_float_pays_for_mixed_readers_only():
    ops = [PricedOp("conv", 1.0, 3.0), PricedOp("next", 1.0, 9.0)]
    alone = [PricedValue(None, ("conv",), 0.5, 0.0), PricedValue("conv", (None,), 9.0, 9.0, emits=True)]
    assert seconds_of({"conv"}, ops[:1], alone) == 1.5
    mixed = [
        alone[0],
        PricedValue("conv", ("next", None), 9.0, 9.0, emits=True),
        PricedValue("next", (None,), 0.0, 0.0),
    ]
    assert seconds_of({"conv", "next"}, ops, mixed) == 1.0 + 1.0 + 0.5 + 9.0


def chain(n, seed=0):
    """Ops in a row of which none is clear by itself."""
    draw = random.Random(seed)
    ops = [PricedOp(i, 1.0 + 0.3 * draw.random(), 1.0 + 0.3 * draw.random()) for i in range(n)]
    return ops, [PricedValue(i - 1 if i else None, (i if i < n else None,), 0.5, 0.5) for i in range(n + 1)]


@pytest.mark.parametrize("window", [10, 40])
def test_pieces_of_a_long_part_cost_little_more(window, monkeypatch):
    ops, values = chain(120)
    least = seconds_of(cheapest(ops, values), ops, values)
    monkeypatch.setattr(pricing, "WINDOW", window)
    monkeypatch.setattr(pricing, "AHEAD", 20)
    assert least <= seconds_of(cheapest(ops, values), ops, values) <= 1.01 * least


def test_twice_the_ops_take_twice_the_steps(monkeypatch):
    monkeypatch.setattr(pricing, "WINDOW", 80)
    monkeypatch.setattr(pricing, "AHEAD", 20)
    small, large = (steps(lambda n=n: cheapest(*chain(n))) for n in (200, 400))
    assert large < 2.6 * small


def fan(n):
    """Ops in a row that all read one value besides."""
    ops = [PricedOp(i, 1.0, 4.0) for i in range(n)]
    return ops, [
        PricedValue(None, tuple(range(n)), 1.0, 1.0),
        *(PricedValue(i, (i + 1,), 0.1, 0.1) for i in range(n - 1)),
    ]


def test_a_value_with_very_many_readers():
    small, large = (steps(lambda n=n: cheapest(*fan(n))) for n in (150, 300))
    assert large < 2.6 * small
    small, large = (steps(lambda n=n: conversions_of({*range(n)}, fan(n)[1])) for n in (150, 300))
    assert large < 2.6 * small
