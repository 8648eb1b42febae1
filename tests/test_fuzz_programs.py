"""Random programs with changes in place, state and containers: right on a stream of calls, or refused by an FxqError.

A failure prints its `ProgramPlan`, which builds the program again.
"""

from __future__ import annotations

import copy
import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fxq
from fxq.common.metrics import sqnr, tensors
from tests.support.fuzz_memories import Memory
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

ALL_FLOAT = fxq.Recipe.static(backend="reference").override("*", fxq.FLOAT)
INT8 = fxq.Recipe.static(backend="auto", optimize="coverage")
MIN_SQNR_DB = 12.0
"""Lowest SQNR of these small programs with 8 bits; the output check of `quantize` warns below 20 dB."""

STATED_SLACK_DB = 6.0
"""How much lower the SQNR of another batch may be than that of calibration batches, where a warning says it is low."""

BACKEND_SLACK_DB = 6.0
"""How much lower the SQNR of a batch may be than with the reference backend: backends choose other grids of 8 bits."""

NUMBER = st.integers(0, 60)
OPTIONS = st.tuples(NUMBER, NUMBER, NUMBER, NUMBER)
WORDS = st.sampled_from([*LAYERS[:5] * 2, *LAYERS, "add", *["change"] * 12, *["loop"] * 3, *["reshape"] * 3])
CONTAINERS = st.sampled_from(["plain", "plain", "tuple", "named", "dict", "ordered"])


def plans(words: st.SearchStrategy[str], most: int = 6) -> st.SearchStrategy[ProgramPlan]:
    statement = st.builds(Statement, words, st.tuples(st.integers(0, 3), st.integers(0, 3)), OPTIONS)
    statements = st.lists(statement, min_size=1, max_size=most)
    layers = Statement("linear"), Statement("linear")
    return st.builds(
        lambda drawn, container, seed: ProgramPlan((layers[0], *drawn, layers[1]), container, seed),
        statements,
        CONTAINERS,
        st.integers(0, 3),
    )


def state_of(program: Any) -> list[Any]:
    """Copies of all that a program keeps from one call to the next."""
    kept = [*program.state_dict().values(), program.last, *program.history, *program.table.values(), *program.recent]
    memories = [part.shown() for part in program.parts if isinstance(part, Memory)]
    return [program.calls, memories, *[None if value is None else value.detach().clone() for value in kept]]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def call(module: Any, batch: Any) -> Any:
    return module(**batch) if isinstance(batch, dict) else module(batch)


def check(plan: ProgramPlan, recipe: fxq.Recipe, bound: float) -> str:
    """Quantize a program; "refused" or "right". A raw error, a changed argument or a wrong value fails."""
    program, expected = plan.build(), plan.build()
    data = [plan.batch(number) for number in range(3)]
    before, data_before = state_of(program), copy.deepcopy(data)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always", fxq.FxqWarning)
        try:
            qmodel = fxq.quantize(program, recipe, data=data)
        except fxq.FxqError:
            qmodel = None
        assert equal(state_of(program), before), "quantize changed the state of the float model"
        assert all(equal([*tensors(a)], [*tensors(b)]) for a, b in zip(data, data_before, strict=True)), (
            "data was changed"
        )
        if qmodel is None:
            return "refused"
        asked = [
            float(db) for w in caught for db in re.findall(r"output is .*recipe asks for (\S+) dB", str(w.message))
        ]
        reached, answers = list[float](), stream_of(qmodel, plan)
        assert equal(state_of(program), before), "calls of the quantized model changed the state of the float model"
        for number, batch, got in answers:
            if number == 10 and asked and min(reached) < asked[0]:  # the warning is true
                bound = min(bound, min(reached) - STATED_SLACK_DB)
            if got is None:
                return "refused"
            want = call(expected, copy.deepcopy(batch))
            assert type(got) is type(want), f"call {number}: a {type(got).__name__}, not a {type(want).__name__}"
            for place, (a, b) in enumerate(zip(tensors(want), tensors(got), strict=True)):
                assert a.shape == b.shape and a.dtype == b.dtype
                reached.append(sqnr(a, b))
                near = float((a - b).abs().max()) <= 1e-4 * (1 + float(a.abs().max()))
                if near or (asked and number < 10) or reached[-1] >= bound:
                    continue
                if number >= 10 and recipe.backend != "reference":  # values may be beyond the calibrated ranges
                    bound = reference_sqnr(plan, recipe, data, answers, number, place) - BACKEND_SLACK_DB
                assert reached[-1] >= bound, f"call {number}: {reached[-1]:.1f} dB, less than {bound:.1f}, unsaid"
    return "right"


def stream_of(qmodel: Any, plan: ProgramPlan) -> list[tuple[int, Any, Any]]:
    """Number, batch and result of each call of a stream; None for the last if the model refuses another batch size."""
    answers: list[tuple[int, Any, Any]] = []
    long = any(statement.kind in STATES for statement in plan.statements)
    for number in [*range(3), *range(10, 36 if long else 15)]:
        batch = plan.batch(number, samples=3 if number % 5 == 3 else 4)
        given_batch = copy.deepcopy(batch)
        try:
            got = copy.deepcopy(call(qmodel, given_batch))
        except fxq.FxqError:  # for a number of samples that the graph was not made for
            assert number % 5 == 3 and long
            return [*answers, (number, batch, None)]
        assert equal([*tensors(batch)], [*tensors(given_batch)]), f"call {number} changed its argument"
        answers.append((number, batch, got))
    return answers


def reference_sqnr(
    plan: ProgramPlan,
    recipe: fxq.Recipe,
    data: list[Any],
    answers: list[tuple[int, Any, Any]],
    last: int,
    place: int,
) -> float:
    """SQNR of one output in one call of a stream with the reference backend, which clips at the ranges like any other.

    Args:
        plan: the program.
        recipe: for another backend.
        data: calibration batches.
        answers: calls of the stream.
        last: number of the call.
        place: index of the output.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxq.FxqWarning)
        qmodel, program = fxq.quantize(plan.build(), replace(recipe, backend="reference"), data=data), plan.build()
    for number, batch, _ in answers:
        want, got = (call(module, copy.deepcopy(batch)) for module in (program, qmodel))
        if number == last:
            break
    return sqnr(list(tensors(want))[place], list(tensors(got))[place])


def check_float(plan: ProgramPlan) -> str:
    """All layers in float: the traced program computes what the model computes, to rounding."""
    return check(plan, ALL_FLOAT, 90.0)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plan=plans(WORDS))
def test_random_programs(plan):
    check_float(plan)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plan=plans(WORDS))
def test_random_programs_on_integers(plan):
    check(plan, INT8, MIN_SQNR_DB)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plan=plans(st.sampled_from([*STATES * 2, *LAYERS[:4], "change"]), most=4))
def test_random_programs_with_state(plan):
    check_float(plan)


@pytest.mark.parametrize("change", range(len(CHANGES)), ids=list(CHANGES))
def test_every_change_of_a_clone_is_right(change):
    """Of the whole clone or of a part: these are ordinary PyTorch, so a refusal is a failure, too."""
    options = (0, (0, 1, 5)[change % 3], change, 0)
    plan = ProgramPlan((Statement("linear"), Statement("change", (0, 1), options), Statement("linear")))
    assert check_float(plan) == "right"


@pytest.mark.parametrize("fresh", range(len(FRESH)), ids=list(FRESH))
def test_every_fresh_tensor_is_fresh_at_each_call(fresh):
    for kind, change in (("change", list(CHANGES).index("add_")), ("loop", fresh % 2)):
        options = (fresh, change, change, 0) if kind == "change" else (fresh, change, 0, 0)
        plan = ProgramPlan((Statement("linear"), Statement(kind, (0, 1), options), Statement("linear")))
        assert check_float(plan) == "right"


@pytest.mark.parametrize("view", range(len(VIEWS)), ids=list(VIEWS))
def test_every_part_of_a_fresh_tensor_can_be_changed(view):
    plan = ProgramPlan((Statement("linear"), Statement("change", (0, 1), (0, view, 3, 0)), Statement("linear")))
    assert check_float(plan) == "right"


@pytest.mark.parametrize("view", range(len(VIEWS), len(PARTS)), ids=list(PARTS)[len(VIEWS) :])
def test_a_part_with_elements_that_share_memory_is_right_or_refused(view):
    for change in map(list(CHANGES).index, ("add_", "mask", "index_put_")):
        options = (0, view, change, 0)
        check_float(ProgramPlan((Statement("linear"), Statement("change", (0, 1), options), Statement("linear"))))


@pytest.mark.parametrize("first", range(len(RESHAPES)), ids=list(RESHAPES))
def test_a_tensor_that_is_given_another_shape_in_place_is_right(first):
    for distance in range(1 + first % 2, 3):  # the slow test below draws all pairs
        options = (0, first, (first + distance) % len(RESHAPES), (first + 2) % len(RESHAPES))
        plan = ProgramPlan((Statement("linear"), Statement("reshape", (0, 0), options), Statement("linear")))
        assert check_float(plan) == "right"


@pytest.mark.parametrize("kind", STATES)
def test_every_kind_of_state_is_refused_or_right_in_a_leaf(kind):
    plan = ProgramPlan((Statement("linear"), Statement(kind), Statement("linear")))
    assert check_float(plan) == ("right" if kind in OWN_STATES else "refused")


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(20))
def test_many_random_programs(round_):
    words = WORDS if round_ % 4 else st.sampled_from(KINDS)
    recipe, bound = (INT8, MIN_SQNR_DB) if round_ % 2 else (ALL_FLOAT, 90.0)

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None, print_blob=True)
    @given(plan=plans(words, most=8))
    def many(plan):
        check(plan, recipe, bound)

    many()
