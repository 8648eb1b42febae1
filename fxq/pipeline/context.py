"""Context of one run of the pipeline, `rewriter.context` in a pass: recipe, backend, model, samples and results."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from fxq.backends.base import Backend
from fxq.common.code_state import OuterVariables
from fxq.common.data import Batch, first_of, pieces_of, samples_in
from fxq.common.isolation import ModelChanges, untouched
from fxq.common.metrics import tensors
from fxq.common.ranks import Ranks
from fxq.errors import RecipeError
from fxq.graph.info import ChosenGrids, info
from fxq.graph.query import op_of
from fxq.graph.region import Region
from fxq.ops import OPS
from fxq.pipeline.derived_weights import ComputedConstant, FoldedNorm, ParameterRows
from fxq.pipeline.float_ops import FloatModelOps
from fxq.pipeline.float_values import FloatValues
from fxq.quant.spec import REDUCIBLE_ROLES, QuantConfig, ReducibleRole
from fxq.recipe.pins import Pin
from fxq.recipe.recipe import Recipe
from fxq.recipe.selector import Selector
from fxq.rewriting.computed import TrainableConstant


@dataclass
class Context:
    """Context of one run of the pipeline.

    Attributes:
        recipe: the recipe.
        backend: the recipe's backend.
        model: the user's float model; never changed.
        example: one batch of inputs, with which the model is traced and passes are checked.
        types: module type by module path of the model.
        samples: recorded calibration inputs.
        floats: cache of the float outputs of layers on the first of these.
        divisible: whether the first axis of the inputs counts samples: the result of a sample does not depend on the
            others.
        units: path of the unit module for each kind and body, so that equal bodies share one.
        regions: region of each lowered node, with its q/dq form, for verify-lowering.
        reduce_range: role that has 7 bits where kernels saturate with 8: the recipe's, or for "auto" the one that
            `fxq/ledger/reduce_range.py` chooses.
        progress: whether to show progress bars; None: on a terminal.
        outputs: output of the float model for `example`.
        decided: decision of `fallback` on every op that could run either way.
        written: module path and op of every call before canonicalize removed any, for the recipe's selectors.
        dropouts: module path of each dropout that canonicalize removed, and the origins of its input.
        grids: plan and edges of every value after choose-grids, for training. If they are set before choose-grids, as
            after training, it takes them.
        computed: how constants are computed from parameters, by path; only if the recipe trains.
        derived: constants to compute again from the trained model's tensors.
        outside: variables outside the model's modules that its code uses, each with the path of a module; from `trace`.
        original: ops of the float model and its canonical graph, for the ledger; None before canonicalize.
        scaled: names of the ops of `original` whose values are divided by factors that depend on data.
        selecting: numbers of the recipe's overrides that select something in this part of a model; None for a whole
            model, in which each override must select something.
        ranks: processes that convert the model together: passes may divide their work among them.
        runs_model_code: whether the graph runs code of the model, which may have state, and not only ops; from `trace`.
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
    reduce_range: ReducibleRole = "activations"
    progress: bool | None = None
    outputs: Any = None
    original: FloatModelOps | None = None
    decided: tuple[Pin, ...] = ()
    written: list[tuple[str, str]] = field(default_factory=list)
    dropouts: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    grids: ChosenGrids | None = None
    computed: dict[str, TrainableConstant] = field(default_factory=dict)
    derived: list[FoldedNorm | ParameterRows | ComputedConstant] = field(default_factory=list)
    outside: Sequence[tuple[str, OuterVariables]] = ()
    scaled: tuple[str, ...] = ()
    selecting: set[int] | None = None
    ranks: Ranks = field(default_factory=Ranks)
    runs_model_code: bool = True

    def __post_init__(self) -> None:
        self.reduce_range = next(
            (role for role in REDUCIBLE_ROLES if role == self.recipe.reduce_range), self.reduce_range
        )
        if not self.types:
            self.types = {path: type(module) for path, module in self.model.named_modules(remove_duplicate=False)}

    @property
    def trains(self) -> bool:
        """Whether the recipe trains."""
        return self.recipe.trains

    @property
    def is_large(self) -> bool:
        """Whether one sample takes so much work that passes use few samples where these suffice.

        The work of a recorded sample is estimated from the sizes of its tensors, relative to those of the example's.
        """
        if self.original is None:
            return False
        first, *others = map(_sizes_of_sample, (self.example, *self.samples))
        ratios = (size / own for sizes in others for own, size in zip(first, sizes, strict=False) if own and size)
        return self.original.is_large_for((samples_in(self.example) or 1) / max(ratios, default=1.0))

    def untouched(self) -> AbstractContextManager[ModelChanges]:
        """Context that undoes state changes of the model's code, if the graph, which shares leaves with it, runs any.

        Comparing the state takes long for a model with many modules.
        """
        return untouched(self.model, self.outside) if self.runs_model_code else nullcontext(ModelChanges())

    def some_samples(self, most: int) -> list[Batch]:
        """About `most` samples of the recorded batches, or of the example if none are recorded.

        They are spread evenly over the batches. Batches stay whole if the context is not `divisible`. If there are more
        than `most` batches, some are left out.
        """
        batches = self.samples or [self.example]
        if len(batches) > most:
            batches = [batches[i * len(batches) // most] for i in range(most)]
        if not self.divisible:
            return batches
        sizes = [samples_in(batch) or 1 for batch in batches]
        per_batch = next((n for n in range(1, max(sizes)) if sum(min(n, size) for size in sizes) >= most), max(sizes))
        return [first_of(batch, per_batch) for batch in batches]

    def share_of(self, samples: Sequence[Batch]) -> list[Batch]:
        """Samples that this process runs, of all that the processes run together; there may be none.

        Whole batches, in turns: if all shares were equally long, those that it calibrated. With fewer batches than
        processes, some samples of each batch.
        """
        rank, size = self.ranks.rank, self.ranks.size
        counts = [samples_in(batch) for batch in samples]
        if len(samples) >= size or not self.divisible or None in counts:
            return list(samples[rank::size])
        shares = [(batch, self.ranks.slice_of(count or 0)) for batch, count in zip(samples, counts, strict=True)]
        return [first_of(batch, at.stop - at.start, at.start) for batch, at in shares if at.stop > at.start]

    def in_pieces(self, most: int, least: int, count: int) -> list[Batch]:
        """Some samples; for a large model in small batches, so that few values are in memory at a time.

        Args:
            most: about how many samples. If the model is large for one sample, half of the recorded ones, up to `most`.
            least: minimum number of samples, if so many are recorded.
            count: about how many batches a large model gets.
        """
        if self.original is None or not self.original.is_large or not self.divisible:
            return self.some_samples(most)
        if self.original.is_large_for(samples_in(self.example) or 1):
            recorded = sum(samples_in(batch) or 1 for batch in self.samples)
            most = min(most, max(min(most, recorded) // 2, least))
        batches = self.some_samples(most)
        size = max(sum(samples_in(batch) or 1 for batch in batches) // count, 1)
        return [piece for batch in batches for piece in pieces_of(batch, size)]

    def config_for(self, path: str, op: str) -> tuple[QuantConfig, Selector | None]:
        """Config of the recipe for an op at a module path, and the selector of the override that gives it, if any."""
        return self.recipe.config_for(path, (op,), self.types)

    def selector_for(self, path: str, op: str) -> Selector:
        """Selector of one op: the path of a module that is the op, or op and path for a call in a module's forward."""
        try:
            spelled = OPS.of_module(self.model.get_submodule(path)) if path else None
        except AttributeError:
            spelled = None
        if spelled is not None and spelled[0].name == op:
            return Selector(path=path)
        return Selector(op=op, path=path or None)

    def override_line(self, path: str, op: str, config: str) -> str:
        """Line of a recipe that gives one op another config."""
        return f"recipe.override({self.selector_for(path, op)}, {config})"

    def refuses_to_join(self, nodes: Sequence[fx.Node]) -> str | None:
        """Reason why the recipe does not let ops become one unit; None if it does. A `refuse` for the rewriter.

        They stay apart if some are float and others integers, or if their specs differ. A function of one tensor has
        no spec of its own: it takes that of its input.
        """
        ops = [(op, info(n).path) for n in nodes if (op := op_of(n)) is not None]
        configs = [(op, self.config_for(path, op.name)[0]) for op, path in ops]
        follows = {op.name for op, _ in configs if op.traits.pointwise and len(op.traits.inputs) == 1}
        specs = {config for op, config in configs if op.traits.kind == "computes" and op.name not in follows}
        if len(specs) > 1 or len({config.is_float for _, config in configs}) > 1:
            return "the recipe configures these ops differently"
        return None

    def check_selectors(self, ops: Collection[tuple[str, str]]) -> None:
        """Raise `RecipeError` for an override whose selector selects nothing, with the nearest names.

        Args:
            ops: module path and op name of each node of the canonical graph, before folding and fusion.
        """
        names = {op for _, op in ops if op}
        for i, (selector, _) in enumerate(self.recipe.overrides):
            if any(selector.matches(path, (op,), self.types) for path, op in ops):
                if self.selecting is not None:
                    self.selecting.add(i)
            elif self.selecting is None:
                near = selector.near_misses(self.types, names)
                raise RecipeError(
                    f"the override for {selector} selects nothing in this model; "
                    f"{'near: ' + ', '.join(near) if near else 'nothing looks like it'}. "
                    "Paths are those of model.named_modules()."
                )


def _sizes_of_sample(batch: Batch) -> list[float]:
    """Number of elements of each tensor for one sample, keyword arguments in the order of their names."""
    count = samples_in(batch) or 1
    return [tensor.numel() / max(count, 1) for tensor in tensors((batch.args, dict(sorted(batch.kwargs.items()))))]
