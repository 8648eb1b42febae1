"""Plain-data view of a graph, for snapshots, printing, drawing and comparison. Holds no weights."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from fxq.graph.grid import GridCache, grid_of, moved_from
from fxq.graph.info import EngineLayer, info
from fxq.graph.precision import NodeKind, Precision
from fxq.graph.query import CONVERSIONS, flat_nodes, makes_no_tensor, op_of, plan_of, submodule
from fxq.graph.text.text_values import value_text
from fxq.graph.unit import Unit
from fxq.quant.observer_base import Observer
from fxq.quant.qparams import QParams


@dataclass(frozen=True)
class NodeView:
    """One node as data.

    Attributes:
        name: the node's name in the graph.
        kind: its precision, or what it is instead, see `fxq/graph/precision.py`; determines its colour.
        label: name of the op, unit, kernel or module type.
        body: for a unit, or a kernel made from one, its ops.
        precisions: for a kernel of several units, the precision of each of its ops.
        layers: for a kernel of an engine, the layers that the engine made of it.
        options: the options that differ from the defaults, as text.
        inputs: names of the nodes it reads, in order, with repetitions.
        text: its call as text, with constants inlined.
        path: module path.  source: `file:line` of the user's code.  made_by: pass and rule that created it.
        shape, dtype: shape and dtype of its value; None and "" if it is not a tensor.
        scale, zero_point: grid of its value as text; empty if there is none.
        reason: why it runs in float.  note: remark for the user.
        origins: names of the traced ops that it represents.
    """

    name: str
    kind: NodeKind
    label: str
    body: tuple[str, ...] = ()
    options: str = ""
    inputs: tuple[str, ...] = ()
    text: str = ""
    path: str = ""
    source: str = ""
    made_by: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    scale: str = ""
    zero_point: str = ""
    reason: str = ""
    note: str = ""
    origins: tuple[str, ...] = ()
    precisions: tuple[Precision, ...] = ()
    layers: tuple[EngineLayer, ...] = ()

    @property
    def is_region(self) -> bool:
        """Whether the node is a kernel of several units or of an engine."""
        return bool(self.precisions or self.layers)


@dataclass(frozen=True)
class GraphView:
    """View of a graph: its nodes in execution order. `print(view)` prints one line per node."""

    nodes: tuple[NodeView, ...]
    name: str = field(default="", compare=False)

    @cached_property
    def by_name(self) -> Mapping[str, NodeView]:
        """The nodes by name."""
        return {node.name: node for node in self.nodes}

    def __iter__(self) -> Iterator[NodeView]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, name: str) -> NodeView:
        return self.by_name[name]

    def __str__(self) -> str:
        return "\n".join(node.text for node in self.nodes if node.kind != "constant")


def view(gm: fx.GraphModule, name: str = "", cached: dict[fx.Node, NodeView] | None = None) -> GraphView:
    """Return the graph of `gm` as data.

    Args:
        gm: any `GraphModule`.
        name: title of the view.
        cached: views of nodes that have not changed since; read and extended.
    """
    nodes, cached, grids = [], {} if cached is None else cached, GridCache()
    for node in gm.graph.nodes:
        node_view = cached.get(node)
        if node_view is None or moved_from(node) is not None:
            grid = _grid_text(grid_of(gm, node, grids))
            if node_view is None or (node_view.scale, node_view.zero_point) != grid:
                node_view = _view_node(gm, node, *grid)
        cached[node] = node_view
        nodes.append(node_view)
    return GraphView(tuple(nodes), name)


def _grid_text(grid: QParams | None) -> tuple[str, str]:
    """Scale and zero point as text."""
    if grid is None:
        return "", ""
    if grid.axis is None:
        return f"{grid.s:.4g}", str(grid.z)
    per = "" if grid.block is None else f", blocks of {grid.block}"
    return f"{float(grid.scale.min()):.3g}..{float(grid.scale.max()):.3g} (axis {grid.axis}{per})", "0"


def _view_node(gm: fx.GraphModule, node: fx.Node, scale: str, zero_point: str) -> NodeView:
    about = info(node)
    label, body, options, kind = _describe(gm, node)
    return NodeView(
        name=node.name,
        kind=kind,
        label=label,
        body=body,
        options=options,
        inputs=tuple(n.name for n in flat_nodes((node.args, node.kwargs))),
        text=_text(node, label, body, options),
        path=about.path,
        source=about.source,
        made_by=about.made_by,
        shape=about.shape,
        dtype=str(about.dtype).removeprefix("torch.") if about.dtype is not None else "",
        scale=scale,
        zero_point=zero_point,
        reason=about.plan.decision.text if about.plan is not None and kind != "size" else "",
        note=about.note or (about.traced.kept.text if about.traced.kept is not None else ""),
        origins=about.origins,
        precisions=tuple(plan.precision for plan in about.lowered.plans),
        layers=about.lowered.layers,
    )


def _describe(gm: fx.GraphModule, node: fx.Node) -> tuple[str, tuple[str, ...], str, NodeKind]:
    """Label, body, options and kind of a node."""
    plan = plan_of(node)
    kind: NodeKind = "op" if plan is None else plan.precision
    if node.op in ("placeholder", "output"):
        return node.op.replace("placeholder", "input"), (), "", "io"
    if node.op == "get_attr":
        return str(node.target), (), "", "constant"
    op = op_of(node)
    if op is not None:
        kind = "convert" if op.name in CONVERSIONS else kind
        return op.name, (), options_text(node.kwargs), kind
    module = submodule(gm, node)
    if isinstance(module, Unit):
        return module.kind, tuple(_body(module)), "", kind
    if isinstance(module, Observer):
        return type(module).__name__, (), str(module.spec), "observer"
    if module is not None:
        label = getattr(module, "name", None)
        kind = getattr(module, "kind", kind)
        return str(label) if isinstance(label, str) else type(module).__name__, info(node).lowered.body, "", kind
    source = node.args[0] if node.target is operator.getitem else None
    part_of = submodule(gm, source) if isinstance(source, fx.Node) else None
    if part_of is not None and not isinstance(part_of, Unit):
        kind = getattr(part_of, "kind", kind)
    kind = "size" if makes_no_tensor(node) else kind
    return getattr(node.target, "__name__", str(node.target)), (), options_text(node.kwargs), kind


def _body(unit: Unit) -> Iterator[str]:
    """The ops of a unit as text."""
    for node in unit.graph.nodes:
        op = op_of(node)
        if op is not None:
            options = options_text(node.kwargs)
            yield f"{op.name}({options})" if options else op.name


def options_text(kwargs: Mapping[str, Any]) -> str:
    """Options as text: `stride=(2, 2), groups=4`."""
    return ", ".join(f"{key}={value_text(value, exact=False)}" for key, value in kwargs.items())


def _text(node: fx.Node, label: str, body: tuple[str, ...], options: str) -> str:
    if node.op == "placeholder":
        return f"{node.name} = input"
    arguments = ", ".join(
        [*(value_text(a, exact=False) for a in node.args), *([options_text(node.kwargs)] if node.kwargs else [])]
    )
    if node.op == "output":
        return f"return {value_text(node.args[0], exact=False)}"
    receiver = {"call_method": ".", "call_module": "" if body else "module "}.get(node.op, "")
    inside = f" {{{'; '.join(body)}}}" if any("(" in part for part in body) else ""
    inside = f" {{{len(body)} ops}}" if info(node).lowered.plans else inside
    return f"{node.name} = {receiver}{label}({arguments}){inside}"
