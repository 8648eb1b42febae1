"""Tracer that runs the example beside the proxies of `torch.fx`, so that branches on sizes can be traced."""

from __future__ import annotations

import inspect
import operator
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from fxq.common.data import Batch, device_of
from fxq.common.globs import path_matches
from fxq.common.hooks import call_forward_hooks
from fxq.common.isolation import copied
from fxq.common.metrics import tensors
from fxq.common.trees import mapped
from fxq.errors import FxqError, InputError, TraceError, words_of
from fxq.graph.analysis.memory import MemoryWatch
from fxq.graph.guards import is_own_container, is_plain, make_output
from fxq.graph.info import TracedInfo, info, set_info
from fxq.graph.query import is_check, tensor_meta
from fxq.ops import OPS
from fxq.tracing.assumptions import Assumptions
from fxq.tracing.dependence import dependence_of
from fxq.tracing.example_run import ExampleRun, has_traced_weights
from fxq.tracing.exported_program import Exported
from fxq.tracing.failure import Untraceable, locate_failure, user_line
from fxq.tracing.forward_arguments import arguments, can_be_default
from fxq.tracing.outputs import PLAIN_CONTAINERS, cannot_construct, content_of
from fxq.tracing.proxies import (
    Dependence,
    TracedValue,
    example_tensors,
    is_value,
    recording_calls,
    traced_values,
    untraced,
)
from fxq.tracing.tuples import sliced, unpacked
from fxq.tracing.wrappers import wrapped

_TRACE_LOCK = threading.RLock()
"""Held during a trace, which patches functions of torch: a second one would undo the patches of the first."""


class Tracer(fx.Tracer):
    """Traces a model while running it on the example. Each node gets module path, source line, shape and memory.

    A module that cannot be traced becomes a leaf, and `broken` gets its path and the reason. If `broken` is not empty
    after the trace, the graph is invalid: trace again with those modules among the leaves.

    Attributes:
        leaves: path globs of modules that are not traced into.
        broken: for each module that cannot be traced, its path and the reason.
        watch: which values share memory.
        returned: tensors that the model returns for the example, in order.
        loops: whether a forward loops over the rows of a tensor.
        unroll: whether such a loop is unrolled.
        record: whether to record the outputs of the traced modules.
        outputs: path and output tensors of each call of a traced module, in order of return, if `record`.
        created: whether tensors that the forward creates, such as torch.zeros, are traced, because it changes them.
        new_constants: attribute paths of these tensors.
        forced: outcome of branches on sizes by line (see `Assumptions`).
        free: lines whose branches on sizes are not checked (see `Assumptions`).
        calls: kind and target of every node other than checks, in the order of their creation.
        expected: `calls` of another trace. The trace ends with an error where it differs; None: it does not end.
    """

    def __init__(
        self,
        leaves: tuple[str, ...],
        example: Batch,
        fixed: Mapping[str, Any],
        strict: bool = False,
        unroll: bool = False,
        record: bool = False,
        forced: Mapping[str, bool] | None = None,
        free: Collection[str] = (),
        created: bool = False,
        expected: Sequence[tuple[str, str]] | None = None,
    ) -> None:
        super().__init__()
        self.calls, self.expected = list[tuple[str, str]](), expected
        self.leaves, self.example, self.fixed, self.strict = leaves, example, fixed, strict
        self.unroll, self.loops, self.forced, self.free = unroll, False, forced or {}, free
        self.record, self.outputs = record, list[tuple[str, list[Tensor]]]()
        self._failed_as_leaf: Exception | None = None
        self.broken: dict[str, str] = {}
        self.watch = MemoryWatch()
        self.returned: list[Tensor] = []
        self._thread = threading.get_ident()
        self._parameters: dict[str, TracedValue] = {}
        self._paths: dict[Tensor, str] = {}
        self.created, self.new_constants = created, set[str]()
        self._constant_versions: dict[Tensor, int] = {}
        self._written_dependence: dict[int, Dependence] = {}

    def trace_model(self, model: nn.Module) -> fx.Graph:
        """Trace a model into a graph.

        Raises:
            TraceError: the model's own forward cannot be traced. A submodule becomes a leaf instead.
            InputError: the model does not run on the example.
        """
        self.run = ExampleRun(model, _TRACE)
        self.assumptions = Assumptions(self.create_node, _TRACE, type(model).__name__, self.forced, self.free)
        self._device = device_of(model)
        self._paths = {p: n for n, p in (*model.named_buffers(), *model.named_parameters())}
        buffers = [(module._buffers, dict(module._buffers)) for module in model.modules() if _has_buffers(module)]
        try:
            with (
                _TRACE_LOCK,
                torch.inference_mode(False),
                torch.no_grad(),
                recording_calls(self.create_proxy, self._traces, self._create if self.created else None),
            ):
                graph = super().trace(model)  # outside inference mode, whose tensors have no version counter
        except FxqError:
            raise
        except Exception as error:  # the user's forward may raise any type of error
            raise TraceError(locate_failure(model, error).error()) from error
        finally:  # a forward may have set a buffer to a traced value, but the graph reads the model's buffer
            for current, before in buffers:
                current.update(before)
        self.assumptions.add_checks(self.graph)
        self._erase_unused()
        return graph

    def _traces(self) -> bool:
        """Whether this thread runs a forward of the model, rather than a layer on the example."""
        return not self.run.is_on and threading.get_ident() == self._thread

    # ---- inputs and outputs

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Arguments of forward: traced values, or plain values where the recipe fixes them."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        entries = arguments(self.root, self.example, self.fixed)
        inputs = [self._input(entry) if can_be_default(entry.default) else entry.value for entry in entries]
        for entry, value in zip(entries, inputs, strict=True):  # all inputs come first in a graph
            value = self._expand(value, value._value) if is_value(value) else value
            if entry.name.startswith("*"):
                args.extend(value)
            elif entry.positional:
                args.append(value)
            elif value is not entry.value or not entry.left_out:  # decorators may look at which arguments are passed
                kwargs[entry.name] = value

        def forward(root: nn.Module) -> Any:
            result = root.forward(*args, **kwargs)
            self._check_swallowed(0)
            self.returned = list(example_tensors(result))
            return result

        return forward, [self.root]

    def _input(self, entry: Any) -> Any:
        node = self.create_node("placeholder", entry.name, entry.default, {})
        with untraced():
            value = copied(entry.value)
        self._record_value(node, value)
        self.assumptions.add_input(entry, node)
        return value if entry.fixed else TracedValue(node, self, value, Dependence.SIZES)

    def _expand(self, value: TracedValue, example: Any) -> Any:
        """Container of inputs of the example's type, with traced values for tensors; plain values stay plain."""
        if isinstance(example, Tensor):
            value._own_dependence = Dependence.DATA
            return value
        kind: Any = type(example)
        if kind in (dict, OrderedDict):
            return kind((key, self._expand(value[key], example[key])) for key in example)  # type: ignore[index]
        if kind in (tuple, list) or (isinstance(example, tuple) and hasattr(example, "_fields")):
            parts = [self._expand(value[i], part) for i, part in enumerate(example)]  # type: ignore[index]
            return kind(*parts) if hasattr(example, "_fields") else kind(parts)
        return example if is_plain(example) else value

    def _erase_unused(self) -> None:
        """Erase reads of sizes and parts that only the trace needed."""
        for node in reversed(self.graph.nodes):
            if not node.users and node.meta.get(_READS_ONLY):
                self.graph.erase_node(node)
            node.meta.pop(_READS_ONLY, None)

    # ---- nodes

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Any = None,
    ) -> Any:
        """Run a call on the example and record it. Returns its traced value, or None if the call returns None."""
        if kind == "call_function":
            selected = sliced(target, args)
            if selected is not None:
                return selected
        if kind in ("call_function", "call_method"):
            args, kwargs = unpacked(target, args, kwargs)
        self._note_assumptions(kind, target, args, kwargs)
        before = self.watch.versions(self.run.values((args, kwargs)))
        inside = next((p for p, _ in reversed(self.module_stack.values())), "")
        result = self.run.call(kind, target, args, kwargs, target if kind == "call_module" else inside)
        node: fx.Node = super().create_proxy(kind, target, args, kwargs, name, type_expr).node
        changes = self.watch.changed(before)
        self._record_value(node, result, changes)
        origin = dependence_of(kind, target, args, kwargs)
        for block in changes:
            self._written_dependence[block] = max(origin, self._written_dependence.get(block, origin))
        value = TracedValue(node, self, result, origin)
        if not changes and result is not None and not isinstance(result, Tensor) and kind != "call_module":
            node.meta[_READS_ONLY] = value._dependence < Dependence.DATA or target is operator.getitem
        if result is None and target in (operator.getitem, getattr):
            self.assumptions.plain_value(value, "none", allow_data=True)
        if node.meta.get(_READS_ONLY) and self.created and origin is Dependence.CONSTANT:
            return result if next(tensors(result), None) is None else value
        return None if result is None else value

    def _note_assumptions(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record what a call assumes of its inputs' ranks. Raises `Untraceable` inside of autocast."""
        self.assumptions.forget()
        if torch.is_autocast_enabled(self._device):
            raise Untraceable(_AUTOCAST, remedy=_WITHOUT_AUTOCAST)
        if (type(self.root.get_submodule(target)) if kind == "call_module" else target) in _RANK_DEPENDENT:
            for value in traced_values((args, kwargs)):
                self.assumptions.reads_rank(value)
        self.assumptions.squeezes = self.assumptions.squeezes or target in _SQUEEZES

    def dependence(self, value: TracedValue) -> Dependence:
        """Inputs that a traced value depends on, through its operands and writes to its memory."""
        spot = self.watch.spot(value.node) if self._written_dependence else None
        return (
            value._own_dependence
            if spot is None
            else max(value._own_dependence, self._written_dependence.get(spot[0], Dependence.CONSTANT))
        )

    def changes_plain_tensors(self) -> bool:
        """Whether the forward changes tensors that it creates, so that they are not constants.

        If so, the model must be traced again with `created=True`.
        """
        if any(tensor._version != version for tensor, version in self._constant_versions.items()):
            return True
        plain = {block for n in self.graph.find_nodes(op="get_attr") if _is_new(n) for block in info(n).traced.memory}
        return any(not plain.isdisjoint(info(node).traced.changes) for node in self.graph.nodes)

    def _create(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function without traced arguments; its new tensors become traced values.

        The call itself is traced if it returns a view of a plain tensor, or if traced calls changed an argument.
        """
        operands = list(tensors((args, kwargs)))
        if not self._traces():
            return function(*args, **kwargs)
        result = None if any(map(self.run.has_changed, operands)) else function(*args, **kwargs)
        results = list(tensors(result))
        if result is not None and (not results or any(new is old for new in results for old in operands)):
            return result
        blocks = set(self.watch.memory(operands))
        if result is None or not blocks.isdisjoint(self.watch.memory(results)):
            args, kwargs = mapped(
                (args, kwargs), lambda leaf: self._as_traced(leaf) if isinstance(leaf, Tensor) else leaf
            )
            if getattr(function, "__name__", "") == "__get__":
                return getattr(args[0], function.__self__.__name__)
            return function(*args, **kwargs)
        return mapped(result, lambda leaf: self._as_traced(leaf, True) if isinstance(leaf, Tensor) else leaf)

    def _as_traced(self, tensor: Tensor, new: bool = False) -> TracedValue:
        """Traced value for a plain tensor; `new`: the forward created it."""
        node = self._attribute(tensor)
        if new:
            self.new_constants.add(str(node.target))
        return TracedValue(node, self, self.run.copy(tensor), Dependence.CONSTANT)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Make a node with its module path and the line of user code that it comes from."""
        node = super().create_node(kind, target, *args, **kwargs)
        if not is_check(node):
            self._follow(kind, target)
        inside = list(node.meta.get("nn_module_stack", {}).values())
        path = str(node.target) if node.op == "call_module" else str(inside[-1][0]) if inside else ""
        source = "" if kind in ("placeholder", "output") else user_line(_TRACE)
        if isinstance(self.root, Exported):
            path, source = self.root.place()
        set_info(node, path=path, source=source)
        if kind == "output" and len(self.returned) == 1:
            self._record_value(node, self.returned[0])
        return node

    def _follow(self, kind: str, target: Any) -> None:
        """Record a call. Raises TraceError if `expected` has another in its place."""
        at, expected = len(self.calls), self.expected
        self.calls.append((kind, str(target)))
        if expected is not None and list(expected[at : at + 1]) != self.calls[at:]:
            self.expected = None
            raise TraceError("the trace differs from the one that it is compared with.")

    def create_arg(self, a: Any) -> Any:
        """Convert a traced value, or an object that holds traced values, to an argument of a node."""
        if is_value(a):
            return a.node
        if isinstance(a, Tensor):
            return self._attribute(a)
        if isinstance(a, np.generic):  # torch.fx would write np.float64(1.0) into code that knows no np
            return super().create_arg(a.item())
        if is_own_container(a):
            return self._container(a)
        try:
            return super().create_arg(a)
        except NotImplementedError:
            raise Untraceable(_NO_ARGUMENT.format(kind=type(a).__name__), remedy=self._remedy_for_object()) from None

    def _container(self, value: Any) -> fx.Node:
        """Node that constructs an object or container of a user-defined class."""
        kind, parts = f"{type(value).__module__}:{type(value).__qualname__}", content_of(value)
        try:
            output = self.create_proxy("call_function", make_output, (kind, parts), {})
        except InputError as error:
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            raise Untraceable(cannot_construct(type(value), words_of(cause)), remedy=PLAIN_CONTAINERS) from error
        if any(a is not b for a, b in zip_longest(tensors(output._value), tensors(self.run.values(parts)))):
            raise Untraceable(cannot_construct(type(value), "its constructor changes them"), remedy=PLAIN_CONTAINERS)
        return cast(fx.Node, output.node)

    def _remedy_for_object(self) -> str:
        """Remedy for an object that a graph cannot hold."""
        if "use_cache" in inspect.signature(self.root.forward).parameters:
            return "If it is the cache of a decoder, disable it: recipe.fix_args(use_cache=False)."
        return PLAIN_CONTAINERS

    def _attribute(self, tensor: Tensor) -> fx.Node:
        """Make the node that reads a tensor of the model, or a constant that a forward created."""
        path = self._paths.get(tensor)
        node: Any = super().create_arg(tensor) if path is None else self.create_node("get_attr", path, (), {})
        self._paths[tensor] = str(node.target)
        if path is None and not tensor.is_inference():
            self._constant_versions[tensor] = tensor._version
        self._record_value(node, self.run.copy(tensor))
        return cast(fx.Node, node)

    def _record_value(self, node: fx.Node, value: Any, changes: tuple[int, ...] = ()) -> None:
        """Record shape, dtype and memory of a node's value."""
        self.watch.see(node, value)
        shape, dtype = tensor_meta(value)
        set_info(node, shape=shape, dtype=dtype, traced=TracedInfo(self.watch.memory(value), changes))

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return a parameter of the model as a traced value, and other attributes unchanged."""
        path = self._paths.get(attr_val) if isinstance(attr_val, nn.Parameter) and self._traces() else None
        if path is None:
            return attr_val
        if path not in self._parameters:
            value = self.run.copy(attr_val)
            node = self.create_node("get_attr", path, (), {})
            self._record_value(node, value)
            self._parameters[path] = TracedValue(node, self, value, Dependence.CONSTANT)
        return self._parameters[path]

    # ---- modules

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is a leaf: named by the recipe, in the op table, or a module of torch.

        nn.Transformer is an exception: it only calls its encoder and decoder, and is traced.
        """
        if is_kept(module_qualified_name, self.leaves):
            return True
        if isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) or "forward" in vars(m):
            return False  # a forward set on the object replaces that of its type, which the op table describes
        own = type(m).__mro__[1] if parametrize.is_parametrized(m) else type(m)
        is_whole = own.__module__.startswith(("torch.nn.", "torch.ao.nn.")) and own is not nn.Transformer
        return (is_whole or OPS.of_call(own) is not None) and not has_traced_weights(m)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace a call of a module of the model. Modules that a graph cannot call, such as wrappers, run as code."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        path = self.submodule_paths.get(m) if self.submodule_paths else None
        inside = wrapped(m)
        if inside is not None and (self.run.is_on or not is_kept(path or "", self.leaves)):
            return inside(*args, **kwargs)
        if m._compiled_call_impl is not None:  # set by module.compile(); the compiled call cannot be traced
            forward = m._call_impl
        if self.run.is_on:
            return forward(*args, **kwargs)
        if isinstance(m, parametrize.ParametrizationList):
            return self.run.fold(m, forward, args, kwargs)
        if path is None:  # created in forward, or in a plain list: a node cannot call it
            if any(p not in self._paths for p in m.parameters()):
                raise Untraceable(_NO_PATH.format(kind=type(m).__name__), remedy=_LIST_MODULES)
            return forward(*args, **kwargs)
        return self._traced_or_kept(m, path, forward, args, kwargs)

    def _traced_or_kept(
        self, m: nn.Module, path: str, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace into a module, or keep it as a leaf if it is one or if tracing into it fails."""
        stack, refusals = dict(self.module_stack), len(self.assumptions.refusals)
        try:
            if isinstance(m, torch.jit.ScriptModule) and not self.is_leaf_module(m, path):
                raise Untraceable(_TORCHSCRIPT)
            result = super().call_module(m, forward, args, kwargs)
            self._check_swallowed(refusals)
            if self.is_leaf_module(m, path):
                self._show_to_hooks(m, args, kwargs, result)
            if self.record and not self.is_leaf_module(m, path):
                with untraced():
                    self.outputs.append((path, copied(list(example_tensors(result)))))
            return result
        except Exception as error:
            del self.assumptions.refusals[refusals:]
            self.module_stack.clear()
            self.module_stack.update(stack)
            if self.strict or self.is_leaf_module(m, path):
                raise
            return self._keep(m, path, args, kwargs, error)

    def _show_to_hooks(self, m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Call the forward hooks of a leaf with its traced result, which forward reads where a hook stores it.

        The graph calls the leaf with its hooks, so what they return here does not matter.
        """
        refusals = len(self.assumptions.refusals)
        call_forward_hooks(m, args, kwargs, result)
        del self.assumptions.refusals[refusals:]

    def _check_swallowed(self, start: int) -> None:
        """Raise the first refusal from index `start` on, if any.

        Raises:
            Untraceable: the forward caught a refusal in a `try`, and then took a path that it would not take on data.
        """
        if len(self.assumptions.refusals) > start:
            raise self.assumptions.refusals[start]

    def _keep(self, m: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        """Call a module that cannot be traced as a leaf. Raises the error again if it does not run as a leaf either."""
        try:
            if error is self._failed_as_leaf:
                raise error
            output = self.create_proxy("call_module", path, args, kwargs)
        except InputError:
            self._failed_as_leaf = error
            raise error from None
        self.broken[path] = locate_failure(self.root, error).note()
        return output

    # ---- plain values

    def rows(self, value: TracedValue) -> Iterator[Any]:
        """Rows of a tensor, for a loop over them, which is unrolled if it depends on sizes only, or if `unroll`."""
        self.loops = True
        if value._dependence is Dependence.DATA and not self.unroll:
            raise self.assumptions.refuse("a loop over the rows of a tensor", value.node)
        return iter([value[i] for i in range(len(value))])  # type: ignore[index]


def _is_new(constant: fx.Node) -> bool:
    """Whether a `get_attr` node reads a tensor that the forward created, not one of the model."""
    return str(constant.target).startswith("_tensor_constant")


def _has_buffers(module: nn.Module) -> bool:
    return not isinstance(module, torch.jit.ScriptModule)  # holds its buffers in C++


_TRACE = Tracer.trace_model.__code__
_RANK_DEPENDENT = (nn.MultiheadAttention, nn.TransformerDecoderLayer, nn.functional.multi_head_attention_forward)
"""Modules and functions that compute something else if the inputs have no batch axis."""
_SQUEEZES = ("squeeze", "squeeze_", torch.squeeze)
_READS_ONLY = "fxq_idle"
"""Metadata key of nodes without side effects, such as reads of sizes, which are erased if they have no users."""


_AUTOCAST = "forward enables torch.autocast, which a graph does not record."
_WITHOUT_AUTOCAST = (
    "Disable it (torch.autocast(..., enabled=False)), as quantized ops compute on integers, or keep the module "
    'as a float leaf: recipe.leaf("path.of.module").'
)
_NO_PATH = (
    "it calls a {kind} that is not a submodule of the model, but is in a plain list or dict, or created in forward."
)
_LIST_MODULES = "Store it in an nn.ModuleList or nn.ModuleDict, or set it as an attribute in __init__."
_TORCHSCRIPT = (
    "a TorchScript module has no Python code to trace: pass the nn.Module that it was scripted from, not the script."
)
_NO_ARGUMENT = "an object of type {kind} is returned or passed to a layer, and a graph cannot hold it."


def is_kept(path: str, leaves: tuple[str, ...]) -> bool:
    """Whether the recipe keeps a module as a leaf."""
    return any(path_matches(path, pattern) for pattern in leaves)
