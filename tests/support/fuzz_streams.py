"""Checks of a random program on a stream of calls: right, or refused by an FxqError."""

from __future__ import annotations

import copy
import pickle
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fxq
from fxq.common.metrics import sqnr, tensors
from tests.support.fuzz_containers import containers_of, leaves_of
from tests.support.fuzz_memories import Memory
from tests.support.fuzz_programs import STATES, ProgramPlan

ALL_FLOAT = fxq.Recipe.static(backend="reference").override("*", fxq.FLOAT)
TRACED_LATER = fxq.Recipe.weight_only(backend="reference", new_kinds="trace")
INT8 = fxq.Recipe.static(backend="auto", optimize="coverage")
RECIPES = {
    "float": ALL_FLOAT,
    "float, traced later": TRACED_LATER.override("*", fxq.FLOAT),
    "static": fxq.Recipe.static(backend="reference"),
    "dynamic": fxq.Recipe.dynamic(backend="reference"),
    "weight-only": fxq.Recipe.weight_only(backend="reference"),
    "weight-only, traced later": TRACED_LATER,
    "static, kernels": INT8,
}
MIN_SQNR_DB = {"float": 90.0, "float, traced later": 90.0, "weight-only": 20.0, "weight-only, traced later": 20.0}
"""Lowest SQNR by recipe. With 8 bits, 12 dB of these small programs; the output check of `quantize` warns below 20."""

STATED_SLACK_DB = 6.0
"""How much lower the SQNR of another batch may be than that of calibration batches, where a warning says it is low."""

BACKEND_SLACK_DB = 6.0
"""How much lower the SQNR of a batch may be than with the reference backend: backends choose other grids of 8 bits."""


class Answer(NamedTuple):
    """One call of a stream.

    Attributes:
        number: number of the batch.
        samples: its size.
        got: result; None if the model refused the number of samples.
        state: copy of the state after the call.
    """

    number: int
    samples: int
    got: Any
    state: Any


def state_of(program: Any) -> list[Any]:
    """Copies of all that a program keeps from one call to the next."""
    kept = [*program.state_dict().values(), program.last, *program.history, *program.table.values(), *program.recent]
    memories = [part.shown() for part in program.parts if isinstance(part, Memory)]
    return [program.calls, memories, *[None if value is None else value.detach().clone() for value in kept]]


def equal(a: Any, b: Any) -> bool:
    """Whether two nests of values are equal to the bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def keeps_state(plan: ProgramPlan) -> bool:
    """Whether a program has a statement that keeps something from call to call."""
    return any(statement.kind in STATES for statement in plan.statements)


def call(module: Any, plan: ProgramPlan, batch: Any, state: Any) -> tuple[Any, Any]:
    """Result of a call, and the state for the next one."""
    options = {} if plan.state is None else {"state": state}
    result = module(**batch, **options) if isinstance(batch, dict) else module(batch)
    return result if plan.state is not None and plan.state.returns else (result, state)


def numbers_of(plan: ProgramPlan) -> Iterator[tuple[int, int]]:
    """Number and size of each batch of a stream; the first three are calibration batches, too."""
    last = 36 if keeps_state(plan) else 15
    for number in [*range(3), *range(10, last)]:
        yield number, 3 if number % 5 == 3 and plan.state is None else 4


def stream_of(module: Any, plan: ProgramPlan) -> list[Answer]:
    """Results of a stream, up to the first call that the model refuses: of another size, or with a state in a view."""
    answers, state = list[Answer](), plan.new_state()
    for number, samples in numbers_of(plan):
        batch = plan.batch(number, samples)
        argument, containers = copy.deepcopy(batch), containers_of(state)
        try:
            got, state = call(module, plan, argument, state)
        except fxq.FxqError:
            is_other_size, has_views = samples == 3 and keeps_state(plan), plan.state and "alias" in plan.state.ops
            assert is_other_size or has_views, f"call {number} is refused"
            return [*answers, Answer(number, samples, None, None)]
        assert equal([*tensors(batch)], [*tensors(argument)]), f"call {number} changed its argument"
        if plan.state is not None and not plan.state.returns:
            after = containers_of(state)
            assert after.keys() == containers.keys() and all(after[name] is containers[name] for name in after)
        answers.append(Answer(number, samples, *copy.deepcopy((got, state))))
    return answers


def calibration_data(plan: ProgramPlan, count: int) -> list[Any]:
    """First batches of a stream, each with the state that the float model has then."""
    data, program, state = list[Any](), plan.build(), plan.new_state()
    for number, samples in list(numbers_of(plan))[:count]:
        batch = plan.batch(number, samples)
        data.append(copy.deepcopy({**batch, "state": state} if plan.state is not None else batch))
        if plan.state is not None:
            try:
                _, state = call(program, plan, batch, state)
            except RuntimeError:  # the program itself does not run
                break
    return data


def quantized(plan: ProgramPlan, program: Any, recipe: fxq.Recipe, data: list[Any]) -> Any:
    """Quantize a program: with data if ranges are calibrated, else with an example of each kind of call."""
    examples = data[:2] if plan.optional and recipe.new_kinds == "error" else data[:1]
    if not plan.optional and recipe.preset == "static":
        return fxq.quantize(program, recipe, data=data)
    if recipe.preset == "static":
        return fxq.quantize(program, recipe, data=data, example_inputs=examples)
    return fxq.quantize(program, recipe, example_inputs=examples if plan.optional else examples[0])


def check(plan: ProgramPlan, recipe: fxq.Recipe, bound: float, use: str = "") -> str:
    """Quantize a program; "refused" or "right". A raw error, a changed argument or a wrong value fails.

    Args:
        plan: the program.
        recipe: of `RECIPES`.
        bound: lowest SQNR in dB.
        use: key of `USES`: what else happens to the quantized model, which must not change its results.
    """
    program = plan.build()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always", fxq.FxqWarning)
        data = calibration_data(plan, 30 if recipe.backend == "reference" and plan.state is not None else 3)
        before, data_before = state_of(program), copy.deepcopy(data)
        try:
            qmodel = quantized(plan, program, recipe, data)
        except fxq.FxqError:
            qmodel = None
        assert equal(state_of(program), before), "quantize changed the state of the float model"
        (structure, leaves), (structure_before, leaves_before) = map(leaves_of, (data, data_before))
        assert structure == structure_before and equal([*leaves.values()], [*leaves_before.values()]), "data changed"
        if qmodel is None:
            return "refused"
        asked = [
            float(db) for w in caught for db in re.findall(r"output is .*recipe asks for (\S+) dB", str(w.message))
        ]
        first = stream_of(qmodel, plan) if recipe.new_kinds == "trace" else None  # files and pickles cannot trace
        answers_of_copy = USES[use](qmodel, plan) if use else None
        answers = first or stream_of(qmodel, plan)
        assert equal(state_of(program), before), "calls of the quantized model changed the state of the float model"
        result = _compare(plan, recipe, bound, data, answers, asked)
        if answers_of_copy is not None:
            check_equal_streams(answers, answers_of_copy)
    return result


def _compare(
    plan: ProgramPlan, recipe: fxq.Recipe, bound: float, data: list[Any], answers: list[Answer], asked: list[float]
) -> str:
    """Compare a stream with that of the float model. `asked`: SQNR that a warning says is not reached."""
    expected, state, reached = plan.build(), plan.new_state(), list[float]()
    for number, samples, got, own_state in answers:
        if number == 10 and asked and min(reached) < asked[0]:  # the warning is true
            bound = min(bound, min(reached) - STATED_SLACK_DB)
        if got is None:
            return "refused"
        want, state = call(expected, plan, plan.batch(number, samples), state)
        (structure, leaves), (own_structure, own_leaves) = leaves_of((want, state)), leaves_of((got, own_state))
        assert structure == own_structure, f"call {number}: {own_structure}, not {structure}"
        for place, (a, b) in enumerate(zip(leaves.values(), own_leaves.values(), strict=True)):
            assert a.shape == b.shape and a.dtype == b.dtype
            reached.append(sqnr(a, b))
            near = float((a - b).abs().max()) <= 1e-4 * (1 + float(a.abs().max())) if a.numel() else True
            if near or (asked and number < 10) or reached[-1] >= bound:
                continue
            if number >= 10 and recipe.backend != "reference":  # values may be beyond the calibrated ranges
                bound = reference_sqnr(plan, recipe, data, answers, number, place) - BACKEND_SLACK_DB
            assert reached[-1] >= bound, f"call {number}: {reached[-1]:.1f} dB, less than {bound:.1f}, unsaid"
    return "right"


def reference_sqnr(
    plan: ProgramPlan, recipe: fxq.Recipe, data: list[Any], answers: list[Answer], last: int, place: int
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
        qmodel, program = quantized(plan, plan.build(), replace(recipe, backend="reference"), data), plan.build()
    state, own_state = plan.new_state(), plan.new_state()
    for number, samples, _, _ in answers:
        want, state = call(program, plan, plan.batch(number, samples), state)
        got, own_state = call(qmodel, plan, plan.batch(number, samples), own_state)
        if number == last:
            break
    (_, leaves), (_, own_leaves) = leaves_of((want, state)), leaves_of((got, own_state))
    return sqnr(list(leaves.values())[place], list(own_leaves.values())[place])


def check_float(plan: ProgramPlan) -> str:
    """All layers in float: the traced program computes what the model computes, to rounding."""
    return check(plan, ALL_FLOAT, 90.0)


# ---- uses of a quantized model, each with the results of a stream


def _saved(qmodel: Any, plan: ProgramPlan) -> list[Answer] | None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            qmodel.save(Path(folder) / "model.fxq")
            loaded = fxq.load(Path(folder) / "model.fxq")
        except fxq.FxqError:  # for instance, a file holds no leaf modules
            return None
        return stream_of(loaded, plan)


def _pickled(qmodel: Any, plan: ProgramPlan) -> list[Answer] | None:
    try:
        data = pickle.dumps(qmodel)
    except (fxq.FxqError, TypeError, AttributeError, RuntimeError, pickle.PicklingError):
        return None  # state and scripted parts that cannot be pickled
    return stream_of(pickle.loads(data), plan)


def _in_threads(qmodel: Any, plan: ProgramPlan) -> list[Answer] | None:
    """Streams of two threads at once: of one model, or if it keeps state, of a copy of it each."""
    results: dict[int, Any] = {}
    models = [copy.deepcopy(qmodel) for _ in range(2)] if keeps_state(plan) else [qmodel, qmodel]

    def run(place: int) -> None:
        try:
            with torch.no_grad():
                results[place] = stream_of(models[place], plan)
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, Exception):
            raise result
    check_equal_streams(results[0], results[1])
    return results[0]  # type: ignore[no-any-return]


USES: dict[str, Callable[[Any, ProgramPlan], list[Answer] | None]] = {
    "saved": _saved,
    "pickled": _pickled,
    "copied": lambda qmodel, plan: stream_of(copy.deepcopy(qmodel), plan),
    "threads": _in_threads,
}
"""Results of a stream of a copy of a quantized model; None if there can be no copy."""


def check_equal_streams(answers: list[Answer], others: list[Answer]) -> None:
    """Two streams have equal results, to the bit."""
    assert len(answers) == len(others)
    for first, second in zip(answers, others, strict=True):
        a, b = leaves_of((first.got, first.state)), leaves_of((second.got, second.state))
        assert a[0] == b[0] and equal([*a[1].values()], [*b[1].values()]), f"call {first.number} of a copy differs"
