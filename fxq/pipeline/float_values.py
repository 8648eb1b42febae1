"""Cache of the float outputs of layers on recorded samples, which passes compare with."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from fxq.common.data import Batch, first_of, place_in, samples_in
from fxq.common.free_memory import free_bytes
from fxq.common.isolation import copied, seeded
from fxq.common.metrics import tensors
from fxq.graph.analysis.expressions import Expressions
from fxq.graph.analysis.mutation import changes
from fxq.graph.info import info
from fxq.graph.query import is_pure, op_of, submodule
from fxq.graph.run import Modules, Runner
from fxq.graph.unit import calls_of, unit_of
from fxq.pipeline.float_form import FloatForm
from fxq.quant.observer_base import Observer
from fxq.tracing.fidelity import same_values

if TYPE_CHECKING:
    from fxq.pipeline.context import Context

log = logging.getLogger("fxq")

MIN_CACHED_BYTES, MAX_CACHED_BYTES, CACHED_SHARE = 1 << 28, 1 << 30, 8
"""Memory for cached outputs: one in so many free bytes, within these limits. Passes run recorded batches that do not
fit again."""


def cached_bytes() -> int:
    """Bytes of memory for cached outputs on this machine now."""
    return min(max((free_bytes() or 0) // CACHED_SHARE, MIN_CACHED_BYTES), MAX_CACHED_BYTES)


@dataclass(frozen=True)
class LayerValues:
    """Float outputs of the layers of one graph on recorded samples.

    Attributes:
        numbers: value number of each layer, see `Expressions`.
        batches: recorded batches, each with layer outputs by value number.
        rows: rows per sample in the first axis of an output, by value number; 0 or missing if it holds no samples.
    """

    numbers: Mapping[fx.Node, int] = field(default_factory=dict)
    batches: tuple[tuple[Batch, Mapping[int, Tensor]], ...] = ()
    rows: Mapping[int, int] = field(default_factory=dict)

    def of(self, batch: Batch) -> dict[fx.Node, Tensor]:
        """Outputs by layer for a recorded batch, or for consecutive samples of one; empty for other samples."""
        for recorded, values in self.batches:
            start, count = place_in(recorded, batch), samples_in(batch)
            if start is None:
                continue
            if count == samples_in(recorded):
                return {node: values[number] for node, number in self.numbers.items()}
            cut = {node: (values[k], self.rows[k]) for node, k in self.numbers.items() if self.rows.get(k)}
            return {node: value.narrow(0, start * rows, (count or 0) * rows) for node, (value, rows) in cut.items()}
        return {}


@dataclass
class FloatValues:
    """Cache of the float outputs of layers on the first recorded batches, as many as fit in memory.

    It holds the output of each layer or matrix product before the ops fused to it; `CachedFloatForm` recomputes all
    other values from these cheaply. `fxq.calibrate` fills the cache. Missing batches are computed on demand, with
    bitwise equal results, also if the data was calibrated in another process.

    Attributes:
        most: maximum size in bytes.
        expressions: value numbers, by which other graphs of the same model look up outputs.
        batches: recorded batches, each with layer outputs by value number.
        rows: rows per sample in the first axis of an output, by value number; 0 if it holds no samples.
    """

    most: int = field(default_factory=cached_bytes)
    expressions: Expressions = field(default_factory=Expressions)
    batches: list[tuple[Batch, dict[int, Tensor]]] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)

    @contextmanager
    def filled_by(self, gm: fx.GraphModule, context: Context) -> Iterator[None]:
        """Cache layer outputs while a graph with observers is called on batches that are recorded in full."""
        layers, plain, recorded_count = _layers(gm), gm.forward, len(context.samples)
        numbers = self.expressions.of(gm) if layers else {}

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal recorded_count
            batch, old_count, recorded_count = Batch(args, kwargs), recorded_count, len(context.samples)
            fits = recorded_count != old_count and recorded_count <= self._fitting(layers, context)
            if not fits or not _is_call(plain, args, kwargs):
                return plain(*args, **kwargs)
            recorded = context.samples[-1]
            if samples_in(recorded) != samples_in(batch):
                return plain(*args, **kwargs)
            run = _OutputRecorder(gm, batch, layers)
            result = run.run()
            if not run.is_random:
                self.batches = [entry for entry in self.batches if any(entry[0] is b for b in context.samples)]
                self.batches.append((recorded, {numbers[layer]: value for layer, value in run.outputs.items()}))
            return result

        gm.__dict__["forward"] = forward  # an instance attribute, so that module hooks still run
        try:
            yield
        finally:
            del gm.__dict__["forward"]

    def of(self, gm: fx.GraphModule, context: Context) -> LayerValues:
        """Outputs for a graph at a stage from `observed` to `qdq`; empty if it has state or draws random numbers."""
        layers = _layers(gm)
        recorded = context.samples[: self._fitting(layers, context)]
        if not recorded:
            return LayerValues()
        all_numbers = self.expressions.of(gm)
        numbers = {layer: all_numbers[layer] for layer in layers}
        try:
            with torch.no_grad(), seeded():
                batches = [self._batch(gm, numbers, batch) for batch in recorded]
                self._find_rows(gm, numbers, batches[0], context)
        except Exception as error:  # the graph may reject these samples; the calling pass then raises
            log.info("float values of recorded samples are not cached: %s", error)
            return LayerValues()
        self.batches = batches
        return LayerValues(numbers, tuple(batches), self.rows)

    def clear(self) -> None:
        """Free the cached outputs. Value numbers stay: another thread may be looking up outputs by them."""
        self.batches, self.rows = [], {}

    def _batch(
        self, gm: fx.GraphModule, numbers: Mapping[fx.Node, int], batch: Batch
    ) -> tuple[Batch, dict[int, Tensor]]:
        """Recorded batch with the outputs of these layers, computed if they are not cached."""
        size = samples_in(batch)
        same = (
            values
            for recorded, values in self.batches
            if samples_in(recorded) == size and place_in(recorded, batch) == 0
        )
        cached = next(same, dict[int, Tensor]())
        values = {number: cached[number] for number in numbers.values() if number in cached}
        if len(values) < len(set(numbers.values())):
            layer_values = LayerValues({n: k for n, k in numbers.items() if k in values}, ((batch, values),))
            missing = {node for node, number in numbers.items() if number not in values}
            values |= {numbers[node]: value for node, value in _computed(gm, batch, missing, layer_values).items()}
        return batch, values

    def _find_rows(
        self,
        gm: fx.GraphModule,
        numbers: Mapping[fx.Node, int],
        first: tuple[Batch, Mapping[int, Tensor]],
        context: Context,
    ) -> None:
        """Determine the rows per sample of new outputs, by running one sample of the first recorded batch alone."""
        batch, values = first
        size = samples_in(batch) or 0
        new = {node for node, number in numbers.items() if number not in self.rows}
        if not context.divisible or size < 2 or not new:
            return
        at = size // 2
        for node, alone in _computed(gm, first_of(batch, 1, at), new, LayerValues()).items():
            value, rows = values[numbers[node]], len(alone)
            fits = value.shape == (rows * size, *alone.shape[1:])
            fits = fits and same_values([value.narrow(0, at * rows, rows)], [alone])
            self.rows[numbers[node]] = rows if fits else 0

    def _fitting(self, layers: Collection[fx.Node], context: Context) -> int:
        """Number of recorded batches that fit, estimated from the shapes on the example."""
        shapes = [info(node).fused.values[0][0] if info(node).fused.values else info(node).shape for node in layers]
        size = 4 * sum(torch.Size(shape).numel() for shape in shapes if shape is not None)
        per_input, room = size / max(_inputs(context.example), 1), float(self.most)
        for count, batch in enumerate(context.samples if size else ()):
            room -= per_input * _inputs(batch)
            if room < 0:
                return count
        return len(context.samples) if size else 0


def _is_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function accepts these arguments."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _inputs(batch: Batch) -> int:
    """Number of elements in the tensors of a batch."""
    return sum(tensor.numel() for tensor in tensors((batch.args, batch.kwargs)))


def _layers(gm: fx.GraphModule) -> list[fx.Node]:
    """Nodes whose first op is a layer or matrix product; empty if any node has state or writes in place."""
    layers = []
    for node in gm.graph.nodes:
        module = submodule(gm, node)
        if changes(node) or (module is not None and not isinstance(module, Observer) and not is_pure(gm, node)):
            return []
        calls = calls_of(gm, node)
        if calls and calls[0].op.traits.heavy and calls[0].op.traits.recurrence is None:
            layers.append(node)
    return layers


def run_layer(runner: Runner, node: fx.Node, see: Callable[[Tensor], Tensor], value: Tensor | None = None) -> Any:
    """Compute a node whose first op is a layer.

    Args:
        runner: runner that holds the inputs of the node; those that only the layer reads may be missing if `value` is
            given.
        node: the node.
        see: called with the layer's output, returns the value to continue with.
        value: the layer's output, if it is cached.
    """
    value_at: Any = runner.values.get
    args: Any = fx.node.map_arg(node.args, value_at)
    kwargs: Any = fx.node.map_arg(node.kwargs, value_at)
    unit = unit_of(runner.gm, node)
    if unit is None:
        return see(node.target(*args, **kwargs) if value is None else value)  # type: ignore[operator]
    inside = Runner(unit, Batch(tuple(args)))
    layer = next(inner for inner in unit.graph.nodes if op_of(inner) is not None)
    result = None
    for inner in unit.graph.nodes:
        if inner is layer:
            result = inside.put(inner, see(inside.compute(inner) if value is None else value))
        else:
            result = inside.step(inner)
    return result


class _OutputRecorder(Runner):
    """Run of a graph with observers that collects the outputs of its layers.

    Attributes:
        outputs: outputs by layer.
        is_random: whether a node drew random numbers.
    """

    def __init__(self, gm: fx.GraphModule, batch: Batch, layers: Collection[fx.Node]) -> None:
        super().__init__(gm, batch)
        self._layers, self.outputs, self.is_random = set(layers), dict[fx.Node, Tensor](), False

    def compute(self, node: fx.Node) -> Any:
        """Compute the value of a node; record the output of a layer."""
        if isinstance(submodule(self.gm, node), Observer):
            return super().compute(node)

        def see(value: Tensor) -> Tensor:
            self.outputs[node] = value
            return value

        rng_state = torch.get_rng_state()
        result = run_layer(self, node, see) if node in self._layers else super().compute(node)
        self.is_random = self.is_random or not torch.equal(rng_state, torch.get_rng_state())
        return result


class CachedFloatForm(FloatForm):
    """Run in float of the part of a graph that some of its values need, reusing cached layer outputs.

    Args:
        gm: the graph.
        batch: some samples.
        layer_values: cached outputs of layers.
        values: nodes whose values are needed.
        see: by node whose layer output is needed, a function that receives this output, before the ops fused to it.
        modules: modules to call instead of those of `gm`, by path.

    Attributes:
        stored: cached outputs of layers for these samples. If empty, the whole graph runs.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        batch: Batch,
        layer_values: LayerValues,
        values: Collection[fx.Node],
        see: Mapping[fx.Node, Callable[[Tensor], object]] | None = None,
        modules: Modules = None,
    ) -> None:
        super().__init__(gm, copied(batch), modules=modules)
        self.stored = layer_values.of(batch)
        self._see, self._whole = see or {}, set(values)
        self._steps = self._needed() if self.stored else set(gm.graph.nodes)

    def step(self, node: fx.Node) -> Any:
        """Run the next node if it is needed, and return its value."""
        if node in self._steps or node.op == "placeholder":
            return super().step(node)
        for dead in self.last.get(node, ()):
            self.free(dead)
        return None

    def compute(self, node: fx.Node) -> Any:
        """Compute the value of a node; return a cached one if it is the layer's output."""
        value, see = self.stored.get(node), self._see.get(node)
        if see is None and value is None:
            return super().compute(node)

        def pass_on(layer_value: Tensor) -> Tensor:
            if see is not None:
                see(layer_value)
            return layer_value

        if value is not None and node not in self._whole:
            return pass_on(value)
        return run_layer(self, node, pass_on, value)

    def free(self, node: fx.Node) -> None:
        """Free a value after its last use."""
        self.values.pop(node, None)

    def _needed(self) -> set[fx.Node]:
        """Nodes that must run. Adds those whose full value is needed, not only the layer's, to `_whole`."""
        steps = set()
        for node in reversed(self.graph.nodes):
            if node not in self._whole and node not in self._see:
                continue
            steps.add(node)
            if node not in self.stored:
                self._whole.update(node.all_input_nodes)
            elif node in self._whole:
                self._whole.update(_read_after_layer(self.gm, node))
        return steps


def _read_after_layer(gm: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """Inputs that a unit reads for the ops after its first one."""
    unit = unit_of(gm, node)
    if unit is None:
        return []
    layer = next(inner for inner in unit.graph.nodes if op_of(inner) is not None)
    arguments = zip(unit.graph.find_nodes(op="placeholder"), node.args, strict=True)
    return [value for name, value in arguments if isinstance(value, fx.Node) and set(name.users) - {layer}]


def _computed(
    gm: fx.GraphModule, batch: Batch, layers: Collection[fx.Node], layer_values: LayerValues
) -> dict[fx.Node, Tensor]:
    """Compute the outputs of layers for some samples. Raises ValueError if a node draws random numbers."""
    results: dict[fx.Node, Tensor] = {}
    rng_state = torch.get_rng_state()
    see = {layer: partial(results.__setitem__, layer) for layer in layers}
    CachedFloatForm(gm, batch, layer_values, (), see).run()
    if not torch.equal(torch.get_rng_state(), rng_state):
        raise ValueError("the graph draws random numbers")
    return results
