"""Classes of the op table: rows, spellings, and the binding of calls to ops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn

from fxq.common.source import name_of
from fxq.errors import FxqError, unknown
from fxq.ops.traits import OpTraits

META = "fxq"
"""Key of the `NodeInfo` in `node.meta` (see `fxq/graph/info.py`)."""

Arguments = dict[str, Any]
Shape = tuple[int, ...]
Adapter = Callable[[Arguments], "Arguments | Redirect | str"]
Pick = Callable[[Arguments, Any], "Arguments | Redirect | str"]

_ALIASES = {"input": "x", "self": "x", "tensor": "x", "query": "x", "tensors": "xs", "mat2": "other"}


@dataclass(frozen=True)
class Redirect:
    """Result of an adapter whose call, with these arguments, is another op than the one that claims the spelling.

    Attributes:
        op: name of the op.
        arguments: its arguments by name.
    """

    op: str
    arguments: Arguments


@dataclass(frozen=True)
class Spelling:
    """One way to write an op: a module type, a function, an aten overload, or a method name.

    Attributes:
        target: the module type, the callable, the name of a method, or `module:name` for a function in a package that
            fxq does not import.
        names: argument names in this spelling's positional order; None for the op's own order. The last name may start
            with `*`: it takes all remaining positional arguments.
        adapt: converts the arguments as written to the op's arguments, or returns the reason why it cannot.
        pick: for a spelling that returns several values: converts the arguments for the value at an index or attribute
            name, or returns the reason why that value is not this op. None if the spelling returns one tensor.
    """

    target: Any
    names: tuple[str, ...] | None = None
    adapt: Adapter | None = None
    pick: Pick | None = None


def spell(target: Any, names: str | None = None, adapt: Adapter | None = None, pick: Pick | None = None) -> Spelling:
    """Return a spelling whose arguments differ from the op's, e.g. `spell("permute", "x *dims")`."""
    return Spelling(target, tuple(names.split()) if names is not None else None, adapt, pick)


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Shape of an argument that is a tensor or a node with a tensor value; None for other arguments."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return getattr(getattr(value, "meta", {}).get(META), "shape", None)


def dtype_of(value: Any) -> torch.dtype | None:
    """Dtype of an argument that is a tensor or a node with a tensor value; None for other arguments."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    return getattr(getattr(value, "meta", {}).get(META), "dtype", None)


@dataclass(frozen=True, eq=False)
class Op:
    """One row of the op table.

    Attributes:
        name: name of the op in patterns, recipes and reports.
        target: the canonical function: tensor arguments are positional, options keyword-only.
        spellings: all ways to write the op.
        traits: how it takes part in quantization.
        commutes: whether the first two tensor arguments can be swapped.
        macs: returns its multiply-accumulates from the shapes of its output and of its tensor arguments; None if they
            are negligible (norms, activation functions, additions).
        is_registered: whether a user registered it.
        tensors: names of the tensor arguments.
        options: names and defaults of the options.
    """

    name: str
    target: Callable[..., Any]
    spellings: tuple[Spelling, ...]
    traits: OpTraits
    commutes: bool = False
    macs: Callable[..., int] | None = None
    is_registered: bool = False
    tensors: tuple[str, ...] = field(init=False)
    options: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        params = inspect.signature(self.target).parameters.values()
        object.__setattr__(self, "tensors", tuple(p.name for p in params if p.kind is not p.KEYWORD_ONLY))
        object.__setattr__(self, "options", {p.name: p.default for p in params if p.kind is p.KEYWORD_ONLY})

    def bind(self, spelling: Spelling, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments | Redirect | str:
        """Bind a call as written to the op's arguments by name, defaults included.

        Returns:
            The arguments, a `Redirect` if the call is another op, or the reason why it is not this op.
        """
        raw = self.bind_raw(spelling, args, kwargs)
        return self.fill(raw) if isinstance(raw, dict) else raw

    def bind_raw(
        self, spelling: Spelling, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Arguments | Redirect | str:
        """Bind a call like `bind`, but without defaults."""
        names = spelling.names or (*self.tensors, *self.options)
        bound: Arguments = {}
        for i, value in enumerate(args):
            if i >= len(names):
                return f"takes {len(names)} arguments, and this call has {len(args)}"
            if names[i].startswith("*"):
                rest = args[i:]
                bound[names[i][1:]] = tuple(rest[0]) if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
                break
            bound[names[i]] = value
        plain = {n.lstrip("*") for n in names}
        for key, value in kwargs.items():
            bound[key if key in plain else _ALIASES.get(key, key)] = value
        return spelling.adapt(bound) if spelling.adapt is not None else bound

    def fill(self, bound: Arguments) -> Arguments | str:
        """Add defaults to bound arguments; return the reason if the op lacks one of the arguments."""
        bound.pop("inplace", None)
        bound = {key: value for key, value in bound.items() if key != "out" or value is not None}
        extra = [key for key in bound if key not in self.tensors and key not in self.options]
        if extra:
            return f"has no argument {extra[0]!r}"
        missing = [key for key, value in self.options.items() if key not in bound and value is inspect.Parameter.empty]
        if missing:
            return f"is called without {missing[0]!r}"
        plain = {k: tuple(v) if k in self.options and isinstance(v, list) else v for k, v in bound.items()}
        return {**{key: value for key, value in self.options.items() if key not in bound}, **plain}

    def canonical(self, bound: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `args, kwargs` of the canonical call: tensors in order, options that differ from defaults."""
        args = [bound.get(name) for name in self.tensors]
        while len(args) > len(self.traits.inputs) and args[-1] is None:
            args.pop()
        return tuple(args), {k: bound[k] for k, default in self.options.items() if bound[k] != default}

    def bind_module(
        self, spelling: Spelling, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Arguments | Redirect | str:
        """Bind the call of a module like `bind`. Missing arguments are read from its attributes."""
        names = self.traits.inputs
        if len(args) + len(kwargs) > len(names):
            return f"{type(module).__name__} is called with extra arguments"
        bound: Arguments = dict(zip(names, args, strict=False))
        bound.update({_ALIASES.get(k, k): v for k, v in kwargs.items()})
        for key in spelling.names or (*self.tensors, *self.options):
            if key not in bound and hasattr(module, key):
                bound[key] = getattr(module, key)
        adapted = spelling.adapt(bound) if spelling.adapt is not None else bound
        return self.fill(adapted) if isinstance(adapted, dict) else adapted


class OpTable:
    """The op table: rows by name and by spelling. Names and spellings are unique, see `add`."""

    def __init__(self) -> None:
        self._rows: dict[str, Op] = {}
        self._spelled: dict[Any, tuple[Op, Spelling]] = {}
        self._canonical: dict[Any, Op] = {}
        self._leaves: dict[type[nn.Module], str] = {}

    def leaf(self, name: str, *modules: type[nn.Module]) -> None:
        """Register stateful modules that stay module calls in every graph, and run in float, under a name."""
        self._leaves.update(dict.fromkeys(modules, name))

    def leaf_name(self, module: nn.Module) -> str | None:
        """Name that `leaf` gave to modules of this type, or None."""
        return next((self._leaves[cls] for cls in type(module).__mro__ if cls in self._leaves), None)

    def add(self, op: Op) -> Op:
        """Add a row. Raises `FxqError` if its name or one of its spellings is taken."""
        if op.name in self._rows:
            raise FxqError(f"op table: the name {op.name!r} is taken; choose another (name=...).")
        spelled: dict[Any, tuple[Op, Spelling]] = {}
        for spelling in op.spellings:
            owner = self._spelled.get(spelling.target) or spelled.get(spelling.target)
            if owner is not None:
                raise FxqError(
                    f"op table: {spelling.target!r} is claimed by both {owner[0].name!r} and {op.name!r}; "
                    "a spelling belongs to one op."
                )
            spelled[spelling.target] = (op, spelling)
        self._spelled.update(spelled)
        self._rows[op.name] = op
        self._canonical[op.target] = op
        return op

    def discard(self, name: str) -> None:
        """Remove a row; unknown names are ignored."""
        op = self._rows.pop(name, None)
        if op is not None:
            del self._canonical[op.target]
            for spelling in op.spellings:
                del self._spelled[spelling.target]

    def row(
        self,
        *spellings: Any,
        traits: OpTraits,
        commutes: bool = False,
        macs: Callable[..., int] | None = None,
        name: str = "",
        rank: int | None = None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator that registers a function as the canonical form of an op; `name` defaults to the function's.

        With a `rank`, the function is one of a family that is defined inside another function: `conv` of rank 2 is
        `conv2d`, and its module has to define that name.
        """

        def register(target: Callable[..., Any]) -> Callable[..., Any]:
            if rank is not None:
                target.__name__ = target.__qualname__ = f"{target.__name__}{rank}d"
            own_spellings = tuple(s if isinstance(s, Spelling) else Spelling(s) for s in spellings)
            self.add(Op(name or target.__name__, target, own_spellings, traits, commutes, macs))
            return target

        return register

    def __getitem__(self, name: str) -> Op:
        if name not in self._rows:
            raise FxqError(unknown("op", name, self._rows))
        return self._rows[name]

    def family(self, name: str) -> tuple[str, str, str]:
        """Names of the ops of a family for 1, 2 and 3 dimensions: for "conv", "conv1d", "conv2d" and "conv3d"."""
        return self[f"{name}1d"].name, self[f"{name}2d"].name, self[f"{name}3d"].name

    def fused_after(self, layer: str) -> tuple[str, ...]:
        """Names of the activation functions that are fused with a kind of layer, see `OpTraits.fused_after`."""
        return tuple(op.name for op in self if layer in op.traits.fused_after)

    def with_slopes(self, tensors: bool = False) -> tuple[str, ...]:
        """Names of the functions that have slopes, see `OpTraits.slopes`; with `tensors`, only if they are a tensor."""
        sloped = (op for op in self if op.traits.slopes is not None)
        return tuple(op.name for op in sloped if not tensors or op.traits.slopes in op.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[Op]:
        return iter(self._rows.values())

    def of_target(self, target: Any) -> Op | None:
        """The op whose canonical function is `target`, or None."""
        try:
            return self._canonical.get(target)
        except TypeError:  # unhashable, so not the target of an op
            return None

    def of_call(self, target: Any) -> tuple[Op, Spelling] | None:
        """Op and spelling of a function, aten overload or method name, or None."""
        try:
            row = self._spelled.get(target)
        except TypeError:
            return None
        return self._spelled.get(name_of(target)) if row is None and isinstance(target, FunctionType) else row

    def of_module(self, module: nn.Module) -> tuple[Op, Spelling] | None:
        """Op and spelling of a module: of its type, or of a base class whose forward it does not override; or None."""
        for cls in type(module).__mro__:
            if cls in self._spelled:
                same = all(
                    getattr(type(module), f, None) is getattr(cls, f, None) for f in ("forward", "_conv_forward")
                )
                return self._spelled[cls] if same else None
        return None
