"""Flat model: the float model with a forward that takes and returns tensors by name, in place of containers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fxq.common.code_state import CodeState
from fxq.common.containers import ContainerNames, Leaves, Structure, put_together, taken_apart
from fxq.common.data import Batch
from fxq.common.isolation import copied, seeded, untouched
from fxq.common.writes import WriteWatch
from fxq.errors import InputError, TraceError, words_of
from fxq.programs.call_form import CallForm, form_of, leaf_names, structure_difference
from fxq.tracing.fidelity import same_values
from fxq.tracing.part_shell import ONE_OF_SEVERAL
from fxq.tracing.proxies import is_value


@dataclass(frozen=True)
class ResultForm:
    """Structure of the outcome of a call: its result, and the arguments that it changed.

    Attributes:
        changed: structure of each changed argument after the call.
        result: structure of the result. Its containers may be those of the arguments.
        kept: tensors that are still in the changed arguments, also where a trace does not see it: their name after the
            call, their name before it, and whether the model writes into them. A tensor that it writes into and then
            replaces has no name after the call, and keeps its values.
    """

    changed: tuple[tuple[str, Structure], ...]
    result: Structure
    kept: tuple[tuple[str, str, bool], ...] = field(default=(), compare=False)

    def deliver(self, outputs: Leaves, leaves: Leaves, containers: Mapping[str, Any]) -> Any:
        """Update the changed arguments of a call, and return its result.

        Args:
            outputs: outputs of the graph by name.
            leaves: tensors and numbers of the call by name.
            containers: containers of the call by name.

        Raises:
            InputError: an argument cannot be changed as the float model does it.
        """
        values = self._written(outputs, leaves)
        present = dict(containers)
        for _, structure in self.changed:
            put_together(structure, values, present)
        return put_together(self.result, values, present)

    def _written(self, outputs: Leaves, leaves: Leaves) -> Leaves:
        """Outputs of the graph, with the caller's own tensors for those that are kept, written where the model does."""
        targets = {before: leaves[before] for _, before, written in self.kept if written}
        for name, target in targets.items():
            for leaf_name, leaf in leaves.items():
                if leaf_name != name and isinstance(leaf, Tensor) and _overlap(target, leaf):
                    raise InputError(
                        f"the model writes into {name}, which shares memory with {leaf_name} in this call: give it a "
                        f"copy, {name}.clone()."
                    )
        values = dict(outputs)
        for name, value in outputs.items():
            if isinstance(value, Tensor) and any(_overlap(value, target) for target in targets.values()):
                values[name] = value.clone()
        for name, before, written in self.kept:
            if not name:
                continue
            if written:
                try:
                    leaves[before].copy_(values[name])
                except RuntimeError as error:
                    raise InputError(f"the model writes into {before}, which fails here: {words_of(error)}") from error
            values[name] = leaves[before]
        return values


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether the memory ranges of two tensors overlap."""
    if first.device != second.device or first.numel() == 0 or second.numel() == 0:
        return False
    (start, end), (other_start, other_end) = map(_memory_range, (first, second))
    return start < other_end and other_start < end


def _memory_range(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def flat_model(
    model: nn.Module, form: CallForm, leaves: Leaves, around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> tuple[nn.Module, ResultForm]:
    """Return a model with the modules and parameters of `model`, whose forward takes and returns tensors by name.

    Args:
        model: the float model; it is run once, and not changed.
        form: form of the call.
        leaves: tensors and numbers of an example call, by name.
        around: context in which forward runs.

    Returns:
        The model, and the structure of its results.

    Raises:
        InputError: the model does not run on the example, or returns a value that is not a tensor, a number or a known
            container.
        TraceError: the model computes other values in the context `around` than outside of it.
    """
    flat = copy.copy(model)
    own = vars(model).get("forward")
    bound = own if own is not None else type(model).forward.__get__(flat)

    def call(*args: Any, **kwargs: Any) -> Any:
        with around():
            return bound(*args, **kwargs)

    try:
        with untouched(model, CodeState.of(model).bindings), seeded(), torch.no_grad():
            inputs = copied(leaves)
            results, outputs = _outputs(call, form, inputs)
            _check_views(results, inputs, outputs)
            _, own_outputs = _outputs(bound, form, copied(leaves))
    except InputError:
        raise
    except Exception as error:  # the user's forward may raise any type of error
        raise InputError(f"the model does not run on the example ({form}): {words_of(error)}") from error

    if not same_values(outputs, own_outputs):
        raise TraceError(
            "the model computes something else when it is called again on equal inputs, or in the context that its "
            "library needs for tracing: it depends on state that is not among its arguments."
        )

    def forward(**inputs: Any) -> dict[str, Any]:
        again, outputs = _outputs(call, form, inputs, [name for name, _ in results.changed])
        if again != results:
            raise InputError(f"the structure of the results varies: {_difference(results, again)}.")
        return outputs

    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kinds) for name in form.leaf_names]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    vars(flat)["forward"] = forward
    vars(flat)[ONE_OF_SEVERAL] = True
    return flat, results


def _check_views(results: ResultForm, inputs: Leaves, outputs: Leaves) -> None:
    """Raise `InputError` if a changed argument holds a view of another tensor that the model writes into.

    Later calls would write into that tensor, and the view of the quantized model has memory of its own.
    """
    targets = {was: inputs[was] for _, was, written in results.kept if written}
    for name in (name for _, structure in results.changed for name in leaf_names(structure)):
        value = outputs[name]
        if not isinstance(value, Tensor) or any(value is target for target in targets.values()):
            continue
        for was, target in targets.items():
            if _overlap(value, target):
                raise InputError(
                    f"the model stores a view of {was} in its arguments (as {name}), and also writes into {was}, so "
                    "that later calls change both. A quantized model cannot do this: store a copy, view.clone()."
                )


def _outputs(
    call: Any, form: CallForm, inputs: Leaves, changed_names: Collection[str] = ()
) -> tuple[ResultForm, Leaves]:
    """Call a forward with containers made from `inputs`. Returns the structure of its results, and their leaves.

    Args:
        call: the forward.
        form: form of the call.
        inputs: tensors and numbers by name.
        changed_names: arguments that are known to change, even if a trace misses the change, as for `keys.mul_(2)`.
    """
    containers: dict[str, Any] = {}
    arguments = form.call_arguments(inputs, containers)
    real = {name: leaf for name, leaf in inputs.items() if isinstance(leaf, Tensor) and not is_value(leaf)}
    with WriteWatch(leaf for leaf in real.values() if leaf.numel()) if real else nullcontext() as watch:
        result = form.called(call, arguments)
    written = set(map(id, watch.written)) if watch is not None else set()
    outputs: Leaves = {}
    changed, kept = [], []
    names, own = ContainerNames(containers), {id(leaf): name for name, leaf in real.items()}
    for name, structure in form.arguments:
        after: Leaves = {}
        now = taken_apart(arguments[name], f"new_{name}", after, leaf_kind=_traced_kind, containers=names)
        if name in changed_names or _differs(structure, now, inputs, after, written):
            outputs |= after
            changed.append((name, now))
            befores = {new: own[id(leaf)] for new, leaf in after.items() if id(leaf) in own}
            kept += [(new, was, id(inputs[was]) in written) for new, was in befores.items()]
            dropped = (was for was in leaf_names(structure) if was not in befores.values())
            kept += [("", was, True) for was in dropped if id(inputs[was]) in written]
    returned = taken_apart(result, "output", outputs, leaf_kind=_traced_kind, containers=names)
    return ResultForm(tuple(changed), returned, tuple(kept)), outputs


def _differs(before: Structure, after: Structure, inputs: Leaves, outputs: Leaves, written: Collection[int]) -> bool:
    """Whether a call replaced parts of a container, wrote into them, or changed the structure.

    Args:
        before: structure before the call.
        after: structure after the call.
        inputs: leaves before the call.
        outputs: leaves after the call.
        written: ids of tensors that the call wrote into.
    """
    if before.kind == after.kind == "leaf":
        was, now = inputs[before.name], outputs[after.name]
        if is_value(was):
            return was is not now
        return was is not now or id(was) in written if isinstance(was, Tensor) else bool(was != now)
    if replace(before, parts=()) != replace(after, parts=()):
        return True
    if [key for key, _ in before.parts] != [key for key, _ in after.parts]:
        return True
    pairs = zip(before.parts, after.parts, strict=True)
    return any(_differs(a, b, inputs, outputs, written) for (_, a), (_, b) in pairs)


def _difference(first: ResultForm, second: ResultForm) -> str:
    """The first place at which two results differ in structure, as text."""
    pairs = [(f"argument {name}", a, b) for (name, a), (_, b) in zip(first.changed, second.changed, strict=False)]
    for place, a, b in [*pairs, ("the result", first.result, second.result)]:
        if text := structure_difference(place, b, a):
            return text
    return f"{len(first.changed)} arguments are changed, then {len(second.changed)}"


def changed_arguments(model: nn.Module, batch: Batch) -> list[str]:
    """Names of the arguments of a call that hold a container of a registered class, or that the model changes.

    The model is run, and not changed. A call that no form describes, or that fails, has none; and so has a call with a
    single tensor, which one graph leaves unchanged, with a warning (`passes/trace.py`).

    Args:
        model: the float model.
        batch: arguments of the call.
    """
    try:
        form, leaves, _ = form_of(inspect.signature(model.forward), batch)
    except InputError:
        return []
    names = [name for name, structure in form.arguments if _is_registered(structure)]
    if names:
        return names
    has_containers = any(structure.kind != "leaf" for _, structure in form.arguments)
    if not has_containers and sum(isinstance(leaf, Tensor) for leaf in leaves.values()) <= 1:
        return []

    def call(*args: Any, **kwargs: Any) -> None:
        model(*args, **kwargs)

    try:
        with untouched(model, CodeState.of(model).bindings, watches=True), seeded(), torch.no_grad():
            results, _ = _outputs(call, form, copied(leaves))
    except Exception:  # the user's forward may raise any type of error, which is reported where the model is traced
        return []
    return [name for name, _ in results.changed]


def _is_registered(structure: Structure) -> bool:
    return structure.kind == "registered" or any(_is_registered(part) for _, part in structure.parts)


def flat_batch(form: CallForm, leaves: Leaves) -> Batch:
    """Batch for the flat model of a form: the leaves as keyword arguments."""
    return Batch((), {name: leaves[name] for name in form.leaf_names})


def _traced_kind(value: Any) -> str:
    """Leaf kind of a traced value, "tensor" or "number"; empty for other values."""
    return ("tensor" if isinstance(value._value, Tensor) else "number") if is_value(value) else ""
