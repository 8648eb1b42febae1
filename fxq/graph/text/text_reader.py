"""Reader of the text form of graphs. It parses and checks each line, and executes nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from keyword import iskeyword
from textwrap import dedent
from typing import Any

from torch import Tensor, fx, nn

from fxq.common.source import without_imports
from fxq.errors import FxqError, InputError, unknown, words_of
from fxq.graph.text.text_checks import check_call, check_path, check_plain
from fxq.graph.text.text_facts import describe
from fxq.graph.text.text_modules import Kernels, read_module
from fxq.graph.text.text_names import FUNCTIONS, METHODS, function_of, is_taken, missing_library
from fxq.graph.text.text_values import dotted, parsed, read_arguments, read_value
from fxq.graph.unit import UNITS, Unit
from fxq.ops import OPS


def read(
    text: str,
    tensors: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module],
    kernels: Kernels,
    complete: bool = False,
) -> fx.GraphModule:
    """Read a graph from its text; see `fxq.extend.read_graph`.

    Args:
        text: text by `write_graph`.
        tensors: tensors by path, as `graph_tensors` returns them.
        modules: the leaf modules by path.
        kernels: returns the kernel class of a name.
        complete: whether the text was written with `complete`, so that its types are trusted. Else they are compared
            with inferred types.

    Raises:
        InputError: the text is not valid; the message has the line number and what was expected.
    """
    reader = _Reader(tensors, modules, kernels, complete=complete)
    with without_imports():
        reader.take_all(dedent(text))
    if reader.unit is not None or not reader.main.done:
        raise InputError("the text ends too early: expected `return ...` as its last line.")
    return reader.module()


def read_graphs(text: str, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, tuple[fx.Graph, dict[str, Unit]]]:
    """Read the graphs of a text by `write_graphs`, each with the units that it calls, by path.

    Args:
        text: the text.
        tensors: tensors of each graph, by the graph's name.

    Raises:
        InputError: the text is not valid; the message has the line number and what was expected.
    """
    reader = _Reader({}, {}, _no_kernels, tensors, complete=True)
    reader.take_all(text)
    if reader.graphs.keys() != tensors.keys():
        raise InputError(f"expected the graphs {', '.join(tensors)}.")
    graphs = ((name, inner.main.graph, inner.used) for name, inner in reader.graphs.items())
    return {name: (graph, {p: m for p, m in used.items() if isinstance(m, Unit)}) for name, graph, used in graphs}


def _no_kernels(name: str) -> Any:
    raise InputError(f"expected no kernel in a graph inside a kernel, not {name}.")


class _Body:
    """A graph under construction, with its nodes by name.

    Attributes:
        done: whether its `return` was read.
    """

    def __init__(self, inputs: tuple[str, ...] = ()) -> None:
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.done = False
        for name in inputs:  # torch.fx may rename a capture, in the same way wherever it is used
            node = self.graph.placeholder(name)
            self.nodes[node.name] = node

    def add(self, name: str, op: str, target: Any, args: Any = (), kwargs: Any = None) -> fx.Node:
        if name in self.nodes:
            raise InputError(f"the value {name!r} is already defined.")
        node = self.graph.create_node(op, target, tuple(args), kwargs or {}, name)
        if node.name != name or name == "self":
            raise InputError(f"a value cannot be called {name!r}, a name of Python or torch.")
        self.nodes[name] = node
        return node

    def finish(self, value: Any) -> fx.Node:
        self.done = True
        return self.graph.output(value)


class _Reader:
    """Reads a text line by line.

    Attributes:
        main: the graph.
        unit: name, kind and body of the unit that is being read; None outside a unit.
        used: the tensors and modules that the graph uses, by path.
        declared: the modules that the text has declared, by path.
        units: the units by name.
        inner: name and reader of the graph inside a kernel that is being read; None outside one.
        graphs: readers of the graphs inside kernels that were read, by name.
        inside: tensors of the graphs inside kernels, by graph name, if they are separate from `tensors`.
        complete: whether types in the text are trusted.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        modules: Mapping[str, nn.Module],
        kernels: Kernels,
        inside: Mapping[str, Mapping[str, Tensor]] | None = None,
        complete: bool = False,
    ) -> None:
        self.complete = complete
        self.tensors, self.leaves, self.kernels, self.inside = tensors, modules, kernels, inside or {}
        self.main = _Body()
        self.unit: tuple[str, str, _Body] | None = None
        self.used: dict[str, Any] = {}
        self.declared: dict[str, nn.Module] = {}
        self.units: dict[str, Unit] = {}
        self.inner: tuple[str, _Reader] | None = None
        self.graphs: dict[str, _Reader] = {}

    def take_all(self, text: str) -> None:
        """Read all lines of a text. Raises `InputError` with the line number."""
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                try:
                    self.take(line)
                except FxqError as error:
                    raise InputError(f"line {number}: {error}") from None
                except Exception as error:  # any error of Python or torch about the line
                    raise InputError(f"line {number}: {type(error).__name__}: {words_of(error)}") from None

    def module(self) -> fx.GraphModule:
        """Return the graph as a module. Raises `InputError` if torch.fx cannot generate code for it."""
        try:
            return fx.GraphModule(self.used, self.main.graph)
        except (SyntaxError, NameError, TypeError, ValueError, AttributeError, RuntimeError, KeyError) as error:
            raise InputError(f"torch.fx cannot generate code for the graph: {type(error).__name__}: {error}") from None

    def _value(self, expr: ast.expr) -> Any:
        return read_value(expr, self.body.nodes)

    @property
    def body(self) -> _Body:
        return self.main if self.unit is None else self.unit[2]

    def take(self, line: str) -> None:
        """Read one line."""
        if line[:1].isspace() != (self.unit is not None or self.inner is not None):
            raise InputError("expected the lines of a unit, and no others, to be indented after its `def` line.")
        if self.inner is not None:
            self._take_inner(*self.inner, line.strip())
            return
        if self.body.done:
            raise InputError("expected nothing after `return`.")
        if line.startswith("def "):
            self._open_unit(line)
            return
        stmt, comment = parsed(line.strip())
        if isinstance(stmt, ast.Return) and stmt.value is not None:
            value = self._value(stmt.value)
            check_plain(value)
            node = self.body.finish(value)
            self._describe(node, None, comment)
            self._close_unit()
        elif isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name) and stmt.value is not None:
            self._node(stmt.target.id, stmt.value, stmt.annotation, comment)
        elif isinstance(stmt, ast.Assign) and len(stmt.targets) == 1 and isinstance(stmt.targets[0], ast.Name):
            self._node(stmt.targets[0].id, stmt.value, None, comment)
        elif isinstance(stmt, ast.Assign) and len(stmt.targets) == 1 and self.unit is None:
            path = self._path(stmt.targets[0])
            if path in self.declared:
                raise InputError(f"the module {path!r} is already defined.")
            self.declared[path] = self._declared(path, stmt.value)
        else:
            raise InputError(
                "expected `name: type = call`, `modules['path'] = call`, `def unit(...):` or `return ...`."
            )

    # ---- units

    def _open_unit(self, line: str) -> None:
        head, _, comment = line.partition("#")
        match = re.fullmatch(r"def (\w+)\(([\w, ]*)\):\s*", head)
        inputs = tuple(name.strip() for name in match[2].split(",") if name.strip()) if match is not None else ()
        defined = {**self.units, **self.graphs}
        if match is None or is_taken(match[1]) or match[1] in defined or len(set(inputs)) < len(inputs):
            raise InputError(f"expected `def name(inputs):` with names that are not in use, not {head.strip()!r}.")
        if not inputs:
            self.inner = (
                match[1],
                _Reader(self.inside.get(match[1], self.tensors), {}, self.kernels, complete=self.complete),
            )
            self.inner[1].units = self.units
            return
        kind = self._value(parsed(comment.strip())[0].value) if comment else match[1]  # type: ignore[attr-defined]
        self.unit = match[1], str(kind), _Body(inputs)

    def _take_inner(self, name: str, reader: _Reader, line: str) -> None:
        """Read a line of a graph inside a kernel."""
        reader.take(line)
        if reader.main.done:
            self.graphs[name], self.inner = reader, None

    def _close_unit(self) -> None:
        if self.unit is not None:
            name, kind, body = self.unit
            self.units[name] = Unit(kind, body.graph)
            self.unit = None

    # ---- nodes

    def _node(self, name: str, call: ast.expr, annotation: ast.expr | None, comment: str) -> None:
        if not isinstance(call, ast.Call):
            raise InputError(f"expected a call, not `{ast.unparse(call)}`.")
        if isinstance(call.func, ast.Name) and call.func.id in ("input", "tensor"):
            if self.unit is not None:
                raise InputError("a unit has no tensors, and its inputs are in its `def` line.")
            make = self._input if call.func.id == "input" else self._tensor
            self._describe(make(name, call), annotation, comment)
            return
        op, target, first = self._target(call.func)
        args, kwargs = read_arguments(call, self.body.nodes)
        check_plain((args, kwargs))
        node = self.body.add(name, op, target, [*first, *args], kwargs)
        check_call(node, self.used[str(node.target)] if node.op == "call_module" else None)
        self._describe(node, annotation, comment)

    def _input(self, name: str, call: ast.Call) -> fx.Node:
        args, default = read_arguments(call, {})
        check_plain(default)
        target = args[0] if args else name
        match = re.fullmatch(r"\*{0,2}([^\W\d]\w*)", target) if isinstance(target, str) else None
        if match is None or iskeyword(match[1]) or match[1] == "self":
            raise InputError(f"expected the name of an argument, not {target!r}.")
        if len(args) > 1 or default.keys() - {"default"}:
            raise InputError("expected `input()`, optionally with the argument's name and `default=`.")
        return self.main.add(name, "placeholder", target, default.values())

    def _tensor(self, name: str, call: ast.Call) -> fx.Node:
        path = self._value(call.args[0]) if len(call.args) == 1 and not call.keywords else None
        path = check_path(path)
        self.used[path] = self._tensor_at(path)
        return self.main.add(name, "get_attr", path)

    def _tensor_at(self, path: Any) -> Tensor:
        if path not in self.tensors:
            raise InputError(unknown("tensor", path, self.tensors))
        return self.tensors[path]

    def _target(self, func: ast.expr) -> tuple[str, Any, tuple[Any, ...]]:
        """Kind of call, target and receiver (an empty tuple if none) of a line's call."""
        if isinstance(func, ast.Subscript):
            path = self._path(func)
            if path not in self.declared:
                raise InputError(unknown("module", path, self.declared))
            self.used[path] = self.declared[path]
            return "call_module", path, ()
        name = dotted(func)
        if name in self.units and self.unit is None:
            self.used[f"{UNITS}.{name}"] = self.units[name]
            return "call_module", f"{UNITS}.{name}", ()
        if name in OPS:
            return "call_function", OPS[name].target, ()
        function = function_of(name)
        if function is not None:
            return "call_function", function, ()
        receiver, _, method = name.rpartition(".")
        if receiver in self.body.nodes:
            if method not in METHODS:
                raise InputError(_unknown("method", method, METHODS))
            return "call_method", method, (self.body.nodes[receiver],)
        if library := missing_library(name):
            raise InputError(f"calls {name}, a function of {library}, which is not imported: import {library} first.")
        raise InputError(_unknown("op, unit or function", name, [*self.units, *(op.name for op in OPS), *FUNCTIONS]))

    def _describe(self, node: fx.Node, annotation: ast.expr | None, comment: str) -> None:
        """Set the metadata of a node, and check the type of its value."""
        if self.unit is None:
            target = self.used[str(node.target)] if node.op in ("call_module", "get_attr") else None
            describe(node, target, annotation, comment, self.body.nodes, self.complete)
        elif annotation is not None or comment:
            raise InputError("lines of a unit have no types or comments: they depend on the call of the unit.")

    # ---- modules

    def _declared(self, path: str, call: ast.expr) -> nn.Module:
        if isinstance(call, ast.Call) and dotted(call.func) == "leaf":
            if path not in self.leaves:
                raise InputError(f"the leaf module {path!r} is not in the text: pass it as modules={{{path!r}: ...}}.")
            return self.leaves[path]
        graphs = {name: inner.module for name, inner in self.graphs.items()}
        return read_module(call, self._tensor_at, self.kernels, graphs)

    def _path(self, target: ast.expr) -> str:
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) and target.value.id == "modules":
            return check_path(self._value(target.slice))
        raise InputError(f"expected `modules['path']`, not `{ast.unparse(target)}`.")


def _unknown(kind: str, name: str, valid_names: Iterable[str]) -> str:
    """Message with the nearest names only, since there are about a thousand."""
    return unknown(kind, name, valid_names).partition(" Known: ")[0]
