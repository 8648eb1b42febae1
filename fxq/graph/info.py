"""What fxq knows about a node: the typed metadata under one key, and the decisions in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import fx

from fxq.display.tables import duration
from fxq.ops.table import META
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.qparams import QParams
from fxq.quant.spec import TensorSpec

Precision = Literal["int8", "weight-only", "moves", "float"]
DecisionKind = Literal[
    "unsupported",
    "excluded by the recipe",
    "slower",
    "unverified",
    "leaf",
    "no integer neighbour",
    "off the grid",
    "no tensor",
    "undecided",
]
Source = Literal["measured", "table", ""]
"""Origin of a price: timed on this machine, estimated by `fxq/cost/price_table.py`, or none."""
DECISION_KINDS: tuple[DecisionKind, ...] = get_args(DecisionKind)


@dataclass(frozen=True)
class Decision:
    """What an op runs as, why, and who says so.

    Attributes:
        precision: `int8` (runs on integers), `weight-only` (computes in float with a weight stored as integers or
            float16), `moves` (moves integers), or `float`.
        kind: what sort of reason `text` is; empty where there is no reason to give.
            `unsupported`: fxq or the backend has no integer form of this call.
            `excluded by the recipe`: the recipe says float.
            `slower`: float was measured, or is known, to be faster.
            `unverified`: its kernel gave other numbers than its qdq form.
            `leaf`: it is in a module that is kept as it is.
            `no integer neighbour`: integers would need conversions made for it alone, or nothing reads them.
            `off the grid`: its values fit no grid, fill a small part of one, or most of them would become zero.
            `no tensor`: it reads or makes a shape or another plain value.
            `undecided`: no pass has decided.
        text: the reason, for people. Nothing in fxq reads meaning out of it.
        fix: what the user can change to get another decision (a recipe line), or empty.
        decided_by: the pass that decided.
    """

    precision: Precision
    kind: DecisionKind | Literal[""] = ""
    text: str = ""
    fix: str = ""
    decided_by: str = ""


@dataclass(frozen=True)
class Cost:
    """Time of an op or unit in microseconds, on one thread.

    Attributes:
        float_us: in float, conversions around it left out.
        int8_us: the same as the backend's integer kernel; None where there is none.
        conversions_us: what the conversions around it take with it on integers, less what they take with it in float,
            all other ops as they are decided. Below zero among integer ops, where a float op is what needs conversions.
        priced_by: "measured", or "table": estimated from sizes (`fxq/cost/price_table.py`).
    """

    float_us: float
    int8_us: float | None = None
    conversions_us: float | None = None
    priced_by: Source = "measured"


class EngineLayer(NamedTuple):
    """What an engine runs as one layer of a region.

    Attributes:
        nodes: what it is made of: names of nodes of the region, layers before other ops; conversions only where it is
            nothing else. Empty for what the engine has put in, as a change of layout, or goes by a name of its own.
        op: what the engine calls it.
        dtype: the type of what it computes with, as torch calls it.
        kind: `int8` or `float`, as it computes; `moves`: it moves values; `convert`: it converts them.
        us: microseconds, the least of a few runs.
    """

    nodes: tuple[str, ...]
    op: str
    dtype: str
    kind: Literal["int8", "float", "moves", "convert"]
    us: float

    def __str__(self) -> str:
        return f"{duration(self.us)}  {self.nodes[0] if self.nodes else self.op}  {self.dtype}"


@dataclass(frozen=True)
class Plan:
    """What `annotate` decided for one node.

    Attributes:
        decision: what it runs as. Its reason says why it is float, or why the ops behind the kernel are.
        reads: the spec that it wants of the activations that its kernel reads; None: it reads floats.
        weight: the spec that it wants of its weights; None: it has none, or reads them in float.
        state: the spec of its hidden state; None: it has none, or keeps it in float.
        state_scale: the scale of that, where it is calibrated and chosen.
        emits: the spec of its result where its kernel emits nothing but integers, else None.
        agreed: the spec in which all read its value that read it as integers; None: each as it wants.
        overflows: whether its kernel adds products in int16, and they do not fit: activations or weights give up a bit.
        kernel_ops: for a unit, how many of its ops, from the first on, the backend's kernel runs; of two numbers, the
            smaller one first, `fallback` takes the faster; empty: all of them.
        exact: for a float op, whether it reads its inputs as they were before they were put on a grid.
        cost: what it takes either way, where `fallback` measured it.
    """

    decision: Decision
    reads: TensorSpec | None = None
    weight: TensorSpec | None = None
    state: TensorSpec | None = None
    kernel_ops: tuple[int, ...] = ()
    cost: Cost | None = None
    emits: TensorSpec | None = None
    agreed: TensorSpec | None = None
    exact: bool = False
    overflows: bool = False
    state_scale: float | None = None

    @property
    def precision(self) -> Precision:
        """What the node runs as."""
        return self.decision.precision

    @property
    def in_float(self) -> bool:
        """Whether the node computes in float: it reads floats, and makes them."""
        return self.precision in ("float", "weight-only")

    def decided(self, **changes: Any) -> Plan:
        """The same plan with fields of its decision replaced."""
        return replace(self, decision=replace(self.decision, **changes))


@dataclass(frozen=True)
class Edge:
    """One integer form of a value. Edges of the same group can share scale and zero point, and do where it is good.

    Attributes:
        spec: what its consumers want.
        group: number of the group; a weight is alone in its.
        source: whether the value is made here; otherwise it is only moved.
        observed: whether an observer watches it: where it is made, where a part of other values is selected, and where
            it may hold constants.
        constants: what masks, pads and fills may have put among its values; no data.
        axis: of a weight, the axis of its output channels where each has a scale, or of its input channels where blocks
            of them have one; of a value whose rows have scales
            that are measured, the first axis of a row, counted from the end; None: one scale.
        qparams: its scale and zero point, once they are chosen; where they are measured at run time, their grid.
    """

    spec: TensorSpec
    group: int
    source: bool
    observed: bool = False
    constants: tuple[float, ...] = ()
    axis: int | None = None
    qparams: QParams | DynamicGrid | None = None

    @property
    def measured(self) -> bool:
        """Whether its scale is measured at run time: nothing is to be calibrated."""
        return self.spec.range == "dynamic"


class NodeInfo(NamedTuple):
    """What fxq knows about a node, kept in `node.meta["fxq"]`. A named tuple: every edit makes a new one, quickly.

    Attributes:
        path: path of the innermost module whose forward made the node; empty for the model itself.
        source: `file:line` of the user's code that made it.
        shape: shape of its value, or None when the value is not a tensor.
        dtype: dtype of its value, or None.
        origins: names of the traced ops that it stands for.
        parts: for a unit or kernel, the origins of each of its ops.
        values: for a unit, shape and dtype of the value of each of its ops.
        paths: for a unit, or a kernel of several, the module path of each of its ops.
        plans: for a kernel of several units, what was decided of each of its ops.
        made_by: the pass and rule that made it, with the rule's source line; empty for traced nodes.
        kept: where a pass before `annotate` leaves a call or a module as it is, its decision.
        plan: what `annotate` decided, once it has run.
        edges: the integer forms that its value is to take, one for each spec that a consumer wants; until insert-qdq.
        body: for a kernel, the ops that it runs, as text.
        layers: for a kernel that an engine runs, the layers that it made of it, for the example input.
        memory: the blocks of memory that the tensors of its value lie in, by number; values with a block in common are
            views of each other (see `fxq/graph/analysis/mutation.py`).
        changes: the blocks that the traced node changes in place.
        stands_for: for an integer weight or a corrected bias, the path of the float one.
        note: something the user should know about the node.
    """

    path: str = ""
    source: str = ""
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    origins: tuple[str, ...] = ()
    parts: tuple[tuple[str, ...], ...] = ()
    values: tuple[tuple[tuple[int, ...] | None, torch.dtype | None], ...] = ()
    paths: tuple[str, ...] = ()
    plans: tuple[Plan, ...] = ()
    made_by: str = ""
    kept: Decision | None = None
    plan: Plan | None = None
    edges: tuple[Edge, ...] = ()
    body: tuple[str, ...] = ()
    layers: tuple[EngineLayer, ...] = ()
    memory: tuple[int, ...] = ()
    changes: tuple[int, ...] = ()
    stands_for: str = ""
    note: str = ""

    @property
    def is_tensor(self) -> bool:
        """Whether the value is a tensor."""
        return self.shape is not None


_NOTHING = NodeInfo()


def info(node: fx.Node) -> NodeInfo:
    """The typed metadata of `node`; empty metadata when it has none."""
    return node.meta.get(META, _NOTHING)


def set_info(node: fx.Node, **changes: Any) -> None:
    """Replace fields of the node's metadata."""
    node.meta[META] = info(node)._replace(**changes)


def precision_of(node: fx.Node) -> Precision | None:
    """What was decided that a node runs as; None where nothing was."""
    plan = info(node).plan
    return plan.precision if plan is not None else None


Grids = Mapping[str, tuple[Plan | None, tuple[Edge, ...]]]
"""The plan and the edges of every value of a graph behind choose-grids, by `grid_key`."""


def grids_of(graph: fx.Graph) -> Grids:
    """Those of a graph."""
    known = ((grid_key(node), info(node).plan, info(node).edges) for node in graph.nodes)
    return {key: (plan, edges) for key, plan, edges in known if plan or edges}


def grid_key(node: fx.Node) -> str:
    """What tells a value from others in every graph that is made of a model in the same way: its name, or its path."""
    return weight_key(str(node.target)) if node.op == "get_attr" else node.name


def weight_key(path: str) -> str:
    """The same for the weight at a path."""
    return f"weight {path}"
