"""Training with fake quantization: the model to train, and the integer model of what was trained."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from fxq.common.data import Batch, as_batch, device_of
from fxq.common.isolation import without_autocast
from fxq.common.metrics import sqnr
from fxq.errors import CalibrationError, InputError, PassError, RecipeError, warn
from fxq.graph.info import Grids, grid_key, grids_of
from fxq.graph.query import constant
from fxq.model import QuantizedModel
from fxq.passes.insert_fake_quantizers import InsertFakeQuantizers
from fxq.patterns.norm import norm_scale
from fxq.pipeline.context import Context
from fxq.pipeline.hand_over import nodes_of
from fxq.quant.fake_quantize import FakeQuantizeValue, FakeQuantizeWeight, whole
from fxq.quant.observer_base import flat, range_along
from fxq.quant.qparams import QParams, scale_and_zero_point
from fxq.recipe.pass_base import Pass
from fxq.recipe.recipe import Recipe
from fxq.steps import finished, manager_for, phases
from fxq.tracing.wrappers import unwrapped
from fxq.training_model import TrainingModel

CHECKED = 16
"""Samples with which the integer model is compared with the one that was trained."""


def prepared_for_training(model: nn.Module, recipe: Recipe, example_inputs: Any) -> TrainingModel:
    """A model to train, on the device of `model`, of which it has a copy; see `fxq.prepare`."""
    model = unwrapped(model)
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}, not an nn.Module. (A function? Wrap it in a module.)")
    device = device_of(model)
    own = copy.deepcopy(model).cpu().eval()
    example = as_batch(example_inputs, own, "example_inputs") if example_inputs is not None else None
    manager = manager_for(own, recipe, _on_cpu(example))
    observing, choosing, inserting = _phases(recipe)
    manager.run(observing)
    manager.check_float()
    with torch.no_grad():
        manager.gm(*manager.context.example.args, **manager.context.example.kwargs)
    observed = nodes_of(manager.gm.graph)
    manager.run(choosing)
    manager.context.grids = grids_of(manager.gm.graph)
    manager.run(inserting)
    return TrainingModel.from_manager(manager, observed).to(device)


def converted_from_training(trained: TrainingModel) -> QuantizedModel:
    """The integer model of a trained one, on the CPU; see `fxq.convert`."""
    context = trained.origin.manager.context
    _check_has_ranges(trained)
    trained.use_ranges()
    tensors = {name: whole(tensor.detach()).cpu() for name, tensor in trained.state_dict().items()}
    own = copy.deepcopy(context.model)
    with torch.no_grad():
        for name, tensor in own.state_dict(keep_vars=True).items():
            if name in tensors:
                tensor.copy_(tensors[name])
    manager = manager_for(own, context.recipe, context.example)
    manager.context.samples = [_moved(batch, "cpu") for batch in context.samples]
    manager.context.progress = context.progress
    observing, choosing, inserting = _phases(context.recipe)
    manager.run(observing)
    now = nodes_of(manager.gm.graph)
    if now != trained.origin.observed:
        other = next((line for line in now if line not in set(trained.origin.observed)), None) or "it has fewer nodes"
        raise PassError(
            f"with the weights that were trained, the passes make another graph than before: {str(other).strip()}. A "
            "pass of the recipe looks at weights; it cannot be used for training."
        )
    known = context.grids or {}
    manager.context.grids = _trained_grids(known, trained, manager.gm, tensors)
    *insert_qdq, _ = inserting
    line = context.recipe.pipeline
    left = line[len(observing) + len(choosing) + len(inserting) :]
    manager.run([*choosing, *insert_qdq])
    made = finished(manager, left)
    _check_alike(trained, made, manager.context)
    return made


def _check_alike(trained: TrainingModel, made: QuantizedModel, context: Context) -> None:
    """Warn when the integer model is not what was trained, on recorded samples."""
    least = context.recipe.min_sqnr
    if least is None or any(hasattr(parameter, "full_tensor") for parameter in trained.parameters()):
        return
    batch, mode = context.some_samples(CHECKED)[0], trained.training
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
    if names[:2] != ["choose-grids", "insert-qdq"] or InsertFakeQuantizers.name not in names:
        raise RecipeError(
            "a pipeline for training has choose-grids, insert-qdq and insert-fake-quantizers in this order behind "
            f"insert-observers; here is {' → '.join(names)}."
        )
    return observing, later[:1], later[1 : names.index(InsertFakeQuantizers.name) + 1]


def _check_has_ranges(trained: TrainingModel) -> None:
    if not trained.steps:
        raise CalibrationError(
            "the model has not been trained: no forward in train mode has found the ranges of values. Run your "
            "training loop, or at least one batch, and then convert it."
        )
    quantizers = (m for m in trained.modules() if isinstance(m, FakeQuantizeValue))
    missing = next((quantizer.name for quantizer in quantizers if not quantizer.has_range), None)
    if missing is not None:
        raise CalibrationError(
            f"{missing} has no range: in {trained.steps} forwards in train mode it was empty, or NaN or Inf. Train "
            "with data that reaches it, or set the layer to float."
        )


def _trained_grids(known: Grids, trained: TrainingModel, gm: fx.GraphModule, tensors: Mapping[str, Tensor]) -> Grids:
    """The edges with the grids that training has found."""
    values = {m.group: m.qparams() for m in trained.modules() if isinstance(m, FakeQuantizeValue)}
    weights = {m.edge: m for m in trained.modules() if isinstance(m, FakeQuantizeWeight)}
    found = dict(known)
    for node in gm.graph.nodes:
        plan, edges = known.get(grid_key(node), (None, ()))
        tensor = constant(gm, node)
        if tensor is None:
            edges = tuple(replace(edge, qparams=values.get(edge.group, edge.qparams)) for edge in edges)
        else:
            for at, quantizer in ((at, weights.get((str(node.target), at))) for at in range(len(edges))):
                if quantizer is not None:
                    grid = _weight_grid(quantizer, tensor, tensors)
                    edges = (*edges[:at], replace(edges[at], qparams=grid), *edges[at + 1 :])
        found[grid_key(node)] = plan, edges
    return found


def _weight_grid(quantizer: FakeQuantizeWeight, weight: Tensor, tensors: Mapping[str, Tensor]) -> QParams:
    """The grid of a weight as it is quantized: with the scale of the batch norm that was folded into it."""
    grid, spec, norm = quantizer.qparams(), quantizer.spec, quantizer.norm
    if not quantizer.learned:
        low, high = torch.aminmax(flat(weight)) if grid.axis is None else range_along(weight, grid.axis, grid.block)
        scale, zero_point = scale_and_zero_point(low, high, grid.qmin, grid.qmax, spec.symmetric)
        return replace(grid, scale=scale.detach(), zero_point=zero_point)
    if norm is None:
        return grid
    times = norm_scale(tensors[norm.var], tensors[norm.gamma] if norm.gamma is not None else None, norm.eps).abs()
    scale = (grid.scale.double() * times).to(torch.float32)
    return replace(grid, scale=torch.where(scale > 0, scale, torch.ones_like(scale)))


def _called(model: nn.Module, batch: Batch) -> Any:
    """What a model returns, on the CPU."""
    return tree_map(lambda v: v.cpu() if isinstance(v, Tensor) else v, model(*batch.args, **batch.kwargs))


def _on_cpu(batch: Batch | None) -> Batch | None:
    return _moved(batch, "cpu") if batch is not None else None


def _moved(batch: Batch, device: str) -> Batch:
    """A batch on a device, without gradients."""

    def move(value: Any) -> Any:
        return value.detach().to(device) if isinstance(value, Tensor) else value

    args, kwargs = tree_map(move, (batch.args, dict(batch.kwargs)))
    return Batch(args, kwargs)
