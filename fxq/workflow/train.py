"""Training with fake quantization: the model to train, and the integer model of what was trained."""

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
from fxq.graph.info import Edge, Grids, grid_key, grids_of
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
from fxq.tracing.wrappers import unwrapped
from fxq.training.gradients import other_gradients
from fxq.workflow.steps import finished, manager_for, phases
from fxq.workflow.training_model import Preparation, TrainingModel

M = TypeVar("M", bound=nn.Module)
CHECKED = 16
"""Samples with which the integer model is compared with the one that was trained."""


def prepared_for_training(model: nn.Module, recipe: Recipe, example_inputs: Any) -> TrainingModel:
    """A model to train, on the device of `model`, of which it has a copy; see `fxq.prepare`."""
    model = unwrapped(model)
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}, not an nn.Module. (A function? Wrap it in a module.)")
    device = device_of(model)
    try:
        own = copy.deepcopy(model, computed_tensors(model)).cpu().eval()
    except Exception as error:
        raise InputError(
            f"training takes a copy of the model, which cannot be copied: {words_of(error)} (Weights of the older "
            "torch.nn.utils.weight_norm cannot: use torch.nn.utils.parametrizations.weight_norm.)"
        ) from error
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
    manager.context.grids = _told_apart(grids_of(chosen.gm.graph))
    manager.run([*choosing, *inserting[:-1]])
    if not any(is_op(node, "dequantize") for node in manager.gm.graph.nodes):
        ledger, _ = ledger_of(manager.history, manager.gm, manager.context)
        warn(f"nothing is rounded in the model that is trained; {ledger.main_reason()}.")
    manager.run(inserting[-1:])
    differing = other_gradients(own, manager.gm.eval(), manager.context.some_samples(2)[0])
    if differing:
        warn(
            f"in the model that is trained, {in_short(differing)} have other gradients than in the float model, which "
            "may use detach(), no_grad(), padding_idx, or a custom autograd.Function."
        )
    manager.context.model = copy.deepcopy(own, computed_tensors(own))  # training changes the tensors that the graph has
    return TrainingModel.from_manager(manager, observed).to(device)


def converted_from_training(trained: TrainingModel) -> QuantizedModel:
    """The integer model of a trained one, on the CPU; see `fxq.convert`."""
    _check_has_ranges(trained)
    trained.use_ranges()
    tensors = {name: full_tensor(tensor.detach()).cpu() for name, tensor in trained.state_dict().items()}
    parameters = dict(trained.named_parameters())
    for name, tensor in tensors.items():
        good = torch.isfinite(tensor) if name in parameters else ~tensor.isnan()  # a mask may hold Inf
        if not bool(good.all()):
            raise InputError(
                f"{name} holds NaN or Inf behind training: a batch had NaN in it, or steps were too large. Train "
                "again, without that batch or with a lower learning rate."
            )
    for one in trained.preparation.manager.context.derived:
        tensors |= one.made(tensors)
    manager = _observed_again(trained.preparation, tensors)
    context = manager.context
    context.grids = _take_grids(trained, manager.gm, tensors)
    observing, choosing, (*inserting, _) = _phases(context.recipe)
    manager.run([*choosing, *inserting])
    made = finished(manager, context.recipe.pipeline[len(observing) + len(choosing) + len(inserting) + 1 :])
    _check_alike(trained, made, context)
    return made


def _told_apart(grids: Grids) -> Grids:
    """The grids, no two groups of which have the same: by chance they may, and would be one grid from there on.

    Scales differ in their last bits, which nobody sees: ranges of the first batches, or training, take their place.
    """
    taken: set[tuple[float, ...]] = set()
    made: dict[Any, QParams] = {}
    for _, edges in grids.values():
        for grid in (edge.qparams for edge in edges):
            if not isinstance(grid, QParams) or grid.axis is not None or grid in made:
                continue
            apart = grid
            while (apart.s, apart.z, apart.qmin, apart.qmax) in taken:
                apart = replace(apart, scale=torch.nextafter(apart.scale, torch.tensor(math.inf)))
            taken.add((apart.s, apart.z, apart.qmin, apart.qmax))
            made[grid] = apart

    def of(edge: Edge) -> Edge:
        return replace(edge, qparams=made[edge.qparams]) if edge.qparams in made else edge

    return {key: (plan, tuple(map(of, edges))) for key, (plan, edges) in grids.items()}


def _observed_again(preparation: Preparation, tensors: Mapping[str, Tensor]) -> PassManager:
    """The graph with observers, with the tensors that were trained, and those that are made of them."""
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
    """A model in eval mode, with these values of its tensors where it has any of their names."""
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in tensors:
                tensor.copy_(tensors[name])
    return model.eval()


def _check_alike(trained: TrainingModel, made: QuantizedModel, context: Context) -> None:
    """Warn when the integer model is not what was trained, on recorded samples."""
    least = context.recipe.min_sqnr
    if least is None or any(hasattr(parameter, "full_tensor") for parameter in trained.parameters()):
        return
    samples, mode = context.some_samples(CHECKED), trained.training
    batch = next(filter(_is_finite, samples), samples[0])
    device = device_of(trained)
    try:
        with torch.no_grad(), without_autocast():
            found = sqnr(_called(trained.eval(), _moved(batch, device)), _called(made, batch))
    finally:
        trained.train(mode)
    if not found >= least:
        warn(
            f"the integer model is at {found:.1f} dB SQNR against the model that was trained; the recipe asks for "
            f"{least:g} dB (min_sqnr). print(qmodel.ledger) shows what runs in float, and why."
        )


def _phases(recipe: Recipe) -> tuple[Sequence[Pass], Sequence[Pass], Sequence[Pass]]:
    """The passes as far as observers, choose-grids, and those behind it as far as fake quantizers."""
    observing, later, _ = phases(recipe)
    names = [step.name for step in later]
    if names[:1] != ["choose-grids"] or InsertFakeQuantizers.name not in names:
        raise RecipeError(
            "a pipeline for training has choose-grids behind insert-observers, and insert-fake-quantizers before "
            f"lower; here is {' → '.join(names)}."
        )
    return observing, later[:1], later[1 : names.index(InsertFakeQuantizers.name) + 1]


def _check_has_ranges(trained: TrainingModel) -> None:
    if not trained.steps:
        raise CalibrationError(
            "the model has not been trained: no forward in train mode has found the ranges of values. Run your "
            "training loop, or at least one batch, and then convert it."
        )
    quantizers = (m for m in trained.modules() if isinstance(m, FakeQuantizeValue))
    missing = next((quantizer.label for quantizer in quantizers if not quantizer.has_range), None)
    if missing is not None:
        raise CalibrationError(
            f"{missing} has no range: in {trained.steps} forwards in train mode it was empty, or NaN or Inf. Train "
            "with data that reaches it, or set the layer to float."
        )


def _take_grids(trained: TrainingModel, gm: fx.GraphModule, tensors: Mapping[str, Tensor]) -> Grids:
    """The edges with the grids that training has found. Weights in the graph move where the grids are to give others.

    Args:
        trained: the model.
        gm: the graph with the tensors that were trained, where batch norms are folded.
        tensors: those of the model by path, and what is made of them.
    """
    context = trained.preparation.manager.context
    known = context.grids or {}
    folds = {one.weight: one for one in context.derived if isinstance(one, FoldedNorm) and one.commutes}
    values = {m.group: m.qparams() for m in trained.modules() if isinstance(m, FakeQuantizeValue)}
    weights = {m.edge: m for m in trained.modules() if isinstance(m, FakeQuantizeWeight)}
    found = dict(known)
    for node in gm.graph.nodes:
        plan, edges = known.get(grid_key(node), (None, ()))
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
        found[grid_key(node)] = plan, edges
    return found


def _folded(quantizer: FakeQuantizeWeight, own: Tensor, weight: Tensor, scale: Tensor, axis: int) -> QParams:
    """The grid of a weight that has taken in a batch norm; on it are the integers that the weight had before.

    Folding rounds, and training leaves many weights near the middle between two integers: those that got across it are
    put back, in place.

    Args:
        quantizer: what rounded the weight while it was trained.
        own: the weight as it was trained.
        weight: the same, times the scale.
        scale: of the batch norm, (C,).
        axis: that of the channels in the weight.
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
    """What a model returns, on the CPU."""
    return tree_map(lambda v: v.cpu() if isinstance(v, Tensor) else v, model(*batch.args, **batch.kwargs))


def _is_finite(batch: Batch) -> bool:
    return all(bool(v.isfinite().all()) for v in leaves((batch.args, batch.kwargs)) if isinstance(v, Tensor))


def _on_cpu(batch: Batch | None) -> Batch | None:
    return _moved(batch, "cpu") if batch is not None else None


def _moved(batch: Batch, device: str) -> Batch:
    """A batch on a device, without gradients."""

    def move(value: Any) -> Any:
        return value.detach().to(device) if isinstance(value, Tensor) else value

    args, kwargs = tree_map(move, (batch.args, dict(batch.kwargs)))
    return Batch(args, kwargs)
