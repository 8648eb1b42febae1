"""The qdq graph of a model that has been lowered: every kernel gives its place to the form that it keeps."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fxq.backends.kernel import Kernel
from fxq.errors import BackendError
from fxq.graph.query import arguments_of, read_attribute, submodule


def qdq_graph(model: fx.GraphModule) -> fx.GraphModule:
    """A model of float ops between conversions, which shares its tensors with the lowered one.

    Before: y = kernel(x)    After: y = quantize(conv2d(dequantize(x), dequantize(w), b))

    Args:
        model: a graph with kernels of any backend, or none. It stays as it is.

    Raises:
        BackendError: a kernel was put into the graph by hand, and keeps no form; the message names it.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
        >>> qmodel = fxq.quantize(model, "static", data=[torch.rand(1, 3, 16, 16)])
        >>> gm = qdq_graph(qmodel)
        >>> x = torch.rand(1, 3, 16, 16)
        >>> bool((gm(x) - qmodel(x)).abs().max() < 0.02)
        True
    """
    graph, attributes = fx.Graph(), dict[str, Any]()
    made: dict[fx.Node, Any] = {}
    forms: dict[Kernel, fx.GraphModule] = {}
    for node in model.graph.nodes:
        kernel = submodule(model, node)
        if isinstance(kernel, Kernel):
            if kernel.form is None:
                raise BackendError(
                    f"{node.name}: its kernel {kernel.name} was put into the graph by hand, and says nowhere what it "
                    "computes in q/dq form."
                )
            inside = forms.setdefault(kernel, kernel.form.module(kernel))
            given, _ = arguments_of(node, made)
            made[node] = _inlined(graph, inside, [given[i] for i in kernel.form.takes], attributes, node.name)
        elif node.target is operator.getitem and isinstance(made[node.args[0]], tuple):
            made[node] = made[node.args[0]][node.args[1]]
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
            if node.op in ("get_attr", "call_module"):
                attributes[str(node.target)] = read_attribute(model, str(node.target))
    return fx.GraphModule(attributes, graph, "Qdq")


def _inlined(graph: fx.Graph, inside: fx.GraphModule, given: list[Any], attributes: dict[str, Any], name: str) -> Any:
    """Copy the graph of a form into another one; what it returns there, a tuple of several.

    Args:
        graph: where it goes.
        inside: the form.
        given: what it takes.
        attributes: the tensors and units of the other graph, which get those of the form.
        name: what their paths begin with.
    """
    made: dict[fx.Node, Any] = dict(zip(inside.graph.find_nodes(op="placeholder"), given, strict=True))
    for node in inside.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        made[node] = copied = graph.node_copy(node, made.__getitem__)
        if node.op in ("get_attr", "call_module"):
            copied.target = f"{name}.{node.target}"
            attributes[copied.target] = read_attribute(inside, str(node.target))
    return arguments_of(inside.graph.output_node(), made)[0][0]
