"""Tracer of `torch.fx` that runs each call on the example while it records it as a node."""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from types import CodeType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx, nn

from fxq.common.data import device_of
from fxq.common.metrics import tensors
from fxq.common.trees import mapped
from fxq.errors import InputError, TraceError, words_of
from fxq.graph.analysis.memory import MemoryWatch
from fxq.graph.guards import is_own_container, make_output
from fxq.graph.info import TracedInfo, info, set_info
from fxq.graph.query import is_check, tensor_meta
from fxq.tracing.assumptions import Assumptions
from fxq.tracing.dependence import dependence_of
from fxq.tracing.example_run import ExampleRun
from fxq.tracing.exported_program import Exported
from fxq.tracing.failure import Untraceable, user_line
from fxq.tracing.outputs import PLAIN_CONTAINERS, cannot_construct, content_of
from fxq.tracing.proxies import Dependence, TracedValue, is_value, traced_values
from fxq.tracing.tuples import sliced, unpacked

READS_ONLY = "fxq_idle"
"""Metadata key of nodes without side effects, such as reads of sizes, which are erased if they have no users."""


class CallRecorder(fx.Tracer):
    """Tracer that runs each call on the example and records it as a node with module path, source line, shape, memory.

    Attributes:
        run: the run of the model on the example.
        assumptions: what the graph assumes of the sizes and plain values of its inputs.
        watch: which values share memory.
        returned: tensors that the model returns for the example, in order.
        loops: whether a forward loops over the rows of a tensor.
        unroll: whether such a loop is unrolled.
        created: whether tensors that the forward creates, such as torch.zeros, are traced, because it changes them.
        new_constants: attribute paths of these tensors.
        forced: outcome of branches on sizes by line (see `Assumptions`).
        free: lines whose branches on sizes are not checked (see `Assumptions`).
        calls: kind and target of every node other than checks, in the order of their creation.
        expected: `calls` of another trace. The trace ends with an error where it differs; None: it does not end.
    """

    run: ExampleRun
    assumptions: Assumptions

    def __init__(
        self,
        unroll: bool = False,
        forced: Mapping[str, bool] | None = None,
        free: Collection[str] = (),
        created: bool = False,
        expected: Sequence[tuple[str, str]] | None = None,
    ) -> None:
        super().__init__()
        self.calls, self.expected = list[tuple[str, str]](), expected
        self.unroll, self.loops, self.forced, self.free = unroll, False, forced or {}, free
        self.watch = MemoryWatch()
        self.returned: list[Tensor] = []
        self._thread = threading.get_ident()
        self._parameters: dict[str, TracedValue] = {}
        self._paths: dict[Tensor, str] = {}
        self.created, self.new_constants = created, set[str]()
        self._constant_versions: dict[Tensor, int] = {}
        self._written_dependence: dict[int, Dependence] = {}

    def begin(self, model: nn.Module, caller: CodeType) -> None:
        """Set the model that is traced.

        Args:
            model: the model.
            caller: code of the function that calls its forward; the frames below it belong to the code of the user.
        """
        self._caller = caller
        self.run = ExampleRun(model, caller)
        self.assumptions = Assumptions(self.create_node, caller, type(model).__name__, self.forced, self.free)
        self._device = device_of(model)
        self._paths = {p: n for n, p in (*model.named_buffers(), *model.named_parameters())}

    def _traces(self) -> bool:
        """Whether this thread runs a forward of the model, rather than a layer on the example."""
        return not self.run.is_on and threading.get_ident() == self._thread

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
            node.meta[READS_ONLY] = value._dependence < Dependence.DATA or target is operator.getitem
        if result is None and target in (operator.getitem, getattr):
            self.assumptions.plain_value(value, "none", allow_data=True)
        if node.meta.get(READS_ONLY) and self.created and origin is Dependence.CONSTANT:
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
        source = "" if kind in ("placeholder", "output") else user_line(self._caller)
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

    def rows(self, value: TracedValue) -> Iterator[Any]:
        """Rows of a tensor, for a loop over them, which is unrolled if it depends on sizes only, or if `unroll`."""
        self.loops = True
        if value._dependence is Dependence.DATA and not self.unroll:
            raise self.assumptions.refuse("a loop over the rows of a tensor", value.node)
        return iter([value[i] for i in range(len(value))])  # type: ignore[index]


def _is_new(constant: fx.Node) -> bool:
    """Whether a `get_attr` node reads a tensor that the forward created, not one of the model."""
    return str(constant.target).startswith("_tensor_constant")


_RANK_DEPENDENT = (nn.MultiheadAttention, nn.TransformerDecoderLayer, nn.functional.multi_head_attention_forward)
"""Modules and functions that compute something else if the inputs have no batch axis."""
_SQUEEZES = ("squeeze", "squeeze_", torch.squeeze)

_AUTOCAST = "forward enables torch.autocast, which a graph does not record."
_WITHOUT_AUTOCAST = (
    "Disable it (torch.autocast(..., enabled=False)), as quantized ops compute on integers, or keep the module "
    'as a float leaf: recipe.leaf("path.of.module").'
)
_NO_ARGUMENT = "an object of type {kind} is returned or passed to a layer, and a graph cannot hold it."
