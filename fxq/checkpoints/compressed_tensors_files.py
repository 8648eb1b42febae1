"""Checkpoints of compressed-tensors, as llm-compressor and vLLM have them: "pack-quantized" and "int-quantized".

Each linear layer has weight_packed, int32 (O, ceil(I * bits / 32)), or weight, int8 (O, I); weight_scale, (O, groups);
weight_shape, (O, I); and for affine grids weight_zero_point, int32 (ceil(O * bits / 32), groups) or int8 (O, groups).
Integers and zero points are signed, and packed with 2 ** (bits - 1) added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxq.checkpoints.grid_weight import PACKED_BITS, GridWeight, blocks_of, check_shape, pack_words, unpack_words
from fxq.checkpoints.tensor_files import Tensors
from fxq.errors import ExportError, FileError

_PACKED = "pack-quantized"
_FORMATS = (_PACKED, "int-quantized", "naive-quantized")
_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")


def read(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, Callable[[], Tensor | GridWeight]]:
    """Return functions that read weights, by name.

    Args:
        tensors: tensors of the files.
        config: `quantization_config` of config.json.

    Raises:
        FileError: the files have another form of the format.
    """
    kinds = list(_weight_kinds(config))
    layers = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
    parts = {f"{layer}.{part}" for layer in layers for part in _PARTS}
    readers: dict[str, Callable[[], Tensor | GridWeight]] = {n: t for n, t in tensors.items() if n not in parts}
    for layer in layers:
        readers[f"{layer}.weight"] = partial(_weight, tensors, layer, kinds)
    return readers


def _weight_kinds(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Settings of weights in the groups of a config."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or config.get("format") not in _FORMATS:
        raise FileError(f"it has the format {config.get('format')!r}; fxq reads {', '.join(_FORMATS)}.")
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or weights.get("type", "int") != "int":
            raise FileError(f"a group of layers has the weights {weights!r}; fxq reads those of type int.")
        if group.get("input_activations") is not None:
            raise FileError("it quantizes activations, too; fxq reads checkpoints with quantized weights alone.")
        yield weights


def _weight(tensors: Tensors, layer: str, kinds: list[Mapping[str, Any]]) -> GridWeight:
    own = {part: tensors[f"{layer}.{part}"]() for part in _PARTS if f"{layer}.{part}" in tensors}
    scale = own["weight_scale"]
    if "weight_packed" not in own:
        integers = tensors[f"{layer}.weight"]()
        rows, columns = integers.shape
        check_shape("weight", integers, (rows, columns), torch.int8)
        bits, zero = 8, own.get("weight_zero_point")
    else:
        packed, shape = own["weight_packed"], own["weight_shape"]
        check_shape("weight_shape", shape, (2,), torch.int64, torch.int32)
        rows, columns = (int(size) for size in shape)
        widths = {b for kind in kinds if (b := kind.get("num_bits")) in PACKED_BITS}
        fitting = [b for b in widths if packed.shape == (rows, blocks_of(columns, 32 // b))]
        if rows < 0 or columns < 1 or len(fitting) != 1:
            raise FileError(
                f"weight_packed is {list(packed.shape)}, which fits {len(fitting)} of the config's widths for "
                f"{[rows, columns]} integers; fxq reads widths of {', '.join(map(str, PACKED_BITS))}."
            )
        check_shape("weight_packed", packed, tuple(packed.shape), torch.int32)
        (bits,) = fitting
        integers, zero = _signed(unpack_words(packed, bits, columns), bits), own.get("weight_zero_point")
        if zero is not None and zero.dtype is torch.int32:
            words = check_shape("weight_zero_point", zero, (blocks_of(rows, 32 // bits), *scale.shape[1:]))
            zero = _signed(unpack_words(words.t(), bits, rows), bits).t()
    scale = scale.reshape(1, 1).expand(rows, 1) if scale.numel() == 1 else scale
    groups = scale.shape[-1]
    check_shape("weight_scale", scale, (rows, groups))
    block = columns // max(groups, 1)
    if not groups or columns % groups:
        sizes = [size for kind in kinds if type(size := kind.get("group_size")) is int and size > 0]
        block = next((size for size in sizes if blocks_of(columns, size) == groups), 0)
        if not block:
            raise FileError(f"{groups} groups of {columns} inputs have none of the sizes of the config.")
    if "weight_g_idx" in own and not torch.equal(own["weight_g_idx"].long(), torch.arange(columns) // block):
        raise FileError("its groups are in the order of activations (actorder), and fxq has blocks of adjacent inputs.")
    if zero is None and not any(kind.get("symmetric", True) for kind in kinds if kind.get("num_bits") == bits):
        raise FileError("it has no weight_zero_point, but the config says that its grid is not symmetric.")
    zero = torch.zeros(rows, groups, dtype=torch.int32) if zero is None else zero.reshape(-1, groups).expand(rows, -1)
    check_shape("weight_zero_point", zero, (rows, groups), torch.int8, torch.int32, torch.int64)
    return GridWeight.of(integers, scale, zero.to(torch.int32), block, bits)


def _signed(values: Tensor, bits: int) -> Tensor:
    """Signed integers, int8, of packed ones."""
    return (values.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)


def write(weights: Mapping[str, GridWeight]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of layers, and `quantization_config` of config.json, without the layers to ignore.

    Args:
        weights: weights of linear layers, by the path of the layer.

    Raises:
        ExportError: the format cannot hold a layer.
    """
    tensors: dict[str, Tensor] = {}
    kinds: dict[tuple[int, int | None, bool], list[str]] = {}
    for layer, weight in weights.items():
        (integers, zero), bits, block = weight.unsigned(), weight.grid.bits, weight.grid.block or 0
        columns, symmetric = integers.shape[1], bool((zero == 2 ** (bits - 1)).all())
        if columns % block:
            raise ExportError(
                f"{layer}: compressed-tensors has no blocks of {block} values in rows of {columns}: blocks divide the "
                "rows. Quantize the layer with another block size."
            )
        tensors[f"{layer}.weight_packed"] = pack_words(integers, bits)
        tensors[f"{layer}.weight_scale"] = weight.grid.scale
        tensors[f"{layer}.weight_shape"] = torch.tensor(integers.shape)
        if not symmetric:
            tensors[f"{layer}.weight_zero_point"] = pack_words(zero.t().to(torch.uint8), bits).t().contiguous()
        kinds.setdefault((bits, None if block == columns else block, symmetric), []).append(layer)
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if len(kinds) == 1 else layers,
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": symmetric,
                "strategy": "channel" if block is None else "group",
                "group_size": block,
                "dynamic": False,
            },
        }
        for i, ((bits, block, symmetric), layers) in enumerate(kinds.items())
    }
    config = {"quant_method": "compressed-tensors", "format": _PACKED, "quantization_status": "compressed"}
    return tensors, {**config, "config_groups": groups}
