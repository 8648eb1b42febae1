"""Variables outside a model's modules that its code uses: globals, closures, class attributes, defaults."""

from __future__ import annotations

import ast
import dis
import inspect
import sys
import textwrap
import threading
import types
from collections import deque
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

_MAX_FUNCTIONS = 2000
_LIBRARIES = ("torch", "fxq", "numpy", "builtins")
_ADDING = ("append", "appendleft", "add", "extend", "update", "insert")
_PARSING = threading.Lock()  # ast.parse in several threads at once can fail in CPython


@dataclass(frozen=True)
class OuterVariables:
    """Group of variables that a snapshot (`fxq/common/state.py`) can read and write.

    Attributes:
        table: mapping that holds the variables, such as a module's globals.
        names: key in `table` by display name: `{"global COUNT": "COUNT"}`.
    """

    table: MutableMapping[str, Any]
    names: dict[str, str]

    def read(self) -> dict[str, Any]:
        """Values by display name, of the variables that exist."""
        return {called: self.table[name] for called, name in self.names.items() if name in self.table}

    def write(self, values: dict[str, Any]) -> None:
        """Set the variables to `values`, by display name; delete those that have none."""
        for called, name in self.names.items():
            if called in values and (name not in self.table or self.table[name] is not values[called]):
                self.table[name] = values[called]
            elif called not in values and name in self.table:
                del self.table[name]


@dataclass
class CodeState:
    """Variables outside a model's modules that the code of the modules refers to.

    Follows calls into the user's code only, not into torch, NumPy or the standard library.

    Attributes:
        bindings: groups of variables, each with the path of the first module whose code refers to them.
    """

    bindings: list[tuple[str, OuterVariables]] = field(default_factory=list)
    _functions: dict[int, types.FunctionType] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, model: nn.Module) -> CodeState:
        """State that the code of any module of a model refers to."""
        state = cls()
        for path, module in model.named_modules():
            for kind in type(module).__mro__:
                state._enter(path, kind)
            for value in vars(module).values():
                state._enter(path, value)
        return state

    def _enter(self, path: str, value: Any) -> None:
        """Add a class or function of the user, and the ones it refers to."""
        waiting = deque([value])
        while waiting and len(self._functions) < _MAX_FUNCTIONS:
            value = waiting.popleft()
            inner = [getattr(value, name, None) for name in ("__func__", "fget", "func", "__wrapped__")]
            value = next((part for part in inner if isinstance(part, types.FunctionType)), value)
            if not isinstance(value, (type, types.FunctionType)) or id(value) in self._seen or _is_library(value):
                continue
            self._seen.add(id(value))
            if isinstance(value, type):
                waiting.extend(vars(value).values())
                self._bind(path, _ClassAttributes(value), f"class attribute {value.__name__}.")
                continue
            self._functions[id(value)] = value
            waiting.extend(self._named_by(path, value))

    def _named_by(self, path: str, function: types.FunctionType) -> Iterator[Any]:
        names, own = set(_names(function.__code__)), set(_globals(function.__code__))
        tables: list[tuple[MutableMapping[str, Any], str, set[str]]] = [(function.__globals__, "global ", own)]
        for name in own:
            value = function.__globals__.get(name)
            if isinstance(value, types.ModuleType) and not _is_library(value):
                tables.append((vars(value), f"global {value.__name__}.", names))
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        tables.append((_Cells(cells), "variable of an enclosing function: ", names))
        for table, prefix, wanted in tables:
            chosen = wanted & table.keys()
            self._bind(path, table, prefix, chosen)
            yield from (table[name] for name in chosen)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._bind(path, {function.__name__: list(defaults)}, "default of ")

    def _bind(self, path: str, table: MutableMapping[str, Any], prefix: str, names: set[str] | None = None) -> None:
        chosen = sorted(table.keys() if names is None else names)
        if chosen:
            self.bindings.append((path, OuterVariables(table, {prefix + name: name for name in chosen})))

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

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.cls, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.cls, name)

    def __iter__(self) -> Iterator[str]:
        return iter([n for n, v in vars(self.cls).items() if not n.startswith("__") and not hasattr(v, "__get__")])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _is_library(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else str(getattr(value, "__module__", ""))
    owner = name.partition(".")[0]
    return owner in _LIBRARIES or (owner in sys.stdlib_module_names and owner != "__main__")


def _names(code: types.CodeType) -> Iterator[str]:
    """Names of globals, attributes and closure variables in code and the functions nested in it."""
    for part in _codes(code):
        yield from part.co_names
        yield from part.co_freevars


def _globals(code: types.CodeType) -> Iterator[str]:
    """Names of globals in code; `co_names` has attributes too, which may have the name of an unrelated global."""
    for part in _codes(code):
        for step in dis.get_instructions(part):
            if step.opname.endswith(("_GLOBAL", "_NAME")) or step.opname.startswith("LOAD_FROM_DICT_OR_GLOBALS"):
                yield str(step.argval)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code and that of the functions nested in it."""
    waiting = deque([code])
    while waiting:
        code = waiting.popleft()
        yield code
        waiting.extend(part for part in code.co_consts if isinstance(part, types.CodeType))


def _reads(function: types.FunctionType, name: str) -> bool:
    try:
        source = textwrap.dedent(inspect.getsource(function))
        with _PARSING:
            tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        return True
    own = {id(part) for node in ast.walk(tree) for part in _to_itself(node, name)}
    return any(_is_read(node, name) and id(node) not in own for node in ast.walk(tree))


def _to_itself(node: ast.AST, name: str) -> Iterator[ast.AST]:
    """Nodes of `n = n + 1`, `c["n"] += 1` or `h.append(x)` that read a name only to update it."""
    call = node.value if isinstance(node, ast.Expr) else None
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
