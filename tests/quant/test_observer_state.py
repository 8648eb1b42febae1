"""States of observers: what is stored comes back, and those of parts of the data give that of all of it."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxq
from fxq.common.stored_data import pack, unpack
from fxq.errors import CalibrationError, InputError
from fxq.quant.observer_state import kind_of, merge_states, state_of, take_over, with_state
from fxq.quant.observers import observer_for

pytestmark = pytest.mark.any_cpu

EXACT = ["minmax", "histogram", "percentile:99", "entropy"]
SPECS = [
    *((fxq.TensorSpec(observer=name), None, ()) for name in [*EXACT, "moving_average", "mse"]),
    (fxq.TensorSpec(observer="histogram"), None, (-3.0, 0.0)),
    (fxq.TensorSpec(observer="minmax", signed=True, symmetric=True, per="channel"), 1, ()),
    (fxq.TensorSpec(observer="mse", signed=True, symmetric=True, per="channel"), 1, ()),
    (fxq.TensorSpec(observer="minmax", signed=True, symmetric=True, per=2), 1, ()),
]


def made(case, data=()):
    spec, axis, constants = case
    observer = observer_for(spec, axis, "x", constants)
    for batch in data:
        observer(batch)
    return observer


def facts(observer):
    """All that makes two observers the same."""
    buffers = {name: (t.dtype, t.shape, t.tolist()) for name, t in observer.named_buffers()}
    return buffers, observer.constants, observer.block, observer.met_empty


@pytest.mark.parametrize("case", SPECS, ids=lambda case: f"{case[0].observer}-{case[1]}-{case[2]}")
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_state_comes_back(case, count):
    data = [torch.randn(5, 4), torch.full((5, 4), -3.0), torch.zeros(0, 4)][:count]
    seen = made(case, data)
    again = with_state(made(case, [torch.full((5, 4), 100.0)]), unpack(pack(dict(state_of(seen)))))
    assert facts(again) == facts(seen)
    more = torch.randn(5, 4)
    assert facts(_after(again, more)) == facts(_after(seen, more))


def _after(observer, x):
    observer(x)
    return observer


def test_whoever_takes_a_state_leaves_the_others_alone():
    case = SPECS[1]
    seen = made(case, [torch.ones(3)])
    before = facts(seen)
    first, second = with_state(made(case), state_of(seen)), made(case)
    take_over(second, first)
    second(torch.full((3,), 9.0))
    assert facts(seen) == before and float(second.maximum) == 9.0


def test_a_state_of_another_kind_is_refused():
    for case in (SPECS[0], (fxq.TensorSpec(observer="percentile:98"), None, ()), (fxq.TensorSpec(bits=7), None, ())):
        with pytest.raises(InputError, match=r"x: its observer is .*, but the state is from "):
            with_state(made(SPECS[2]), state_of(made(case)))
    assert kind_of(made(SPECS[2])) != kind_of(made((fxq.TensorSpec(observer="percentile:98"), None, ())))


VALUES = st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from([-3.0, 0.0])
BATCHES = st.lists(st.lists(VALUES, max_size=6), min_size=1, max_size=8)


@settings(deadline=None, max_examples=10)
@given(BATCHES, st.integers(1, 4), st.data())
def test_parts_of_the_data_give_what_all_of_it_does(batches, parts, data):
    """Bit for bit, in whatever way batches are dealt out, also none to some."""
    batches = [torch.tensor(values, dtype=torch.float32) for values in batches]
    owners = [data.draw(st.integers(0, parts - 1)) for _ in batches]
    shares = [[b for b, owner in zip(batches, owners, strict=True) if owner == part] for part in range(parts)]
    cases = [(fxq.TensorSpec(observer=name), None, constants) for name in EXACT for constants in ((), (-3.0, 0.0))]
    states = [{str(i): state_of(made(case, share)) for i, case in enumerate(cases)} for share in shares]
    merged = {str(i): made(case, [torch.ones(2)]) for i, case in enumerate(cases)}
    assert merge_states(merged, iter(states)) == set(merged)
    for i, case in enumerate(cases):
        whole = made(case, batches)
        assert facts(merged[str(i)]) == facts(whole)
        if whole.seen:
            assert str(merged[str(i)].qparams()) == str(whole.qparams())


@pytest.mark.parametrize("first", [0, 1])
def test_blocks_are_cut_alike_where_one_part_has_no_data(first):
    case, x = SPECS[-1], torch.randn(3, 8)
    shares = [[x], []] if first else [[], [x]]
    merged = {"x": made(case)}
    merge_states(merged, [{"x": state_of(made(case, share))} for share in shares])
    assert facts(merged["x"]) == facts(made(case, [x])) and merged["x"].block == 2
    assert torch.equal(merged["x"].qparams().scale, made(case, [x]).qparams().scale)


def test_what_not_all_parts_have_is_left_as_it_is():
    case = SPECS[0]
    observers = {"x": made(case), "y": made(case, [torch.ones(1)])}
    before = facts(observers["y"])
    seen = state_of(made(case, [torch.full((1,), 5.0)]))
    assert merge_states(observers, [{"x": seen, "y": seen}, {"x": seen}]) == {"x"}
    assert float(observers["x"].maximum) == 5.0 and facts(observers["y"]) == before


def test_other_numbers_of_channels_are_an_error():
    case = SPECS[7]
    states = [{"x": state_of(made(case, [torch.rand(2, channels)]))} for channels in (3, 4)]
    with pytest.raises(CalibrationError, match="x has 4 channels on axis 1, but had 3 before"):
        merge_states({"x": made(case)}, states)


def test_an_observer_of_ones_own_needs_no_more_than_buffers():
    class Largest(fxq.quant.observers.MinMax):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.register_buffer("batches", torch.tensor(0))

        def observe(self, x):
            super().observe(x)
            self.batches = self.batches + 1

        def absorb(self, other):
            super().absorb(other)
            self.batches = self.batches + other.batches

    fresh = Largest(fxq.TensorSpec())
    parts = [copy.deepcopy(fresh), copy.deepcopy(fresh)]
    for part in parts:
        part(torch.ones(2))
    merge_states({"x": fresh}, [{"x": unpack(pack(state_of(part)))} for part in parts])
    assert int(fresh.batches) == 2 and float(fresh.maximum) == 1.0
