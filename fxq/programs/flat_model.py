"""Flat model: the float model with a forward that takes and returns tensors by name, in place of containers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxq.common.containers import Leaves, Structure, put_together, taken_apart, update_container
from fxq.common.data import Batch
from fxq.common.isolation import copied, seeded, untouched
from fxq.errors import InputError, TraceError, words_of
from fxq.programs.call_form import CallForm, structure_difference
from fxq.tracing.fidelity import same_values
from fxq.tracing.part_shell import ONE_OF_SEVERAL
from fxq.tracing.proxies import is_value


@dataclass(frozen=True)
class ResultForm:
    """Structure of the outcome of a call: its result, and the arguments that it changed.

    Attributes:
        changed: structure of each changed argument after the call.
        result: structure of the result. Its containers may be arguments of the call.
    """

    changed: tuple[tuple[str, Structure], ...]
    result: Structure

    def deliver(self, leaves: Leaves, arguments: Mapping[str, Any]) -> Any:
        """Update the changed arguments of a call, and return its result.

        Args:
            leaves: outputs of the graph by name.
            arguments: arguments of the call by name.
        """
        for name, structure in self.changed:
            update_container(arguments[name], structure, leaves)
        return put_together(self.result, leaves, arguments)


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

    def call(**arguments: Any) -> Any:
        with around():
            return bound(**arguments)

    try:
        with untouched(model), seeded(), torch.no_grad():
            results, outputs = _outputs(call, form, copied(leaves))
            _, own_outputs = _outputs(bound, form, copied(leaves))
    except InputError:
        raise
    except Exception as error:  # the user's forward may raise any type of error
        raise InputError(f"the model does not run on the example ({form}): {words_of(error)}") from error

    if not same_values(outputs, own_outputs):
        raise TraceError("the model computes other values in the context of the trace than outside of it.")

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
    arguments = form.call_arguments(inputs)
    versions = {name: leaf._version for name, leaf in inputs.items() if isinstance(leaf, Tensor) and not is_value(leaf)}
    result = call(**arguments)
    outputs: Leaves = {}
    changed, same = [], {}
    for name, structure in form.arguments:
        argument = arguments[name]
        if structure.kind not in ("registered", "plain"):
            continue
        after: Leaves = {}
        now = taken_apart(argument, f"new_{name}", after, leaf_kind=_traced_kind)
        if name in changed_names or _differs(structure, now, inputs, after, versions):
            outputs |= after
            changed.append((name, now))
        if structure.kind == "registered" or isinstance(argument, (list, dict)):
            same[id(argument)] = name
    returned = taken_apart(result, "output", outputs, leaf_kind=_traced_kind, same=same)
    return ResultForm(tuple(changed), returned), outputs


def _differs(before: Structure, after: Structure, inputs: Leaves, outputs: Leaves, versions: Mapping[str, int]) -> bool:
    """Whether a call replaced parts of a container, changed them in place, or changed the structure."""
    if before.kind == after.kind == "leaf":
        was, now = inputs[before.name], outputs[after.name]
        if is_value(was):
            return was is not now
        return was is not now or was._version != versions[before.name] if isinstance(was, Tensor) else bool(was != now)
    if (before.kind, before.cls, before.constant) != (after.kind, after.cls, after.constant):
        return True
    if [key for key, _ in before.parts] != [key for key, _ in after.parts]:
        return True
    pairs = zip(before.parts, after.parts, strict=True)
    return any(_differs(a, b, inputs, outputs, versions) for (_, a), (_, b) in pairs)


def _difference(first: ResultForm, second: ResultForm) -> str:
    """The first place at which two results differ in structure, as text."""
    pairs = [(f"argument {name}", a, b) for (name, a), (_, b) in zip(first.changed, second.changed, strict=False)]
    for place, a, b in [*pairs, ("the result", first.result, second.result)]:
        if text := structure_difference(place, b, a):
            return text
    return f"{len(first.changed)} arguments are changed, then {len(second.changed)}"


def flat_batch(form: CallForm, leaves: Leaves) -> Batch:
    """Batch for the flat model of a form: the leaves as keyword arguments."""
    return Batch((), {name: leaves[name] for name in form.leaf_names})


def _traced_kind(value: Any) -> str:
    """Leaf kind of a traced value, "tensor" or "number"; empty for other values."""
    return ("tensor" if isinstance(value._value, Tensor) else "number") if is_value(value) else ""
