"""Builder of a `torch.fx` graph from the operands of an ONNX file; it computes constants while it builds."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from fxq.onnx.reading.file_names import attribute_name, free_name, identifier
from fxq.onnx.varying_sizes import VaryingSizes, varies
from fxq.onnx.writer import WithoutData, refuse
from fxq.quant.qparams import QParams
from fxq.quant.stored_grids import store_grid


@dataclass(frozen=True, eq=False)
class Traced(WithoutData):
    """Tensor that the model computes when it runs.

    Attributes:
        node: node of the `torch.fx` graph.
        like: tensor of its shape and dtype, without data. Dynamic sizes are symbols.
    """

    node: fx.Node
    like: Tensor


@dataclass(frozen=True, eq=False)
class Sizes:
    """Small tensor of numbers that are computed from sizes, such as the shape that a Reshape reads.

    Attributes:
        array: numbers and symbols, as an array of Python objects.
        dtype: dtype of the tensor in the file.
    """

    array: np.ndarray
    dtype: torch.dtype = torch.int64


Operand = Traced | Sizes | Tensor
"""Value of the file while it is read: computed by the model, computed from sizes, or constant."""


@dataclass
class GraphBuilder:
    """Graph that is being built from operands of a file.

    Attributes:
        sizes: dynamic sizes of the inputs.
        root: module that holds the parameters, buffers and layers.
        graph: the `torch.fx` graph.
        names: names of the constants of the file, by the id of their tensors.
        grids: grids of the constants that the file holds as integers, by the id of their float tensors.
        label: name of the node of the file that is being read.
    """

    sizes: VaryingSizes = field(default_factory=VaryingSizes)
    root: nn.Module = field(default_factory=lambda: fx.GraphModule(nn.Module(), fx.Graph()))  # keeps its names free
    graph: fx.Graph = field(default_factory=fx.Graph)
    names: dict[int, str] = field(default_factory=dict)
    grids: dict[int, QParams] = field(default_factory=dict)
    label: str = ""
    _kept: list[Any] = field(default_factory=list)
    _attributes: dict[int, fx.Node] = field(default_factory=dict)
    _derived: dict[Any, Tensor] = field(default_factory=dict)
    _layers: dict[Any, str] = field(default_factory=dict)
    _size_nodes: dict[Any, fx.Node] = field(default_factory=dict)

    def constant(self, name: str, tensor: Tensor) -> Tensor:
        """Declare a constant of the file, so that a weight keeps its name."""
        self.names[id(tensor)] = name
        self._kept.append(tensor)  # so that its id stays unique
        return tensor

    def input(self, name: str, like: Tensor) -> Traced:
        """Add an input of the model, like a tensor without data.

        It keeps its name unless the code of the graph could not: keywords, numbers, names that the code itself uses.
        """
        node = self.graph.placeholder(identifier(name))
        if (node.target != node.name and node.target != "input") or node.target == "self":
            node.target = f"{node.name}_" if node.name == "self" else node.name
        return self._traced(node, like)

    def call(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Call a PyTorch function: compute it if all of its arguments are constants, else add a node.

        Args:
            function: the function, or the name of a method of its first argument.
            args: operands, numbers, sizes, and sequences of these.
            kwargs: further arguments.
        """
        computed: Any = getattr(torch.Tensor, function) if isinstance(function, str) else function
        leaves: list[Any] = []
        fx.node.map_aggregate((args, kwargs), lambda a: leaves.append(a))
        if not any(isinstance(leaf, (Traced, Sizes)) or symbolic(leaf) for leaf in leaves):
            with torch.no_grad():
                return computed(*args, **kwargs)
        args, kwargs = fx.node.map_aggregate((args, kwargs), lambda a: self.tensor(a) if isinstance(a, Sizes) else a)
        likes, options = fx.node.map_aggregate((args, kwargs), _shape_only)
        with self.sizes.computing(), torch.device("meta"):
            like = computed(*likes, **options)
        kind = "call_method" if isinstance(function, str) else "call_function"
        node = self.graph.create_node(
            kind, function, self._arguments(args), self._arguments(kwargs), identifier(self.label) or None
        )
        return self._parts(node, like)

    def call_of_data(
        self, function: Callable[..., Any], *args: Any, like: Callable[[Any], tuple[Any, ...]], dtype: torch.dtype
    ) -> Any:
        """Call a function whose result has a length that depends on values, such as `torch.nonzero`.

        Args:
            function: the function.
            args: its arguments.
            like: returns the shape of the result from its length, which is one of the sizes of the shape.
            dtype: dtype of the result.
        """
        if not any(isinstance(arg, (Traced, Sizes)) for arg in args):
            return function(*args)
        node = self.graph.call_function(function, self._arguments(tuple(map(self.tensor, args))))
        length = self.sizes.axis(f"length of {node.name}", node.name, 0, 7)
        return self._traced(node, self.sizes.empty(like(length), dtype))

    def call_like(self, function: Callable[..., Any], *args: Any, like: Any) -> Any:
        """Call a function with loops in Python, whose results have the shapes of the tensors `like`, without data."""
        node = self.graph.call_function(function, self._arguments(tuple(map(self.tensor, args))))
        return self._parts(node, like)

    def derived(self, key: Any, source: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """Return a constant that is computed once from a constant of the file and takes its name, such as a transpose.

        Args:
            key: key of the result in the cache.
            source: the constant of the file.
            compute: computes the result.
        """
        if key not in self._derived:
            self._derived[key] = self.constant(self.names.get(id(source), self.label), compute())
        return self._derived[key]

    def permuted(self, constant: Tensor, axes: Sequence[int]) -> Tensor:
        """Return a constant of the file with its axes permuted, on its grid if it has one."""
        result = self.derived(("permuted", id(constant), *axes), constant, lambda: constant.permute(*axes))
        grid = self.grids.get(id(constant))
        if grid is not None:
            per_block = grid.block is not None
            axis = None if grid.axis is None else list(axes).index(grid.axis % len(axes))
            scale, zero_point = (
                t.permute(*axes).contiguous() if per_block else t for t in (grid.scale, grid.zero_point)
            )
            self.grids[id(result)] = replace(grid, scale=scale, zero_point=zero_point, axis=axis)
        return result

    def layer(self, key: Any, weight: Tensor, build: Callable[[], nn.Module], *inputs: Any, like: Any = None) -> Any:
        """Call a layer of the model, which is built once for each `key`.

        The layer is named after its weight: `a.conv` for a weight `a.conv.weight`; else after the node.

        Args:
            key: attributes of the layer.
            weight: its weight in the file.
            build: returns the layer.
            inputs: its inputs.
            like: tensors of the shapes of its results, without data; by default, the layer computes them.
        """
        key = (id(weight), *key)
        if key not in self._layers:
            name = self.names.get(id(weight), "")
            path = name.removesuffix(".weight") if name.endswith(".weight") else self.label
            layer: Any = build().eval()
            if id(weight) in self.grids and hasattr(layer, "weight"):  # weights of recurrent layers keep their floats
                store_grid(layer.weight, self.grids[id(weight)])
            self._layers[key] = self._added(path or "layer", layer)
        path = self._layers[key]
        module = self.root.get_submodule(path)
        if like is None:
            likes = fx.node.map_aggregate(inputs, _shape_only)
            with self.sizes.computing(), torch.device("meta"):
                like = functional_call(module, {name: _shape_only(p) for name, p in _tensors_of(module)}, likes)
        node = self.graph.call_module(path, self._arguments(inputs))
        return self._parts(node, like)

    def _parts(self, node: fx.Node, like: Any) -> Any:
        """Values of a node's results, which may be nested tuples."""
        if isinstance(like, Tensor):
            return self._traced(node, like)
        return tuple(
            self._parts(self.graph.call_function(operator.getitem, (node, i)), part) for i, part in enumerate(like)
        )

    def tensor(self, value: Any) -> Any:
        """Return sizes as a tensor that the model computes; other operands are returned unchanged."""
        if not isinstance(value, Sizes):
            return value
        entries = list(value.array.flat)
        if not any(map(symbolic, entries)):
            return torch.tensor(entries, dtype=value.dtype).reshape(value.array.shape)
        scalars = [self.call(torch.full, (), entry, dtype=value.dtype) for entry in entries]
        if value.array.ndim == 0:
            return scalars[0]
        stacked = self.call(torch.stack, scalars)
        return stacked if value.array.ndim == 1 else self.call(torch.reshape, stacked, value.array.shape)

    def like(self, value: Any) -> Any:
        """Tensor of the shape and dtype of an operand, without data unless it is constant."""
        value = self.tensor(value)
        return value.like if isinstance(value, Traced) else value

    def shape_of(self, value: Operand) -> tuple[Any, ...]:
        """Shape of an operand. Symbols of a traced tensor's sizes are bound to this tensor."""
        if isinstance(value, Sizes):
            return value.array.shape
        if isinstance(value, Traced):
            for axis, expression in _dynamic_axes(value.like):
                self._bind(expression, value.node, axis)
        return tuple(value.shape)

    def _bind(self, expression: Any, node: fx.Node, axis: int) -> None:
        if expression not in self._size_nodes:
            self._size_nodes[expression] = self.graph.call_method("size", (node, axis))

    def ints(self, value: Any) -> list[Any]:
        """Numbers of a 0-d or 1-d operand: integers, and symbols of dynamic sizes."""
        refuse(isinstance(value, Traced), "its sizes or axes are computed from data")
        if isinstance(value, Sizes):
            return list(value.array.flat)
        return [int(v) for v in value.flatten().tolist()] if isinstance(value, Tensor) else list(value)

    def number(self, value: Any) -> Any:
        """Number of a constant with one entry, or of sizes with one entry."""
        refuse(isinstance(value, Traced), "one of its parameters is computed from data")
        return (
            value.array.reshape(-1)[0]
            if isinstance(value, Sizes)
            else value.item()
            if isinstance(value, Tensor)
            else value
        )

    def _traced(self, node: fx.Node, like: Tensor) -> Traced:
        for axis, expression in _dynamic_axes(like):
            if expression.is_Symbol:
                self._bind(expression, node, axis)
        return Traced(node, like)

    def _arguments(self, arguments: Any) -> Any:
        return fx.node.map_aggregate(arguments, self._argument)

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Traced):
            return argument.node
        if isinstance(argument, Tensor):
            return self._attribute(argument)
        return self.size_node(argument) if symbolic(argument) else argument

    def node_of(self, value: Operand) -> fx.Node:
        """Node of the graph that computes an operand."""
        node: fx.Node = self._argument(self.tensor(value))
        return node

    def size_node(self, size: Any) -> fx.Node:
        """Node that computes a dynamic size."""
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        expression = size.node.expr
        if expression not in self._size_nodes:
            proxies = {s: fx.Proxy(n, fx.proxy.GraphAppendingTracer(self.graph)) for s, n in self._size_nodes.items()}
            unbound = [s for s in expression.free_symbols if s not in proxies]
            refuse(unbound, f"fxq cannot compute its size {expression}")
            self._size_nodes[expression] = sympy_interp(PythonReferenceAnalysis, proxies, expression).node
        return self._size_nodes[expression]

    def _attribute(self, tensor: Tensor) -> fx.Node:
        """Node of a constant. Floats with axes are parameters, other tensors buffers."""
        if id(tensor) not in self._attributes:
            trains = tensor.is_floating_point() and tensor.dim() > 0 and id(tensor) in self.names
            held = nn.Parameter(tensor, requires_grad=True) if trains else tensor
            if trains and id(tensor) in self.grids:
                store_grid(held, self.grids[id(tensor)])
            self._kept.append(tensor)
            path = self._added(self.names.get(id(tensor), f"{self.label}.constant"), held)
            self._attributes[id(tensor)] = self.graph.get_attr(path)
        return self._attributes[id(tensor)]

    def _added(self, name: str, item: nn.Module | Tensor) -> str:
        """Add a module, parameter or buffer to the root under a name of the file; return its path."""
        *parents, last = [part for part in re.split(r"[./]", name) if part] or ["constant"]
        owner, path = self.root, []
        for part in map(attribute_name, parents):
            child = owner._modules.get(part)
            if child is None or type(child) is not nn.Module:
                part = free_name(owner, part)
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
            path.append(part)
        last = free_name(owner, attribute_name(last))
        if isinstance(item, nn.Module):
            owner.add_module(last, item)
        elif isinstance(item, nn.Parameter):
            owner.register_parameter(last, item)
        else:
            owner.register_buffer(last, item)
        return ".".join([*path, last])


def _tensors_of(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _dynamic_axes(like: Tensor) -> list[tuple[int, Any]]:
    """Axes of dynamic size, each with the expression of its size."""
    sizes: list[Any] = list(like.shape)
    return [(axis, size.node.expr) for axis, size in enumerate(sizes) if varies(size)]


def _shape_only(argument: Any) -> Any:
    """Argument of a computation of shapes: tensors without data, all on one device."""
    if isinstance(argument, Traced):
        return argument.like
    return argument.to("meta") if isinstance(argument, Tensor) else argument


def symbolic(value: Any) -> bool:
    """Whether a number is an expression of dynamic sizes."""
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return not value.node.expr.is_number
    return varies(value)
