"""Op or fusion that a kernel function runs, and checks of the function's parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

from fxq.backends.table.kernel_table import KernelRequest, rule_key
from fxq.common.source import name_of
from fxq.errors import InputError, unknown
from fxq.ops.table import Op
from fxq.rewriting.pattern import Rule, reached


@dataclass(frozen=True, eq=False)
class KernelPattern:
    """Op or fusion rule that a kernel function runs.

    Attributes:
        name: name of the op or rule.
        key: key of its row in kernel tables.
        captures: names of its inputs, in order.
        ops: the ops, each with the options that the pattern prescribes.
        variant: values of the rule's keyword-only parameters, by name.
    """

    name: str
    key: str
    captures: tuple[str, ...]
    ops: tuple[tuple[Op, Mapping[str, Any]], ...]
    variant: Mapping[str, str]

    @classmethod
    def of_op(cls, op: Op) -> KernelPattern:
        """Return the pattern of a single op."""
        return cls(op.name, op.name, op.tensors, ((op, {}),), {})

    @classmethod
    def of_rule(cls, rule: Rule) -> KernelPattern:
        """Return the pattern of a rule of a fusion."""
        ops = tuple((node.op, node.options) for node in dict.fromkeys(reached(rule.outputs)) if isinstance(node.op, Op))
        return cls(rule.name, rule_key(rule.name, rule.captures), rule.captures, ops, rule.variant)

    @property
    def options(self) -> Counter[str]:
        """Options that the pattern does not prescribe, with the number of its ops that have an option of that name."""
        return Counter(name for op, prescribed in self.ops for name in op.options if name not in prescribed)

    def refused(self, parameters: Collection[str], request: KernelRequest) -> str | None:
        """Why a function with these options as parameters cannot run the ops; None if it can."""
        for call in request.calls:
            if call.run_time_option is not None:
                return f"its {call.run_time_option} is computed at run time"
            for name, value in call.options.items():
                supported = [
                    call.op.options[name],
                    *(prescribed[name] for op, prescribed in self.ops if op is call.op and name in prescribed),
                ]
                if name not in parameters and value not in supported:
                    return f"its {name} is {value!r}, and its kernel function takes no {name}"
        return None

    def settings(self, parameters: Collection[str], request: KernelRequest) -> dict[str, Any]:
        """Values of the options and variants of the ops that are parameters of the function."""
        options = {name: value for call in request.calls for name, value in call.options.items() if name in parameters}
        return options | {name: value for name, value in self.variant.items() if name in parameters}


def check_signature(
    function: Callable[..., Any], pack: Callable[..., Any] | None, pattern: KernelPattern
) -> tuple[str, ...]:
    """Check the parameters of a kernel function, and return the names of the options and variants among them.

    Raises:
        InputError: the parameters are not the captures of the pattern, `out`, `packed` and options.
    """
    subject, parameters = f"the kernel function {name_of(function)}", signature(function).parameters.values()
    kinds = {parameter.kind for parameter in parameters} - {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}
    if kinds:
        raise InputError(f"{subject} has positional-only parameters, *args or **kwargs; arguments are passed by name.")
    captures = [p.name for p in parameters if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    _check_captures(subject, captures, pattern)
    missing = [name for name in pattern.captures if name not in captures]
    if missing:
        raise InputError(f"{subject} does not take {missing[0]!r}, which {pattern.name!r} captures.")
    keywords = [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
    for name, is_needed in (("out", True), ("packed", pack is not None)):
        if (name in keywords) != is_needed:
            fault = f"needs a keyword-only parameter {name!r}" if is_needed else f"takes {name!r}, and has no `pack`"
            raise InputError(f"{subject} {fault}.")
    if pack is not None:
        _check_captures(f"pack={name_of(pack)}", [*signature(pack).parameters], pattern)
    option_names = tuple(name for name in keywords if name not in ("out", "packed"))
    for name in option_names:
        if name not in pattern.variant and not pattern.options[name]:
            names = {*pattern.variant, *pattern.options}
            raise InputError(f"{subject}: {unknown(f'option of {pattern.name!r}', name, names)}")
        if pattern.options[name] > 1:
            raise InputError(
                f"{subject} takes {name!r}, an option of several ops of {pattern.name!r}; set it in the pattern."
            )
    omitted = [name for name in pattern.variant if name not in option_names]
    if omitted:
        raise InputError(f"{subject} needs a keyword-only parameter {omitted[0]!r}, the variant of {pattern.name!r}.")
    return option_names


def _check_captures(subject: str, names: Sequence[str], pattern: KernelPattern) -> None:
    for name in names:
        if name not in pattern.captures:
            raise InputError(f"{subject}: {unknown(f'capture of {pattern.name!r}', name, pattern.captures)}")
