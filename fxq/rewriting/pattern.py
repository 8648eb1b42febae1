"""The pattern language: plain functions, traced once into patterns.

    @fusion("conv2d_add_relu")
    def conv_add_relu(op, x, w, b, residual):
        return op.relu(op.add(op.conv2d(x, w, b), residual))

    @conv_add_relu.unless
    def residual_is_broadcast(m):
        return m.residual.shape != m.root.shape

`op.conv2d` is a row of the op table. The parameters are captures: they bind to any value, None and numbers included.
Keyword-only parameters make a family: `@fusion("linear_{act}", act=("relu", "gelu"))` with `op[act](...)`.
Options written in a pattern must be equal in the graph; options left out match anything and are carried over.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxq.common.names import is_writable
from fxq.common.source import imported, source_of
from fxq.errors import FxqError, PatternError, RecipeError, unknown
from fxq.ops import OPS
from fxq.ops.table import Op


@dataclass(frozen=True, eq=False, repr=False)
class PatternNode:
    """One node of a pattern: a capture (`op` is None) or a call of an op.

    Attributes:
        name: the capture's name, or the op's.
        op: the row of the op table, or None.
        inputs: the tensor arguments: pattern nodes, lists of them, or constants that must be equal.
        options: options that must be equal in the graph.
    """

    name: str
    op: Op | None = None
    inputs: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.name if self.op is None else f"{self.name}({', '.join(str(i) for i in self.inputs)})"


class PatternOps:
    """The `op` argument of a pattern: `op.relu(x)` or `op["relu"](x)` makes a pattern node."""

    def __init__(self, made: list[PatternNode]) -> None:
        self._made = made

    def __getitem__(self, name: str) -> Callable[..., PatternNode]:
        row = OPS[name]

        def make(*inputs: Any, **options: Any) -> PatternNode:
            if len(inputs) > len(row.tensors):
                raise PatternError(
                    f"op.{name} takes {len(row.tensors)} tensors ({', '.join(row.tensors)}), not {len(inputs)}."
                )
            for key in options:
                if key not in row.options:
                    raise PatternError(unknown(f"option of op.{name}", key, row.options))
            node = PatternNode(name, row, inputs, options)
            self._made.append(node)
            return node

        return make

    def __getattr__(self, name: str) -> Callable[..., PatternNode]:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]


Guard = Callable[[Any], object]
Replacement = Callable[[Any, Any], Any]


@dataclass(eq=False)
class Rule:
    """A pattern with its guards and, for a rewrite, what it becomes. A fusion becomes a unit of that name.

    Attributes:
        name: what reports call it.
        source: `file:line` of the pattern function.
        captures: parameter names, in order.
        outputs: the pattern nodes that the function returns; the first one is the root.
        guards: functions of the match; a true result refuses it, and the function's name is the reason.
        replacement: builds the new nodes; None for a fusion.
        variant: the values of the keyword-only parameters.
        size: number of ops in the pattern.
        function: module and qualified name of the pattern function.
        exclusive: inner values must have no reader outside the match. Without it, such values are left in place.
    """

    name: str
    source: str
    captures: tuple[str, ...]
    outputs: tuple[PatternNode, ...]
    size: int
    variant: dict[str, str] = field(default_factory=dict)
    guards: list[Guard] = field(default_factory=list)
    replacement: Replacement | None = None
    function: tuple[str, str] = ("", "")
    exclusive: bool = True

    @property
    def root(self) -> PatternNode:
        """The op that matching starts from: the first output."""
        return self.outputs[0]


class Family(Sequence[Rule]):
    """The rules made from one pattern function: one, or one for each combination of its keyword-only parameters."""

    def __init__(self, rules: Sequence[Rule], function: Callable[..., Any]) -> None:
        self._rules = tuple(rules)
        self.function = function

    def __getitem__(self, index: Any) -> Any:
        return self._rules[index]

    def __len__(self) -> int:
        return len(self._rules)

    def unless(self, guard: Guard) -> Guard:
        """Decorator: refuse a match when `guard(match)` is true. The guard's name is the reason that users read."""
        for rule in self._rules:
            rule.guards.append(guard)
        return guard

    def becomes(self, replacement: Replacement) -> Replacement:
        """Decorator: `replacement(op, match)` builds the new nodes and returns as many as the pattern has outputs."""
        for rule in self._rules:
            rule.replacement = replacement
        return replacement


class RuleSet:
    """Rules by name, in order of registration."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}

    def plus(self, paths: Iterable[str]) -> RuleSet:
        """A set with more fusions, which import paths name.

        Raises:
            RecipeError: a path cannot be imported, or names no fusion.
            PatternError: the name of a rule is taken by another.
        """
        made = RuleSet()
        made._rules = dict(self._rules)
        for path in paths:
            family = imported(path)
            if not isinstance(family, Family) or any(rule.replacement is not None for rule in family):
                raise RecipeError(f"{path!r} is not a fusion: decorate the function with fxq.fusion.")
            made.add(family)
        return made

    def add(self, family: Family) -> None:
        """Register all rules of a family. A name that another function has taken is an error.

        A function defined anew (a notebook cell that is run again) replaces what it was.
        """
        for rule in family:
            taken = self._rules.get(rule.name)
            if taken is not None and taken.function != rule.function:
                raise PatternError(
                    f"the rule name {rule.name!r} ({rule.source}) is taken by {taken.source}; choose another."
                )
        for rule in family:
            self._rules.pop(rule.name, None)
            self._rules[rule.name] = rule

    def discard(self, name: str) -> None:
        """Forget a rule; unknown names are ignored."""
        self._rules.pop(name, None)

    def __getitem__(self, name: str) -> Rule:
        if name not in self._rules:
            raise PatternError(unknown("rule", name, self._rules))
        return self._rules[name]

    def __iter__(self) -> Iterator[Rule]:
        return iter(list(self._rules.values()))

    def __contains__(self, name: object) -> bool:
        return name in self._rules

    def largest_first(self) -> list[Rule]:
        """The rules by falling size; among equals, the one registered last comes first, so users' rules win."""
        return sorted(reversed(self._rules.values()), key=lambda rule: -rule.size)


FUSIONS = RuleSet()
ON_REQUEST: dict[str, Rule] = {}
"""The fusions that only recipes use which name them; of two with one name, the one defined last."""


def fusion(name: Any = None, *, everywhere: bool = True, **variants: Sequence[str]) -> Any:
    """Decorator: register a plain function as a fusion pattern. What it matches becomes one unit of that name.

    Args:
        name: the rule's name; may hold `{parameter}` for each keyword-only parameter. Default: the function's name.
        everywhere: whether it is used from now on with every recipe; else only with those that name it, see
            `Recipe.with_fusions`.
        **variants: the ops that each keyword-only parameter stands for.

    Returns:
        The `Family` of rules, with `.unless` to add guards.

    Raises:
        PatternError: unknown op (nearest names given), a capture that the pattern does not use, no op at the root.

    Example:
        >>> @fusion
        ... def mul_of_relu(op, x, s):
        ...     return op.mul(op.relu(x), s)
        >>> mul_of_relu[0].size
        2
        >>> FUSIONS.discard("mul_of_relu")
    """
    if callable(name):
        return fusion()(name)

    def register(function: Callable[..., Any]) -> Family:
        family = _family(function, name, variants)
        if everywhere:
            FUSIONS.add(family)
        else:
            ON_REQUEST.update((rule.name, rule) for rule in family)
        return family

    return register


def rewrite(name: Any = None, *, exclusive: bool = True, **variants: Sequence[str]) -> Any:
    """Decorator: a rewrite rule from a plain function, for passes to apply. `.becomes` says what it turns into.

    Not registered anywhere: a pass applies it with `rewriter.apply(rule)`. With `exclusive=False` it also matches where
    an inner value has other readers; the value then stays for them.
    """
    if callable(name):
        return rewrite()(name)

    def make(function: Callable[..., Any]) -> Family:
        family = _family(function, name, variants)
        for rule in family:
            rule.exclusive = exclusive
        return family

    return make


def _family(function: Callable[..., Any], name: str | None, variants: dict[str, Sequence[str]]) -> Family:
    parameters = inspect.signature(function).parameters.values()
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if sorted(keywords) != sorted(variants):
        raise PatternError(
            f"pattern {function.__name__}: its keyword-only parameters are {keywords}, but variants are given "
            f"for {sorted(variants)}."
        )
    captures = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY][1:]
    _check_captures(function, captures)
    label = name if name is not None else "_".join([function.__name__, *(f"{{{k}}}" for k in keywords)])
    rules = []
    for values in itertools.product(*(variants[k] for k in keywords)):
        chosen = dict(zip(keywords, values, strict=True))
        rules.append(_trace(function, label.format(**chosen), captures, chosen))
    return Family(rules, function)


MATCH = ("bound", "captures", "gm", "nodes", "options", "outputs", "root", "rule")
"""What a match has besides its captures (see `fxq/rewriting/match.py`), which are attributes, too."""


def _check_captures(function: Callable[..., Any], captures: Sequence[str]) -> None:
    for name in captures:
        if name in MATCH or name.startswith("__"):
            raise PatternError(
                f"pattern {function.__name__!r} ({source_of(function)}): a capture cannot be called {name!r}, as "
                f"guards would find the match's own {name} under it; rename the parameter. Taken: {', '.join(MATCH)}."
            )


def _trace(function: Callable[..., Any], name: str, captures: list[str], variant: dict[str, str]) -> Rule:
    if not name or not is_writable(name):
        raise PatternError(
            f"pattern {name!r} ({source_of(function)}): torch.fx cannot write this name; choose another."
        )
    made: list[PatternNode] = []
    inputs = [PatternNode(capture) for capture in captures]
    try:
        result = function(PatternOps(made), *inputs, **variant)
    except FxqError as error:
        raise PatternError(f"pattern {name!r} ({source_of(function)}): {error}") from None
    outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    for output in outputs:
        if not isinstance(output, PatternNode) or output.op is None:
            raise PatternError(
                f"pattern {name!r} ({source_of(function)}) must return the value of an op, not {output!r}."
            )
    used = set(reached(outputs))
    unused = [node.name for node in inputs if node not in used]
    if unused:
        raise PatternError(f"pattern {name!r} ({source_of(function)}): the capture {unused[0]!r} is not used.")
    dead = [node.name for node in made if node not in used]
    if dead:
        raise PatternError(f"pattern {name!r} ({source_of(function)}): the value of op.{dead[0]} is not used.")
    identity = (function.__module__, function.__qualname__)
    return Rule(name, source_of(function), tuple(captures), outputs, len(made), variant, function=identity)


def reached(outputs: Sequence[Any]) -> Iterator[PatternNode]:
    """Nodes of a pattern that its outputs depend on, and the outputs; one with several readers comes several times."""
    for node in outputs:
        if isinstance(node, (tuple, list)):
            yield from reached(node)
        elif isinstance(node, PatternNode):
            yield node
            yield from reached(node.inputs)
