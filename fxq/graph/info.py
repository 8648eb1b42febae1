"""Typed metadata of graph nodes (`NodeInfo`): the plan, decision and costs of a node, and the edges of its value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import fx

from fxq.display.tables import duration
from fxq.graph.precision import LayerKind, Precision
from fxq.ops.table import META
from fxq.quant.dynamic_grid import Grid
from fxq.quant.spec import Compute, TensorSpec

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
    """Precision of an op, the reason for it, and the pass that decided.

    Attributes:
        precision: precision of the op, see `fxq/graph/precision.py`.
        kind: category of the reason; empty if there is no reason to give.
            `unsupported`: fxq or the backend has no integer form of this call.
            `excluded by the recipe`: the recipe asks for float.
            `slower`: float is faster, as timed or as known for this op.
            `unverified`: the kernel's results differ from those of its q/dq form.
            `leaf`: it is in a module that is kept as it is.
            `no integer neighbour`: it would need conversions of its own, or nothing reads its integers.
            `off the grid`: its values do not fit a grid, use a small part of one, would mostly become zero, or
                decide a size.
            `no tensor`: it reads or returns a shape or another plain value.
            `undecided`: no pass has decided.
        text: the reason, for users. fxq does not parse it.
        fix: remedy: the recipe lines that change the decision, or empty.
        decided_by: name of the pass that decided.
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
        float_us: time in float, without conversions.
        int8_us: time of the backend's integer kernel, without conversions; None if there is no kernel.
        conversions_us: extra time of the surrounding conversions if this op runs on integers instead of float, with
            all other ops as decided. Negative among integer ops, where a float op would need the conversions.
        priced_by: "measured" (timed) or "table" (estimated from sizes by `fxq/cost/price_table.py`).
    """

    float_us: float
    int8_us: float | None = None
    conversions_us: float | None = None
    priced_by: Source = "measured"


class EngineLayer(NamedTuple):
    """Layer that an engine made of a part of a region.

    Attributes:
        nodes: names of the region's nodes that it runs, layers before other ops; conversions are listed only if it
            runs nothing else. Empty for layers that the engine inserted, such as a change of layout, or renamed.
        op: name of its op in the engine.
        dtype: dtype that it computes with, in torch's spelling.
        kind: precision of its arithmetic, `int8` or `float`; else `moves` or `convert`.
        us: fastest of a few runs, in microseconds.
    """

    nodes: tuple[str, ...]
    op: str
    dtype: str
    kind: LayerKind
    us: float

    def __str__(self) -> str:
        return f"{duration(self.us)}  {self.nodes[0] if self.nodes else self.op}  {self.dtype}"


@dataclass(frozen=True)
class Plan:
    """Plan of one node, decided by `annotate`: its precision, and the specs of the integers that it reads and emits.

    `wanted_forms` (`fxq/graph/unit.py`) has the form that the node wants of each value.

    Attributes:
        decision: precision of the node. Its reason says why the node, or the ops after its kernel, run in float.
        reads: spec of the activations that its kernel reads; None if it reads floats.
        weight: spec of its weights; None if it has none, or reads them in float.
        state: spec of its hidden state; None if it has none, or keeps it in float.
        state_scale: calibrated scale of the hidden state, once chosen.
        emits: spec of its result if its kernel emits integers only, else None.
        agreed: one spec for all nodes that read its value as integers; None if each reads it in the spec of its plan.
        overflows: whether the kernel's int16 sums saturate with 8 bits, so that activations or weights need
            reduce_range (7 bits).
        kernel_ops: for a unit, number of its leading ops that the backend's kernel runs. If there are two numbers,
            smaller first, `fallback` takes the faster. Empty: all ops.
        exact: for a float op, whether it reads its inputs as they were before quantization.
        cost: time in either precision, if `fallback` priced it.
        compute: "bfloat16" if a weight-only layer may compute in it, see `QuantConfig.compute`.
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
    compute: Compute = "float32"

    @property
    def precision(self) -> Precision:
        """Precision of the node."""
        return self.decision.precision

    @property
    def in_float(self) -> bool:
        """Whether the node computes in float, so that it reads and returns floats."""
        return self.precision in ("float", "weight-only")

    def decided(self, **changes: Any) -> Plan:
        """Copy of the plan with fields of its decision replaced."""
        return replace(self, decision=replace(self.decision, **changes))


class IntegerForm(NamedTuple):
    """Integer form of a value, as a node wants it of a value that it reads.

    Attributes:
        spec: spec of the integers.
        axis: None for one scale. For a weight, the output-channel axis (a scale per channel) or the input-channel axis
            (a scale per block). For a dynamic per-row value, the first axis of a row, counted from the end.
    """

    spec: TensorSpec
    axis: int | None = None


@dataclass(frozen=True)
class Edge:
    """One integer form of a value. Edges of one shared-grid group may share scale and zero point.

    Attributes:
        spec: spec of the form that the readers want.
        group: number of its shared-grid group; a weight has a group of its own.
        source: whether the node computes the value; otherwise the node only moves it.
        observed: whether an observer watches the value: if the node computes it, selects a part of another value, or
            may add fill constants.
        constants: fill constants that the value may hold.
        axis: axis of the form, see `IntegerForm`.
        qparams: scale and zero point, once chosen; the dynamic grid if the range is dynamic.
    """

    spec: TensorSpec
    group: int
    source: bool
    observed: bool = False
    constants: tuple[float, ...] = ()
    axis: int | None = None
    qparams: Grid | None = None

    @property
    def form(self) -> IntegerForm:
        """Form that the readers want."""
        return IntegerForm(self.spec, self.axis)

    @property
    def dynamic(self) -> bool:
        """Whether its range is dynamic: the scale is computed at run time, not calibrated."""
        return self.spec.range == "dynamic"


class TracedInfo(NamedTuple):
    """Metadata that `trace` and the passes up to `decompose` record of a node of the model.

    Attributes:
        memory: numbers of the memory blocks of the tensors in its value; values with a common block are views of each
            other (see `fxq/graph/analysis/mutation.py`).
        changes: numbers of the blocks that the traced node changes in place.
        kept: decision of a pass before `annotate` to leave a call or a module as it is.
    """

    memory: tuple[int, ...] = ()
    changes: tuple[int, ...] = ()
    kept: Decision | None = None


class FusedInfo(NamedTuple):
    """Metadata of the ops inside a unit or kernel, in execution order. `fuse` records it, and kernels inherit it.

    Attributes:
        parts: the origins of each op.
        values: for a unit, shape and dtype of the value of each op.
        paths: for a unit, or a kernel of several units, the module path of each op.
    """

    parts: tuple[tuple[str, ...], ...] = ()
    values: tuple[tuple[tuple[int, ...] | None, torch.dtype | None], ...] = ()
    paths: tuple[str, ...] = ()


class LoweredInfo(NamedTuple):
    """Metadata of a kernel, recorded by `lower`.

    Attributes:
        body: the ops that it runs, as text.
        plans: for a kernel of several units, the plan of each op.
        layers: for a kernel of an engine, the layers that the engine made of it for the example input.
    """

    body: tuple[str, ...] = ()
    plans: tuple[Plan, ...] = ()
    layers: tuple[EngineLayer, ...] = ()


class NodeInfo(NamedTuple):
    """Metadata of a node, stored in `node.meta["fxq"]`. A named tuple, since edits often replace fields.

    Fields of one stage are in a record of that stage; the others hold at every stage.

    Attributes:
        path: path of the innermost module whose forward created the node; empty for the model itself.
        source: `file:line` of the user's code that created it.
        shape: shape of its value, or None if the value is not a tensor.
        dtype: dtype of its value, or None.
        origins: names of the traced ops that it represents.
        made_by: the pass and rule that created it, with the rule's source line; empty for traced nodes.
        stands_for: for an integer weight or a corrected bias, the path of the float one.
        corrects: whether it is an integer weight that is added to correct the rounding of another one. It has no float
            weight, and is 0 in the float form of the graph.
        note: remark for the user.
        traced: memory of its value, and whether it was kept as the model calls it.
        fused: the ops inside a unit or kernel.
        plan: the plan by `annotate`, once it has run.
        edges: integer forms of its value, one for each spec that a consumer wants; empty from insert-qdq on.
        lowered: the ops and layers of a kernel.
    """

    path: str = ""
    source: str = ""
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    origins: tuple[str, ...] = ()
    made_by: str = ""
    stands_for: str = ""
    corrects: bool = False
    note: str = ""
    traced: TracedInfo = TracedInfo()
    fused: FusedInfo = FusedInfo()
    plan: Plan | None = None
    edges: tuple[Edge, ...] = ()
    lowered: LoweredInfo = LoweredInfo()

    @property
    def is_tensor(self) -> bool:
        """Whether the value is a tensor."""
        return self.shape is not None


_NO_INFO = NodeInfo()


def info(node: fx.Node) -> NodeInfo:
    """Metadata of `node`; empty metadata if it has none."""
    return node.meta.get(META, _NO_INFO)


def set_info(node: fx.Node, **changes: Any) -> None:
    """Replace fields of the node's metadata."""
    node.meta[META] = info(node)._replace(**changes)


def precision_of(node: fx.Node) -> Precision | None:
    """Precision of a node, or None if it is not decided."""
    plan = info(node).plan
    return plan.precision if plan is not None else None


ChosenGrids = Mapping[str, tuple[Plan | None, tuple[Edge, ...]]]
"""Plan and edges of every value of a graph after choose-grids, by `grid_key`."""


def grids_of(graph: fx.Graph) -> ChosenGrids:
    """Plan and edges of every value of a graph that has any, by `grid_key`."""
    entries = ((grid_key(node), info(node).plan, info(node).edges) for node in graph.nodes)
    return {key: (plan, edges) for key, plan, edges in entries if plan or edges}


def grid_key(node: fx.Node) -> str:
    """Key of a value that is equal in all graphs made of a model in the same way: its name, or a weight's path."""
    return weight_key(str(node.target)) if node.op == "get_attr" else node.name


def weight_key(path: str) -> str:
    """`grid_key` of the weight at a path."""
    return f"weight {path}"
