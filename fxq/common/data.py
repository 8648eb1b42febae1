"""Inputs of a model: batches, and checks of calibration data and inputs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fxq.common.metrics import tensors
from fxq.common.trees import mapped
from fxq.errors import CalibrationError, FxqError, InputError, words_of


@dataclass(frozen=True)
class Batch:
    """Arguments of one call of the model."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"({described_call(self.args, self.kwargs)})"


def described(value: Any) -> str:
    """Return a short text for an argument: dtype and shape of a tensor, a number, items of a container, or its type."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {described(part)}' for key, part in value.items())}}}"
    if isinstance(value, (tuple, list)):
        items = ", ".join(map(described, value))
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    return repr(value) if isinstance(value, (int, float)) else type(value).__name__


def described_call(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a short text for the arguments of a call."""
    return ", ".join([*map(described, args), *(f"{key}={described(value)}" for key, value in kwargs.items())])


_MORE, _NAMED = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def as_batch(value: Any, model: nn.Module, where: str = "data") -> Batch:
    """Return the batch of an item of `data` or `example_inputs`.

    For a forward with one argument, a pair counts as (input, target), and the target is ignored.

    Args:
        value: a tensor, a tuple or list of positional inputs, or a dict of keyword inputs.
        model: the float model.
        where: name of the value in errors.

    Raises:
        InputError: another type, an argument that forward does not have, or a pair for a forward that needs one
            argument and takes more, since its second half may be a target.
    """
    if isinstance(value, Batch):
        return value
    if isinstance(value, Tensor):
        return Batch((value,))
    parameters = inspect.signature(model.forward).parameters.values()
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names, required = [p.name for p in plain], sum(p.default is p.empty for p in plain)
    open_ended, any_name = (any(p.kind is kind for p in parameters) for kind in (_MORE, _NAMED))
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or (key not in names and not any_name):
                advice = f" If {names[0]!r} is a dict itself, give (dict,)." if len(names) == 1 else ""
                arguments = ", ".join(names) or "none"
                raise InputError(f"{where}: forward has no argument {key!r}; it has {arguments}.{advice}")
        return Batch((), dict(value))
    if isinstance(value, (tuple, list)) and value:
        if len(value) == 2 and len(names) == 1 and not open_ended:
            return Batch((value[0],))
        if len(value) == 2 and required == 1 and not open_ended:
            x, second = names[:2]
            raise InputError(
                f"{where}: a pair is ambiguous: its second half may be a target or {second!r}, which forward does not "
                f"need. Give (x,) for {x!r} alone, or {{{x!r}: x, {second!r}: y}} for both."
            )
        if len(value) > len(names) and not open_ended:
            raise InputError(f"{where}: {len(value)} inputs, but forward takes {len(names)} ({', '.join(names)}).")
        return Batch(tuple(value))
    raise InputError(
        f"{where}: {type(value).__name__} is not a batch of inputs; pass a tensor, a tuple or list of positional "
        "inputs, or a dict of keyword inputs."
    )


def batches(data: Any, model: nn.Module, may_be_empty: bool = False) -> Iterator[Batch]:
    """Yield the batches of `data`, each checked.

    Args:
        data: iterable of values that `as_batch` accepts.
        model: the float model.
        may_be_empty: whether `data` may have no batch.

    Raises:
        InputError: `data` is not an iterable of batches, or is empty, or a batch is on another device than the model.
        CalibrationError: a batch has NaN or +Inf.
    """
    if isinstance(data, (Tensor, str, bytes, Mapping)) or not isinstance(data, Iterable):
        raise InputError(
            f"data is a {type(data).__name__}; give an iterable of batches, e.g. a DataLoader or a list "
            "(data=[x] for one batch)."
        )
    count = 0
    for count, value in enumerate(data, 1):
        batch = as_batch(value, model, f"data, batch {count - 1}")
        check_batch(batch, model, f"data, batch {count - 1}")
        yield batch
    if count == 0 and not may_be_empty:
        raise InputError("data is empty: give at least one batch. A generator is empty after its first use.")


@contextmanager
def naming_batch(i: int, batch: Batch) -> Iterator[None]:
    """Context whose errors name the batch of the data that they occurred with."""
    try:
        yield
    except (CalibrationError, InputError) as error:
        raise type(error)(f"data, batch {i}: {words_of(error)}") from error
    except FxqError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"data, batch {i} {batch}: the model does not run on it: {words_of(error)}") from error


@contextmanager
def naming_samples(name: str) -> Iterator[None]:
    """Context for a pass that runs the model on recorded samples; its errors say so."""
    try:
        yield
    except FxqError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"{name}: the model does not run on the calibration data: {words_of(error)}") from error


def device_of(model: nn.Module) -> str:
    """Type of the device of a model, such as "cpu"."""
    return next((t.device.type for t in (*model.parameters(), *model.buffers())), "cpu")


def check_batch(batch: Batch, model: nn.Module, where: str) -> None:
    """Check a batch of calibration data. -Inf is allowed, since attention masks hold it.

    Raises:
        InputError: a tensor is on another device than the model, nested or sparse.
        CalibrationError: a tensor has NaN or +Inf.
    """
    home = next((t.device for t in (*model.parameters(), *model.buffers())), None)
    for i, tensor in enumerate(tensors((batch.args, batch.kwargs))):
        if home is not None and tensor.device != home:
            raise InputError(
                f"{where}: input {i} is on {tensor.device}, the model on {home}; move one of them with .to(...)."
            )
        if tensor.is_nested:
            raise InputError(f"{where}: input {i} is a nested tensor; give a dense one, .to_padded_tensor(0.0).")
        if tensor.layout is not torch.strided:
            raise InputError(f"{where}: input {i} is a {tensor.layout} tensor; give a dense one, .to_dense().")
        if tensor.is_floating_point() and not _has_no_nan_or_inf(tensor):
            raise CalibrationError(f"{where}: input {i} {described(tensor)} holds NaN or Inf; clean the data.")


def check_finite(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `InputError` if a float tensor among the inputs of a call has NaN or +Inf. Reads each tensor once.

    -Inf is allowed, as in `check_batch`.

    Args:
        names: names of forward's arguments, in order; further positional inputs get the last name.
        args: positional inputs, also nested ones.
        kwargs: keyword inputs.
    """
    positional = zip_longest(names[: len(args)], args, fillvalue=names[-1] if names else "*args")
    for name, value in (*positional, *kwargs.items()):
        for tensor in tensors(value):
            if tensor.is_floating_point() and not _has_no_nan_or_inf(tensor):
                raise InputError(
                    f"the input {name} {described(tensor)} holds NaN or Inf, which integers cannot represent. Find its "
                    "source, or set check_inputs=False in the recipe, which turns NaN and Inf into finite integers."
                )


def _has_no_nan_or_inf(tensor: Tensor) -> bool:
    """Whether no value is NaN or +Inf.

    A finite sum, which is faster to compute, already excludes both.
    """
    dtype = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    return math.isfinite(float(tensor.sum(dtype=dtype))) or bool((tensor < math.inf).all())


def length_of(data: Any) -> int | None:
    """Number of batches of `data`; None if it has no length."""
    try:
        return len(data)
    except TypeError:
        return None


def samples_in(batch: Batch) -> int | None:
    """Number of samples of a batch: the length of the first axis of its tensors; None if the lengths differ."""
    sizes = {t.shape[0] for t in tensors((batch.args, batch.kwargs)) if t.dim() > 0}
    return sizes.pop() if len(sizes) == 1 else None


def first_of(batch: Batch, count: int, start: int = 0) -> Batch:
    """Copy up to `count` samples of a batch, from `start` on; the whole batch if its tensors have no common first axis.

    In-place changes of the user's tensors do not reach the copy.
    """
    cut = slice(start, start + count) if samples_in(batch) is not None else slice(None)

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach()[cut].clone() if leaf.dim() > 0 else leaf.detach().clone()

    return Batch(mapped(batch.args, copy), mapped(batch.kwargs, copy))


def pieces_of(batch: Batch, count: int) -> list[Batch]:
    """Copy a batch in pieces of up to `count` samples each, see `first_of`."""
    return [first_of(batch, count, start) for start in range(0, samples_in(batch) or 1, count)]


def place_in(whole: Batch, part: Batch) -> int | None:
    """Index at which a batch contains the samples of another batch consecutively; None if it does not.

    Without a sample axis, a batch contains only itself, at 0. A batch without samples is part of no batch.

    Args:
        whole: the batch to search.
        part: the samples to look for.
    """
    (ours, form), (theirs, part_form) = (tree_flatten((b.args, dict(b.kwargs))) for b in (whole, part))
    size, count = samples_in(whole), samples_in(part)
    if form != part_form or count == 0:
        return None

    def is_at(start: int) -> bool:
        for a, b in zip(ours, theirs, strict=True):
            if not isinstance(a, Tensor) or not isinstance(b, Tensor):
                plain = type(a) is type(b) and isinstance(a, (bool, int, float, complex, str, bytes, type(None)))
                if a is not b and not (plain and a == b):  # `==` of other objects, which may hold tensors, is no proof
                    return False
                continue
            samples = a if count is None or size is None or a.dim() == 0 else a[start : start + count]
            if samples.dtype != b.dtype or not torch.equal(samples, b):
                return False
        return True

    places = range(size - count + 1) if size is not None and count is not None else range(1)
    return next((start for start in places if is_at(start)), None)
