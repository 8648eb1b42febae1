"""The jit backend: regions run as programs of fxq's own loops, compiled by Numba; recurrent layers are kernels."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.backends.base import Support
from fxq.backends.engine import EngineBackend, EngineKernel, kind_of_grid, profile_runs
from fxq.backends.kernel import Kernel
from fxq.backends.loops.code.compiler import has_memory, loops, missing
from fxq.backends.loops.jit_units import JitUnits
from fxq.backends.loops.programs.layer_steps import AttentionStep, LinearStep
from fxq.backends.loops.programs.plan import planned
from fxq.backends.loops.programs.planned_values import PLANNERS, NotPlannedError
from fxq.backends.loops.programs.program_steps import PointwiseStep, ProgramStep, QuantizeStep
from fxq.backends.loops.programs.region_program import RegionProgram
from fxq.common.data import Batch
from fxq.errors import BackendError
from fxq.graph.analysis.integer_sums import node_refused
from fxq.graph.info import EngineLayer, info
from fxq.graph.precision import LayerKind
from fxq.graph.query import CONVERSIONS, is_op
from fxq.graph.region import Region, is_weight, region_of
from fxq.graph.run import Runner
from fxq.graph.unit import Calls, calls_of
from fxq.quant.spec import QuantConfig

log = logging.getLogger("fxq")


class JitKernel(EngineKernel):
    """Kernel that runs a region as a program: one call of compiled code runs all steps in memory that is laid out once.

    It runs on as many threads as PyTorch has. While they serve another caller, it runs on the caller's thread alone.
    """

    name: ClassVar[str] = "jit.region"

    @classmethod
    def try_out(cls, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Raise `NotPlannedError` for a region that is no program.

        An op that reads floats counts as one that will read integers.
        """
        planned(gm, inputs, trial=True)

    def prepared(self, form: fx.GraphModule, inputs: Sequence[Any], last: Sequence[bool]) -> Callable[..., Any]:
        """Return the program of the region for inputs like these."""
        return _program(form, inputs, last)

    def forward(self, *inputs: Any) -> Any:
        """Run the program, or the q/dq form for tensors that PyTorch traces or that have no memory of their own."""
        if self.form is None or (all(isinstance(x, Tensor) for x in inputs) and has_memory(*inputs)):
            return super().forward(*inputs)
        for x in inputs:
            if isinstance(x, Tensor) and x.layout is not torch.strided:
                self._check(None, x)
        return self.form.runner(self)(*inputs)

    def bind(self, *inputs: Any) -> Callable[..., Any]:
        """Return the program for inputs like these, see `Bindable.bind`; `forward` where those need the q/dq form."""
        reads_memory = self.form is not None and all(isinstance(x, Tensor) for x in inputs) and has_memory(*inputs)
        return super().bind(*inputs) if reads_memory else self.forward

    def layers(self, *inputs: Any) -> tuple[EngineLayer, ...]:
        """Timed steps of the program that runs for these inputs, in order."""
        program = self._runner(inputs)
        timed = program.timed(inputs, profile_runs()) if isinstance(program, RegionProgram) else ()
        return tuple(_layer(step, us) for step, us in timed)

    @classmethod
    def profiled(
        cls, gm: fx.GraphModule, inputs: Sequence[Any], floats: bool = False, **options: Any
    ) -> list[EngineLayer]:
        """Time each step of the program, or with `floats` each op of the float form in PyTorch."""
        if floats:
            return _float_layers(gm, inputs)
        timed = _program(gm, inputs, [False] * len(inputs)).timed(inputs, profile_runs())
        return [_layer(step, us) for step, us in timed]


def _layer(step: ProgramStep, us: float) -> EngineLayer:
    """Report a timed step as a layer of the engine."""
    kind = _kind_of(step)
    op, dtype = type(step).__name__.removesuffix("Step"), "float32" if kind == "float" else "uint8"
    return EngineLayer((step.name,), op, dtype, kind, us)


def _program(gm: fx.GraphModule, inputs: Sequence[Any], last: Sequence[bool]) -> RegionProgram:
    """Compile the program of a region. Raises `BackendError` where Numba is missing or does not work."""
    compiled = loops("program_loops")
    if compiled is None:
        raise BackendError(f"no loops are compiled: {missing('program_loops')} (pip install fxq[jit])")
    return RegionProgram(compiled, gm, inputs, last)


def _kind_of(step: ProgramStep) -> LayerKind:
    """Whether a step converts, computes in float or computes on integers."""
    if isinstance(step, QuantizeStep) or (isinstance(step, PointwiseStep) and step.is_conversion):
        return "convert"
    all_float = isinstance(step, (LinearStep, AttentionStep)) or (
        bool(step.out.is_float) and all(x.is_float for x in step.reads)
    )
    return "float" if all_float else "int8"


def _float_layers(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[EngineLayer]:
    """Time each op of a float region in PyTorch: the shortest of a few runs."""
    seconds = dict[fx.Node, float]()
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    with torch.no_grad():
        for _ in range(_TIMED_ROUNDS):
            runner = Runner(gm, Batch(tuple(inputs), {}))
            for node in gm.graph.nodes:
                start = time.perf_counter()
                runner.step(node)
                seconds[node] = min(seconds.get(node, 1.0e9), time.perf_counter() - start)
    return [
        EngineLayer((node.name,), "", "float32", "float", 1e6 * seconds[node])
        for node in nodes
        if not is_op(node, *CONVERSIONS) and calls_of(gm, node)
    ]


_TIMED_ROUNDS = 2


def _options_without_grids(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of options; of a scale or zero point only whether it is a number or a node."""
    return [(name, repr(kind_of_grid(name, value))) for name, value in options.items()]


def _region_refusal(gm: fx.GraphModule, region: Region) -> NotPlannedError | None:
    """Error that says why a region is no program; None if it is one."""
    kinds = [(info(read).shape, info(read).dtype) for read in region.inputs]
    if any(shape is None or dtype is None for shape, dtype in kinds) or not region.outputs:
        return NotPlannedError("its shapes are not known")
    try:
        inputs = [torch.empty(shape or (), dtype=dtype, device="meta") for shape, dtype in kinds]
        planned(fx.GraphModule(gm, region.to_graph()), inputs)
    except NotPlannedError as error:
        return error
    return None


class Jit(EngineBackend):
    """Backend of fxq's own loops: uint8 activations, int8 per-channel weights, exact sums on any CPU."""

    name: ClassVar[str] = "jit"
    packages: ClassVar[tuple[str, ...]] = ("numba",)
    kernel: ClassVar[type[EngineKernel]] = JitKernel
    layers: ClassVar[frozenset[str]] = frozenset({"conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d", "linear"})
    other_ops: ClassVar[frozenset[str]] = frozenset(
        {"add", "mul", "mean", "avg_pool2d", "adaptive_avg_pool2d", "batch_norm"}
    )

    def __init__(self) -> None:
        super().__init__()
        self._is_taken: dict[str, bool] = {}
        self._left_in_float: set[fx.Node] = set()
        self._units = JitUnits()

    def available(self) -> str | None:
        """Reason why the backend cannot run here: Numba is not installed, or compiles nothing. None if it can run."""
        absent = super().available()
        if absent is None and loops("program_loops") is None:
            return f'Numba does not compile its loops here: {missing("program_loops")}. Use backend="auto".'
        return absent

    def supports(self, gm: fx.GraphModule, node: fx.Node, calls: Calls, config: QuantConfig) -> Support:
        """How many ops of a unit a program or a kernel of its own runs on integers."""
        activation = config.activation
        if activation is None or self._units.has_kernel(calls, activation.range == "dynamic"):
            return self._units.supports(gm, node, calls, config)
        return super().supports(gm, node, calls, config)

    def kind_of(self, value: fx.Node) -> Any:
        """Shape of a value: programs are planned per shape."""
        return info(value).shape

    def takes(self, gm: fx.GraphModule, node: fx.Node) -> bool:
        """Whether a step computes the node from the integers or floats that it reads."""
        calls, plan = calls_of(gm, node), info(node).plan
        if not calls or node in self._left_in_float or (plan is not None and plan.precision == "weight-only"):
            return False
        if node_refused(gm, node) is not None:
            return False
        integers = [read for read in node.all_input_nodes if is_op(read, "dequantize") and not is_weight(read)]
        read_kinds = [
            (read in integers, is_weight(read), sorted(_options_without_grids(read.kwargs)))
            for read in node.all_input_nodes
        ]
        key = repr((self.key(gm, node), read_kinds))
        if key not in self._is_taken:
            self._is_taken[key] = _region_refusal(gm, region_of([*dict.fromkeys(integers), node])) is None
        return self._is_taken[key]

    def regions(self, gm: fx.GraphModule) -> Iterator[Region]:
        """Regions of units with kernels, regions that run as programs, and conversions that are left.

        Nodes that no step computes beside their neighbours are left in float.
        """
        yield from self._units.regions(gm)
        programs: set[tuple[fx.Node, ...]] = set()
        while refusing := self._refusing(gm, programs):
            self._left_in_float |= refusing
        planned = set[fx.Node]()
        for region in super().regions(gm):
            if any(is_op(node, *CONVERSIONS) for node in region.nodes):
                planned.update(region.nodes)
                yield region
        yield from self._units.conversions(gm, planned)

    def lower(self, gm: fx.GraphModule, region: Region) -> Kernel | None:
        """Return the kernel of a unit, or of a region that runs as a program."""
        return self._units.lower(gm, region) if self._units.is_own(region) else super().lower(gm, region)

    def _refusing(self, gm: fx.GraphModule, programs: set[tuple[fx.Node, ...]]) -> set[fx.Node]:
        """First node of each region because of which the region is no program.

        Args:
            gm: module of the qdq graph.
            programs: nodes of regions that are programs, which are not planned again. Regions are added to it.
        """
        refusing: set[fx.Node] = set()
        for region in super().regions(gm):
            key = tuple(region.nodes)
            reason = None if key in programs else _region_refusal(gm, region)
            if reason is None:
                programs.add(key)
            else:
                nodes = {node.name: node for node in region.nodes}
                refusing.add(nodes.get(reason.node, region.nodes[-1]))
        return refusing

    def fuses(self, calls: Calls) -> bool:
        """Whether steps compute all of these ops."""
        return all(call.op.name in PLANNERS for call in calls)
