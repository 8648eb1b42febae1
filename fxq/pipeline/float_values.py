"""What layers compute in float for recorded samples: kept in calibration, for the passes that compare with it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from fxq.common.data import Batch, first_of, place_in, samples_in
from fxq.common.isolation import copied, seeded
from fxq.common.metrics import tensors
from fxq.graph.expressions import Expressions
from fxq.graph.info import info
from fxq.graph.mutation import changes
from fxq.graph.query import is_pure, op_of, submodule
from fxq.graph.run import Modules, Runner
from fxq.graph.unit import calls_of, unit_of
from fxq.pipeline.float_form import FloatForm
from fxq.quant.observer_base import Observer
from fxq.tracing.fidelity import same_values

if TYPE_CHECKING:
    from fxq.pipeline.context import Context

log = logging.getLogger("fxq")

BYTES = 1 << 28
"""Memory for the values of layers. Recorded batches that find no room are run again by each pass that looks at them."""


@dataclass(frozen=True)
class LayerValues:
    """What the layers of one graph compute in float for recorded samples.

    Attributes:
        numbers: the number of what each layer computes.
        batches: recorded batches, with values by these numbers.
        rows: how many rows of a value belong to each sample, by number; none of one whose first axis holds no samples.
    """

    numbers: Mapping[fx.Node, int] = field(default_factory=dict)
    batches: tuple[tuple[Batch, Mapping[int, Tensor]], ...] = ()
    rows: Mapping[int, int] = field(default_factory=dict)

    def of(self, batch: Batch) -> dict[fx.Node, Tensor]:
        """The values for some samples, by layer: those of a recorded batch, or of some of its samples in a row."""
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
    """The values of layers for the first recorded batches, as many as fit, each batch run as a whole.

    Of a layer, or of a product, the value is kept that it has before what is fused to it; all others follow from these
    in little time, see `KnownFloatForm`. `fxq.calibrate` fills it. Batches that it has not shown are run when a pass
    asks for them: the values are the same then, bit by bit, in whatever processes the data was shown.

    Attributes:
        most: bytes that they may take.
        expressions: numbers of what graphs compute, by which values are found again in other graphs of the model.
        batches: recorded batches, each with the values of layers by their numbers.
        rows: how many rows of a value belong to each sample, by number; 0 where its first axis does not hold samples.
    """

    most: int = BYTES
    expressions: Expressions = field(default_factory=Expressions)
    batches: list[tuple[Batch, dict[int, Tensor]]] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)

    @contextmanager
    def filled_by(self, gm: fx.GraphModule, context: Context) -> Iterator[None]:
        """Keep what layers compute while a graph with observers is called on batches that are recorded as a whole."""
        layers, plain, before = _layers(gm), gm.forward, len(context.samples)
        numbers = self.expressions.of(gm) if layers else {}

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal before
            batch, count, before = Batch(args, kwargs), before, len(context.samples)
            if before == count or before > self._fitting(layers, context) or not _is_call(plain, args, kwargs):
                return plain(*args, **kwargs)
            recorded = context.samples[-1]
            if samples_in(recorded) != samples_in(batch):
                return plain(*args, **kwargs)
            run = _Keeping(gm, batch, layers)
            result = run.run()
            if not run.is_random:
                self.batches = [there for there in self.batches if any(there[0] is b for b in context.samples)]
                self.batches.append((recorded, {numbers[layer]: value for layer, value in run.found.items()}))
            return result

        gm.__dict__["forward"] = forward  # so that hooks run as they do
        try:
            yield
        finally:
            del gm.__dict__["forward"]

    def of(self, gm: fx.GraphModule, context: Context) -> LayerValues:
        """The values for a graph from `observed` to `qdq`; none for one that keeps a state or draws random numbers."""
        layers = _layers(gm)
        recorded = context.samples[: self._fitting(layers, context)]
        if not recorded:
            return LayerValues()
        all_numbers = self.expressions.of(gm)
        numbers = {layer: all_numbers[layer] for layer in layers}
        try:
            with torch.no_grad(), seeded():
                self.batches = [self._batch(gm, numbers, batch) for batch in recorded]
                self._find_rows(gm, numbers, context)
        except Exception as error:  # a graph may not run on some samples of a batch: those who ask see it themselves
            log.info("float values of recorded samples are not kept: %s", error)
            return LayerValues()
        return LayerValues(numbers, tuple(self.batches), self.rows)

    def _batch(
        self, gm: fx.GraphModule, numbers: Mapping[fx.Node, int], batch: Batch
    ) -> tuple[Batch, dict[int, Tensor]]:
        """A recorded batch with the values of these layers; those that are not there are computed."""
        size = samples_in(batch)
        same = (
            values
            for recorded, values in self.batches
            if samples_in(recorded) == size and place_in(recorded, batch) == 0
        )
        there = next(same, dict[int, Tensor]())
        values = {number: there[number] for number in numbers.values() if number in there}
        if len(values) < len(set(numbers.values())):
            seen = LayerValues({n: k for n, k in numbers.items() if k in values}, ((batch, values),))
            missing = {node for node, number in numbers.items() if number not in values}
            values |= {numbers[node]: value for node, value in _computed(gm, batch, missing, seen).items()}
        return batch, values

    def _find_rows(self, gm: fx.GraphModule, numbers: Mapping[fx.Node, int], context: Context) -> None:
        """Find out which rows of the values belong to a sample, from one that is run alone."""
        batch, values = self.batches[0]
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
        """How many of the first recorded batches have room, by the shapes that values have for the example."""
        shapes = [info(node).values[0][0] if info(node).values else info(node).shape for node in layers]
        size = 4 * sum(torch.Size(shape).numel() for shape in shapes if shape is not None)
        per_input, room = size / max(_inputs(context.example), 1), float(self.most)
        for count, batch in enumerate(context.samples if size else ()):
            room -= per_input * _inputs(batch)
            if room < 0:
                return count
        return len(context.samples) if size else 0


def _is_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function takes these arguments."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _inputs(batch: Batch) -> int:
    """How many numbers a batch holds."""
    return sum(tensor.numel() for tensor in tensors((batch.args, batch.kwargs)))


def _layers(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes whose first op is a layer, or a product; none where something keeps a state or changes values."""
    layers = []
    for node in gm.graph.nodes:
        module = submodule(gm, node)
        if changes(node) or (module is not None and not isinstance(module, Observer) and not is_pure(gm, node)):
            return []
        calls = calls_of(gm, node)
        if calls and calls[0].op.quant.heavy and calls[0].op.quant.recurrence is None:
            layers.append(node)
    return layers


def run_layer(runner: Runner, node: fx.Node, see: Callable[[Tensor], Tensor], value: Tensor | None = None) -> Any:
    """The value of a node whose first op is a layer.

    Args:
        runner: has the values that the node reads, as far as they are needed.
        node: the node.
        see: is handed what the layer computes, and says what to take for it.
        value: what the layer computes, where that is known.
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


class _Keeping(Runner):
    """Runs a graph with observers, and keeps what its layers compute.

    Attributes:
        found: that, by layer.
        is_random: whether a node has drawn random numbers.
    """

    def __init__(self, gm: fx.GraphModule, batch: Batch, layers: Collection[fx.Node]) -> None:
        super().__init__(gm, batch)
        self._layers, self.found, self.is_random = set(layers), dict[fx.Node, Tensor](), False

    def compute(self, node: fx.Node) -> Any:
        """The value of a node."""
        if isinstance(submodule(self.gm, node), Observer):
            return super().compute(node)

        def see(value: Tensor) -> Tensor:
            self.found[node] = value
            return value

        before = torch.get_rng_state()
        result = run_layer(self, node, see) if node in self._layers else super().compute(node)
        self.is_random = self.is_random or not torch.equal(before, torch.get_rng_state())
        return result


class KnownFloatForm(FloatForm):
    """Runs a graph in float, as far as some of its values need it that are not known.

    Args:
        gm: the graph.
        batch: some samples.
        known: what layers compute for recorded samples.
        values: the nodes whose values are wanted.
        layers: those of which is wanted what their first op computes; it is handed to `see_layer`.
        modules: modules to call in the place of those of `gm`, by path.

    Attributes:
        stored: what layers compute for these samples, as far as it is known. Where nothing is, the whole graph runs.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        batch: Batch,
        layer_values: LayerValues,
        values: Collection[fx.Node],
        layers: Collection[fx.Node] = (),
        modules: Modules = None,
    ) -> None:
        super().__init__(gm, copied(batch), modules=modules)
        self.stored = layer_values.of(batch)
        self._layers, self._whole = set(layers), set(values)
        self._steps = self._needed() if self.stored else set(gm.graph.nodes)

    def see_layer(self, node: fx.Node, value: Tensor) -> None:
        """Take in what the first op of a layer's node computes."""

    def step(self, node: fx.Node) -> Any:
        """Run the next node, if it must be; its value."""
        if node in self._steps or node.op == "placeholder":
            return super().step(node)
        for dead in self.last.get(node, ()):
            self.free(dead)
        return None

    def compute(self, node: fx.Node) -> Any:
        """The value of a node."""
        value = self.stored.get(node)
        if node not in self._layers and value is None:
            return super().compute(node)

        def see(layer_value: Tensor) -> Tensor:
            if node in self._layers:
                self.see_layer(node, layer_value)
            return layer_value

        if value is not None and node not in self._whole:
            return see(value)
        return run_layer(self, node, see, value)

    def free(self, node: fx.Node) -> None:
        """Let go of a value that nobody reads any more."""
        self.values.pop(node, None)

    def _needed(self) -> set[fx.Node]:
        """The nodes that must run; those of whose values more than the layer's is wanted are added to `_whole`."""
        steps = set()
        for node in reversed(self.graph.nodes):
            if node not in self._whole and node not in self._layers:
                continue
            steps.add(node)
            if node not in self.stored:
                self._whole.update(node.all_input_nodes)
            elif node in self._whole:
                self._whole.update(_read_behind_layer(self.gm, node))
        return steps


def _read_behind_layer(gm: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """What a unit reads for the ops behind its first one."""
    unit = unit_of(gm, node)
    if unit is None:
        return []
    layer = next(inner for inner in unit.graph.nodes if op_of(inner) is not None)
    arguments = zip(unit.graph.find_nodes(op="placeholder"), node.args, strict=True)
    return [value for name, value in arguments if isinstance(value, fx.Node) and set(name.users) - {layer}]


def _computed(
    gm: fx.GraphModule, batch: Batch, layers: Collection[fx.Node], layer_values: LayerValues
) -> dict[fx.Node, Tensor]:
    """What layers compute for some samples. Raises ValueError where something draws random numbers."""
    results: dict[fx.Node, Tensor] = {}

    class Run(KnownFloatForm):
        def see_layer(self, node: fx.Node, value: Tensor) -> None:
            results[node] = value

    before = torch.get_rng_state()
    Run(gm, batch, layer_values, (), layers).run()
    if not torch.equal(torch.get_rng_state(), before):
        raise ValueError("the graph draws random numbers")
    return results
