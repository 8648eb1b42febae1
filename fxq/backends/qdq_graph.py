"""Qdq graph of a lowered model, in which every kernel is replaced by its q/dq form."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fxq.backends.kernel import Kernel
from fxq.errors import BackendError
from fxq.graph.query import arguments_of, read_attribute, submodule


def qdq_graph(model: fx.GraphModule) -> fx.GraphModule:
    """Return the qdq graph of a lowered model: float ops between conversions. It shares the model's tensors.

    Before: y = kernel(x)    After: y = quantize(conv2d(dequantize(x), dequantize(w), b))

    Args:
        model: graph with kernels of any backend, or without kernels. It is not changed.

    Raises:
        BackendError: a kernel has no q/dq form, because it was inserted by hand; the message names it.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
        >>> qmodel = fxq.quantize(model, "static", data=[torch.rand(1, 3, 16, 16)])
        >>> gm = qdq_graph(qmodel)
        >>> x = torch.rand(1, 3, 16, 16)
        >>> bool((gm(x) - qmodel(x)).abs().max() < 0.02)
        True
    """
    graph, attributes = fx.Graph(), dict[str, Any]()
    copies: dict[fx.Node, Any] = {}
    forms: dict[Kernel, fx.GraphModule] = {}
    for node in model.graph.nodes:
        kernel = submodule(model, node)
        if isinstance(kernel, Kernel):
            if kernel.form is None:
                raise BackendError(
                    f"{node.name}: its kernel {kernel.name} was inserted into the graph by hand and has no q/dq form."
                )
            inside = forms.setdefault(kernel, kernel.form.module(kernel))
            inputs, _ = arguments_of(node, copies)
            copies[node] = _inlined(graph, inside, [inputs[i] for i in kernel.form.takes], attributes, node.name)
        elif node.target is operator.getitem and isinstance(copies[node.args[0]], tuple):
            copies[node] = copies[node.args[0]][node.args[1]]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op in ("get_attr", "call_module"):
                attributes[str(node.target)] = read_attribute(model, str(node.target))
    return fx.GraphModule(attributes, graph, "Qdq")


def _inlined(graph: fx.Graph, inside: fx.GraphModule, inputs: list[Any], attributes: dict[str, Any], name: str) -> Any:
    """Copy the nodes of a form to the end of a graph, and return the copy of its output: a node, or a tuple of nodes.

    Args:
        graph: graph that gets the nodes.
        inside: the form.
        inputs: nodes that replace the inputs of the form.
        attributes: tensors and units of `graph` by path; those of the form are added.
        name: prefix of the added paths.
    """
    copies: dict[fx.Node, Any] = dict(zip(inside.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in inside.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        copies[node] = copied = graph.node_copy(node, copies.__getitem__)
        if node.op in ("get_attr", "call_module"):
            copied.target = f"{name}.{node.target}"
            attributes[copied.target] = read_attribute(inside, str(node.target))
    return arguments_of(inside.graph.output_node(), copies)[0][0]
