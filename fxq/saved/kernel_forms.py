"""Saving and loading of the q/dq forms of kernels: one text for all graphs, and references to tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxq.backends.qdq_form import BufferSlice, FallbackKernel, QdqForm
from fxq.errors import InputError
from fxq.graph.info import info
from fxq.graph.plain_data import to_data
from fxq.graph.text.text_reader import read_graphs
from fxq.graph.text.text_writer import write_graphs
from fxq.saved.other_machine import kernels_of


@dataclass(frozen=True)
class StoredForm:
    """Description of the q/dq form of a kernel in a file, besides its graph.

    Attributes:
        kernel: path of the kernel.
        takes: for each input of the form, index of the kernel's input.
        parts: tensors that are parts of the kernel's, by path: name of the kernel's tensor, first index, shape.
        reason: why the form runs instead of the kernel; empty if the kernel runs.
    """

    kernel: str
    takes: tuple[int, ...]
    parts: Mapping[str, tuple[str, int, tuple[int, ...]]]
    reason: str = ""


def write_forms(gm: fx.GraphModule) -> tuple[str, dict[str, StoredForm], dict[str, Tensor]]:
    """Collect the q/dq forms of a model's kernels, except kernels whose graph is part of the model's text.

    Returns:
        The text of their graphs; the description of each, by the name of its graph; and the tensors that are not parts
        of the kernels' own, by name.
    """
    graphs: dict[str, fx.GraphModule] = {}
    stored: dict[str, StoredForm] = {}
    tensors: dict[str, Tensor] = {}
    for node, kernel in kernels_of(gm):
        form = kernel.form
        if form is None or kernel.graph_inside() is not None:
            continue
        name = f"form_{len(graphs)}"
        graphs[name] = form.module(kernel)
        own = {path: part for path, part in form.tensors.items() if isinstance(part, BufferSlice)}
        parts = {path: (part.name, part.start, tuple(part.shape)) for path, part in own.items()}
        stored[name] = StoredForm(
            str(node.target), form.takes, parts, kernel.reason if isinstance(kernel, FallbackKernel) else ""
        )
        further = {path: tensor for path, tensor in form.tensors.items() if isinstance(tensor, Tensor)}
        tensors |= {f"{name}:{path}": tensor for path, tensor in further.items()}
    return write_graphs(graphs), stored, tensors


def attach_forms(
    gm: fx.GraphModule, text: str, stored: Mapping[str, StoredForm], tensors: Mapping[str, Tensor]
) -> None:
    """Set the q/dq forms of a model's kernels, as `write_forms` returned them.

    Args:
        gm: the model.
        text: text of the graphs.
        stored: description of each form, by the name of its graph.
        tensors: tensors that are not parts of the kernels' own, by name.

    Raises:
        InputError: a form does not match its kernel, or the node that calls it.
    """
    called = {str(node.target): (node, kernel) for node, kernel in kernels_of(gm)}
    held: dict[str, dict[str, Tensor | BufferSlice]] = {name: {} for name in stored}
    for name, tensor in tensors.items():
        form, _, path = name.partition(":")
        if form in held:
            held[form][path] = tensor
    values: dict[str, dict[str, Tensor]] = {}
    for name, about in stored.items():
        if about.kernel not in called:
            raise InputError(f"{name} is the q/dq form of {about.kernel!r}, which no node calls.")
        kernel = called[about.kernel][1]
        held[name] |= {path: BufferSlice(own, at, torch.Size(shape)) for path, (own, at, shape) in about.parts.items()}
        try:
            for own, _, shape in about.parts.values():
                own_shape = tuple(kernel.get_buffer(own).shape)
                if own_shape != shape and len(own_shape) > 1 and len(shape) in (1, len(own_shape)):
                    raise InputError(f"{own} of {about.kernel!r} has the shape {own_shape}, but {shape} in its form.")
            values[name] = {p: t.of(kernel) if isinstance(t, BufferSlice) else t for p, t in held[name].items()}
        except (AttributeError, IndexError, RuntimeError) as error:
            raise InputError(f"the tensors of {about.kernel!r} do not fit its form: {error}") from None
    for name, (graph, units) in read_graphs(text, values).items():
        node, kernel = called[stored[name].kernel]
        _check_call(node, graph, stored[name])
        kernel.form = QdqForm(to_data(graph), stored[name].takes, units, held[name])
        if stored[name].reason and not isinstance(kernel, FallbackKernel):
            gm.set_submodule(str(node.target), FallbackKernel.instead_of(kernel, stored[name].reason))


def _check_call(node: fx.Node, graph: fx.Graph, about: StoredForm) -> None:
    """Raise `InputError` if a form has other inputs or outputs than the call of its kernel."""
    inputs = graph.find_nodes(op="placeholder")
    if len(inputs) != len(about.takes) or not all(0 <= i < len(node.args) for i in about.takes):
        raise InputError(f"{node.name}: the form of {about.kernel!r} takes other inputs than it is called with.")
    pairs = [(node.args[i], inner) for i, inner in zip(about.takes, inputs, strict=True)]
    result = graph.output_node().args[0]
    for outer, inner in [*pairs, (node, result)]:
        if isinstance(outer, fx.Node) and isinstance(inner, fx.Node):
            types = [(info(value).shape, info(value).dtype) for value in (outer, inner)]
            if None not in (types[0][0], types[1][0]) and types[0] != types[1]:
                raise InputError(f"{node.name}: the form of {about.kernel!r} is for {types[1]}, not for {types[0]}.")
