"""Queries on graph nodes: the op that a node calls, its arguments, constants and users. Nothing here edits the graph.

`fxq/rewriting/rewriter.py` edits graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph_module import _copy_attr

from fxq.graph.guards import check_fixed, check_same, check_sizes
from fxq.graph.info import NodeInfo, Plan, info
from fxq.graph.uncompiled import UncompiledModule
from fxq.ops import OPS
from fxq.ops.table import META, Op
from fxq.quant.observer_base import Observer


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """Copy of a node's fields, which later edits of the graph do not change.

    Cheaper than a copied `fx.Graph`, whose reference cycles only the garbage collector frees.

    Attributes:
        node: the node; the arguments of other snapshots refer to it.
        name: its name.
        op: its kind of call, e.g. `call_function`.
        target: the function, method name or path that it calls or reads.
        args: its arguments.
        kwargs: its keyword arguments.
        about: its metadata.
    """

    node: fx.Node
    name: str
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    about: NodeInfo

    @classmethod
    def of(cls, node: fx.Node) -> NodeSnapshot:
        """Snapshot of a node as it is now."""
        return cls(node, node.name, node.op, node.target, node.args, node.kwargs, info(node))


def arguments_of(node: fx.Node | NodeSnapshot, values: Mapping[fx.Node, Any]) -> tuple[Any, Any]:
    """Arguments and keyword arguments of a node, with each node in them replaced by its entry in `values`."""
    return fx.node.map_arg(node.args, values.__getitem__), fx.node.map_arg(node.kwargs, values.__getitem__)


def op_of(node: fx.Node | NodeSnapshot) -> Op | None:
    """The op that a canonical node calls; None for other nodes (leaves, units, weights, inputs)."""
    return OPS.of_target(node.target) if node.op == "call_function" else None


def called_name(node: fx.Node) -> str:
    """Name of the op, function or method that a node calls."""
    op = op_of(node)
    return op.name if op is not None else str(getattr(node.target, "__name__", node.target))


def is_op(node: Any, *names: str) -> bool:
    """Whether `node` is a canonical call of one of these ops."""
    op = op_of(node) if isinstance(node, (fx.Node, NodeSnapshot)) else None
    return op is not None and op.name in names


def options_of(node: fx.Node | NodeSnapshot) -> dict[str, Any]:
    """All options of a canonical node, defaults included."""
    op = op_of(node)
    return {**op.options, **node.kwargs} if op is not None else dict(node.kwargs)


def argument(node: fx.Node, name: str) -> Any:
    """The tensor argument `name` of a canonical node; None if it is missing."""
    op = op_of(node)
    if op is None or name not in op.tensors:
        return None
    i = op.tensors.index(name)
    return node.args[i] if i < len(node.args) else None


def activation_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes that a canonical node reads as activations, in order, with repetitions; none for other nodes."""
    op = op_of(node)
    return list(flat_nodes([argument(node, name) for name in op.traits.inputs])) if op is not None else []


def states_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that hold hidden states of a recurrent layer: the layer itself, and its initial state if it has one."""
    recurrence = op.traits.recurrence if (op := op_of(node)) is not None else None
    first = argument(node, recurrence.states[0]) if recurrence is not None else None
    return [node, first] if isinstance(first, fx.Node) else [node]


def swapped(values: Any, new: Mapping[fx.Node, Any]) -> Any:
    """Nested arguments with the nodes that are keys of `new` replaced."""
    return fx.node.map_arg(values, lambda node: new.get(node, node))


def flat_nodes(values: Any) -> Iterator[fx.Node]:
    """Every node inside nested arguments, in order, with repetitions."""
    nodes: list[fx.Node] = []
    fx.node.map_arg(values, lambda node: nodes.append(node) or node)  # type: ignore[func-returns-value]
    return iter(nodes)


def read_attribute(root: nn.Module, path: str) -> Any:
    """The attribute at a dotted path below `root`."""
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part)
    return value


def module_of(graph: fx.Graph, gm: fx.GraphModule) -> fx.GraphModule:
    """Module of a graph that shares the tensors and modules of `gm`.

    Unlike `fx.GraphModule(gm, graph)`, it also has the float tensors that integer weights stand for. No node reads
    them, but an op that returns to float does.
    """
    module = UncompiledModule(gm, graph)
    present = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    for path in {info(node).stands_for for node in graph.nodes} - present - {""}:
        _copy_attr(gm, module, path)
    return module


def constant(gm: fx.GraphModule, node: Any) -> Tensor | None:
    """The tensor that a `get_attr` node reads; None for anything else."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = read_attribute(gm, str(node.target))
    return value if isinstance(value, Tensor) else None


def submodule(gm: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """The module that a `call_module` node calls, or None."""
    return gm.get_submodule(str(node.target)) if node.op == "call_module" else None


DYNAMIC_GRID_OPS = ("choose_scale", "choose_zero_point")
"""The ops that compute the scale and the zero point of a dynamic grid."""
CONVERSIONS = ("quantize", "dequantize", "requantize", *DYNAMIC_GRID_OPS)
"""The ops that convert between floats and integers, or between grids, and those that compute dynamic grids."""
ARITHMETIC = frozenset({"_operator", "builtins", "math"})
"""Modules of Python's functions of numbers."""
_METADATA_METHODS = frozenset({"size", "dim", "numel", "stride", "ndimension", "nelement"})
_METADATA_ATTRIBUTES = frozenset({"shape", "ndim", "device"})
_METADATA_FUNCTIONS = frozenset({torch.numel, torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default})
_FILL_METHODS = frozenset({"new_zeros", "new_ones", "new_full", "new_empty"})
_FILL_FUNCTIONS = frozenset({torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like})


def fills_like(node: fx.Node) -> bool:
    """Whether the node creates a tensor of one repeated value, with the dtype and device of its input."""
    return node.target in (_FILL_METHODS if node.op == "call_method" else _FILL_FUNCTIONS)


def is_check(node: fx.Node) -> bool:
    """Whether the node only checks that the graph is run as it was traced (see `fxq/graph/guards.py`)."""
    return node.op == "call_function" and node.target in (check_fixed, check_same, check_sizes)


def taken_part(user: fx.Node, node: fx.Node) -> Any:
    """Index or name by which `user` takes one value of the tuple or mapping of `node`; None if it takes all of it."""
    takes = user.op == "call_function" and user.target in (operator.getitem, getattr) and user.args[0] is node
    return user.args[1] if takes and not isinstance(user.args[1], (slice, fx.Node)) else None


def taken_from(value: fx.Node) -> fx.Node:
    """The node that computes a value: the module call, if `value` takes one of its several values; else `value`."""
    source = value.args[0] if value.args else None
    if isinstance(source, fx.Node) and source.op == "call_module" and not info(source).is_tensor:
        return source if isinstance(taken_part(value, source), int) else value
    return value


def values_of(node: fx.Node) -> list[fx.Node]:
    """Nodes that stand for the values of a node, in order: the node itself, or the users that take its several values.

    Inverse of `taken_from`.
    """
    takers = [user for user in node.users if taken_from(user) is node]
    return sorted(takers, key=lambda taker: taken_part(taker, node)) or [node]


def plan_of(node: fx.Node) -> Plan | None:
    """Plan of a node; for one of several values, the plan of the node that computes them."""
    return info(node).plan or info(taken_from(node)).plan


def makes_no_tensor(node: fx.Node) -> bool:
    """Whether the node returns only plain values, such as sizes and numbers, and no tensors."""
    about = info(node)
    calls = node.op in ("call_function", "call_method") and op_of(node) is None
    return calls and META in node.meta and not about.is_tensor and not about.traced.memory


def reads_only_metadata(node: fx.Node) -> bool:
    """Whether the node reads only the shape or device of its input, so that the input may be integers or floats."""
    if _is_only_counted(node):
        return True
    if node.op == "call_method":
        return node.target in _METADATA_METHODS or (fills_like(node) and "dtype" in node.kwargs)
    if node.op != "call_function":
        return False
    if is_check(node):
        return node.target is check_sizes or node.kwargs.get("how") in ("len", "keys")
    if node.target is getattr:
        return node.args[1] in _METADATA_ATTRIBUTES
    return node.target in _METADATA_FUNCTIONS or (fills_like(node) and "dtype" in node.kwargs)


def is_size(node: fx.Node) -> bool:
    """Whether the node reads sizes or computes with them, so that its value follows from the input shapes."""
    if not makes_no_tensor(node) or is_check(node):
        return False
    arithmetic = getattr(node.target, "__module__", "") in ARITHMETIC and bool(node.all_input_nodes)
    return reads_only_metadata(node) or (arithmetic and all(map(makes_no_tensor, node.all_input_nodes)))


def _is_only_counted(node: fx.Node) -> bool:
    """Whether the node splits a tensor, and only the number of parts is read."""
    if not node.users or not all(is_check(user) and user.kwargs.get("how") == "len" for user in node.users):
        return False
    row = OPS.of_call(node.target)
    return row is not None and row[1].pick is not None and row[0].traits.layout


_CREATING_FUNCTIONS = frozenset({torch.arange, torch.zeros, torch.ones, torch.full})


def is_pure(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the node can be removed if its value is not read: ops, units, kernels, weights, metadata, new tensors.

    A module is pure if it has the attribute `pure = True`.
    """
    module = submodule(gm, node)
    if module is not None:
        return getattr(module, "pure", False) is True
    if node.target is operator.getitem and (makes_no_tensor(node) or _is_pure_module(gm, node.args[0])):
        return True
    reads_sizes = is_size(node) or (reads_only_metadata(node) and not is_check(node))
    creates = node.target in _CREATING_FUNCTIONS and node.kwargs.get("out") is None
    return node.op == "get_attr" or op_of(node) is not None or reads_sizes or creates


def _is_pure_module(gm: fx.GraphModule, value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "call_module" and is_pure(gm, value)


def producer_of(value: Any) -> Any:
    """The node that computes a value, conversions skipped."""
    while is_op(value, *CONVERSIONS):
        value = value.args[0]
    return value


def dynamic_grid_ops(value: Any) -> tuple[fx.Node, ...]:
    """The ops that compute the dynamic grid of a quantize or dequantize: scale, then zero point; empty if static."""
    if not is_op(value, "quantize", "dequantize"):
        return ()
    read = (value.kwargs.get(name) for name in ("scale", "zero_point"))
    return tuple(node for node in read if isinstance(node, fx.Node) and is_op(node, *DYNAMIC_GRID_OPS))


def unobserved(gm: fx.GraphModule, node: fx.Node) -> fx.Node:
    """The value that an observer watches; for other nodes, the node itself."""
    while isinstance(submodule(gm, node), Observer):
        (node,) = node.all_input_nodes
    return node


def tensor_meta(value: Any) -> tuple[tuple[int, ...] | None, torch.dtype | None]:
    """Shape and dtype of a value; (None, None) if it is not a tensor."""
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else (None, None)


def merge_origins(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """Names of the traced ops that these nodes represent together, in order, each once."""
    return tuple(dict.fromkeys(name for node in nodes for name in info(node).origins))
