"""The op or fusion that a kernel function runs, and whether the function's parameters fit it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

from fxq.backends.table.kernel_table import FusedUnit, rule_key
from fxq.common.source import name_of
from fxq.errors import InputError, unknown
from fxq.ops.table import Op
from fxq.rewriting.pattern import Rule, reached


@dataclass(frozen=True, eq=False)
class KernelPattern:
    """Op or fusion rule with a kernel.

    Attributes:
        name: the op's or the rule's.
        key: under which backends' tables have its row.
        captures: names of its inputs, in order.
        ops: the ops, each with the options that the pattern prescribes.
        variant: the values of the rule's keyword-only parameters.
    """

    name: str
    key: str
    captures: tuple[str, ...]
    ops: tuple[tuple[Op, Mapping[str, Any]], ...]
    variant: Mapping[str, str]

    @classmethod
    def of_op(cls, op: Op) -> KernelPattern:
        """The pattern of a single op."""
        return cls(op.name, op.name, op.tensors, ((op, {}),), {})

    @classmethod
    def of_rule(cls, rule: Rule) -> KernelPattern:
        """The pattern of a fusion's rule."""
        ops = tuple((node.op, node.options) for node in dict.fromkeys(reached(rule.outputs)) if node.op is not None)
        return cls(rule.name, rule_key(rule.name, rule.captures), rule.captures, ops, rule.variant)

    @property
    def options(self) -> Counter[str]:
        """The options that the pattern leaves open, and how many of its ops have one of that name."""
        return Counter(name for op, prescribed in self.ops for name in op.options if name not in prescribed)

    def refused(self, taken: Collection[str], unit: FusedUnit) -> str | None:
        """Reason why a function that takes these options cannot run a unit; None if it can."""
        for call in unit.calls:
            if call.run_time_option is not None:
                return f"its {call.run_time_option} is computed at run time"
            for name, value in call.options.items():
                usual = [
                    call.op.options[name],
                    *(said[name] for op, said in self.ops if op is call.op and name in said),
                ]
                if name not in taken and value not in usual:
                    return f"its {name} is {value!r}, and its kernel function takes no {name}"
        return None

    def settings(self, taken: Collection[str], unit: FusedUnit) -> dict[str, Any]:
        """The options and variants that a function takes, of a unit."""
        options = {name: value for call in unit.calls for name, value in call.options.items() if name in taken}
        return options | {name: value for name, value in self.variant.items() if name in taken}


def check_signature(
    function: Callable[..., Any], pack: Callable[..., Any] | None, pattern: KernelPattern
) -> tuple[str, ...]:
    """Names of the options and variants that a kernel function takes.

    Raises:
        InputError: its parameters are not the captures of the pattern, `out`, `packed` and options.
    """
    who, parameters = f"the kernel function {name_of(function)}", signature(function).parameters.values()
    kinds = {parameter.kind for parameter in parameters} - {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}
    if kinds:
        raise InputError(f"{who} has positional-only parameters, *args or **kwargs; it is called with names.")
    captures = [p.name for p in parameters if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    _check_captures(who, captures, pattern)
    missing = [name for name in pattern.captures if name not in captures]
    if missing:
        raise InputError(f"{who} does not take {missing[0]!r}, which {pattern.name!r} captures.")
    keywords = [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
    for name, wanted in (("out", True), ("packed", pack is not None)):
        if (name in keywords) != wanted:
            why = f"needs a keyword-only parameter {name!r}" if wanted else f"takes {name!r}, and has no `pack`"
            raise InputError(f"{who} {why}.")
    if pack is not None:
        _check_captures(f"pack={name_of(pack)}", [*signature(pack).parameters], pattern)
    taken = tuple(name for name in keywords if name not in ("out", "packed"))
    for name in taken:
        if name not in pattern.variant and not pattern.options[name]:
            known = {*pattern.variant, *pattern.options}
            raise InputError(f"{who}: {unknown(f'option of {pattern.name!r}', name, known)}")
        if pattern.options[name] > 1:
            raise InputError(
                f"{who} takes {name!r}, an option of several ops of {pattern.name!r}; say it in the pattern."
            )
    lost = [name for name in pattern.variant if name not in taken]
    if lost:
        raise InputError(f"{who} needs a keyword-only parameter {lost[0]!r}, the variant of {pattern.name!r}.")
    return taken


def _check_captures(who: str, names: Sequence[str], pattern: KernelPattern) -> None:
    for name in names:
        if name not in pattern.captures:
            raise InputError(f"{who}: {unknown(f'capture of {pattern.name!r}', name, pattern.captures)}")
