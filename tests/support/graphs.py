"""Test helpers for graphs: text that does not depend on data, runs of single passes, and comparison of results."""

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
from fxq.recipe.recipe import as_recipe
from fxq.rewriting.rewriter import Rewriter
from fxq.workflow.steps import manager_for
from tests.support.helpers import REFERENCE, context
from tests.support.machine import QMAX
from tests.support.models import call

MINMAX = fxq.TensorSpec(observer="minmax")


def text(graph: GraphView | fx.GraphModule) -> str:
    """Return the graph as text, with letters for grids: `quantize(x, A)` for the first scale and zero point, and so on.

    Activations with reduce_range (on a machine that needs it) are written like those with 8 bits. An integer weight is
    written `int8(name, axis=0)`.
    """
    lines = str(graph if isinstance(graph, GraphView) else view(graph))
    grids: dict[str, str] = {}

    def letter(match: re.Match[str]) -> str:
        return grids.setdefault(match[0], chr(ord("A") + len(grids)))

    weight = r"dequantize\(@fxq_data\.(\w+)_int8, scale=@[^,]+, zero_point=@[^,]+, qmin=[-\d]+, qmax=\d+, axis=(\d)\)"
    lines = re.sub(weight, r"int8(\1, axis=\2)", lines)
    lines = re.sub(r"from_scale=[^,]+, from_zero_point=\d+, ", "", lines)
    lines = re.sub(r"scale=[-+.e\d]+, zero_point=-?\d+", letter, lines)
    return lines.replace(f", qmax={QMAX}", "")


def expected(lines: str) -> str:
    """Remove the indentation of a text in a test."""
    return dedent(lines).strip()


def anonymous(graph: GraphView | fx.GraphModule) -> str:
    """Return the graph as text with numbered nodes, so that graphs that differ only in names have the same text."""
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
    """Return the graph as text with its scales and zero points."""
    return str(view(gm))


def program(gm: fx.GraphModule) -> str:
    """Return the graph as text that parses back, without metadata."""
    return fxq.extend.write_graph(gm, facts=False)


def node(gm: fx.GraphModule, name: str) -> fx.Node:
    """The node of a name."""
    return next(n for n in gm.graph.nodes if n.name == name)


def graph(model: nn.Module, inputs: Any, until: str = "canonicalize", recipe: Any = REFERENCE) -> fx.GraphModule:
    """The graph after the pass `until`, one of those before calibration."""
    return fxq.extend.run_passes(model, recipe, example_inputs=inputs, until=until)


def run_pass(step: Pass, program: str, tensors: Any = None, recipe: Any = REFERENCE, data: Any = ()) -> fx.GraphModule:
    """Run a pass on a graph in text form, check that a second run changes nothing, and return the graph.

    Args:
        step: the pass.
        program: text of the graph, as `fxq.extend.write_graph` writes it.
        tensors: tensors by name; all others are random.
        recipe: the recipe.
        data: one batch, which is the example, the calibration data and the recorded sample.
    """
    gm = fxq.extend.read_graph(program, {**drawn(program), **(tensors or {})})
    pass_context = context(gm, *data, recipe=recipe)
    if data:
        gm(*data)
        pass_context.samples.append(pass_context.example)
    gm, _ = _after(step, gm, pass_context)
    if not isinstance(step, (InsertObservers, InsertQdq, CorrectBias)):  # these edit again in a second run
        written = _without_costs(gm)
        gm, edits = _after(step, gm, pass_context)
        assert edits == [] and _without_costs(gm) == written
    gm.recompile()
    return gm


def _without_costs(gm: fx.GraphModule) -> str:
    """Text of a graph without costs, which are timed in each run."""
    return re.sub(r", cost=Cost\([^)]*\)", "", fxq.extend.write_graph(gm))


def _after(step: Pass, gm: fx.GraphModule, pass_context: Context) -> tuple[fx.GraphModule, list[Any]]:
    """Run a pass once; return the graph and the edits."""
    work = Rewriter(gm, pass_context, step.name)
    step.run(work)
    check(work.gm, step.gives, step.name)
    return work.gm, work.edits


def joined(*parts: str) -> str:
    """Join parts of a text, each without its indentation."""
    return "\n".join(map(expected, parts))


def integer_weight(name: str, sizes: str, axis: int = 0) -> str:
    """Lines for a float weight `name.weight` and its integers, dequantized as `name_dq`."""
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
"""Default grid of activations in test graphs, which the kernels of this machine support."""


def qdq(name: str) -> str:
    """Lines that quantize and dequantize a value on `GRID`, as `name_q` and `name_qdq`."""
    return f"{name}_q = quantize({name}, {GRID})\n{name}_qdq = dequantize({name}_q, {GRID})"


def drawn(program: str) -> dict[str, torch.Tensor]:
    """Random tensors for a graph in text form: floats between 0 and 1, int8 integers, zero points of 0."""
    tensors = {}
    for dtype, sizes, name in re.findall(r": (\w+)\[([\d, ]*)[()]*\] = tensor\('([^']+)'\)", program):
        shape = [int(size) for size in sizes.split(",") if size]
        real = torch.rand(shape)
        tensors[name] = real if dtype == "float32" else (254 * real - 127).to(torch.int8)
        if dtype == "int32":
            tensors[name] = torch.zeros(shape, dtype=torch.int32)
    return tensors


def stepwise(model: nn.Module, inputs: Any, recipe: Any = "static") -> Iterator[tuple[Any, Pass]]:
    """Run the pipeline, calibrated on one batch; yield the manager and the pass after each pass."""
    manager = manager_for(model, as_recipe(recipe), inputs)
    for step in manager.context.recipe.pipeline:
        manager.run([step])
        yield manager, step
        if isinstance(step, InsertObservers):
            call(manager.gm, inputs)
            manager.context.samples.append(manager.context.example)


def until(model: nn.Module, inputs: Any, last: str, recipe: Any = "static") -> Any:
    """The manager after the pass `last`, calibrated on one batch."""
    return next(manager for manager, step in stepwise(model, inputs, recipe) if step.name == last)


def again(manager: Any, step: Pass) -> list[Any]:
    """Run a pass again on the graph of a manager, and return its edits."""
    rewriter = Rewriter(manager.gm, manager.context, step.name)
    step.run(rewriter)
    rewriter.gm.graph.lint()
    return rewriter.edits


def idle(graph: GraphView) -> list[str]:
    """Names of useless nodes: quantize nodes after float ops, and moving ops, whose integers no integer op reads."""
    useful: set[str] = set()
    for node in reversed(graph.nodes):
        if node.kind == "int8" or (node.kind in ("convert", "moves") and node.name in useful):
            useful.update(node.inputs)
    integers = [n for n in graph if n.kind == "moves" or (n.label == "quantize" and graph[n.inputs[0]].kind != "int8")]
    return [n.name for n in integers if n.name not in useful]


def equal(a: Any, b: Any) -> bool:
    """Whether two results are equal in structure and bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, Sequence):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def kinds(gm: fx.GraphModule) -> list[str]:
    """Labels of a graph's nodes, without inputs, outputs and weights."""
    return [n.label for n in view(gm) if n.kind not in ("io", "constant")]
