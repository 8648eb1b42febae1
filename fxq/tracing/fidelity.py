"""Comparison of a traced graph's outputs with the model's, and search for the module that differs."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxq.common.code_state import CodeState
from fxq.common.data import Batch
from fxq.common.hooks import recorded_calls
from fxq.common.isolation import copied, drawn, seeded, untouched
from fxq.common.metrics import tensors
from fxq.tracing.forward_arguments import arguments


def run_model(model: nn.Module, example: Batch, fixed: Mapping[str, Any], seed: int = 0) -> Any:
    """Run `call` and undo all changes to the model and to the variables that its code uses."""
    with untouched(model, CodeState.of(model).bindings, watches=True):
        return call(model, example, fixed, seed)


def call(
    model: nn.Module, example: Batch, fixed: Mapping[str, Any], seed: int = 0, draws: list[str] | None = None
) -> Any:
    """Run the float model on a copy of one batch, with the arguments that the recipe fixes.

    Appends the names of the global NumPy and Python generators that it draws from to `draws`.
    """
    batch = copied(example)
    late = {a.name: a.value for a in arguments(model, example, fixed)[len(batch.args) :] if a.fixed}
    with seeded(seed), torch.inference_mode(False), torch.no_grad():
        drawn_from = drawn() if draws is not None else list
        result = model(*batch.args, **{**late, **batch.kwargs})
        if draws is not None:
            draws += drawn_from()
        return result


def first_difference(
    model: nn.Module, example: Batch, fixed: Mapping[str, Any], traced: list[tuple[str, list[Tensor]]]
) -> str:
    """Path of the innermost module whose traced forward returns other values than the module; empty if none does.

    Args:
        model: the float model.
        example: one batch.
        fixed: arguments that the recipe fixes.
        traced: path and tensors of each call of a traced module, in the order in which they return.
    """
    own: dict[str, deque[list[Tensor]]] = {path: deque() for path, _ in traced}
    for path, result in _results(model, example, fixed, own):
        own[path].append(result)
    return next((path for path, got in traced if not own[path] or not same_values(got, own[path].popleft())), "")


def _results(
    model: nn.Module, example: Batch, fixed: Mapping[str, Any], paths: Collection[str]
) -> list[tuple[str, list[Tensor]]]:
    """Path and tensors of each call of these modules when the model runs, in the order in which they return."""
    results: list[tuple[str, list[Tensor]]] = []

    def leave(path: str, inputs: Any, result: Any) -> None:
        results.append((path, copied(list(tensors(result)))))

    with recorded_calls(model, paths, leave):
        call(model, example, fixed)
    return results


def part_for(whole: Tensor, alone: Tensor, start: int, samples: int, count: int) -> Tensor:
    """Slice of a batch's result that belongs to some of its samples.

    Args:
        whole: result for the batch.
        alone: result for these samples alone, whose shape tells which axes hold samples.
        start: index of the first sample.
        samples: number of samples.
        count: number of samples in the batch.
    """
    for axis, (size, part) in enumerate(zip(whole.shape, alone.shape, strict=True)):
        if size != part and size * samples == count * part:
            whole = whole.narrow(axis, start * part // samples, part)
    return whole


def same_values(got: Any, expected: Any) -> bool:
    """Whether two results hold equal tensors, to within 1e-3 of the largest element; NaN equals NaN."""
    pairs = list(tensors(got)), list(tensors(expected))
    return len(pairs[0]) == len(pairs[1]) and all(_close(a, b) for a, b in zip(*pairs, strict=True))


def _close(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if got.layout is not torch.strided or torch.equal(got, expected) or got.numel() == 0:
        return True
    a, b = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (got, expected))
    largest = float(b.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * largest, equal_nan=True)
