"""Variables outside a model's modules that its code uses: globals, closures, attributes of classes and functions."""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import operator
import sys
import textwrap
import types
from collections import OrderedDict, deque
from collections.abc import Container, Iterator, MutableMapping, Set
from dataclasses import dataclass, field, replace
from functools import _lru_cache_wrapper, cached_property, lru_cache
from itertools import islice
from typing import Any

from torch import nn

from fxq.common.parsing import call_parser

_MAX_FUNCTIONS = 2000
_PLAIN = (type(None), bool, int, float, complex, str, bytes, types.ModuleType, types.CodeType, nn.Parameter)
_EMPTY_TYPES = (OrderedDict, dict, set, list, bool)
_MAX_ITEMS = 1000
_ASSIGNING = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_DEREF", "DELETE_DEREF")
_DYNAMIC = frozenset(
    ("globals", "vars", "setattr", "delattr", "exec", "eval", "__dict__", "__setattr__", "__defaults__")
)
_LIBRARIES = ("torch", "fxq", "numpy", "builtins", "_pytest")  # pytest rewrites asserts of modules in tests
_ADDING = ("append", "appendleft", "add", "extend", "update", "insert")


class _Assigned:
    """Names of variables and attributes that code assigns; all names if it has calls such as `setattr`."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def add(self, code: types.CodeType) -> None:
        """Add the names that code and the functions nested in it assign or delete."""
        self.names.update(_assigned_by(code))

    def __contains__(self, name: object) -> bool:
        return name in self.names or not self.names.isdisjoint(_DYNAMIC)


@dataclass(frozen=True)
class OuterVariables:
    """Group of variables that a snapshot (`fxq/common/state.py`) can read and write.

    Attributes:
        table: mapping that holds the variables, such as a module's globals.
        prefix: text before each key in display names: `"global "` for `global COUNT`.
        keys: keys in `table`, also of variables that do not exist yet; None for all.
        assigned: names that the code assigns; other variables are read, but only other code can set them.
    """

    table: MutableMapping[str, Any]
    prefix: str
    keys: frozenset[str] | None = None
    assigned: Container[str] = field(default_factory=_Assigned)

    def __deepcopy__(self, memo: dict[int, Any]) -> OuterVariables:
        """Return itself: the variables are those of the process."""
        return self

    def sets(self, name: str) -> bool:
        """Whether the code may set the variable with this display name."""
        return name.removeprefix(self.prefix) in self.assigned

    def read(self) -> dict[str, Any]:
        """Values by display name, of the variables that exist."""
        prefix = self.prefix
        if self.keys is None:
            return {f"{prefix}{key}": value for key, value in self.table.items()}
        return {name: self.table[key] for key, name in self._display_names if key in self.table}

    @cached_property
    def _display_names(self) -> list[tuple[str, str]]:
        """Keys in order, with their display names."""
        return [(key, f"{self.prefix}{key}") for key in sorted(self.keys or ())]

    def still_has(self, values: dict[str, Any]) -> bool:
        """Whether the variables are the very values that `read` returned."""
        if not values and not self.table:
            return True
        now = self.read()
        return len(now) == len(values) and all(map(operator.is_, now.values(), values.values()))

    def put(self, name: str, value: Any) -> None:
        """Set the variable with this display name."""
        self.table[name.removeprefix(self.prefix)] = value

    def write(self, values: dict[str, Any]) -> None:
        """Set the variables that the code may set to `values`, by display name; delete those that have none."""
        now = self.read()
        for name in now.keys() - values.keys():
            if self.sets(name):
                del self.table[name.removeprefix(self.prefix)]
        for name, value in values.items():
            if self.sets(name) and (name not in now or now[name] is not value):
                self.put(name, value)


@dataclass
class CodeState:
    """Variables outside a model's modules that the code of the modules refers to.

    Follows calls into the user's code only, not into torch, NumPy or the standard library.

    Attributes:
        bindings: groups of variables, each with the path of the first module whose code refers to them.
    """

    bindings: list[tuple[str, OuterVariables]] = field(default_factory=list)
    _functions: dict[int, types.FunctionType] = field(default_factory=dict)
    _seen: dict[int, Any] = field(default_factory=dict)
    _assigned: _Assigned = field(default_factory=lambda: _Assigned())
    _groups: dict[tuple[str, int, str], int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> CodeState:
        """State that the code of any module of a model refers to."""
        state = cls()
        for module in model.modules():  # each is entered with its own path, not from the module around it
            state._seen |= {id(module): module, id(module._modules): module._modules}
        for path, module in model.named_modules():
            for kind in type(module).__mro__:
                state._enter(path, kind)
            for value in vars(module).values():
                if type(value) not in _EMPTY_TYPES or value:  # most attributes of a module are empty tables of hooks
                    state._enter(path, value)
        return state

    def _enter(self, path: str, value: Any) -> None:
        """Add a class, function or object of the user, and the ones it refers to."""
        waiting = deque([value])
        while waiting and len(self._functions) < _MAX_FUNCTIONS:
            value = waiting.popleft()
            if isinstance(value, _PLAIN) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value  # also keeps the id from being reused
            if isinstance(value, (type, types.FunctionType)) and _is_library(value):
                continue
            waiting.extend(_referred(value))
            if isinstance(value, type):
                self._bind(path, _ClassAttributes(value), f"class attribute {value.__name__}.")
            elif isinstance(value, types.FunctionType):
                self._functions[id(value)] = value
                self._assigned.add(value.__code__)
                self._bind(path, value.__dict__, f"attribute of function: {value.__name__}.")
                waiting.extend(self._named_by(path, value))

    def _named_by(self, path: str, function: types.FunctionType) -> Iterator[Any]:
        names, used = _names(function.__code__), _globals(function.__code__)
        own = {name for name in used if name in function.__globals__ or name not in vars(builtins)}
        tables: list[tuple[MutableMapping[str, Any], str, Set[str]]] = [(function.__globals__, "global ", own)]
        for name in own:
            value = function.__globals__.get(name)
            if isinstance(value, types.ModuleType) and not _is_library(value):
                tables.append((vars(value), f"global {value.__name__}.", names & vars(value).keys()))
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        tables.append((_Cells(cells), "variable of an enclosing function: ", names & cells.keys()))
        if function.__defaults__ or function.__kwdefaults__:
            defaults = _Defaults(function)
            tables.append((defaults, f"default of {function.__name__}: ", set(defaults)))
        for table, prefix, wanted in tables:
            self._bind(path, table, prefix, wanted)
            yield from (table[name] for name in sorted(wanted) if name in table)

    def _bind(self, path: str, table: MutableMapping[str, Any], prefix: str, names: Set[str] | None = None) -> None:
        if names is None:
            self.bindings.append((path, OuterVariables(table, prefix, None, self._assigned)))
            return
        group = path, id(table), prefix
        if names and group in self._groups:  # as the globals of one file, which many functions read
            variables = self.bindings[self._groups[group]][1]
            self.bindings[self._groups[group]] = (
                path,
                replace(variables, keys=frozenset((*names, *(variables.keys or ())))),
            )
        elif names:
            self._groups[group] = len(self.bindings)
            self.bindings.append((path, OuterVariables(table, prefix, frozenset(names), self._assigned)))

    def reads(self, name: str) -> bool:
        """Whether the code uses a variable or attribute other than to update it, as `n += 1` does.

        Code without source counts as using every name in it.
        """
        return any(name in _names(f.__code__) and _reads(f, name) for f in self._functions.values())


class _Cells(MutableMapping[str, Any]):
    """Mapping of closure variables."""

    def __init__(self, cells: dict[str, types.CellType]) -> None:
        self.cells = cells

    def __getitem__(self, name: str) -> Any:
        return self.cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self.cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self.cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.cells if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        try:
            self.cells[str(name)].cell_contents  # noqa: B018 - raises if the cell is empty
        except (KeyError, ValueError):
            return False
        return True


class _ClassAttributes(MutableMapping[str, Any]):
    """Mapping of a class's data attributes."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def __getitem__(self, name: str) -> Any:
        return vars(self.cls)[name]

    def __contains__(self, name: object) -> bool:
        return name in vars(self.cls) and name in set(self)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.cls, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.cls, name)

    def __iter__(self) -> Iterator[str]:
        return iter([n for n, v in vars(self.cls).items() if not n.startswith("__") and _is_data(v)])

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Defaults(MutableMapping[str, Any]):
    """Mapping of a function's default values by parameter."""

    def __init__(self, function: types.FunctionType) -> None:
        self.function = function
        code, count = function.__code__, len(function.__defaults__ or ())
        self.positional = code.co_varnames[code.co_argcount - count : code.co_argcount]

    def __getitem__(self, name: str) -> Any:
        if name in self.positional:
            return (self.function.__defaults__ or ())[self.positional.index(name)]
        return (self.function.__kwdefaults__ or {})[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.positional:
            values = list(self.function.__defaults__ or ())
            values[self.positional.index(name)] = value
            self.function.__defaults__ = tuple(values)
        else:
            self.function.__kwdefaults__ = {**(self.function.__kwdefaults__ or {}), name: value}

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"the default of {name} cannot be deleted")

    def __iter__(self) -> Iterator[str]:
        return iter((*self.positional, *(self.function.__kwdefaults__ or {})))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _is_data(value: Any) -> bool:
    return not hasattr(value, "__get__") or isinstance(value, _lru_cache_wrapper)


_HOLDING = frozenset(("__func__", "__self__", "fget", "func", "args", "keywords", "__wrapped__"))
"""Attributes of methods, properties, partials and wrappers with what they call."""


def _referred(value: Any) -> Iterator[Any]:
    """Objects that may hold code of the user, in a container, class, partial, property, method or object."""
    if isinstance(value, (list, tuple, set, frozenset)):
        yield from islice(value, _MAX_ITEMS)
    elif isinstance(value, dict):
        yield from islice(dict.values(value), _MAX_ITEMS)  # its class may load what is not used yet
    elif isinstance(value, type):
        yield from vars(value).values()
    else:
        kinds = () if type(value) is types.FunctionType else type(value).__mro__
        attributes = getattr(value, "__dict__", None)
        there = attributes.keys() & _HOLDING if isinstance(attributes, dict) else set[str]()
        for kind in kinds:
            there |= _HOLDING & vars(kind).keys()  # an attribute of the instance may be computed, and fail
        yield from (getattr(value, name, None) for name in sorted(there))
        yield from kinds


def _is_library(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else str(getattr(value, "__module__", ""))
    owner = name.partition(".")[0]
    return owner in _LIBRARIES or (owner in sys.stdlib_module_names and owner != "__main__")


@lru_cache(maxsize=2 * _MAX_FUNCTIONS)
def _names(code: types.CodeType) -> frozenset[str]:
    """Names of globals, attributes and closure variables in code and the functions nested in it."""
    return frozenset(name for part in _codes(code) for name in (*part.co_names, *part.co_freevars))


def _globals(code: types.CodeType) -> frozenset[str]:
    """Names of globals in code; `co_names` has attributes too, which may have the name of an unrelated global."""
    return _uses(code)[0]


def _assigned_by(code: types.CodeType) -> frozenset[str]:
    """Names of variables and attributes that code assigns or deletes, and of functions that can assign any."""
    return _uses(code)[1]


@lru_cache(maxsize=2 * _MAX_FUNCTIONS)
def _uses(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Names of globals in code, and names that it assigns; see `_globals` and `_assigned_by`."""
    own, assigned = set[str](), set[str]()
    for part in _codes(code):
        for opcode, name in _naming_instructions(part):
            if opcode in _READS_OR_SETS_GLOBAL:
                own.add(name)
            if opcode in _ASSIGNS:
                assigned.add(name)
    return frozenset(own), frozenset(assigned) | _DYNAMIC.intersection(_names(code))


_ASSIGNS = frozenset(dis.opmap[name] for name in _ASSIGNING)
_READS_OR_SETS_GLOBAL = frozenset(
    number
    for name, number in dis.opmap.items()
    if name.endswith(("_GLOBAL", "_NAME")) or name.startswith("LOAD_FROM_DICT_OR_GLOB")
)
_NAMING = _ASSIGNS | _READS_OR_SETS_GLOBAL
"""Instructions that name a global, or assign a variable or an attribute."""


_SHIFTED = dis.opmap["LOAD_GLOBAL"] if sys.version_info >= (3, 11) else -1
"""Instruction whose argument is not the index of a name, but twice the index, plus a flag."""
_CLOSURE = frozenset(number for name, number in dis.opmap.items() if name.endswith("_DEREF"))


def _naming_instructions(code: types.CodeType) -> Iterator[tuple[int, str]]:
    """Yield the instructions in `_NAMING`, each with its name. `dis` decodes all others, too, which takes long."""
    opcodes = code.co_code[::2]
    if not (_NAMING & _CLOSURE).isdisjoint(opcodes):  # their names depend on Python's version
        yield from ((step.opcode, str(step.argval)) for step in dis.get_instructions(code) if step.opcode in _NAMING)
        return
    higher_bytes = 0
    for opcode, byte in zip(opcodes, code.co_code[1::2], strict=True):
        argument = higher_bytes | byte
        higher_bytes = argument << 8 if opcode == dis.EXTENDED_ARG else 0
        if opcode in _NAMING:
            yield opcode, code.co_names[argument >> 1 if opcode == _SHIFTED else argument]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code, and the code of the functions nested in it."""
    waiting = deque([code])
    while waiting:
        code = waiting.popleft()
        yield code
        waiting.extend(part for part in code.co_consts if isinstance(part, types.CodeType))


def _reads(function: types.FunctionType, name: str) -> bool:
    try:
        source = textwrap.dedent(inspect.getsource(function))
        tree = call_parser(ast.parse, source)
    except (OSError, TypeError, SyntaxError):
        return True
    own = {id(part) for node in ast.walk(tree) for part in _to_itself(node, name)}
    return any(_is_read(node, name) and id(node) not in own for node in ast.walk(tree))


def _to_itself(node: ast.AST, name: str) -> Iterator[ast.AST]:
    """Nodes of `n = n + 1`, `c["n"] += 1` or `h.append(x)` that read a name only to update it."""
    call = node.value if isinstance(node, ast.Expr) else node.body if isinstance(node, ast.Lambda) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _ADDING:
        yield from _holders(call.func)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    for target in targets:
        holders = list(_holders(target))
        yield from holders
        if isinstance(node, ast.Assign) and any(_named(part) == name for part in holders):
            yield from ast.walk(node.value)


def _holders(target: ast.AST) -> Iterator[ast.AST]:
    """Assignment target, followed by the objects that it is an attribute or item of."""
    yield target
    while isinstance(target, (ast.Attribute, ast.Subscript)):
        target = target.value
        yield target


def _named(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_read(node: ast.AST, name: str) -> bool:
    return _named(node) == name and isinstance(getattr(node, "ctx", None), ast.Load)
