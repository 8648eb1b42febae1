"""Reading a graph: which op a node calls, what it reads, and the other small questions that passes ask.

Changing a graph is the rewriter's business (`fxq/rewriting/rewriter.py`); nothing here edits.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxq.graph.guards import check_fixed, check_same, check_sizes
from fxq.graph.info import NodeInfo, Plan, info
from fxq.ops import OPS
from fxq.ops.table import META, Op
from fxq.quant.observer_base import Observer


@dataclass(frozen=True, slots=True)
class Step:
    """A node as it was when somebody read it: edits of its graph do not reach it.

    Several in a tuple are no graph: the parts of one refer to each other in circles, which only the collector frees.

    Attributes:
        node: which node it was; in the arguments of other steps, this stands for its value.
        name: its name.
        op: its kind of call, e.g. `call_function`.
        target: what it calls.
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
    def of(cls, node: fx.Node) -> Step:
        """A node as it is now."""
        return cls(node, node.name, node.op, node.target, node.args, node.kwargs, info(node))


def arguments_of(node: fx.Node | Step, given: Mapping[fx.Node, Any]) -> tuple[Any, Any]:
    """The arguments and keyword arguments of a node with what is given for each node in the place of the node."""
    return fx.node.map_arg(node.args, given.__getitem__), fx.node.map_arg(node.kwargs, given.__getitem__)


def op_of(node: fx.Node | Step) -> Op | None:
    """The op that a canonical node calls; None for anything else (leaves, units, weights, inputs)."""
    return OPS.of_target(node.target) if node.op == "call_function" else None


def called_name(node: fx.Node) -> str:
    """The op of a call, or the name of the function or method that it calls."""
    op = op_of(node)
    return op.name if op is not None else str(getattr(node.target, "__name__", node.target))


def is_op(node: Any, *names: str) -> bool:
    """Whether `node` is a canonical call of one of these ops."""
    op = op_of(node) if isinstance(node, (fx.Node, Step)) else None
    return op is not None and op.name in names


def options_of(node: fx.Node | Step) -> dict[str, Any]:
    """All options of a canonical node, defaults included."""
    op = op_of(node)
    return {**op.options, **node.kwargs} if op is not None else dict(node.kwargs)


def argument(node: fx.Node, name: str) -> Any:
    """The tensor argument `name` of a canonical node, or None when it is not given."""
    op = op_of(node)
    if op is None or name not in op.tensors:
        return None
    i = op.tensors.index(name)
    return node.args[i] if i < len(node.args) else None


def states_of(node: fx.Node) -> list[fx.Node]:
    """A recurrent layer, whose value its hidden states are, and the one that it begins with, where that is given."""
    recurrence = op.traits.recurrence if (op := op_of(node)) is not None else None
    first = argument(node, recurrence.states[0]) if recurrence is not None else None
    return [node, first] if isinstance(first, fx.Node) else [node]


def swapped(values: Any, new: Mapping[fx.Node, Any]) -> Any:
    """Nested arguments with others in the place of some nodes."""
    return fx.node.map_arg(values, lambda node: new.get(node, node))


def flat_nodes(values: Any) -> Iterator[fx.Node]:
    """Every node inside nested arguments, in order, repetitions kept."""
    found: list[fx.Node] = []
    fx.node.map_arg(values, lambda node: found.append(node) or node)  # type: ignore[func-returns-value]
    return iter(found)


def read_attribute(root: nn.Module, path: str) -> Any:
    """The attribute at a dotted path below `root`."""
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part)
    return value


def constant(gm: fx.GraphModule, node: Any) -> Tensor | None:
    """The tensor that a `get_attr` node reads, or None when `node` is something else."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = read_attribute(gm, str(node.target))
    return value if isinstance(value, Tensor) else None


def submodule(gm: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """The module that a `call_module` node calls, or None."""
    return gm.get_submodule(str(node.target)) if node.op == "call_module" else None


MEASURES = ("choose_scale", "choose_zero_point")
"""The ops that measure a grid."""
CONVERSIONS = ("quantize", "dequantize", "requantize", *MEASURES)
"""The ops between floats and integers of one grid, and from one grid to another; and what measures a grid."""
ARITHMETIC = frozenset({"_operator", "builtins", "math"})
"""The modules of Python's own functions of numbers."""
_METADATA_METHODS = frozenset({"size", "dim", "numel", "stride", "ndimension", "nelement"})
_METADATA_ATTRIBUTES = frozenset({"shape", "ndim", "device"})
_METADATA_FUNCTIONS = frozenset({torch.numel, torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default})
_FILL_METHODS = frozenset({"new_zeros", "new_ones", "new_full", "new_empty"})
_FILL_FUNCTIONS = frozenset({torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like})


def fills_like(node: fx.Node) -> bool:
    """Whether the node makes a tensor of one value, of its input's type and device and perhaps shape."""
    return node.target in (_FILL_METHODS if node.op == "call_method" else _FILL_FUNCTIONS)


def is_check(node: fx.Node) -> bool:
    """Whether the node does nothing but check that the graph is run as it was traced (see `fxq/graph/guards.py`)."""
    return node.op == "call_function" and node.target in (check_fixed, check_same, check_sizes)


def taken_part(user: fx.Node, node: fx.Node) -> Any:
    """The index or name by which `user` takes one value of a tuple or mapping; None when it uses all of it."""
    takes = user.op == "call_function" and user.target in (operator.getitem, getattr) and user.args[0] is node
    return user.args[1] if takes and not isinstance(user.args[1], (slice, fx.Node)) else None


def taken_from(value: fx.Node) -> fx.Node:
    """The node that computes a value: where it is one of several that a module returns, the call of that module."""
    source = value.args[0] if value.args else None
    if isinstance(source, fx.Node) and source.op == "call_module" and not info(source).is_tensor:
        return source if isinstance(taken_part(value, source), int) else value
    return value


def values_of(node: fx.Node) -> list[fx.Node]:
    """The values that a node computes: its own, or the nodes that take one of several, in order. Inverse of that."""
    parts = [user for user in node.users if taken_from(user) is node]
    return sorted(parts, key=lambda part: taken_part(part, node)) or [node]


def plan_of(node: fx.Node) -> Plan | None:
    """What was decided of a node; of one value of several, what was decided of the node that computes them."""
    return info(node).plan or info(taken_from(node)).plan


def makes_no_tensor(node: fx.Node) -> bool:
    """Whether the node gives sizes, numbers and the like, and no tensors: it is no op of the model."""
    about = info(node)
    calls = node.op in ("call_function", "call_method") and op_of(node) is None
    return calls and META in node.meta and not about.is_tensor and not about.memory


def reads_only_metadata(node: fx.Node) -> bool:
    """Whether the node looks at its input's shape and not at a value, so that integers serve it as well as floats."""
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
    """Whether the node gives sizes, or computes with them, so that who knows the shapes knows it."""
    if not makes_no_tensor(node) or is_check(node):
        return False
    arithmetic = getattr(node.target, "__module__", "") in ARITHMETIC and bool(node.all_input_nodes)
    return reads_only_metadata(node) or (arithmetic and all(map(makes_no_tensor, node.all_input_nodes)))


def _is_only_counted(node: fx.Node) -> bool:
    """Whether the node cuts a tensor into parts of which nobody reads more than how many they are."""
    if not node.users or not all(is_check(user) and user.kwargs.get("how") == "len" for user in node.users):
        return False
    found = OPS.of_call(node.target)
    return found is not None and found[1].pick is not None and found[0].traits.layout


def is_pure(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the node can go when nobody reads it: an op, unit or kernel, a weight, metadata, or a part of it.

    Modules say so with an attribute `pure = True`.
    """
    module = submodule(gm, node)
    if module is not None:
        return getattr(module, "pure", False) is True
    if node.target is operator.getitem and (makes_no_tensor(node) or _is_pure_module(gm, node.args[0])):
        return True
    reads_sizes = is_size(node) or (reads_only_metadata(node) and not is_check(node))
    return node.op == "get_attr" or op_of(node) is not None or reads_sizes


def _is_pure_module(gm: fx.GraphModule, value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "call_module" and is_pure(gm, value)


def made_by(value: Any) -> Any:
    """The node that makes a value, seen through conversions."""
    while is_op(value, *CONVERSIONS):
        value = value.args[0]
    return value


def measures_of(value: Any) -> tuple[fx.Node, ...]:
    """The ops that measure the grid of a quantize or a dequantize, in order; none where it is known before."""
    if not is_op(value, "quantize", "dequantize"):
        return ()
    read = (value.kwargs.get(name) for name in ("scale", "zero_point"))
    return tuple(node for node in read if isinstance(node, fx.Node) and is_op(node, *MEASURES))


def unobserved(gm: fx.GraphModule, node: fx.Node) -> fx.Node:
    """The value that an observer watches; any other node as it is."""
    while isinstance(submodule(gm, node), Observer):
        (node,) = node.all_input_nodes
    return node


def tensor_meta(value: Any) -> tuple[tuple[int, ...] | None, torch.dtype | None]:
    """Shape and dtype of a value, or (None, None) when it is not a tensor."""
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else (None, None)


def merge_origins(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """The traced ops that these nodes stand for together, in order, each once."""
    return tuple(dict.fromkeys(name for node in nodes for name in info(node).origins))
