"""The jit backend: regions run as programs of fxq's own, whose loops Numba has compiled."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, fx

from fxq.backends.engine import EngineBackend, EngineKernel, profile_runs
from fxq.backends.loops.code.compiler import has_memory, loops, missing
from fxq.backends.loops.programs.layer_steps import AttentionStep, LinearStep
from fxq.backends.loops.programs.plan import planned
from fxq.backends.loops.programs.planned_values import ROWS, NotPlannedError
from fxq.backends.loops.programs.program_steps import PointwiseStep, ProgramStep, QuantizeStep
from fxq.backends.loops.programs.region_program import RegionProgram
from fxq.common.data import Batch
from fxq.errors import BackendError
from fxq.graph.analysis.integer_sums import node_refused
from fxq.graph.info import EngineLayer, info
from fxq.graph.query import CONVERSIONS, is_op
from fxq.graph.region import Region, is_weight, region_of
from fxq.graph.run import Runner
from fxq.graph.unit import Calls, calls_of

log = logging.getLogger("fxq")


class JitKernel(EngineKernel):
    """A region as a program: memory that is laid out once, and one call of compiled code for all of its steps.

    It runs on one thread.
    """

    name: ClassVar[str] = "jit.region"

    @classmethod
    def try_out(cls, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """As in `EngineKernel`: an op that reads floats counts as one that will read integers."""
        planned(gm, inputs, trial=True)

    def prepared(self, form: fx.GraphModule, inputs: Sequence[Any], last: Sequence[bool]) -> Callable[..., Any]:
        """As in `EngineKernel`."""
        return _program(form, inputs, last)

    def forward(self, *inputs: Any) -> Any:
        """As the region; for tensors that are watched, or have no memory of their own, in qdq form."""
        if self.form is None or (all(isinstance(x, Tensor) for x in inputs) and has_memory(*inputs)):
            return super().forward(*inputs)
        for x in inputs:
            if isinstance(x, Tensor) and x.layout is not torch.strided:
                self._check(None, x)
        return self.form.runner(self)(*inputs)

    @classmethod
    def profiled(
        cls, gm: fx.GraphModule, inputs: Sequence[Any], floats: bool = False, **options: Any
    ) -> list[EngineLayer]:
        """As in `EngineKernel`; in float, each op alone, by PyTorch."""
        if floats:
            return _in_float(gm, inputs)
        timed = _program(gm, inputs, [False] * len(inputs)).timed(inputs, profile_runs())
        return [_layer(step, us) for step, us in timed]


def _layer(step: ProgramStep, us: float) -> EngineLayer:
    """A step as the layer that an engine runs."""
    kind = _kind_of(step)
    op, dtype = type(step).__name__.removesuffix("Step"), "float32" if kind == "float" else "uint8"
    return EngineLayer((step.name,), op, dtype, kind, us)


def _program(gm: fx.GraphModule, inputs: Sequence[Any], last: Sequence[bool]) -> RegionProgram:
    compiled = loops("program_loops")
    if compiled is None:
        raise BackendError(f"no loops are compiled: {missing('program_loops')} (pip install fxq[jit])")
    return RegionProgram(compiled, gm, inputs, last)


def _kind_of(step: ProgramStep) -> Literal["int8", "float", "convert"]:
    if isinstance(step, QuantizeStep) or (isinstance(step, PointwiseStep) and step.is_conversion):
        return "convert"
    all_float = isinstance(step, (LinearStep, AttentionStep)) or (
        bool(step.out.is_float) and all(x.is_float for x in step.reads)
    )
    return "float" if all_float else "int8"


def _in_float(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[EngineLayer]:
    """What PyTorch takes for each op of a region in float."""
    found = dict[fx.Node, float]()
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    with torch.no_grad():
        for _ in range(_ROUNDS):
            runner = Runner(gm, Batch(tuple(inputs), {}))
            for node in gm.graph.nodes:
                start = time.perf_counter()
                runner.step(node)
                found[node] = min(found.get(node, 1.0e9), time.perf_counter() - start)
    return [
        EngineLayer((node.name,), "", "float32", "float", 1e6 * found[node])
        for node in nodes
        if not is_op(node, *CONVERSIONS) and calls_of(gm, node)
    ]


_ROUNDS = 2


def _plain(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Options without the numbers and tensors of grids."""
    return [(name, "" if name in ("scale", "zero_point") else repr(value)) for name, value in options.items()]


def _refused(gm: fx.GraphModule, region: Region) -> NotPlannedError | None:
    """Why a region is no program; None: it is one."""
    about = [(info(read).shape, info(read).dtype) for read in region.inputs]
    if any(shape is None or dtype is None for shape, dtype in about) or not region.outputs:
        return NotPlannedError("its shapes are not known")
    try:
        inputs = [torch.empty(shape or (), dtype=dtype, device="meta") for shape, dtype in about]
        planned(fx.GraphModule(gm, region.to_graph()), inputs)
    except NotPlannedError as error:
        return error
    return None


class Jit(EngineBackend):
    """fxq's own loops. uint8 activations, int8 weights per channel; all sums are exact on any CPU."""

    name: ClassVar[str] = "jit"
    packages: ClassVar[tuple[str, ...]] = ("numba",)
    kernel: ClassVar[type[EngineKernel]] = JitKernel
    layers: ClassVar[frozenset[str]] = frozenset({"conv2d", "conv_transpose2d", "linear"})
    other_ops: ClassVar[frozenset[str]] = frozenset(
        {"add", "mul", "mean", "avg_pool2d", "adaptive_avg_pool2d", "batch_norm"}
    )

    def __init__(self) -> None:
        super().__init__()
        self._taken: dict[str, bool] = {}
        self._left: set[fx.Node] = set()

    def available(self) -> str | None:
        """As in `Backend`; not where Numba is there and compiles nothing."""
        absent = super().available()
        if absent is None and loops("program_loops") is None:
            return f'Numba does not compile its loops here: {missing("program_loops")}. Use backend="auto".'
        return absent

    def kind_of(self, value: fx.Node) -> Any:
        """As in `EngineBackend`: its shape."""
        return info(value).shape

    def takes(self, gm: fx.GraphModule, node: fx.Node) -> bool:
        """As in `EngineBackend`: what a step computes of the integers, or floats, that the node reads."""
        calls, plan = calls_of(gm, node), info(node).plan
        if not calls or node in self._left or (plan is not None and plan.precision == "weight-only"):
            return False
        if node_refused(gm, node) is not None:
            return False
        integers = [read for read in node.all_input_nodes if is_op(read, "dequantize") and not is_weight(read)]
        about = [(read in integers, is_weight(read), sorted(_plain(read.kwargs))) for read in node.all_input_nodes]
        key = repr((self.key(gm, node), about))
        if key not in self._taken:
            self._taken[key] = _refused(gm, region_of([*dict.fromkeys(integers), node])) is None
        return self._taken[key]

    def regions(self, gm: fx.GraphModule) -> Iterable[Region]:
        """As in `EngineBackend`, without the ops that no step computes among their neighbours; of integers."""
        while (found := self._refusing(gm)) is not None:
            self._left.add(found)
        return (region for region in super().regions(gm) if any(is_op(node, *CONVERSIONS) for node in region.nodes))

    def _refusing(self, gm: fx.GraphModule) -> fx.Node | None:
        """A node because of which a region is no program."""
        for region in super().regions(gm):
            reason = _refused(gm, region)
            if reason is not None:
                nodes = {node.name: node for node in region.nodes}
                return nodes.get(reason.node, region.nodes[-1])
        return None

    def fuses(self, calls: Calls) -> bool:
        """As in `Backend`: what steps compute."""
        return all(call.op.name in ROWS for call in calls)
