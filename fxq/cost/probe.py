"""Prober: prices of regions of the qdq graph as kernels of a backend, and of their ops in float."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxq.backends.base import Backend, Prices
from fxq.backends.kernel import Kernel
from fxq.backends.lower_graph import lowered_copy
from fxq.common.data import Batch
from fxq.cost.cache import Call, Costs
from fxq.cost.price_table import PriceTable, table_for
from fxq.graph.grid import grid_of
from fxq.graph.info import Cost, NodeInfo, info
from fxq.graph.query import CONVERSIONS, arguments_of, dynamic_grid_ops, is_op, options_of, values_of
from fxq.graph.region import Region, is_weight, region_of
from fxq.graph.run import value_of
from fxq.graph.unit import unit_of
from fxq.graph.view import options_text
from fxq.pipeline.context import Context
from fxq.recipe.recipe import Recipe
from fxq.rewriting.rewriter import Rewriter
from fxq.rewriting.unit_edits import split_unit
from fxq.runtime.binding import bind

log = logging.getLogger("fxq")
_MICRO = 1e-6
MIN_SPEEDUP = 1.15
"""Speedup of float over integers that is required to choose float. Timing single ops favors float, as integers leave
more room in caches in a network; and noise must not decide near ties."""


class Prober:
    """Source of prices for one backend: measured and stored (see `Costs`), or estimated by the price table.

    Attributes:
        measures: whether prices may be measured; otherwise only the price table is used.
        table: price table of the backend on this kind of CPU, if there is one.
        own: prices that the backend measured itself. These ops, and conversions, are not timed here.
    """

    def __init__(self, backend: Backend, recipe: Recipe, costs: Costs, measures: bool = True) -> None:
        self.backend, self.recipe, self.costs, self.measures = backend, recipe, costs, measures
        self.table: PriceTable | None = table_for(backend.name) if costs.has_table else None
        self.own: Prices | None = None

    def estimate(self, gm: fx.GraphModule, region: Region) -> tuple[float, float] | None:
        """Seconds on integers and in float by the price table; None if it has none, or the backend has prices."""
        if self.table is None or self.own_cost(region) is not None:
            return None
        int8, real = self.table.kernel_seconds(gm, region), self.table.float_seconds(gm, region)
        return None if int8 is None or real is None else (int8, real)

    def estimate_float(self, gm: fx.GraphModule, region: Region) -> float | None:
        """Seconds in float by the price table; None as for `estimate`."""
        return None if self.table is None or self.own_cost(region) is not None else self.table.float_seconds(gm, region)

    def is_sound(self, region: Region) -> bool:
        """Whether the measured rounds of a region agree, both as a kernel and in float."""
        return all(map(self.costs.is_sound, self.keys(region)))

    def kernel(self, gm: fx.GraphModule, region: Region, ops: int | None = None) -> float:
        """Return the seconds of a region of a qdq graph as a kernel of the backend, on random integers.

        Args:
            gm: module of the qdq graph.
            region: the region.
            ops: number of its ops that the kernel runs, while the others run in float; None: all of them.
        """
        if self.own is not None and is_op(region.node, *CONVERSIONS):
            return self.own.conversion * _MICRO * math.prod(info(region.node).shape or ())
        own = self.own_cost(region) if ops is None else None
        if own is not None and own.int8_us is not None:
            return _MICRO * own.int8_us
        return self.costs.seconds(
            self._kernel_key(region, ops), lambda: _call(self._lowered(gm, region.to_graph(), ops))
        )

    def fastest(self, gm: fx.GraphModule, region: Region, counts: Sequence[int]) -> int:
        """Return how many ops of a region a kernel should run: the maximum, unless a smaller count is clearly faster.

        It is always the maximum if the backend has priced the region itself.

        Args:
            gm: module of the qdq graph.
            region: the region.
            counts: the numbers of ops to choose from.
        """
        if self.own_cost(region) is not None:
            return max(counts)
        parts = {ops: ops if ops < len(region.calls) else None for ops in counts}
        keys = [self._kernel_key(region, part) for part in parts.values()]

        def seconds() -> dict[int, float]:
            return {ops: self.kernel(gm, region, part) for ops, part in parts.items()}

        def clearly_fastest() -> int:
            times, maximum = seconds(), max(counts)
            best = min(times, key=times.__getitem__)
            return best if MIN_SPEEDUP * times[best] < times[maximum] else maximum

        if clearly_fastest() != max(counts):
            self.costs.settle(keys)
        return clearly_fastest()

    def real(self, gm: fx.GraphModule, region: Region) -> float:
        """Seconds of the ops of a region in float, with float weights, on random values."""
        own = self.own_cost(region)
        if own is not None:
            return _MICRO * own.float_us
        return self.costs.seconds(_float_key(region), lambda: _float_form(gm, region))

    def can_price(self, region: Region) -> bool:
        """Whether the backend has priced a region, or all its inputs and outputs are tensors."""
        values = (*values_of(region.node), *region.node.all_input_nodes)
        return self.own_cost(region) is not None or all(info(value).is_tensor for value in values)

    def knows(self, region: Region) -> bool:
        """Whether the prices of a region are known already."""
        return self.own_cost(region) is not None or all(key in self.costs for key in self.keys(region))

    def own_cost(self, region: Region) -> Cost | None:
        """Cost of a region by the backend's own prices; None without these."""
        return self.own.ops.get(region.node) if self.own is not None else None

    def keys(self, region: Region) -> tuple[str, str]:
        """Keys of the prices of a region: as a kernel, and in float."""
        return self._kernel_key(region), _float_key(region)

    def _kernel_key(self, region: Region, ops: int | None = None) -> str:
        """Key with all that the time depends on, such as whether a zero point is 0, but no weights and scales."""
        name = self.backend.name + self.backend.code(region.calls)
        parts = [f"{name} {_threads()}: {_ops_on(region)} from", *map(_shape, map(info, region.inputs))]
        for step in region.steps:
            if step.op == "get_attr":
                parts.append(_shape(step.about))
            elif is_op(step, "dequantize", "quantize") and (grid := options_of(step))["axis"] is None:
                parts.append(f"{'at 0' if grid['zero_point'] == 0 else 'shifted'} {grid['qmin']}..{grid['qmax']}")
        plan = info(region.node).plan
        parts += [plan.compute] if plan is not None and plan.compute != "float32" else []
        split = [f"after {ops} ops"] if ops is not None else []
        return " ".join([*parts, "to", *map(_shape, map(info, region.outputs)), *split])

    def measure(self, gm: fx.GraphModule, quantize: fx.Node) -> float:
        """Seconds to compute the dynamic range of a value and quantize it."""
        if self.own is not None:
            return self.own.conversion * _MICRO * math.prod(info(quantize).shape or ())
        estimate = self._estimate("measure", math.prod(info(quantize).shape or ()))
        if estimate is not None:
            return estimate
        measures = dynamic_grid_ops(quantize)
        options = options_of(measures[0])
        value = f"{_shape(info(quantize.all_input_nodes[0]))} from {options['axis']}"
        key = f"{self.backend.name} {_threads()}: measure {'' if options['symmetric'] else 'a range of '}{value}"
        return self.costs.seconds(key, lambda: _call(self._lowered(gm, region_of((*measures, quantize)).to_graph())))

    def quantize(self, elements: int) -> float:
        """Seconds to quantize a number of floats."""
        return self._conversion("quantize", elements)

    def dequantize(self, elements: int) -> float:
        """Seconds to dequantize a number of integers."""
        return self._conversion("dequantize", elements)

    def _conversion(self, op: str, elements: int) -> float:
        if self.own is not None:
            return _MICRO * self.own.conversion * elements
        estimate = self._estimate(op, elements)
        if estimate is not None:
            return estimate

        def prepare(size: int) -> Call:
            graph = fx.Graph()
            rewriter = Rewriter(fx.GraphModule(nn.Module(), graph), self._context(), "probe")
            x = graph.placeholder("x")
            grid: dict[str, Any] = {"scale": 0.02, "zero_point": 3}
            typed = ((size,), torch.float32), ((size,), torch.uint8)
            real, integer = typed if op == "quantize" else reversed(typed)
            rewriter.describe(x, shape=real[0], dtype=real[1])
            graph.output(rewriter.call(op, x, after=x, typed=integer, **grid))
            try:
                return _call(self._lowered(rewriter.gm, graph))
            except Exception as error:  # engines that cannot build a lone conversion may raise anything
                log.debug("%s cannot be timed as a kernel: %s: %s", op, type(error).__name__, error)
                return _call(rewriter.gm)

        return self.costs.of_size(f"{self.backend.name} {_threads()}: {op}", elements, prepare)

    def requantize(self, gm: fx.GraphModule, region: Region) -> float:
        """Seconds to requantize integers."""
        estimate = self._estimate("requantize", math.prod(info(region.node).shape or ())) if self.own is None else None
        return self.kernel(gm, region) if estimate is None else estimate

    def _estimate(self, conversion: str, elements: int) -> float | None:
        """Seconds of a conversion by the price table; if it has none, 0 without measurements, otherwise None."""
        seconds = self.table.conversion(conversion, elements) if self.table is not None else None
        return 0.0 if seconds is None and not self.measures else seconds

    def _context(self) -> Context:
        return Context(self.recipe, self.backend, nn.Module(), Batch(()))

    def _lowered(self, gm: fx.GraphModule, graph: fx.Graph, ops: int | None = None) -> fx.GraphModule:
        """Lower a graph that uses the weights of `gm`; its unit is split after `ops` ops."""

        def split(rewriter: Rewriter, copies: Mapping[fx.Node, fx.Node]) -> None:
            for node in [n for n in rewriter.nodes() if unit_of(rewriter.gm, n) is not None]:
                split_unit(rewriter, node, ops)

        lowered = lowered_copy(gm, graph, self._context(), split)
        for kernel in lowered.modules():
            if isinstance(kernel, Kernel) and not kernel.is_ours():  # the user's code may change the weights of `gm`
                for name, buffer in [*kernel.named_buffers(recurse=False)]:
                    setattr(kernel, name, buffer.clone())
                for name, parameter in [*kernel.named_parameters(recurse=False)]:
                    setattr(kernel, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
        return lowered


def _threads() -> str:
    return f"{torch.get_num_threads()} threads"


def _shape(value_info: NodeInfo) -> str:
    return f"{str(value_info.dtype).removeprefix('torch.')}{list(value_info.shape or ())}"


def _ops_on(region: Region) -> str:
    """Text of the ops of a region with their options, and the shapes that they read."""
    ops = " ".join(f"{call.op.name}({options_text(call.options)})" for call in region.calls)
    return f"{ops} of {' '.join(_shape(info(n)) for n in region.node.all_input_nodes)}"


def _float_key(region: Region) -> str:
    return f"float {_threads()}: {_ops_on(region)}"


def _float_form(gm: fx.GraphModule, region: Region) -> Call:
    """Call of the region's unit or op in float on random values, with dequantized weights, as in a binding."""
    node, values = region.node, dict[fx.Node, Any]()
    for value in node.all_input_nodes:
        if is_weight(value):
            values[value] = value_of(gm, value, {read: value_of(gm, read, {}) for read in value.all_input_nodes})
        else:
            value_info = info(value)
            is_quantized = value_info.dtype is None or grid_of(gm, value) is not None
            values[value] = _random(value_info.shape, torch.float32 if is_quantized else value_info.dtype)
    args, kwargs = arguments_of(node, values)
    recurrence = region.calls[0].op.traits.recurrence
    kwargs = kwargs if recurrence is None else recurrence.without_grid(kwargs)
    unit = unit_of(gm, node)
    target: Any = node.target if unit is None else unit.callable_for()
    return partial(target, *args, **kwargs)


def _call(gm: fx.GraphModule) -> Call:
    """Call of a lowered graph on random inputs, bound as in the model."""
    inputs = tuple(_random(info(n).shape, info(n).dtype) for n in gm.graph.nodes if n.op == "placeholder")
    _, bound = bind(gm, inputs, {})
    return partial(bound.run, *inputs)


def _random(shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> Tensor:
    """Random values, channels-last like the values between kernels. The user's generator is not used."""
    generator = torch.Generator().manual_seed(0)
    if dtype is None or dtype.is_floating_point:
        values = torch.randn(shape or (), dtype=dtype, generator=generator)
    elif dtype is torch.uint8:
        values = torch.randint(0, 100, shape or (), dtype=dtype, generator=generator)
    else:  # a mask or an index
        values = torch.zeros(shape or (), dtype=dtype)
    return values.contiguous(memory_format=torch.channels_last) if values.dim() == 4 else values
