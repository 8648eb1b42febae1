"""What tests ask of graphs: their text in a form that does not depend on the data, and runs of a few passes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from textwrap import dedent
from typing import Any

import torch
from torch import fx, nn

import fxq
from fxq.graph.view import GraphView, view
from fxq.passes import CorrectBias, InsertObservers, InsertQdq
from fxq.pipeline.context import Context
from fxq.pipeline.invariants import check
from fxq.recipe.pass_base import Pass
from fxq.rewriting.rewriter import Rewriter
from fxq.workflow.steps import manager_for
from tests.support.helpers import REFERENCE, context
from tests.support.machine import QMAX
from tests.support.models import call

MINMAX = fxq.TensorSpec(observer="minmax")


def text(graph: GraphView | fx.GraphModule) -> str:
    """The graph as text, with grids by letter: `quantize(x, A)` for the first scale and zero point, and so on.

    Activations of the bits that this machine computes with are written as those of 8 bits are.

    An integer weight is written `int8(name, axis=0)`.
    """
    lines = str(graph if isinstance(graph, GraphView) else view(graph))
    grids: dict[str, str] = {}

    def letter(found: re.Match[str]) -> str:
        return grids.setdefault(found[0], chr(ord("A") + len(grids)))

    weight = r"dequantize\(@fxq_data\.(\w+)_int8, scale=@[^,]+, zero_point=@[^,]+, qmin=[-\d]+, qmax=\d+, axis=(\d)\)"
    lines = re.sub(weight, r"int8(\1, axis=\2)", lines)
    lines = re.sub(r"from_scale=[^,]+, from_zero_point=\d+, ", "", lines)
    lines = re.sub(r"scale=[-+.e\d]+, zero_point=-?\d+", letter, lines)
    return lines.replace(f", qmax={QMAX}", "")


def expected(lines: str) -> str:
    """The text of a test without its indentation."""
    return dedent(lines).strip()


def anonymous(graph: GraphView | fx.GraphModule) -> str:
    """The graph as text with the nodes numbered, so that graphs that differ in names alone have the same text."""
    numbers: dict[str, str] = {}
    lines = []
    for node in graph if isinstance(graph, GraphView) else view(graph):
        numbers[node.name] = f"%{len(numbers)}"
        if node.kind == "constant":
            continue
        left, equals, call_ = node.text.partition(" = ")
        if not equals:
            left, call_ = "return", f"({left.removeprefix('return ')})"
        label, _, arguments = call_.partition("(")
        renamed = re.sub(r"(?<![@.\w'])[A-Za-z_]\w*(?![\w=(.'])", lambda m: numbers.get(m[0], m[0]), arguments)
        lines.append(f"{numbers[node.name]} = {label}({renamed}")
    return "\n".join(lines)


def full_text(gm: fx.GraphModule) -> str:
    """The graph as text with its numbers."""
    return str(view(gm))


def program(gm: fx.GraphModule) -> str:
    """The graph as a text that parses back, without what passes know of its nodes."""
    return fxq.extend.write_graph(gm, facts=False)


def node(gm: fx.GraphModule, name: str) -> fx.Node:
    """The node of that name."""
    return next(n for n in gm.graph.nodes if n.name == name)


def graph(model: nn.Module, inputs: Any, until: str = "canonicalize", recipe: Any = REFERENCE) -> fx.GraphModule:
    """The graph after the pass `until`, one of those before calibration."""
    return fxq.extend.run_passes(model, recipe, example_inputs=inputs, until=until)


def run_pass(step: Pass, program: str, given: Any = None, recipe: Any = REFERENCE, data: Any = ()) -> fx.GraphModule:
    """The graph that a pass makes of the one that is written here. Run once more, it must find nothing to do.

    Args:
        step: the pass.
        program: a graph, as `fxq.extend.write_graph` writes one.
        given: tensors by name; others that the program names are random.
        recipe: the recipe.
        data: one batch: the example, what observers have seen, and what is recorded.
    """
    gm = fxq.extend.read_graph(program, {**drawn(program), **(given or {})})
    known = context(gm, *data, recipe=recipe)
    if data:
        gm(*data)
        known.samples.append(known.example)
    gm, _ = _after(step, gm, known)
    if not isinstance(step, (InsertObservers, InsertQdq, CorrectBias)):  # twice is something else
        written = _without_costs(gm)
        gm, edits = _after(step, gm, known)
        assert edits == [] and _without_costs(gm) == written
    gm.recompile()
    return gm


def _without_costs(gm: fx.GraphModule) -> str:
    """The text of a graph; what ops cost is measured anew each time, of those that are left."""
    return re.sub(r", cost=Cost\([^)]*\)", "", fxq.extend.write_graph(gm))


def _after(step: Pass, gm: fx.GraphModule, known: Context) -> tuple[fx.GraphModule, list[Any]]:
    """The graph after one run of a pass, and its edits."""
    work = Rewriter(gm, known, step.name)
    step.run(work)
    check(work.gm, step.gives, step.name)
    return work.gm, work.edits


def joined(*parts: str) -> str:
    """Parts of a program as one, each without its indentation."""
    return "\n".join(map(expected, parts))


def integer_weight(name: str, sizes: str, axis: int = 0) -> str:
    """The lines of the float weight `name.weight` and of its integers, dequantized as `name_dq`."""
    channels = sizes.split(", ")[axis]
    return f"""
        {name}_real: float32[{sizes}] = tensor('{name}.weight')
        {name}_int8: int8[{sizes}] = tensor('fxq_data.{name}_weight_int8')
        {name}_scale: float32[{channels}] = tensor('fxq_data.{name}_weight_scale')
        {name}_zero: int32[{channels}] = tensor('fxq_data.{name}_weight_zero_point')
        {name}_dq = dequantize({name}_int8, scale={name}_scale, zero_point={name}_zero, qmin=-127, qmax=127, \
axis={axis})  # stands_for='{name}.weight'
    """


GRID = f"scale=0.5, zero_point=3, qmax={QMAX}"
"""The grid of activations in programs that name no other: one that this machine's kernels take."""


def qdq(name: str) -> str:
    """The lines that put a value on that grid and take it off again, as `name_q` and `name_qdq`."""
    return f"{name}_q = quantize({name}, {GRID})\n{name}_qdq = dequantize({name}_q, {GRID})"


def drawn(program: str) -> dict[str, torch.Tensor]:
    """Random tensors for those that a program names: floats between 0 and 1, any int8, zero points of 0."""
    found = {}
    for dtype, sizes, name in re.findall(r": (\w+)\[([\d, ]*)[()]*\] = tensor\('([^']+)'\)", program):
        shape = [int(size) for size in sizes.split(",") if size]
        real = torch.rand(shape)
        found[name] = real if dtype == "float32" else (254 * real - 127).to(torch.int8)
        if dtype == "int32":
            found[name] = torch.zeros(shape, dtype=torch.int32)
    return found


def stepwise(model: nn.Module, inputs: Any, recipe: Any = "static") -> Iterator[tuple[Any, Pass]]:
    """The manager and the pass that it has run, pass by pass; calibrated on one batch. Its `gm` runs."""
    manager = manager_for(model, recipe, inputs)
    for step in manager.context.recipe.pipeline:
        manager.run([step])
        yield manager, step
        if isinstance(step, InsertObservers):
            call(manager.gm, inputs)
            manager.context.samples.append(manager.context.example)


def until(model: nn.Module, inputs: Any, last: str, recipe: Any = "static") -> Any:
    """The manager after the pass `last` of any stage, calibrated on one batch. Its `gm` runs."""
    return next(manager for manager, step in stepwise(model, inputs, recipe) if step.name == last)


def again(manager: Any, step: Pass) -> list[Any]:
    """The edits that a pass makes when it runs once more on the graph that a manager holds."""
    rewriter = Rewriter(manager.gm, manager.context, step.name)
    step.run(rewriter)
    rewriter.gm.graph.lint()
    return rewriter.edits


def idle(graph: GraphView) -> list[str]:
    """What is made integer for nothing: float values quantized, and integers moved, that no integer op reads."""
    useful: set[str] = set()
    for node in reversed(graph.nodes):
        if node.kind == "int8" or (node.kind in ("convert", "moves") and node.name in useful):
            useful.update(node.inputs)
    made = [n for n in graph if n.kind == "moves" or (n.label == "quantize" and graph[n.inputs[0]].kind != "int8")]
    return [n.name for n in made if n.name not in useful]


def equal(a: Any, b: Any) -> bool:
    """Whether two results are the same, bit for bit and in structure."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, Sequence):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def kinds(gm: fx.GraphModule) -> list[str]:
    """The labels of a graph's nodes, inputs, outputs and weights left out."""
    return [n.label for n in view(gm) if n.kind not in ("io", "constant")]
