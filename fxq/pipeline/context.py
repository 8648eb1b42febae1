"""What a run of the pipeline knows besides the graph: passes ask it through `rewriter.context`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from fxq.backends.base import Backend
from fxq.common.data import Batch, first_of, pieces_of, samples_in
from fxq.errors import RecipeError
from fxq.graph.info import Grids, info
from fxq.graph.query import op_of
from fxq.graph.region import Region
from fxq.ops import OPS
from fxq.pipeline.derived_weights import FoldedNorm, ParameterRows, Recomputed
from fxq.pipeline.float_ops import FloatModelOps
from fxq.pipeline.float_values import FloatValues
from fxq.quant.spec import NARROW, Narrow, QuantConfig
from fxq.recipe.pins import Pin
from fxq.recipe.recipe import Recipe
from fxq.recipe.selector import Selector
from fxq.rewriting.computed import TrainableConstant


@dataclass
class Context:
    """One run of the pipeline.

    Attributes:
        recipe: the recipe.
        backend: the backend it resolved to.
        model: the user's float model; never changed.
        example: one batch of inputs: shapes are found and passes are checked with it.
        types: module type by module path of the model.
        samples: recorded calibration inputs.
        floats: float outputs of layers on the first of these.
        divisible: whether the first axis of the inputs counts samples: the graph computes for some of them alone what
            it computes for them among all.
        units: path of the unit module for each kind and body, so that equal bodies share one.
        regions: for each lowered node, the qdq form it came from; for verify-lowering.
        reduce_range: role that has 7 bits where kernels saturate with 8: the recipe's, or for "auto" the one that
            `fxq/ledger/reduce_range.py` chooses.
        progress: whether to show progress bars; None: on a terminal.
        outputs: what the float model returns for `example`.
        decided: what `fallback` decided of every op that could run either way.
        written: module path and op of every call before canonicalize removed any; what selectors may select.
        dropouts: of each dropout that canonicalize removed, its module path, and the origins of the value that it drops
            from.
        grids: the plan and the edges of every value behind choose-grids, for training. Where they are known before, as
            behind training, choose-grids takes them.
        computed: how constants are computed of parameters, by their paths; known where the recipe trains.
        derived: the constants that are made of the model's own tensors again, behind training.
        original: the ops of the float model and its canonical graph, for the ledger; None before canonicalize.
    """

    recipe: Recipe
    backend: Backend
    model: nn.Module
    example: Batch
    types: Mapping[str, type[nn.Module]] = field(default_factory=dict)
    samples: list[Batch] = field(default_factory=list)
    floats: FloatValues = field(default_factory=FloatValues)
    divisible: bool = True
    units: dict[str, str] = field(default_factory=dict)
    regions: dict[fx.Node, Region] = field(default_factory=dict)
    reduce_range: Narrow = "activations"
    progress: bool | None = None
    outputs: Any = None
    original: FloatModelOps | None = None
    decided: tuple[Pin, ...] = ()
    written: list[tuple[str, str]] = field(default_factory=list)
    dropouts: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    grids: Grids | None = None
    computed: dict[str, TrainableConstant] = field(default_factory=dict)
    derived: list[FoldedNorm | ParameterRows | Recomputed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reduce_range = next((role for role in NARROW if role == self.recipe.reduce_range), self.reduce_range)
        if not self.types:
            self.types = {path: type(module) for path, module in self.model.named_modules(remove_duplicate=False)}

    def some_samples(self, most: int) -> list[Batch]:
        """About `most` samples of the recorded batches, or of the example: as many of each, as far as it has them.

        Batches are whole where the graph does not compute the same for a part of one. Where there are more batches than
        that, some are left out.
        """
        batches = self.samples or [self.example]
        if len(batches) > most:
            batches = [batches[i * len(batches) // most] for i in range(most)]
        if not self.divisible:
            return batches
        sizes = [samples_in(batch) or 1 for batch in batches]
        each = next((n for n in range(1, max(sizes)) if sum(min(n, size) for size in sizes) >= most), max(sizes))
        return [first_of(batch, each) for batch in batches]

    def in_pieces(self, most: int, least: int, count: int) -> list[Batch]:
        """Some samples; of a large model in small batches, so that few values are held at a time.

        Args:
            most: about how many. Of a model that is large for one sample, half of those that are known, up to so many.
            least: but no fewer than that, if there are so many.
            count: in about how many batches they come, of a large model.
        """
        if self.original is None or not self.original.is_large or not self.divisible:
            return self.some_samples(most)
        if self.original.is_large_for(samples_in(self.example) or 1):
            known = sum(samples_in(batch) or 1 for batch in self.samples)
            most = min(most, max(min(most, known) // 2, least))
        batches = self.some_samples(most)
        size = max(sum(samples_in(batch) or 1 for batch in batches) // count, 1)
        return [piece for batch in batches for piece in pieces_of(batch, size)]

    def config_for(self, path: str, op: str) -> tuple[QuantConfig, Selector | None]:
        """The recipe's config for an op at a module path, and the override that decided it."""
        return self.recipe.config_for(path, (op,), self.types)

    def selector_for(self, path: str, op: str) -> Selector:
        """What selects one op: for a module that is the op its path, for a call in a module's forward op and path."""
        try:
            spelled = OPS.of_module(self.model.get_submodule(path)) if path else None
        except AttributeError:
            spelled = None
        if spelled is not None and spelled[0].name == op:
            return Selector(path=path)
        return Selector(op=op, path=path or None)

    def override_line(self, path: str, op: str, config: str) -> str:
        """The line of a recipe that gives one op another config."""
        return f"recipe.override({self.selector_for(path, op)}, {config})"

    def refuses_to_join(self, nodes: Sequence[fx.Node]) -> str | None:
        """Why ops may not become one, for the recipe; None when they may. A `refuse` for the rewriter.

        It asks for float for some and integers for others; or for different specs, of ops that have a say in them: a
        function of one tensor takes what it gets.
        """
        ops = [(op, info(n).path) for n in nodes if (op := op_of(n)) is not None]
        configs = [(op, self.config_for(path, op.name)[0]) for op, path in ops]
        follows = {op.name for op, _ in configs if op.traits.pointwise and len(op.traits.inputs) == 1}
        specs = {config for op, config in configs if op.traits.kind == "computes" and op.name not in follows}
        if len(specs) > 1 or len({config.is_float for _, config in configs}) > 1:
            return "the recipe configures these ops differently"
        return None

    def check_selectors(self, ops: Collection[tuple[str, str]]) -> None:
        """Raise `RecipeError` for an override whose selector selects nothing, with what looks most like it.

        Args:
            ops: module path and op name of each node of the canonical graph, before anything is folded or fused.
        """
        names = {op for _, op in ops if op}
        for selector, _ in self.recipe.overrides:
            if not any(selector.matches(path, (op,), self.types) for path, op in ops):
                near = selector.near_misses(self.types, names)
                raise RecipeError(
                    f"the override for {selector} selects nothing in this model; "
                    f"{'near: ' + ', '.join(near) if near else 'nothing looks like it'}. "
                    "Paths are those of model.named_modules()."
                )
