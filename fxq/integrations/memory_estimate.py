"""Estimate of the memory that quantizing a model takes, computed from the shapes of its weights."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fxq.integrations import float_shell, recipe_for
from fxq.ops import OPS
from fxq.quant.packing import Packing
from fxq.quant.spec import LOW_BITS, TensorSpec
from fxq.recipe.recipe import as_recipe
from fxq.workflow.entry import trainable_model

_LARGEST_COPIES = 2
"""Copies of the largest weight, in float32, that are in memory while it is rounded; one is in pages of its file."""
_OVERHEAD = 48 << 20
"""Bytes of graphs, small temporary tensors, and freed memory that the allocator keeps."""


class MemoryEstimate(NamedTuple):
    """Estimate of the memory that quantizing a model takes, in bytes.

    Attributes:
        result: bytes of the quantized model.
        peak: bytes at the peak, while its weights are read from files: the result, the scales of blocks as linear
            layers compute with them, 48 MiB, and the memory for one weight: twice the largest in float32, or with data
            what `gptq` takes, if that is more. Recorded samples, activations, and memory of Python and its libraries
            are not counted.
    """

    result: int
    peak: int


def estimate_memory(model: Any, recipe: Any = "weight_only", data: bool = False) -> MemoryEstimate:
    """Estimate the memory that `quantize` takes with weights in files.

    Args:
        model: the model, which may be on the meta device; or the folder of a float model of transformers.
        recipe: as for `quantize`. Layers that lowering or the fallback keeps in float are counted as integers.
        data: whether `quantize` gets data. The pass `gptq`, which only then runs, takes some matrices of the size
            inputs x inputs for a layer, and several copies of its weight.

    Raises:
        FileError: the folder has no model of transformers.
        InputError: the model is no module.
        RecipeError: the recipe is not valid.

    Example:
        >>> estimate_memory(nn.Sequential(nn.Linear(256, 256, bias=False))).result < 256 * 256 * 1.1
        True
        >>> model = nn.Sequential(nn.Linear(2048, 512))
        >>> recipe = fxq.Recipe.weight_only(bits=4)
        >>> estimate_memory(model, recipe, data=True).peak > estimate_memory(model, recipe).peak + 4 * 2048**2
        True
    """
    is_folder = isinstance(model, (str, os.PathLike)) and os.path.isdir(model)
    shell = float_shell(None, Path(model)) if is_folder else trainable_model(model)
    chosen = recipe_for(shell, as_recipe(recipe))
    types = {path: type(module) for path, module in shell.named_modules()}
    integers: dict[int, int] = {}
    floats: dict[int, int] = {id(buffer): buffer.nbytes for buffer in shell.buffers()}
    temporary, scales = 0, dict[int, int]()
    for path, module in shell.named_modules():
        spelled = OPS.of_module(module)
        op = "linear" if spelled is None else spelled[0].name
        for leaf, tensor in module.named_parameters(recurse=False):
            config = chosen.config_for(path, (op,), types)[0] if leaf == "weight" and tensor.dim() > 1 else None
            spec = None if config is None else config.weight
            if config is None or spec is None:
                floats[id(tensor)] = 4 * tensor.numel()
                continue
            is_packed = config.activation is None or spec.block is not None or spec.bits <= LOW_BITS
            integers[id(tensor)] = _stored_bytes(tensor, spec.for_embedding if op == "embedding" else spec, is_packed)
            if op == "linear" and spec.block is not None:  # scales, and scaled zero points, in float32
                scales[id(tensor)] = (4 if spec.symmetric else 8) * _blocks(tensor, spec.block)
            steps = [step for step in chosen.pipeline if step.applies([config])] if data and op != "embedding" else []
            passes = [step.scratch_bytes(_rows(module, tensor)) for step in steps]
            temporary = max(temporary, _LARGEST_COPIES * 4 * tensor.numel(), *passes)
    result = sum(integers.values()) + sum(floats.values())
    return MemoryEstimate(result, result + sum(scales.values()) + temporary + _OVERHEAD)


def _stored_bytes(weight: Tensor, spec: TensorSpec, is_packed: bool) -> int:
    """Bytes of the integers, scales and zero points of a weight. `is_packed`: whether its layer packs few bits."""
    if spec.format == "float16":
        return 2 * weight.numel()
    packing = Packing.of_grid(spec.qmin, spec.qmax, tuple(weight.shape[1:])) if is_packed else None
    values = weight.numel() if packing is None else len(weight) * packing.row_bytes
    if spec.block is None:
        return values + 8 * (len(weight) if spec.per == "channel" else 1)
    return values + _blocks(weight, spec.block) * (2 if spec.symmetric else 3)


def _rows(module: Any, weight: Tensor) -> tuple[int, int, int]:
    """Groups, outputs of a group and inputs of a weight; where the layout is not known, the larger number of inputs."""
    groups = getattr(module, "groups", 1)
    outputs = weight.shape[1] if getattr(module, "transposed", False) else len(weight) // groups
    if OPS.of_module(module) is None:
        outputs = min(weight.shape[:2])
    return groups, outputs, weight.numel() // groups // outputs


def _blocks(weight: Tensor, block: int) -> int:
    return weight.numel() // weight.shape[1] * math.ceil(weight.shape[1] / block)
