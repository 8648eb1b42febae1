"""Binding: compilation of a graph into one Python function for inputs of one kind.

Networks of small layers are dominated by Python overhead: module lookups and calls, shape comparisons, argument
handling. All of it depends only on the kind of the inputs: their shapes, strides and dtypes, and the number of threads.
The second call with inputs of one kind therefore writes a function of straight calls, which later calls run. Calls with
inputs of many kinds, such as a cache that grows, run one more function, which is for inputs of all kinds.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count, repeat
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
from fxq.graph.guards import check_fixed
from fxq.graph.query import submodule
from fxq.graph.run import Runner
from fxq.quant.quantized_rows import QuantizedRows
from fxq.runtime.call_checks import check_call, naming_inputs
from fxq.runtime.generated_code import function_of
from fxq.runtime.growing import GrowingKinds, OtherInputsError, has_growing_states
from fxq.runtime.stable_kinds import run

MAX_BOUND_KINDS = 16
"""Maximum number of input kinds in the LRU cache, unless the module has an attribute `kinds_kept`."""

Kind = tuple[Hashable, ...]
Forward = Callable[..., Any]


def kind_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], grows: bool = False) -> Kind | None:
    """Kind of the inputs of a call; None if nothing can be bound for it.

    Nothing is bound for tensors other than dense CPU tensors, for objects, and for calls that a tool watches: a
    compiler, `torch.jit.trace`, `torch.func`, a dispatch mode, a global module hook. States in integers
    (`QuantizedRows`) are inputs of graphs that append to states.

    Args:
        args: positional inputs.
        kwargs: keyword inputs.
        grows: whether the graph appends to states.
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
    flash, plain = _get_flash_sdp_enabled(), _get_math_sdp_enabled()  # they also apply on the CPU
    try:
        kind = (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            autocast,
            flash,
            plain,
            *map(_kind, args, repeat(grows)),
        )
        return (*kind, *((k, _kind(v, grows)) for k, v in kwargs.items())) if kwargs else kind
    except _UnboundError:
        return None


class _UnboundError(Exception):
    """Error for an input for which nothing is bound."""


def _kind(value: Any, grows: bool) -> Hashable:
    cls = type(value)
    if cls is Tensor or cls is nn.Parameter:
        if (
            value.is_nested
            or value.layout is not torch.strided
            or not value.is_cpu
            or value.is_neg()
            or value._is_zerotensor()
        ):
            raise _UnboundError
        return value.shape, value.stride(), value.dtype, value.requires_grad
    if value is None or cls in (bool, int, float, str):
        return cls, value
    if cls in (tuple, list):
        return cls, *map(_kind, value, repeat(grows))
    if cls is dict:
        return cls, *((key, _kind(v, grows)) for key, v in value.items())
    if cls is QuantizedRows and grows:
        return cls, value.shape, value.device, value.packing, value.blocks, value.is_rotated
    raise _UnboundError


class Bindings:
    """Forward of a graph module, with an LRU cache of bound functions by input kind.

    Args:
        plain: unbound forward of the module, with the module as first argument.
        growing: how graphs with states that grow are bound; None: as all others.
    """

    def __init__(self, plain: Forward, growing: GrowingKinds | None = None) -> None:
        self.plain, self._growing = plain, growing
        self._grows: bool | None = None  # whether the graph has states that grow; None: not known yet
        self._cache: OrderedDict[Kind, BoundForward | None] = OrderedDict()  # None: called once; latest at the end
        self._last: tuple[Kind, BoundForward] | None = None  # of the last call, since most calls are of its kind
        self._unspecific: BoundForward | None = None  # for inputs of all kinds
        self._ran_unbound = False  # since the graph, a kernel or a weight last changed
        self._lock = threading.Lock()
        self._never = False
        self._accepted: set[Hashable] = set()

    def __call__(self, gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward of `gm`. A kind is bound at its second call, if it is still in the cache then."""
        if self._grows is None:
            self._grows = self._growing is not None and has_growing_states(gm.graph)
        kind = None if self._never else kind_of(args, kwargs, self._grows)
        if kind is None:
            check_call(gm, args, kwargs)
            with naming_inputs(gm, args, kwargs):
                return self.plain(gm, *args, **kwargs)
        last = self._last
        if last is not None and last[0] == kind and last[1].holds():
            return last[1].run(*args, **kwargs)
        if self._growing is not None and self._grows:
            return self._run_growing(self._growing, gm, kind, args, kwargs)
        bound = self._cache.get(kind)
        is_second = kind in self._cache
        if bound is not None and not bound.holds():
            bound, is_second = None, False
            with self._lock:
                self._cache.clear()
        self._never = bound is None and is_second and not _can_bind(gm)
        if bound is not None:
            value = bound.run(*args, **kwargs)
        elif is_second and not self._never:
            value, bound = bind(gm, args, kwargs)
        else:
            value = self._run_unspecific(gm, args, kwargs)  # if it raises, the kind is not cached
        self._remember(kind, bound, getattr(gm, "kinds_kept", MAX_BOUND_KINDS))
        return value

    def _run_unspecific(self, gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call whose kind is not bound; from the second such call on by a function for inputs of all kinds."""
        self._check(gm, args, kwargs)
        bound, is_second = self._unspecific, self._ran_unbound
        capacity: int = getattr(gm, "kinds_kept", MAX_BOUND_KINDS)
        with naming_inputs(gm, args, kwargs):
            if bound is not None and bound.holds():
                return bound.run(*args, **kwargs)
            self._unspecific, self._ran_unbound = None, False
            if bound is None and is_second and capacity:
                inspect.signature(self.plain).bind(gm, *args, **kwargs)  # raises for a wrong call
                if _can_bind(gm):
                    value, self._unspecific = bind(gm, args, kwargs, to_kind=False)
                    return value
                self._never = True
            value = self.plain(gm, *args, **kwargs)
            self._ran_unbound = True
            return value

    def _run_growing(
        self, growing: GrowingKinds, gm: fx.GraphModule, kind: Kind, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a graph with states that grow. What a call leaves open is bound at the second call that leaves it."""
        key, cached = growing.bound_for(kind)
        capacity = getattr(gm, "kinds_kept", MAX_BOUND_KINDS)
        growing.limit(capacity)
        if isinstance(cached, BoundForward):
            if not cached.holds():
                growing.clear()
                cached = None
            else:
                try:
                    with naming_inputs(gm, args, kwargs):
                        value = cached.run(*args, **kwargs)
                    growing.accepted(key)
                    return value
                except OtherInputsError:
                    growing.refused(key)
                    cached = False
        self._check(gm, args, kwargs)
        with naming_inputs(gm, args, kwargs):
            if not key or not capacity or cached is False or not _can_bind(gm):
                return self.plain(gm, *args, **kwargs)
            if cached is None:
                return growing.first(key, gm, args, kwargs)
            names = [str(node.target) for node in gm.graph.find_nodes(op="placeholder")]
            return growing.second(key, cached, gm, args, kwargs, names)

    def _check(self, gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check a call, unless a call with inputs of the same types has been checked before."""
        types = (*map(type, args), *((name, type(value)) for name, value in kwargs.items()))
        if types not in self._accepted:
            check_call(gm, args, kwargs)
            self._accepted.add(types)

    def _remember(self, kind: Kind, bound: BoundForward | None, capacity: int) -> None:
        with self._lock:
            self._last = (kind, bound) if bound is not None and capacity else None
            self._cache[kind] = bound
            self._cache.move_to_end(kind)
            while len(self._cache) > capacity:
                self._cache.popitem(last=False)


@dataclass(frozen=True)
class BoundForward:
    """Function that a graph was bound to.

    Attributes:
        run: forward for inputs of its kind.
        source: its code.
        watch: notices changes of the modules that it calls and of the members that it reads.
    """

    run: Forward
    source: str
    watch: ModuleWatch

    def holds(self) -> bool:
        """Whether the modules that it calls have neither changed nor been replaced."""
        return not self.watch.changed and self.watch.seen.is_unchanged()


def bind(
    gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any], to_kind: bool = True
) -> tuple[Any, BoundForward]:
    """Run `gm` on these inputs and bind its graph.

    Args:
        gm: the graph module.
        args: positional inputs.
        kwargs: keyword inputs.
        to_kind: whether to bind it to the kind of these inputs; else the function takes inputs of all kinds.

    Returns:
        The outputs, and the function.
    """
    names = frozenset() if to_kind else frozenset(str(node.target) for node in gm.graph.find_nodes(op="placeholder"))
    return Binder(gm, Batch(args, dict(kwargs)), names).bound()


def _can_bind(gm: fx.GraphModule) -> bool:
    """Whether every input has a name, and the module runs exactly its graph: its code is up to date."""
    codegen: Any = gm.graph._codegen
    plain = type(codegen) is CodeGen and codegen._body_transformer is None
    named = not any(str(node.target).startswith("*") for node in gm.graph.find_nodes(op="placeholder"))
    return plain and named and gm.graph.python_code("self").src == gm.code


@dataclass(frozen=True)
class BoundLine:
    """Line of a bound function.

    Attributes:
        node: the node whose value it computes.
        text: its code.
        reads: names of the values that it reads.
        writes: names of the values that it computes.
    """

    node: fx.Node
    text: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()


class Binder(Runner):
    """Runs a graph node by node, and writes the code of a function that does the same.

    Args:
        gm: the module.
        batch: the inputs.
        open_inputs: names of inputs whose kind may change.

    Attributes:
        fixed: nodes whose shape, strides and dtype, or number, are the same for all inputs of the kind.
        names: name of each node's value in the function.
        constants: objects that the function refers to, by name.
        lines: lines of its body, in order.
        watch: notices changes of the modules that it calls.
    """

    def __init__(self, gm: fx.GraphModule, batch: Batch, open_inputs: frozenset[str] = frozenset()) -> None:
        super().__init__(gm, batch)
        self.fixed = {
            node
            for node, value in self.values.items()
            if str(node.target) not in open_inputs and type(value) is not QuantizedRows
        }
        self._inputs = list(self.values)
        self.names = {node: str(node.target) for node in self._inputs}
        self.constants: dict[str, Any] = {}
        self.lines: list[BoundLine] = []
        self.watch = ModuleWatch()
        self._constant_names: dict[int, str] = {}
        self._numbers = count()  # of constants
        self._prefix = "_"
        while any(name.startswith(self._prefix) for name in self.names.values()):  # the user's names
            self._prefix += "_"

    def bound(self) -> tuple[Any, BoundForward]:
        """Run the graph. Returns its outputs and the function."""
        self._watch_members()
        value = self.run()
        return value, self.written()

    def written(self) -> BoundForward:
        """Function with the code of `body`, once the graph has run."""
        parameters = [f"{n.target}={self._text(n.args[0])}" if n.args else str(n.target) for n in self._inputs]
        source = f"def forward({', '.join(parameters)}):\n" + "".join(f"    {line}\n" for line in self.body())
        return BoundForward(function_of(source, "forward", dict(self.constants)), source, self.watch)

    def body(self) -> list[str]:
        """Code of all lines, with a `del` after the last reader of a value."""
        read_later: set[str] = set()
        texts: list[str] = []
        for line in reversed(self.lines):
            names = dict.fromkeys((*line.reads, *line.writes))
            dead = [name for name in names if name not in read_later and name not in self.constants]
            read_later.update(dead)
            if dead and line.node.op != "output":
                texts.append(f"del {', '.join(dead)}")
            texts.append(line.text)
        return texts[::-1]

    def compute(self, node: fx.Node) -> Any:
        """Run a node and write its line."""
        if node.op == "output":
            self.lines.append(BoundLine(node, f"return {self._text(node.args[0])}", self._names_of(node)))
            return self._with_values(node.args[0])
        if node.op == "get_attr":
            value = super().compute(node)
            self.names[node] = self._constant(value)
            self.fixed.add(node)
            return value
        args, kwargs = self._with_values(node.args), self._with_values(node.kwargs)
        called, text = self._called(node, args)
        first = 1 if node.op == "call_method" else 0  # the object of a method
        value = self._run(node, called, args[first:], kwargs)
        if node.target is check_fixed and self._is_fixed(node):
            self.names[node] = "None"
            return value  # of the kind, so that no later call can fail it
        texts = [*map(self._text, node.args[first:]), *(f"{k}={self._text(v)}" for k, v in node.kwargs.items())]
        name = self.names[node] = f"{self._prefix}v{len(self.names)}"
        self.lines.append(BoundLine(node, f"{name} = {text}({', '.join(texts)})", self._names_of(node), (name,)))
        return value

    def _names_of(self, node: fx.Node) -> tuple[str, ...]:
        """Names of the values that a node reads, without constants."""
        return tuple(self.names[read] for read in node.all_input_nodes if read.op != "get_attr")

    def _run(self, node: fx.Node, called: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call. If the kind of its value is fixed, add the node to `fixed`."""
        if not self._is_fixed(node):
            return called(*args, **kwargs)
        module = submodule(self.gm, node)
        value, fixed = run(node, called, args, kwargs, isinstance(module, Bindable) and module.is_unmodified())
        if fixed:
            self.fixed.add(node)
        return value

    def _is_fixed(self, node: fx.Node) -> bool:
        """Whether the kinds of all inputs of a node are the same in all calls of the function."""
        return self.fixed.issuperset(node.all_input_nodes)

    def _with_values(self, arguments: Any) -> Any:
        """Arguments with values in place of nodes. Not by `map_arg`, which makes immutable lists and dicts."""
        return mapped(arguments, lambda leaf: self.values[leaf] if isinstance(leaf, fx.Node) else leaf)

    def _called(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, str]:
        """Callable of a node, bound to its inputs if possible, and the code that refers to it."""
        if node.op == "call_method":
            return getattr(args[0], str(node.target)), f"{self._text(node.args[0])}.{node.target}"
        called: Any = node.target if node.op == "call_function" else self.gm.get_submodule(str(node.target))
        if isinstance(called, Bindable):
            called.notify(self.watch)
            binds = not node.kwargs and self._is_fixed(node)
            called = called.callable_for(*args) if binds else called.callable_for()
        return called, self._constant(called)

    def _text(self, value: Any) -> str:
        """Code of an argument."""
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, tuple):
            items = "".join(f"{self._text(v)}, " for v in value)
            return f"({items})" if type(value) is tuple else f"{self._constant(type(value))}({items})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self._text(k)}: {self._text(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            return f"{self._constant(slice)}({', '.join(map(self._text, (value.start, value.stop, value.step)))})"
        return repr(value) if value is None or type(value) in (bool, int, str) else self._constant(value)

    def _constant(self, value: Any) -> str:
        """Name by which the function refers to an object."""
        name = self._constant_names.get(id(value))
        if name is None:
            name = self._constant_names[id(value)] = f"{self._prefix}c{next(self._numbers)}"
            self.constants[name] = value
        return name

    def _forget(self, names: Iterable[str]) -> None:
        """Remove constants that no line refers to any more."""
        for name in names:
            del self._constant_names[id(self.constants.pop(name))]

    def _watch_members(self) -> None:
        """Watch all modules that contain a module or attribute of the graph, so that replaced members are noticed."""
        paths = {str(n.target) for n in self.graph.nodes if n.op in ("get_attr", "call_module")}
        above = {path.rpartition(".")[0] for path in paths}
        above |= {path[:i] for path in above for i, letter in enumerate(path) if letter == "."} | {""}
        for owner in (self.gm.get_submodule(path) for path in sorted(above)):
            for members in (owner._modules, owner._parameters, owner._buffers):
                if members:
                    self.watch.seen.add(members)
