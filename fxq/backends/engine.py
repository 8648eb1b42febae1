"""What all engines have in common: a region runs as a whole, made ready for the inputs that come."""

from __future__ import annotations

import importlib
import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.backends.base import Backend, Prices, Support
from fxq.backends.engine_layers import shares
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
    """A region that an engine runs as one model, compiled anew for other shapes of its inputs, and for other threads.

    What is compiled is neither copied nor pickled: it is made again of the region. A batch of no samples runs in qdq
    form, and so do inputs of a size that the engine refuses, once it has taken another, with a warning. Images that lie
    in memory channels-last are read as they are, and come out so.

    Raises:
        BackendError: the engine refuses the first inputs that come.
        InputError: an input is no plain tensor on the CPU, or floats of another type; or the engine refuses its values.
    """

    sizes_kept: ClassVar[int] = 8
    _was_compiled = False

    @classmethod
    @abstractmethod
    def try_out(cls, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Raise whatever the engine raises for a region that it does not take."""

    @abstractmethod
    def prepared(self, form: fx.GraphModule, inputs: Sequence[Any], last: Sequence[bool]) -> Callable[..., Any]:
        """What runs the region for inputs like these; `last` says which are images that lie channels-last."""

    @classmethod
    @abstractmethod
    def profiled(
        cls, gm: fx.GraphModule, inputs: Sequence[Any], floats: bool = False, **options: Any
    ) -> list[EngineLayer]:
        """What the engine does to run a region, with the options of a kernel; with `floats`, without conversions."""

    def layers(self, *inputs: Any) -> tuple[EngineLayer, ...]:
        """As in `RegionKernel`."""
        return () if self.form is None else tuple(self.profiled(self.form.module(self), inputs, **self.config()))

    def forward(self, *inputs: Any) -> Any:
        """As the region."""
        return self._runner(inputs)(*inputs)

    def bind(self, *inputs: Any) -> Callable[..., Any]:
        """As in `Bindable`: the compiled model."""
        return self._runner(inputs)

    def _runner(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        kind: Hashable = (torch.get_num_threads(), *map(_kind, inputs))
        runner: Callable[..., Any] = self._kept_for(kind, lambda: self._made_for(inputs))
        return runner

    def _made_for(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.form is None or any(isinstance(x, Tensor) and x.numel() == 0 for x in inputs):
            return super().forward
        form = self.form.module(self)
        beyond = self.sums_refused()
        if beyond is not None:  # loaded from a file of a version without this check
            said = f"{self.name}: {beyond}. It runs in q/dq form, which is slow. Quantize the float model again."
            self._kept("sums", partial(warn, said))  # once
            return super().forward
        for node, x in zip(form.graph.find_nodes(op="placeholder"), inputs, strict=True):
            self._check(info(node).dtype, x)
        last = [is_channels_last(x) for x in inputs]
        try:
            run = self.prepared(form, inputs, last)
        except Exception as error:  # whatever an engine raises
            why = f"{self.name}: the engine does not take the region: {type(error).__name__}: {words_of(error)}"
            if not self._was_compiled:
                raise BackendError(why) from error
            warn(f"{why.rstrip('.')}. For inputs of this size it runs in qdq form, which is slow.")
            return super().forward
        # Past `__setattr__`, which tells bound graphs that the kernel has changed.
        self.__dict__["_was_compiled"] = True
        if len(self._packed_now().of_sizes) == self.sizes_kept:
            said = (
                f"{self.name}: inputs come in more than {self.sizes_kept} sizes, batch sizes included. Models compiled "
                "for other sizes are evicted and compiled again on return. Pad inputs to fewer sizes, or use "
                'backend="auto", which compiles nothing per size.'
            )
            self._kept("sizes", partial(warn, said))  # once
        return run

    def _check(self, wanted: torch.dtype | None, x: Any) -> None:
        """Raise `InputError` for a tensor that the engine would read as another, or not at all."""
        if not isinstance(x, Tensor):
            return
        if x.layout is not torch.strided or x.device.type != "cpu":
            raise InputError(f"{self.name}: an input is {x.layout} on {x.device}; it takes strided tensors on the CPU.")
        floats = wanted is not None and (wanted.is_floating_point or x.dtype.is_floating_point)
        if x.dtype.is_complex or (floats and x.dtype != wanted):
            raise InputError(f"{self.name}: an input is {x.dtype}; it takes {wanted}. Convert it with .to({wanted}).")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_was_compiled"}


def _kind(value: Any) -> Hashable:
    if not isinstance(value, Tensor):
        return value
    return value.shape, value.dtype, value.device.type, value.layout, is_channels_last(value)


def is_channels_last(value: Any) -> bool:
    """Whether an image lies in memory channel by channel of each pixel, and not otherwise as well."""
    if not isinstance(value, Tensor) or value.dim() != 4 or value.layout is not torch.strided:
        return False
    return value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous()


class EngineBackend(Backend):
    """An engine with an interpreter, or a compiler, of whole models.

    Attributes:
        packages: what it needs; the extra of fxq that installs it has the backend's name.
        kernel: the class of its kernels.
        layers: ops with weights that it runs on integers, where they begin a unit.
        others: further ops that compute on integers, beside those that only move them.
        rounding: those of them that run on integers only where their result is rounded.
        last: ops of `rounding` that run on integers even if their result reaches the model's output in float.
        measures: layers that read values whose ranges are measured at run time.
        tables: ops that compute in float, with a table that it keeps in integers of 8 bits.
    """

    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    packages: ClassVar[tuple[str, ...]]
    kernel: ClassVar[type[EngineKernel]]
    layers: ClassVar[frozenset[str]]
    others: ClassVar[frozenset[str]]
    rounding: ClassVar[frozenset[str]] = frozenset()
    last: ClassVar[frozenset[str]] = frozenset()
    measures: ClassVar[frozenset[str]] = frozenset()
    tables: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        self._refused: dict[str, str | None] = {}

    def available(self) -> str | None:
        """As in `Backend`."""
        missing = [package for package in self.packages if find_spec(package) is None]
        what = f"{(missing or [''])[0]} is not installed: pip install fxq[{self.name}]."
        return f'{what} Use backend="auto", which needs no more than PyTorch.' if missing else None

    def supports(self, gm: fx.GraphModule, node: fx.Node, calls: Calls, config: QuantConfig) -> Support:
        """As in `Backend`: what the engine has integer kernels for, and ONNX nodes."""
        first = calls[0]
        if config.activation is None:
            weight, is_table = config.weight, first.op.name in self.tables
            is_kept = is_table and weight is not None and weight.bits > 4 and weight.format == "integer"
            which = " of so few bits, or in float16," if is_table else ""
            why = f"{self.name} takes no integer weights{which} beside float activations"
            return Support(len(calls)) if is_kept else Support(0, why)
        measured = config.activation.range == "dynamic"
        if measured and first.op.name not in self.measures:
            of = f" for {first.op.name}" if self.measures and first.op.traits.weight else ""
            return Support(0, f"{self.name} measures no ranges at run time{of}")
        moves = all(call.op.traits.kind == "moves" for call in calls)
        if not moves and not measured and first.op.name not in self.layers | self.others:
            return Support(0, f"{self.name} has no integer kernel for {first.op.name}")
        reason = self.refusal(gm, node)
        if reason is not None:
            return Support(0, f"{self.name}: {reason}")
        emits_float = measured or first.op.name not in self.rounding
        return Support(len(calls), emits_float=emits_float, emits_float_last=first.op.name in self.last)

    def refusal(self, gm: fx.GraphModule, node: fx.Node) -> str | None:
        """Why the engine does not take a node of the graph; None: it does. One of each kind is tried out alone."""
        key = self.key(gm, node)
        if key not in self._refused:
            self._refused[key] = self._refused_alone(gm, node)
        return self._refused[key]

    def key(self, gm: fx.GraphModule, node: fx.Node) -> str:
        """What decides whether the engine takes a node: its ops, and the ranks and types of what they read."""
        parts = [
            (call.op.name, sorted((name, _kind_of_grid(name, value)) for name, value in call.options.items()))
            for call in calls_of(gm, node)
        ]
        return repr((parts, [(self.kind_of(read), info(read).dtype) for read in node.all_input_nodes]))

    def kind_of(self, value: fx.Node) -> Any:
        """What of the shape of a value decides that: how many axes it has."""
        return len(info(value).shape or ())

    def _refused_alone(self, gm: fx.GraphModule, node: fx.Node) -> str | None:
        region = region_of([node])
        inputs = [made_up(read) for read in region.inputs]
        if any(x is None for x in inputs) or not region.outputs:
            return None
        try:
            self.kernel.try_out(fx.GraphModule(gm, region.to_graph()), inputs)
        except Exception as error:  # whatever an engine raises
            return f"the engine refuses it: {words_of(error)}"
        return None

    def takes(self, gm: fx.GraphModule, node: fx.Node) -> bool:
        """Whether a node of the qdq graph goes into a region."""
        plan = info(node).plan
        calls = calls_of(gm, node)
        kept = plan is not None and plan.precision == "weight-only" and calls[0].op.name not in self.tables
        return bool(calls) and not kept and node_refused(gm, node) is None and self.refusal(gm, node) is None

    def regions(self, gm: fx.GraphModule) -> Iterable[Region]:
        """As in `Backend`: connected ones, as large as can be, of which one op at least computes."""
        found: Iterator[Region] = connected_regions(gm, partial(self.takes, gm))
        return (region for region in found if any(map(_works, region.nodes)))

    def lower(self, gm: fx.GraphModule, region: Region) -> Kernel:
        """As in `Backend`."""
        return self.kernel.of(gm, region)

    def prices(self, gm: fx.GraphModule, example: Batch) -> Prices:
        """As in `Backend`: each region runs as a whole, in float and on integers; the engine says what took long."""
        costs: dict[fx.Node, Cost] = {}
        converting, converted = 0.0, 0
        for region in self.regions(gm):
            inside = fx.GraphModule(gm, region.to_graph())
            inputs = [made_up(node) for node in region.inputs]
            if any(x is None for x in inputs):
                continue
            taken = {node.name: node for node in region.nodes}
            try:
                int8, real = (shares(self.kernel.profiled(inside, inputs, floats), taken) for floats in (False, True))
            except Exception as error:  # whatever an engine raises: then each op is timed alone
                log.debug("%s does not profile %s: %s", self.name, region.nodes[0].name, error)
                continue
            for node in region.nodes:
                if is_op(node, *CONVERSIONS):
                    converting += int8.get(node, 0.0)
                    converted += math.prod(info(node).shape or ()) if node in int8 else 0
                else:
                    costs[node] = Cost(real.get(node, 0.0), int8.get(node, 0.0))
        return Prices(costs, converting / converted if converted else CONVERSION)


CONVERSION = 3e-4
"""Microseconds to convert an element, where an engine has joined all conversions with what is before them."""


def _kind_of_grid(name: str, value: Any) -> Any:
    """An option of an op; of a scale or zero point, whether it is a number: an engine takes any, or none."""
    return type(value) if name in ("scale", "zero_point") else value


def made_up(node: fx.Node) -> Tensor | None:
    """Values of the shape and dtype of a node, images channels-last; None where those are not known."""
    shape, dtype = info(node).shape, info(node).dtype
    if shape is None or dtype is None:
        return None
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        made = torch.randn(shape, dtype=dtype, generator=generator, device="cpu")
    else:
        made = torch.randint(0, 2, shape, generator=generator, device="cpu").to(dtype)
    return made.contiguous(memory_format=torch.channels_last) if made.dim() == 4 else made


def _works(node: fx.Node) -> bool:
    """Whether a node is more than a change of shape: those alone are not worth a call of the engine."""
    op = op_of(node)
    return op is None or not (op.traits.layout or op.name in CONVERSIONS or is_weight(node))


def repeated() -> Iterator[None]:
    """How often a model is profiled. The shortest time of a node counts, since other programs only add to it."""
    end = time.perf_counter() + SECONDS
    for i in range(MOST):
        if i < LEAST or time.perf_counter() < end:
            yield


SECONDS, LEAST, MOST = 0.5, 4, 20


def imported(package: str) -> Any:
    """The package of an engine.

    Raises:
        BackendError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise BackendError(f"{package} is not installed: pip install fxq[{package}].") from None
