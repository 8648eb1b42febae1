"""The q/dq forms of kernels in a file: one text for all of them, and where each one's tensors are."""

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
    """What a file says of the form of a kernel, besides its graph.

    Attributes:
        kernel: the path of the kernel.
        takes: for each of its inputs, which of the kernel's inputs that is.
        parts: its tensors that are those of the kernel, by path: the name there, where it begins, its shape.
        reason: why the form runs in the place of the kernel; empty where the kernel runs.
    """

    kernel: str
    takes: tuple[int, ...]
    parts: Mapping[str, tuple[str, int, tuple[int, ...]]]
    reason: str = ""


def write_forms(gm: fx.GraphModule) -> tuple[str, dict[str, StoredForm], dict[str, Tensor]]:
    """The forms of the kernels of a model, but of those whose graph stands in the model's text.

    Returns:
        The text of their graphs; what else there is to say of each, by the name of its graph; and the tensors that are
        not the kernels' own, by names that are no tensors of the model.
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
        others = {path: tensor for path, tensor in form.tensors.items() if isinstance(tensor, Tensor)}
        tensors |= {f"{name}:{path}": tensor for path, tensor in others.items()}
    return write_graphs(graphs), stored, tensors


def attach_forms(
    gm: fx.GraphModule, text: str, stored: Mapping[str, StoredForm], tensors: Mapping[str, Tensor]
) -> None:
    """Give the kernels of a model the forms that `write_forms` wrote.

    Raises:
        InputError: a form does not fit its kernel, or what calls that.
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
            raise InputError(f"{name} is the form of {about.kernel!r}, which no node calls.")
        kernel = called[about.kernel][1]
        held[name] |= {path: BufferSlice(own, at, torch.Size(shape)) for path, (own, at, shape) in about.parts.items()}
        try:
            for own, _, shape in about.parts.values():
                found = tuple(kernel.get_buffer(own).shape)
                if found != shape and len(found) > 1 and len(shape) in (1, len(found)):
                    raise InputError(f"{own} of {about.kernel!r} is of the shape {found}, in its form {shape}.")
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
    """Refuse a form of other inputs or outputs than the kernel has where it is called."""
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
