"""The pattern language: plain functions, traced once into patterns.

    @fusion("conv2d_add_relu")
    def conv_add_relu(op, x, w, b, residual):
        return op.relu(op.add(op.conv2d(x, w, b), residual))

    @conv_add_relu.unless
    def residual_is_broadcast(m):
        return m.residual.shape != m.root.shape

`op.conv2d` is a row of the op table. The parameters are captures: they bind to any value, including None and numbers.
Keyword-only parameters make a family: `@fusion("linear_{act}", act=("relu", "gelu"))` with `op[act](...)`.
Options in a pattern must be equal in the graph; options that are left out match anything, and the unit keeps them.
In a rewrite, `op.any_op(layout=True)` stands for every op with these traits.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from fxq.common.names import is_writable
from fxq.common.source import imported, source_of
from fxq.errors import FxqError, PatternError, RecipeError, unknown
from fxq.ops import OPS
from fxq.ops.table import Op
from fxq.ops.traits import OpTraits


@dataclass(frozen=True)
class AnyOp:
    """Trait wildcard of a pattern: stands for every op of the table with these traits.

    Attributes:
        traits: fields of `OpTraits` with the values that they must have.
    """

    traits: Mapping[str, Any]
    commutes: ClassVar[bool] = False

    def __str__(self) -> str:
        return "an op with " + ", ".join(f"{name}={wanted!r}" for name, wanted in self.traits.items())

    def accepts(self, op: Op) -> bool:
        """Whether an op has these traits."""
        return all(getattr(op.traits, name) == wanted for name, wanted in self.traits.items())


@dataclass(frozen=True, eq=False, repr=False)
class PatternNode:
    """Node of a pattern: a capture (`op` is None) or a call of an op.

    Attributes:
        name: name of the capture or op.
        op: row of the op table, a trait wildcard, or None.
        inputs: tensor arguments: pattern nodes, lists of them, `Each`, or constants that must be equal. For a wildcard,
            its activations, or one `Each` for all of them.
        options: options that must be equal in the graph.
    """

    name: str
    op: Op | AnyOp | None = None
    inputs: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.name if self.op is None else f"{self.name}({', '.join(str(i) for i in self.inputs)})"

    def accepts(self, op: Op | None) -> bool:
        """Whether the node stands for calls of an op."""
        return self.op.accepts(op) if isinstance(self.op, AnyOp) and op is not None else op is self.op


@dataclass(frozen=True, eq=False)
class Each:
    """List of values, however many, each of which fits one pattern, independently of the others.

    A node of that pattern is bound to a tuple with one entry for each value; a value that occurs twice counts once.
    """

    pattern: PatternNode


class PatternOps:
    """The `op` argument of a pattern: `op.relu(x)` or `op["relu"](x)` makes a pattern node."""

    def __init__(self, nodes: list[PatternNode]) -> None:
        self._nodes = nodes

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
            return self._added(PatternNode(name, row, inputs, options))

        return make

    def any_op(self, **traits: Any) -> Callable[..., PatternNode]:
        """Trait wildcard, for rewrites: `op.any_op(layout=True)(x)` is a call of any op with these traits.

        Its arguments are the op's activations; other tensors and options match anything. A call that its op's row
        makes an exception of (`OpTraits.unless`) does not match.

        Args:
            **traits: fields of `OpTraits` with the values that they must have.

        Raises:
            PatternError: `OpTraits` has no such field.
        """
        for name in traits:
            if name not in _TRAITS:
                raise PatternError(unknown("trait of op.any_op", name, _TRAITS))
        return lambda *inputs: self._added(PatternNode("any_op", AnyOp(traits), inputs))

    def each(self, pattern: PatternNode) -> Each:
        """All activations of a wildcard, or a list of tensors as of `cat`, if each of them fits the pattern.

        In `op.any_op(layout=True)(op.each(op.relu(x)))`, the match has a tuple as `x`, with one entry for each relu.
        """
        return Each(pattern)

    def _added(self, node: PatternNode) -> PatternNode:
        self._nodes.append(node)
        return node

    def __getattr__(self, name: str) -> Callable[..., PatternNode]:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]


_TRAITS = tuple(trait.name for trait in fields(OpTraits))
Guard = Callable[[Any], object]
Replacement = Callable[[Any, Any], Any]


@dataclass(eq=False)
class Rule:
    """Pattern with its guards and, for a rewrite, its replacement. A match of a fusion becomes a unit of its name.

    Attributes:
        name: name in reports.
        source: `file:line` of the pattern function.
        captures: parameter names, in order.
        outputs: pattern nodes that the function returns; the first one is the root.
        guards: functions of the match. A true result refuses it, with the function's name as the reason.
        replacement: function that builds the new nodes; None for a fusion.
        variant: op names of the keyword-only parameters.
        size: number of ops in the pattern.
        function: module and qualified name of the pattern function.
        exclusive: whether the rule matches only if no node outside the match reads its inner values. If False, inner
            nodes that are read outside stay in the graph.
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
        """First output, from which matching starts."""
        return self.outputs[0]


class Family(Sequence[Rule]):
    """Rules of one pattern function: one for each combination of the variants of its keyword-only parameters."""

    def __init__(self, rules: Sequence[Rule], function: Callable[..., Any]) -> None:
        self._rules = tuple(rules)
        self.function = function

    def __getitem__(self, index: Any) -> Any:
        return self._rules[index]

    def __len__(self) -> int:
        return len(self._rules)

    def unless(self, guard: Guard) -> Guard:
        """Decorator: refuse a match if `guard(match)` is true. Users read the guard's name as the reason."""
        for rule in self._rules:
            rule.guards.append(guard)
        return guard

    def becomes(self, replacement: Replacement) -> Replacement:
        """Decorator: `replacement(op, match)` builds the new nodes and returns one value for each output."""
        for rule in self._rules:
            rule.replacement = replacement
        return replacement


class RuleSet:
    """Rules by name, in order of registration."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}

    def plus(self, paths: Iterable[str]) -> RuleSet:
        """Return a copy of the set with more fusions, given by import path.

        Raises:
            RecipeError: a path cannot be imported, or names no fusion.
            PatternError: two functions define rules of one name.
        """
        extended = RuleSet()
        extended._rules = dict(self._rules)
        for path in paths:
            family = imported(path)
            if not isinstance(family, Family) or any(rule.replacement is not None for rule in family):
                raise RecipeError(f"{path!r} is not a fusion: decorate the function with fxq.fusion.")
            extended.add(family)
        return extended

    def add(self, family: Family) -> None:
        """Register all rules of a family. A function that is defined again, as in a notebook cell, replaces its rules.

        Raises:
            PatternError: another function defines a rule of that name.
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
        """Remove a rule; unknown names are ignored."""
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
        """Rules by decreasing size. Of equal sizes, the one registered last comes first, so that users' rules win."""
        return sorted(reversed(self._rules.values()), key=lambda rule: -rule.size)


FUSIONS = RuleSet()
ON_REQUEST: dict[str, Rule] = {}
"""Fusions with `everywhere=False`, used only by recipes that name them. The last definition of a name counts."""
REWRITES: dict[str, Rule] = {}
"""Rewrite rules by name, for `explain`. The last definition of a name counts."""


def fusion(name: Any = None, *, everywhere: bool = True, **variants: Sequence[str]) -> Any:
    """Decorator: register a plain function as a fusion pattern. Each match becomes one unit of the rule's name.

    Args:
        name: name of the rule, with `{parameter}` for each keyword-only parameter. Default: the function's name.
        everywhere: whether every recipe uses it from now on; if not, only recipes that name it
            (`Recipe.with_fusions`).
        **variants: op names that each keyword-only parameter stands for.

    Returns:
        The `Family` of rules, with `.unless` to add guards.

    Raises:
        PatternError: an op is unknown (the message suggests names), a capture is not used, or no op is returned.

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
        if any(isinstance(node.op, AnyOp) for rule in family for node in reached(rule.outputs)):
            raise PatternError(f"fusion {family[0].name!r} ({family[0].source}): op.any_op is for rewrites only.")
        if everywhere:
            FUSIONS.add(family)
        else:
            ON_REQUEST.update((rule.name, rule) for rule in family)
        return family

    return register


def rewrite(name: Any = None, *, exclusive: bool = True, **variants: Sequence[str]) -> Any:
    """Decorator: make a rewrite rule of a plain function. `.becomes` gives its replacement.

    No recipe uses it by itself: a pass applies it with `rewriter.apply(rule)`.

    Args:
        name: as for `fusion`.
        exclusive: whether the rule matches only if no node outside the match reads its inner values. If False, inner
            nodes that are read outside stay in the graph.
        **variants: as for `fusion`.
    """
    if callable(name):
        return rewrite()(name)

    def make(function: Callable[..., Any]) -> Family:
        family = _family(function, name, variants)
        for rule in family:
            rule.exclusive = exclusive
            REWRITES[rule.name] = rule
        return family

    return make


def _family(function: Callable[..., Any], name: str | None, variants: dict[str, Sequence[str]]) -> Family:
    parameters = inspect.signature(function).parameters.values()
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if sorted(keywords) != sorted(variants):
        raise PatternError(
            f"pattern {function.__name__}: its keyword-only parameters are {keywords}, but there are variants "
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
"""Attributes of a match (see `fxq/rewriting/match.py`), whose names captures cannot have."""


def _check_captures(function: Callable[..., Any], captures: Sequence[str]) -> None:
    for name in captures:
        if name in MATCH or name.startswith("__"):
            raise PatternError(
                f"pattern {function.__name__!r} ({source_of(function)}): a capture cannot be called {name!r}, since "
                f"a match has an attribute of that name. Rename the parameter. Reserved: {', '.join(MATCH)}."
            )


def _trace(function: Callable[..., Any], name: str, captures: list[str], variant: dict[str, str]) -> Rule:
    if not name or not is_writable(name):
        raise PatternError(
            f"pattern {name!r} ({source_of(function)}): torch.fx cannot write code with this name; choose another."
        )
    nodes: list[PatternNode] = []
    inputs = [PatternNode(capture) for capture in captures]
    try:
        result = function(PatternOps(nodes), *inputs, **variant)
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
    dead = [node.name for node in nodes if node not in used]
    if dead:
        raise PatternError(f"pattern {name!r} ({source_of(function)}): the value of op.{dead[0]} is not used.")
    if len(outputs) > 1 and any(isinstance(node.op, AnyOp) for node in nodes):
        raise PatternError(f"pattern {name!r} ({source_of(function)}): a pattern with op.any_op has one output.")
    identity = (function.__module__, function.__qualname__)
    return Rule(name, source_of(function), tuple(captures), outputs, len(nodes), variant, function=identity)


def reached(outputs: Sequence[Any]) -> Iterator[PatternNode]:
    """Outputs of a pattern and the nodes that they depend on. A node with several users appears several times."""
    for node in outputs:
        if isinstance(node, (tuple, list)):
            yield from reached(node)
        elif isinstance(node, Each):
            yield from reached([node.pattern])
        elif isinstance(node, PatternNode):
            yield node
            yield from reached(node.inputs)
