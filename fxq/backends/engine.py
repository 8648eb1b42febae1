"""Base classes of engines, which run a region as a whole, compiled for the kinds of inputs that it is called with."""

from __future__ import annotations

import importlib
import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx

from fxq.backends.base import Backend, Prices, Support
from fxq.backends.engine_layers import node_times
from fxq.backends.kernel import Kernel
from fxq.backends.region_kernel import RegionKernel
from fxq.common.data import Batch
from fxq.errors import BackendError, InputError, warn, words_of
from fxq.graph.analysis.integer_sums import node_refused
from fxq.graph.analysis.partition import connected_regions
from fxq.graph.info import Cost, EngineLayer, info
from fxq.graph.query import CONVERSIONS, is_op, op_of
from fxq.graph.region import Region, is_weight, region_of
from fxq.graph.unit import Calls, calls_of
from fxq.quant.spec import QuantConfig

log = logging.getLogger("fxq")


class EngineKernel(RegionKernel):
    """A region that an engine runs as one model, compiled once per kind of inputs: shapes, dtypes, number of threads.

    Compiled models are neither copied nor pickled; a copy compiles the region again. An empty batch runs in qdq form.
    If the engine refuses inputs of a further size, they run in qdq form, too, with a warning. Images in channels-last
    memory are read as they are, and results are channels-last then.

    Raises:
        BackendError: the engine refuses the inputs of the first call.
        InputError: an input is not a plain tensor on the CPU, or is float of another dtype; or the engine refuses its
            values.
    """

    max_cached_sizes: ClassVar[int] = 8
    _was_compiled = False

    @classmethod
    @abstractmethod
    def try_out(cls, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Compile a region. Whatever the engine raises means that it does not take the region."""

    @abstractmethod
    def prepared(self, form: fx.GraphModule, inputs: Sequence[Any], last: Sequence[bool]) -> Callable[..., Any]:
        """Return a function that runs the region on inputs like these; `last` tells which are channels-last images."""

    @classmethod
    @abstractmethod
    def profiled(
        cls, gm: fx.GraphModule, inputs: Sequence[Any], floats: bool = False, **options: Any
    ) -> list[EngineLayer]:
        """Return the timed layers that the engine runs for a region. With `floats`, conversions are left out.

        `options` are the options of the kernel.
        """

    def layers(self, *inputs: Any) -> tuple[EngineLayer, ...]:
        """Layers that the engine runs for these inputs, in order."""
        return () if self.form is None else tuple(self.profiled(self.form.module(self), inputs, **self.config()))

    def forward(self, *inputs: Any) -> Any:
        """Compute the outputs of the region from its inputs."""
        return self._runner(inputs)(*inputs)

    def bind(self, *inputs: Any) -> Callable[..., Any]:
        """Return the model compiled for inputs like these, see `Bindable.bind`."""
        return self._runner(inputs)

    def _runner(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        kind: Hashable = (torch.get_num_threads(), *map(_kind, inputs))
        runner: Callable[..., Any] = self._cached_for_size(kind, lambda: self._compiled_for(inputs))
        return runner

    def _compiled_for(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.form is None or any(isinstance(x, Tensor) and x.numel() == 0 for x in inputs):
            return super().forward
        form = self.form.module(self)
        overflow = self.sums_refused()
        if overflow is not None:  # loaded from a file of a version without this check
            message = f"{self.name}: {overflow}. It runs in q/dq form, which is slow. Quantize the float model again."
            self._cached("sums", partial(warn, message))  # once
            return super().forward
        for node, x in zip(form.graph.find_nodes(op="placeholder"), inputs, strict=True):
            self._check(info(node).dtype, x)
        last = [is_channels_last(x) for x in inputs]
        try:
            run = self.prepared(form, inputs, last)
        except Exception as error:  # whatever an engine raises
            reason = f"{self.name}: the engine does not take the region: {type(error).__name__}: {words_of(error)}"
            if not self._was_compiled:
                raise BackendError(reason) from error
            warn(f"{reason.rstrip('.')}. Inputs of this size run in qdq form, which is slow.")
            return super().forward
        # Not by `__setattr__`, which would tell bound graphs that the kernel has changed.
        self.__dict__["_was_compiled"] = True
        if len(self._derived_now().values_by_size) == self.max_cached_sizes:
            message = (
                f"{self.name}: inputs have more than {self.max_cached_sizes} sizes, batch sizes included. The least "
                "recently used models are evicted, and compiled again when their size returns. Pad inputs to fewer "
                'sizes, or use backend="auto", which compiles nothing per size.'
            )
            self._cached("sizes", partial(warn, message))  # once
        return run

    def _check(self, dtype: torch.dtype | None, x: Any) -> None:
        """Raise `InputError` for a tensor that the engine would misread or cannot read; `dtype` is the expected one."""
        if not isinstance(x, Tensor):
            return
        if x.layout is not torch.strided or x.device.type != "cpu":
            raise InputError(f"{self.name}: an input is {x.layout} on {x.device}; it takes strided tensors on the CPU.")
        floats = dtype is not None and (dtype.is_floating_point or x.dtype.is_floating_point)
        if x.dtype.is_complex or (floats and x.dtype != dtype):
            raise InputError(f"{self.name}: an input is {x.dtype}; it takes {dtype}. Convert it with .to({dtype}).")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_was_compiled"}


def _kind(value: Any) -> Hashable:
    if not isinstance(value, Tensor):
        return value
    return value.shape, value.dtype, value.device.type, value.layout, is_channels_last(value)


def is_channels_last(value: Any) -> bool:
    """Whether `value` is an image in channels-last memory that is not also contiguous."""
    if not isinstance(value, Tensor) or value.dim() != 4 or value.layout is not torch.strided:
        return False
    return value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous()


class RegionTimes(NamedTuple):
    """Region that an engine runs, with the microseconds of its nodes on integers."""

    region: Region
    us: Mapping[fx.Node, float]


class EngineBackend(Backend):
    """Backend of an engine that compiles or interprets whole regions.

    The attributes name ops by the first op of a unit. Ops that only move values always run on integers.

    Attributes:
        packages: Python packages that it needs. The extra of fxq that installs them has the backend's name.
        kernel: class of its kernels.
        layers: ops with weights that run on integers.
        other_ops: further ops that compute on integers.
        rounded_ops: the ops above that run on integers only if their result is quantized.
        float_output_ops: ops of `rounded_ops` that also run on integers if their result is an output of the model in
            float.
        dynamic_layers: layers that run on integers with dynamic ranges.
        table_ops: ops such as embedding that compute in float, with a table that the engine keeps in int8.
        large_layers_gain: whether large layers, see `share_of_large_layers`, are always faster on integers.
    """

    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    packages: ClassVar[tuple[str, ...]]
    kernel: ClassVar[type[EngineKernel]]
    layers: ClassVar[frozenset[str]]
    other_ops: ClassVar[frozenset[str]]
    rounded_ops: ClassVar[frozenset[str]] = frozenset()
    float_output_ops: ClassVar[frozenset[str]] = frozenset()
    dynamic_layers: ClassVar[frozenset[str]] = frozenset()
    table_ops: ClassVar[frozenset[str]] = frozenset()
    large_layers_gain: ClassVar[bool] = False

    def __init__(self) -> None:
        self._refused: dict[str, str | None] = {}

    def available(self) -> str | None:
        """Why the engine cannot run, with the command that installs its package; None if it can."""
        missing = next((package for package in self.packages if find_spec(package) is None), None)
        if missing is None:
            return None
        return (
            f"{missing} is not installed: pip install fxq[{self.name}]. "
            'Or use backend="auto", which needs nothing besides PyTorch.'
        )

    def supports(self, gm: fx.GraphModule, node: fx.Node, calls: Calls, config: QuantConfig) -> Support:
        """Whole units whose first op has an integer kernel in the engine, if the engine compiles them."""
        first = calls[0]
        if config.activation is None:
            weight, is_table = config.weight, first.op.name in self.table_ops
            is_kept = is_table and weight is not None and weight.bits > 4 and weight.format == "integer"
            which = "tables of 4 bits or fewer, or in float16" if is_table else "integer weights with float activations"
            unsupported = f"{self.name} takes no {which}"
            return Support(len(calls)) if is_kept else Support(0, unsupported)
        is_dynamic = config.activation.range == "dynamic"
        if config.weight is not None and config.weight.block is not None:
            return Support(0, f"{self.name} has no integer kernel for {first.op.name} with scales per block")
        if is_dynamic and first.op.name not in self.dynamic_layers:
            detail = f" for {first.op.name}" if self.dynamic_layers and first.op.traits.weight else ""
            return Support(0, f"{self.name} has no kernels with dynamic ranges{detail}")
        moves = all(call.op.traits.kind == "moves" for call in calls)
        if not moves and not is_dynamic and first.op.name not in self.layers | self.other_ops:
            return Support(0, f"{self.name} has no integer kernel for {first.op.name}")
        reason = self.refusal(gm, node)
        if reason is not None:
            return Support(0, f"{self.name}: {reason}")
        emits_float = is_dynamic or first.op.name not in self.rounded_ops
        return Support(len(calls), emits_float=emits_float, emits_float_last=first.op.name in self.float_output_ops)

    def refusal(self, gm: fx.GraphModule, node: fx.Node) -> str | None:
        """Why the engine does not take a node of the graph; None if it does. One node per key is tried out alone."""
        key = self.key(gm, node)
        if key not in self._refused:
            self._refused[key] = self._refused_alone(gm, node)
        return self._refused[key]

    def key(self, gm: fx.GraphModule, node: fx.Node) -> str:
        """Key of the nodes that the engine takes or refuses alike: ops and options, ranks and dtypes of the inputs."""
        parts = [
            (call.op.name, sorted((name, kind_of_grid(name, value)) for name, value in call.options.items()))
            for call in calls_of(gm, node)
        ]
        return repr((parts, [(self.kind_of(read), info(read).dtype) for read in node.all_input_nodes]))

    def kind_of(self, value: fx.Node) -> Any:
        """Part of the key for the shape of an input: its rank."""
        return len(info(value).shape or ())

    def _refused_alone(self, gm: fx.GraphModule, node: fx.Node) -> str | None:
        region = region_of([node])
        inputs = [random_value(read) for read in region.inputs]
        if any(x is None for x in inputs) or not region.outputs:
            return None
        try:
            self.kernel.try_out(fx.GraphModule(gm, region.to_graph()), inputs)
        except Exception as error:  # whatever an engine raises
            return f"the engine refuses it: {words_of(error)}"
        return None

    def takes(self, gm: fx.GraphModule, node: fx.Node) -> bool:
        """Whether a node of the qdq graph can be part of a region."""
        plan = info(node).plan
        calls = calls_of(gm, node)
        is_weight_only = plan is not None and plan.precision == "weight-only"
        if not calls or (is_weight_only and calls[0].op.name not in self.table_ops):
            return False
        if any(call.op.traits.grows for call in calls):  # an engine would copy the whole state in each call
            return False
        return node_refused(gm, node) is None and self.refusal(gm, node) is None

    def regions(self, gm: fx.GraphModule) -> Iterable[Region]:
        """Connected regions, as large as possible, with at least one op that computes."""
        regions: Iterator[Region] = connected_regions(gm, partial(self.takes, gm))
        return (region for region in regions if any(map(_computes, region.nodes)))

    def lower(self, gm: fx.GraphModule, region: Region) -> Kernel | None:
        """Return the kernel of a region."""
        return self.kernel.of(gm, region)

    def prices(self, gm: fx.GraphModule, example: Batch) -> Prices:
        """Prices from profiles of each whole region, in float and on integers."""
        return self.prices_beside(gm, self.integer_times(gm))

    def integer_times(self, gm: fx.GraphModule) -> list[RegionTimes]:
        """Profiles of each whole region on integers. Regions that the engine does not profile are left out."""
        profiles = ((region, self._node_times(gm, region, floats=False)) for region in self.regions(gm))
        return [RegionTimes(region, us) for region, us in profiles if us is not None]

    def share_of_large_layers(self, gm: fx.GraphModule, times: Sequence[RegionTimes]) -> float:
        """Share of large layers in the times of all nodes: those that multiply many channels, without groups."""
        all_us = [(node, us) for region_times in times for node, us in region_times.us.items()]
        large_us = sum(us for node, us in all_us if self._is_large(gm, node))
        return large_us / max(sum(us for _, us in all_us), 1e-9)

    def prices_beside(self, gm: fx.GraphModule, times: Sequence[RegionTimes]) -> Prices:
        """Prices from profiles of regions in float, and their profiles on integers."""
        costs: dict[fx.Node, Cost] = {}
        conversion_us, converted_elements = 0.0, 0
        for region, int8_us in times:
            float_us = self._node_times(gm, region, floats=True)
            if float_us is None:
                continue
            for node in region.nodes:
                if is_op(node, *CONVERSIONS):
                    conversion_us += int8_us.get(node, 0.0)
                    converted_elements += math.prod(info(node).shape or ()) if node in int8_us else 0
                else:
                    costs[node] = Cost(float_us.get(node, 0.0), int8_us.get(node, 0.0))
        return Prices(costs, conversion_us / converted_elements if converted_elements else CONVERSION_US_PER_ELEMENT)

    def _is_large(self, gm: fx.GraphModule, node: fx.Node) -> bool:
        """Whether a node is a layer without groups that reads and computes at least `_MIN_LARGE_CHANNELS` channels."""
        call = next(iter(calls_of(gm, node)), None)
        if call is None or call.op.name not in self.layers or call.options.get("groups", 1) != 1:
            return False
        weight = call.tensors.get(call.op.traits.weight or "")
        shape = (info(weight).shape if isinstance(weight, fx.Node) else None) or (0,)
        return min(shape[:2]) >= _MIN_LARGE_CHANNELS

    def _node_times(self, gm: fx.GraphModule, region: Region, floats: bool) -> dict[fx.Node, float] | None:
        """Microseconds of the nodes of a region on random inputs; None if the engine does not profile it."""
        inside, inputs = fx.GraphModule(gm, region.to_graph()), [random_value(node) for node in region.inputs]
        if any(x is None for x in inputs):
            return None
        try:
            return node_times(self.kernel.profiled(inside, inputs, floats), {node.name: node for node in region.nodes})
        except Exception as error:  # whatever an engine raises: each op of the region is timed alone instead
            log.debug("%s does not profile %s: %s", self.name, region.nodes[0].name, error)
            return None


_MIN_LARGE_CHANNELS = 32
CONVERSION_US_PER_ELEMENT = 3e-4
"""Microseconds to convert an element, if the engine has fused all conversions into the ops before them."""


def kind_of_grid(name: str, value: Any) -> Any:
    """Part of the key for an option of an op: its value, but of a scale or zero point only the type."""
    return type(value) if name in ("scale", "zero_point") else value


def random_value(node: fx.Node) -> Tensor | None:
    """Random tensor with the shape and dtype of a node, images channels-last; None if shape or dtype is unknown."""
    shape, dtype = info(node).shape, info(node).dtype
    if shape is None or dtype is None:
        return None
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        value = torch.randn(shape, dtype=dtype, generator=generator, device="cpu")
    else:
        value = torch.randint(0, 2, shape, generator=generator, device="cpu").to(dtype)
    return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value


def _computes(node: fx.Node) -> bool:
    """Whether a node computes. Changes of shape and conversions alone are not worth a call of the engine."""
    op = op_of(node)
    return op is None or not (op.traits.layout or op.name in CONVERSIONS or is_weight(node))


def profile_runs() -> Iterator[None]:
    """Yield once per run in which a model is to be profiled. Use the minimum time, since noise only adds to it."""
    end = time.perf_counter() + PROFILE_SECONDS
    for i in range(MAX_PROFILE_RUNS):
        if i < MIN_PROFILE_RUNS or time.perf_counter() < end:
            yield


PROFILE_SECONDS, MIN_PROFILE_RUNS, MAX_PROFILE_RUNS = 0.25, 4, 20


def import_engine(package: str) -> Any:
    """Import the package of an engine.

    Raises:
        BackendError: it is not installed; the message names the extra that installs it.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise BackendError(f"{package} is not installed: pip install fxq[{package}].") from None
