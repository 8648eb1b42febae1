"""Quantization-aware training: prepare a model with fake quantizers, and convert the trained model."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from fxq.common.data import Batch, as_batch, device_of
from fxq.common.isolation import computed_tensors, without_autocast
from fxq.common.metrics import sqnr
from fxq.common.names import in_short
from fxq.common.trees import leaves
from fxq.errors import CalibrationError, InputError, RecipeError, warn, words_of
from fxq.graph.info import ChosenGrids, Edge, grid_key, grids_of
from fxq.graph.query import constant, is_op
from fxq.ledger.build import ledger_of
from fxq.model import QuantizedModel
from fxq.passes.insert_fake_quantizers import InsertFakeQuantizers
from fxq.pipeline.context import Context
from fxq.pipeline.derived_weights import FoldedNorm
from fxq.pipeline.manager import PassManager
from fxq.quant.fake_quantize import FakeQuantizeValue, FakeQuantizeWeight, full_tensor
from fxq.quant.qparams import QParams, dequantize, quantize
from fxq.recipe.pass_base import Pass
from fxq.recipe.recipe import Recipe
from fxq.training.gradients import other_gradients
from fxq.workflow.obstacles import check_model
from fxq.workflow.steps import finished, manager_for, phases
from fxq.workflow.training_model import Preparation, TrainingModel

M = TypeVar("M", bound=nn.Module)
MAX_CHECKED_SAMPLES = 16
"""Samples that the integer model is compared with the trained model on."""


def prepared_for_training(model: nn.Module, recipe: Recipe, example_inputs: Any) -> TrainingModel:
    """Prepare a copy of `model` for training, on its device; see `fxq.prepare`."""
    device = device_of(model)
    try:
        own = copy.deepcopy(model, computed_tensors(model)).cpu().eval()
    except Exception as error:
        raise InputError(
            f"the model cannot be copied for training: {words_of(error)} (Weights of the deprecated "
            "torch.nn.utils.weight_norm cannot be copied: use torch.nn.utils.parametrizations.weight_norm.)"
        ) from error
    check_model(own)
    example = as_batch(example_inputs, own, "example_inputs") if example_inputs is not None else None
    manager = manager_for(own, recipe, _on_cpu(example))
    observing, choosing, inserting = _phases(recipe)
    manager.run(observing)
    manager.check_float()
    with torch.no_grad():
        manager.gm(*manager.context.example.args, **manager.context.example.kwargs)
    observed = manager.fork()
    chosen = manager.fork()
    chosen.run(choosing)
    manager.context.grids = _made_distinct(grids_of(chosen.gm.graph))
    manager.run([*choosing, *inserting[:-1]])
    if not any(is_op(node, "dequantize") for node in manager.gm.graph.nodes):
        ledger, _ = ledger_of(manager.history, manager.gm, manager.context)
        warn(f"nothing is quantized in the model to train; {ledger.main_reason()}.")
    manager.run(inserting[-1:])
    differing = other_gradients(own, manager.gm.eval(), manager.context.some_samples(2)[0])
    if differing:
        warn(
            f"in the model to train, {in_short(differing)} have other gradients than in the float model, which may use "
            "detach(), no_grad(), padding_idx, or a custom autograd.Function."
        )
    manager.context.model = copy.deepcopy(own, computed_tensors(own))  # training changes the graph's tensors
    return TrainingModel.from_manager(manager, observed).to(device)


def converted_from_training(trained: TrainingModel) -> QuantizedModel:
    """Convert a trained model to a quantized model on the CPU, see `fxq.convert`."""
    _check_has_ranges(trained)
    trained.use_ranges()
    tensors = {name: full_tensor(tensor.detach()).cpu() for name, tensor in trained.state_dict().items()}
    parameters = dict(trained.named_parameters())
    for name, tensor in tensors.items():
        good = torch.isfinite(tensor) if name in parameters else ~tensor.isnan()  # a mask may hold Inf
        if not bool(good.all()):
            raise InputError(
                f"{name} has NaN or Inf after training: a batch had NaN, or the learning rate was too high. Train "
                "again without that batch, or with a lower learning rate."
            )
    for derived_weight in trained.preparation.manager.context.derived:
        tensors |= derived_weight.made(tensors)
    manager = _observed_again(trained.preparation, tensors)
    context = manager.context
    context.grids = _take_grids(trained, manager.gm, tensors)
    observing, choosing, (*inserting, _) = _phases(context.recipe)
    manager.run([*choosing, *inserting])
    quantized = finished(manager, context.recipe.pipeline[len(observing) + len(choosing) + len(inserting) + 1 :])
    _check_output(trained, quantized, context)
    return quantized


def _made_distinct(grids: ChosenGrids) -> ChosenGrids:
    """Return the grids, changed so that no two groups have equal grids, which later passes would treat as one group.

    Scales change in the last bits only, and are replaced by the ranges of the first batches, or learned.
    """
    taken: set[tuple[float, ...]] = set()
    distinct: dict[Any, QParams] = {}
    for _, edges in grids.values():
        for grid in (edge.qparams for edge in edges):
            if not isinstance(grid, QParams) or grid.axis is not None or grid in distinct:
                continue
            new_grid = grid
            while (new_grid.s, new_grid.z, new_grid.qmin, new_grid.qmax) in taken:
                new_grid = replace(new_grid, scale=torch.nextafter(new_grid.scale, torch.tensor(math.inf)))
            taken.add((new_grid.s, new_grid.z, new_grid.qmin, new_grid.qmax))
            distinct[grid] = new_grid

    def with_distinct_grid(edge: Edge) -> Edge:
        return replace(edge, qparams=distinct[edge.qparams]) if edge.qparams in distinct else edge

    return {key: (plan, tuple(map(with_distinct_grid, edges))) for key, (plan, edges) in grids.items()}


def _observed_again(preparation: Preparation, tensors: Mapping[str, Tensor]) -> PassManager:
    """Return the manager of the graph with observers, with the trained tensors and those derived from them."""
    context = preparation.manager.context
    model = _with(copy.deepcopy(context.model, computed_tensors(context.model)), tensors)
    manager = preparation.observed.fork(model=model, samples=[_moved(batch, "cpu") for batch in context.samples])
    manager.gm = _with(copy.deepcopy(manager.gm, computed_tensors(manager.gm)).cpu(), tensors)
    original = manager.context.original
    if original is not None:
        gm = fx.GraphModule(original.gm, copy.deepcopy(original.graph))
        manager.context.original = replace(original, gm=_with(copy.deepcopy(gm, computed_tensors(gm)).cpu(), tensors))
    with torch.no_grad(), without_autocast():
        manager.context.outputs = model(*context.example.args, **context.example.kwargs)
    return manager


def _with(model: M, tensors: Mapping[str, Tensor]) -> M:
    """Copy tensors into a model, by name, and return it in eval mode. Names that it does not have are ignored."""
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in tensors:
                tensor.copy_(tensors[name])
    return model.eval()


def _check_output(trained: TrainingModel, quantized: QuantizedModel, context: Context) -> None:
    """Warn if the quantized model's output on recorded samples differs from the trained model's."""
    min_sqnr = context.recipe.min_sqnr
    if min_sqnr is None or any(hasattr(parameter, "full_tensor") for parameter in trained.parameters()):
        return
    samples, mode = context.some_samples(MAX_CHECKED_SAMPLES), trained.training
    batch = next(filter(_is_finite, samples), samples[0])
    device = device_of(trained)
    try:
        with torch.no_grad(), without_autocast():
            output_sqnr = sqnr(_called(trained.eval(), _moved(batch, device)), _called(quantized, batch))
    finally:
        trained.train(mode)
    if not output_sqnr >= min_sqnr:
        warn(
            f"the quantized model is at {output_sqnr:.1f} dB SQNR against the trained model; the recipe asks for "
            f"{min_sqnr:g} dB (min_sqnr). print(qmodel.ledger) shows what runs in float, and why."
        )


def _phases(recipe: Recipe) -> tuple[Sequence[Pass], Sequence[Pass], Sequence[Pass]]:
    """Passes of a training recipe in three phases: up to observers, choose-grids, and up to fake quantizers."""
    observing, later, _ = phases(recipe)
    names = [step.name for step in later]
    if names[:1] != ["choose-grids"] or InsertFakeQuantizers.name not in names:
        raise RecipeError(
            "a pipeline for training needs choose-grids after insert-observers, and insert-fake-quantizers before "
            f"lower; this one has {' → '.join(names)}."
        )
    return observing, later[:1], later[1 : names.index(InsertFakeQuantizers.name) + 1]


def _check_has_ranges(trained: TrainingModel) -> None:
    if not trained.steps:
        raise CalibrationError(
            "the model has not been trained: it has run no forward in train mode, so the ranges of values are unknown. "
            "Run your training loop, or at least one batch, before fxq.convert."
        )
    quantizers = (m for m in trained.modules() if isinstance(m, FakeQuantizeValue))
    missing = next((quantizer.label for quantizer in quantizers if not quantizer.has_range), None)
    if missing is not None:
        raise CalibrationError(
            f"{missing} has no range: in {trained.steps} forwards in train mode it was empty, NaN or Inf. Train with "
            "data that reaches it, or set the layer to float."
        )


def _take_grids(trained: TrainingModel, gm: fx.GraphModule, tensors: Mapping[str, Tensor]) -> ChosenGrids:
    """Return the edges with the grids that were found in training.

    Folded weights in the graph are changed in place if they would round to other integers than in training.

    Args:
        trained: the model.
        gm: graph with the trained tensors, after folding batch norms.
        tensors: trained tensors and the tensors derived from them, by path.
    """
    context = trained.preparation.manager.context
    initial = context.grids or {}
    folds = {norm.weight: norm for norm in context.derived if isinstance(norm, FoldedNorm) and norm.commutes}
    values = {m.group: m.qparams() for m in trained.modules() if isinstance(m, FakeQuantizeValue)}
    weights = {m.edge: m for m in trained.modules() if isinstance(m, FakeQuantizeWeight)}
    grids = dict(initial)
    for node in gm.graph.nodes:
        plan, edges = initial.get(grid_key(node), (None, ()))
        tensor, fold = constant(gm, node), folds.get(str(node.target))
        if tensor is None:
            edges = tuple(replace(edge, qparams=values.get(edge.group, edge.qparams)) for edge in edges)
        else:
            for at, quantizer in ((at, weights.get((str(node.target), at))) for at in range(len(edges))):
                if quantizer is None:
                    continue
                grid = quantizer.qparams_of(tensor)
                if fold is not None:
                    grid = _folded(quantizer, tensors[fold.own_weight], tensor, fold.scale(tensors), fold.axis)
                edges = (*edges[:at], replace(edges[at], qparams=grid), *edges[at + 1 :])
        grids[grid_key(node)] = plan, edges
    return grids


def _folded(quantizer: FakeQuantizeWeight, own: Tensor, weight: Tensor, scale: Tensor, axis: int) -> QParams:
    """Return the grid of a weight with a folded batch norm, on which it has the integers that it had in training.

    Folding rounds, and training leaves many weights near the midpoint of two integers. Weights that crossed it are
    moved back, in place.

    Args:
        quantizer: fake quantizer of the weight in training.
        own: float32, the trained weight.
        weight: float32, same shape, the trained weight times the scale; changed in place.
        scale: float32, (C,), scale of the batch norm.
        axis: axis of the channels in the weight.
    """
    before, after = quantizer.qparams_of(own), quantizer.qparams_of(weight)
    if quantizer.learned:
        times = (before.scale.double() * scale.abs()).to(torch.float32)
        after = replace(before, scale=torch.where(times > 0, times, torch.ones_like(times)))
    sign = scale.sign().to(torch.int8).reshape([-1] + [1] * (weight.dim() - 1 - axis))
    integers = quantize(own, before) * sign  # of a symmetric grid
    weight.copy_(torch.where(quantize(weight, after) == integers, weight, dequantize(integers, after)))
    return after


def _called(model: nn.Module, batch: Batch) -> Any:
    """Run a model and return its outputs on the CPU."""
    return tree_map(lambda v: v.cpu() if isinstance(v, Tensor) else v, model(*batch.args, **batch.kwargs))


def _is_finite(batch: Batch) -> bool:
    return all(bool(v.isfinite().all()) for v in leaves((batch.args, batch.kwargs)) if isinstance(v, Tensor))


def _on_cpu(batch: Batch | None) -> Batch | None:
    return _moved(batch, "cpu") if batch is not None else None


def _moved(batch: Batch, device: str) -> Batch:
    """Return a batch on a device, without gradients."""

    def move(value: Any) -> Any:
        return value.detach().to(device) if isinstance(value, Tensor) else value

    args, kwargs = tree_map(move, (batch.args, dict(batch.kwargs)))
    return Batch(args, kwargs)
