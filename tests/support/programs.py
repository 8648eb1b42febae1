"""Regions in qdq form, written op by op, and comparison of their programs with PyTorch's results."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn

import fxq
from fxq.backends.engine import EngineBackend
from fxq.backends.loops.jit_engine import JitKernel
from fxq.backends.loops.programs import split_rows
from fxq.backends.loops.programs.plan import ProgramPlan, planned
from fxq.backends.loops.programs.planned_values import NotPlannedError
from fxq.backends.loops.programs.program_steps import ProgramStep
from fxq.backends.loops.programs.region_program import RegionProgram
from fxq.common.timed_calls import threads_set_to
from fxq.graph.info import set_info
from fxq.graph.query import submodule
from fxq.ops import OPS
from tests.support.helpers import plain

LOOPS = pytest.importorskip("fxq.backends.loops.code.program_loops", reason="needs Numba", exc_type=ImportError)
LAST = torch.channels_last


class Draft:
    """A region in qdq form that is being written. Each op runs at once, so that grids fit the values.

    Attributes:
        inputs: Example inputs.
        values: Value of each node for the example.
    """

    def __init__(self, seed: int = 0) -> None:
        self.root, self.graph = nn.Module(), fx.Graph()
        self.inputs: list[Tensor] = []
        self.values: dict[fx.Node, Any] = {}
        self.random = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def input(self, x: Tensor) -> fx.Node:
        """An input of the region."""
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        self.inputs.append(x)
        self.values[node] = x
        return node

    def constant(self, tensor: Tensor) -> fx.Node:
        name = f"constant_{len(self.values)}"
        self.root.register_buffer(name, tensor)
        node = self.graph.get_attr(name)
        self.values[node] = tensor
        return node

    def vector(self, count: int) -> fx.Node:
        """A random bias."""
        return self.constant(self.normal(count))

    def weight(self, *shape: int, axis: int = 0) -> fx.Node:
        """Random integers with a scale for each entry of an axis. Results are about as large as what is read."""
        values = torch.randint(-127, 128, shape, generator=self.random, dtype=torch.int8)
        depth = values.numel() // shape[axis]
        scale = (0.5 + torch.rand(shape[axis], generator=self.random)) / (60 * depth**0.5)
        zero = self.constant(torch.zeros(shape[axis], dtype=torch.int32))
        about = {"scale": self.constant(scale), "zero_point": zero, "qmin": -127, "qmax": 127, "axis": axis}
        return self.op("dequantize", self.constant(values), **about)

    def op(self, name: str, *args: Any, **options: Any) -> fx.Node:
        """A call of an op of the table."""
        node = self.graph.call_function(OPS[name].target, args, options)
        read = fx.map_arg((args, options), lambda n: self.values[n])
        self.values[node] = OPS[name].target(*read[0], **read[1])
        return node

    def size(self, target: str | Callable[..., Any], *args: Any, **options: Any) -> fx.Node:
        """Size of a value, or a number computed from sizes: by a tensor method's name, or a function."""
        is_method = isinstance(target, str)
        node = self.graph.create_node("call_method" if is_method else "call_function", target, args, options)
        set_info(node)
        args, options = fx.map_arg((args, options), lambda n: self.values[n])
        self.values[node] = getattr(args[0], target)(*args[1:]) if is_method else target(*args, **options)
        return node

    def quantize(self, x: fx.Node, grid: tuple[float, int] | None = None) -> fx.Node:
        """Integers, on the given grid (scale, zero point), or on one that fits."""
        scale, zero = grid or fitting(self.values[x])
        return self.op("quantize", x, scale=scale, zero_point=zero)

    def dequantize(self, x: fx.Node, grid: tuple[float, int] | None = None) -> fx.Node:
        """Dequantize integers. The grid is that of the `quantize` before, also through ops that move values."""
        if grid is None:
            source = x
            while "scale" not in source.kwargs:
                source = source.all_input_nodes[0]
            grid = source.kwargs["scale"], source.kwargs["zero_point"]
        return self.op("dequantize", x, scale=grid[0], zero_point=grid[1])

    def qdq(self, x: fx.Node, grid: tuple[float, int] | None = None) -> fx.Node:
        return self.dequantize(self.quantize(x, grid))

    def image(self, *shape: int) -> fx.Node:
        """A random input, rounded to a grid. No value is near the middle between two integers."""
        x = self.normal(*shape)
        scale, zero = fitting(x)
        aside = 0.8 * torch.rand(shape, generator=self.random) - 0.4
        return self.qdq(self.input((torch.round(x / scale) + aside) * scale), (scale, zero))

    def conv(self, x: fx.Node, columns: int, size: int = 1, **options: Any) -> fx.Node:
        """A convolution with a bias, with `size` x `size` windows and 'same' padding unless options say otherwise."""
        channels = self.values[x].shape[1] // options.get("groups", 1)
        options = {"padding": (size // 2, size // 2), **options}
        return self.op("conv2d", x, self.weight(columns, channels, size, size), self.vector(columns), **options)

    def form(self, *outputs: fx.Node) -> fx.GraphModule:
        """Return the region with these outputs."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(self.graph, copies)
        returned = tuple(copies[node] for node in outputs)
        graph.output(returned if len(returned) > 1 else returned[0])
        gm = fx.GraphModule(self.root, graph)
        gm.graph.eliminate_dead_code()
        gm.recompile()
        return gm


def fitting(x: Tensor) -> tuple[float, int]:
    """Grid (scale, zero point) that is a little wider than the values."""
    low, high = min(x.min().item(), -0.1), max(x.max().item(), 0.1)
    scale = 1.013 * (high - low) / 255
    return scale, round(-low / scale)


def is_last(x: Tensor) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=LAST)


def program(form: fx.GraphModule, inputs: Sequence[Tensor]) -> RegionProgram:
    """The program of a region for inputs like these."""
    return RegionProgram(LOOPS, form, inputs, [is_last(x) for x in inputs])


MAX_ROUNDING_SHARE = 1 / 200
"""Share of integers after a layer or two that may be rounded to the other side: PyTorch adds floats."""


def compare(got: Any, wanted: Any, share: float = MAX_ROUNDING_SHARE) -> None:
    """Floats to 1e-5 of the largest; integers within one step, where rounding ties differ: a share of them, or one."""
    if isinstance(wanted, tuple):
        assert isinstance(got, tuple) and len(got) == len(wanted)
        for got_part, wanted_part in zip(got, wanted, strict=True):
            compare(got_part, wanted_part, share)
        return
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    if wanted.dtype == torch.uint8:
        difference = (got.int() - wanted.int()).abs()
        assert difference.max() <= 1 and (difference > 0).sum() <= 1 + share * difference.numel()
    else:
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * max(1.0, wanted.abs().max().item()))


def divided(form: fx.GraphModule, inputs: Sequence[Tensor], threads: int) -> RegionProgram:
    """The program of a region whose steps are divided among threads, however small they are."""
    with threads_set_to(threads), patch.object(split_rows, "TAKING_NANOSECONDS", 1e-4):
        return program(form, inputs)


def compare_exactly(got: Any, wanted: Any) -> None:
    """All results are equal bit by bit, NaN included."""
    got, wanted = ([x] if isinstance(x, Tensor) else list(x) for x in (got, wanted))
    for got_part, wanted_part in zip(got, wanted, strict=True):
        torch.testing.assert_close(got_part, wanted_part, rtol=0, atol=0, equal_nan=True)


def check(draft: Draft, *outputs: fx.Node, share: float = MAX_ROUNDING_SHARE) -> RegionProgram:
    """Compare a program with its region, for contiguous and channels-last inputs; return the last program.

    With three threads its results are equal bit by bit.
    """
    form = draft.form(*outputs)
    wanted = form(*draft.inputs)
    compiled = program(form, draft.inputs)
    result = compiled(*draft.inputs)
    compare(result, wanted, share)
    compare_exactly(divided(form, draft.inputs, 3)(*draft.inputs), result)
    if any(x.dim() == 4 for x in draft.inputs):
        last = [x.contiguous(memory_format=LAST) if x.dim() == 4 else x for x in draft.inputs]
        compiled = program(form, last)
        compare(compiled(*last), wanted, share)
    return compiled


def check_both(draft: Draft, x: fx.Node) -> None:
    """Run `check` for an op that returns floats: once for the floats, and once for quantized results."""
    check(draft, x)
    check(draft, draft.quantize(x))


def plan_of(draft: Draft, *outputs: fx.Node) -> ProgramPlan:
    return planned(draft.form(*outputs), draft.inputs)


def kinds(compiled: ProgramPlan | RegionProgram) -> list[str]:
    """The steps by the names of their classes."""
    plan = compiled.plan if isinstance(compiled, RegionProgram) else compiled
    return [type(step).__name__ for step in plan.steps]


def refused(draft: Draft, *outputs: fx.Node) -> str:
    """Reason why a region is no program."""
    with pytest.raises(NotPlannedError) as caught:
        plan_of(draft, *outputs)
    return str(caught.value)


# ---- whole networks


@contextmanager
def free():
    """Integers cost nothing, so that no test depends on how fast the machine is."""
    with patch.object(EngineBackend, "prices", lambda self, gm, example: fxq.extend.Prices({}, 0.0)):
        yield


def quantized(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    """Quantize a network with the jit backend, without corrections of the results."""
    recipe = plain(fxq.Recipe.static(backend="jit", optimize="coverage")).with_min_sqnr(None)
    with free():
        return fxq.quantize(model.eval(), recipe, data=[inputs], example_inputs=inputs, progress=False)


def regions(q: fx.GraphModule) -> list[JitKernel]:
    return [submodule(q, n) for n in q.graph.nodes if isinstance(submodule(q, n), JitKernel)]


def whole(model: nn.Module, *inputs: Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Quantize a network, which must become one region, and return it with the region's qdq form."""
    q = quantized(model, *inputs)
    computed = [n for n in q.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    assert [n.op for n in computed if n.target is not operator.getitem] == ["call_module"]
    (kernel,) = regions(q)
    return q, kernel.form.module(kernel)


def steps_of(compiled: ProgramPlan | RegionProgram, kind: type[ProgramStep]) -> list[Any]:
    """The steps of a class."""
    plan = compiled.plan if isinstance(compiled, RegionProgram) else compiled
    return [step for step in plan.steps if isinstance(step, kind)]
