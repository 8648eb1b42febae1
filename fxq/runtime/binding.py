"""A graph bound to inputs of one kind: its forward as straight calls, with nothing left to look up or to decide.

What a network of small layers spends outside its kernels is Python: modules that are looked up and called, shapes that
are compared, arguments that are put together. All of it depends on the inputs' kind only: their shapes, strides and
dtypes, and the number of threads. The second call with inputs of one kind therefore writes a function for that kind,
and later ones run it.
"""

from __future__ import annotations

import itertools
import linecache
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C import _get_flash_sdp_enabled, _get_math_sdp_enabled, _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.fx.graph import CodeGen
from torch.nn.modules import module as every_module

from fxq.common.data import Batch
from fxq.common.trees import mapped
from fxq.graph.bindable import Bindable, ModuleWatch
from fxq.graph.query import submodule
from fxq.graph.run import Runner
from fxq.runtime.call_checks import check_call, naming_inputs
from fxq.runtime.stable_kinds import run

KEPT = 16
"""Kinds of inputs that are remembered unless the module says otherwise, `kinds_kept`: a function for each."""

Kind = tuple[Hashable, ...]
Forward = Callable[..., Any]


def kind_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Kind | None:
    """What a bound function depends on; None where a call is out of the ordinary, and nothing is bound for it.

    Out of the ordinary: tensors that are not plain ones on the CPU, objects, and whatever watches the call: a compiler,
    `torch.jit.trace`, `torch.func`, a dispatch mode, a hook on every module.
    """
    watched = (
        every_module._global_forward_hooks
        or every_module._global_forward_pre_hooks
        or every_module._global_backward_hooks
        or every_module._global_backward_pre_hooks
        or torch.compiler.is_compiling()
        or _get_tracing_state() is not None
        or peek_interpreter_stack() is not None
        or _len_torch_dispatch_stack()
    )
    if watched:
        return None
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    flash, plain = _get_flash_sdp_enabled(), _get_math_sdp_enabled()  # they count on the CPU, too
    try:
        kind = torch.get_num_threads(), torch.get_default_dtype(), autocast, flash, plain, *map(_kind, args)
        return (*kind, *((k, _kind(v)) for k, v in kwargs.items())) if kwargs else kind
    except _OddError:
        return None


class _OddError(Exception):
    """A value that nothing is bound for."""


def _kind(value: Any) -> Hashable:
    cls = type(value)
    if cls is Tensor or cls is nn.Parameter:
        if (
            value.is_nested
            or value.layout is not torch.strided
            or not value.is_cpu
            or value.is_neg()
            or value._is_zerotensor()
        ):
            raise _OddError
        return value.shape, value.stride(), value.dtype, value.requires_grad
    if value is None or cls in (bool, int, float, str):
        return cls, value
    if cls in (tuple, list):
        return cls, *map(_kind, value)
    if cls is dict:
        return cls, *((key, _kind(v)) for key, v in value.items())
    raise _OddError


class Bindings:
    """How a graph module runs: the functions that its graph was bound to, by the kind of inputs.

    Args:
        plain: the forward that the module's graph stands for, with the module as its first argument.
    """

    def __init__(self, plain: Forward) -> None:
        self.plain = plain
        self._known: OrderedDict[Kind, Bound | None] = OrderedDict()  # None: has come once; the last to come at the end
        self._last: tuple[Kind, Bound] | None = None  # which most calls are of
        self._changing = threading.Lock()
        self._never = False

    def __call__(self, gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The forward of `gm`. Kinds that take turns with more others than are remembered are not bound."""
        kind = None if self._never else kind_of(args, kwargs)
        if kind is None:
            check_call(gm, args, kwargs)
            with naming_inputs(gm, args, kwargs):
                return self.plain(gm, *args, **kwargs)
        last = self._last
        if last is not None and last[0] == kind and last[1].holds():
            return last[1].run(*args, **kwargs)
        bound = self._known.get(kind)
        is_known = kind in self._known
        if bound is not None and not bound.holds():
            bound, is_known = None, False
            with self._changing:
                self._known.clear()
        self._never = bound is None and is_known and not _can_bind(gm)
        if bound is not None:
            value = bound.run(*args, **kwargs)
        elif is_known and not self._never:
            value, bound = bind(gm, args, kwargs)
        else:
            check_call(gm, args, kwargs)
            with naming_inputs(gm, args, kwargs):
                value = self.plain(gm, *args, **kwargs)  # where it raises, the kind stays unknown
        self._remember(kind, bound, getattr(gm, "kinds_kept", KEPT))
        return value

    def _remember(self, kind: Kind, bound: Bound | None, most: int) -> None:
        with self._changing:
            self._last = (kind, bound) if bound is not None and most else None
            self._known[kind] = bound
            self._known.move_to_end(kind)
            while len(self._known) > most:
                self._known.popitem(last=False)


@dataclass(frozen=True)
class Bound:
    """A function that a graph was bound to.

    Attributes:
        run: the forward, for inputs of its kind.
        source: its code.
        watch: of the modules that it calls, and of the members of modules that it has taken values from.
    """

    run: Forward
    source: str
    watch: ModuleWatch

    def holds(self) -> bool:
        """Whether the modules that it calls are the same, and as they were."""
        return not self.watch.changed and self.watch.seen.is_unchanged()


def bind(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Bound]:
    """Run `gm` on these inputs, and bind its graph to their kind on the way.

    Returns:
        What the forward of `gm` returns for them, and the function for others of their kind.
    """
    return _Binder(gm, Batch(args, dict(kwargs))).bound()


def _can_bind(gm: fx.GraphModule) -> bool:
    """Whether every input has a name, and the graph is what the module runs: its code is made of it, and up to date."""
    codegen: Any = gm.graph._codegen
    plain = type(codegen) is CodeGen and codegen._body_transformer is None
    named = not any(str(node.target).startswith("*") for node in gm.graph.find_nodes(op="placeholder"))
    return plain and named and gm.graph.python_code("self").src == gm.code


class _Binder(Runner):
    """Runs a graph node by node, and writes down what to call.

    Attributes:
        fixed: the nodes whose shapes, strides and types, or numbers, are the same for all inputs of the kind.
        names: of the values in the function.
        constants: what the function refers to besides.
        lines: its body.
        watch: of the modules that it calls.
    """

    def __init__(self, gm: fx.GraphModule, batch: Batch) -> None:
        super().__init__(gm, batch)
        self.fixed = set(self.values)
        self.names = {node: str(node.target) for node in self.values}
        self.constants: dict[str, Any] = {}
        self.lines: list[str] = []
        self.watch = ModuleWatch()
        self._known: dict[int, str] = {}
        self._prefix = "_"
        while any(name.startswith(self._prefix) for name in self.names.values()):  # names of the user's
            self._prefix += "_"

    def bound(self) -> tuple[Any, Bound]:
        """Run to the end; the value, and the function."""
        self._watch_members()
        inputs = list(self.names)
        value = self.run()
        parameters = [f"{n.target}={self._text(n.args[0])}" if n.args else str(n.target) for n in inputs]
        source = f"def forward({', '.join(parameters)}):\n" + "".join(f"    {line}\n" for line in self.lines)
        return value, Bound(_function(source, self.constants), source, self.watch)

    def compute(self, node: fx.Node) -> Any:
        """Run a node, and write its line."""
        if node.op == "output":
            self.lines.append(f"return {self._text(node.args[0])}")
            return self._given(node.args[0])
        if node.op == "get_attr":
            value = super().compute(node)
            self.names[node] = self._constant(value)
            self.fixed.add(node)
            return value
        args, kwargs = self._given(node.args), self._given(node.kwargs)
        called, text = self._called(node, args)
        first = 1 if node.op == "call_method" else 0  # the object of a method
        value = self._run(node, called, args[first:], kwargs)
        given = [*map(self._text, node.args[first:]), *(f"{k}={self._text(v)}" for k, v in node.kwargs.items())]
        self.names[node] = f"{self._prefix}v{len(self.names)}"
        self.lines.append(f"{self.names[node]} = {text}({', '.join(given)})")
        gone = [self.names[n] for n in self.last.get(node, ()) if n.op != "get_attr"]
        gone += [] if node.users else [self.names[node]]
        if gone:
            self.lines.append(f"del {', '.join(gone)}")
        return value

    def _run(self, node: fx.Node, called: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The value of a call; whether it is of a fixed kind is noted."""
        if not self.fixed.issuperset(node.all_input_nodes):
            return called(*args, **kwargs)
        module = submodule(self.gm, node)
        value, fixed = run(node, called, args, kwargs, isinstance(module, Bindable) and module.is_unmodified())
        if fixed:
            self.fixed.add(node)
        return value

    def _given(self, arguments: Any) -> Any:
        """Arguments with values in the place of nodes. Not with `map_arg`: it makes immutable lists and dicts."""
        return mapped(arguments, lambda leaf: self.values[leaf] if isinstance(leaf, fx.Node) else leaf)

    def _called(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, str]:
        """What a node calls, bound to its inputs where that can be, and the code that names it."""
        if node.op == "call_method":
            return getattr(args[0], str(node.target)), f"{self._text(node.args[0])}.{node.target}"
        called: Any = node.target if node.op == "call_function" else self.gm.get_submodule(str(node.target))
        if isinstance(called, Bindable):
            called.notify(self.watch)
            binds = not node.kwargs and self.fixed.issuperset(node.all_input_nodes)
            called = called.callable_for(*args) if binds else called.callable_for()
        return called, self._constant(called)

    def _text(self, value: Any) -> str:
        """An argument as code."""
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, tuple):
            given = "".join(f"{self._text(v)}, " for v in value)
            return f"({given})" if type(value) is tuple else f"{self._constant(type(value))}({given})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self._text(k)}: {self._text(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            return f"{self._constant(slice)}({', '.join(map(self._text, (value.start, value.stop, value.step)))})"
        return repr(value) if value is None or type(value) in (bool, int, str) else self._constant(value)

    def _constant(self, value: Any) -> str:
        """The name of something that the function refers to."""
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = f"{self._prefix}c{len(self._known)}"
            self.constants[name] = value
        return name

    def _watch_members(self) -> None:
        """Look out for other members in the modules on the way to what the graph names."""
        paths = {str(n.target) for n in self.graph.nodes if n.op in ("get_attr", "call_module")}
        above = {path.rpartition(".")[0] for path in paths}
        above |= {path[:i] for path in above for i, letter in enumerate(path) if letter == "."} | {""}
        for owner in (self.gm.get_submodule(path) for path in sorted(above)):
            for members in (owner._modules, owner._parameters, owner._buffers):
                if members:
                    self.watch.seen.add(members)


def _function(source: str, constants: dict[str, Any]) -> Forward:
    """The function `forward` of this code, whose lines tracebacks show."""
    place = f"<a graph bound by fxq, {next(_NUMBERS)}>"
    exec(compile(source, place, "exec"), constants)
    made: Forward = constants.pop("forward")
    linecache.cache[place] = len(source), None, source.splitlines(keepends=True), place
    weakref.finalize(made, linecache.cache.pop, place, None)
    return made


_NUMBERS = itertools.count()
