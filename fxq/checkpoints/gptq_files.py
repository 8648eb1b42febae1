"""GPTQ checkpoints, of AutoGPTQ and gptqmodel: integers packed along the inputs of a layer.

Each linear layer has qweight, int32 (I * bits / 32, O); qzeros, int32 (groups, O * bits / 32); scales (groups, O); and
g_idx, int32 (I,), the group of each input. Version 1 stores zero points minus 1, version 2 as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxq.checkpoints.grid_weight import (
    GridWeight,
    blocks_of,
    check_bits,
    check_shape,
    pack_words,
    unpack_words,
)
from fxq.checkpoints.tensor_files import Tensors
from fxq.errors import ExportError, FileError

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_VERSION_2 = "gptq_v2"


def read(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, Callable[[], Tensor | GridWeight]]:
    """Return functions that read weights, by name.

    Args:
        tensors: tensors of the files.
        config: `quantization_config` of config.json.

    Raises:
        FileError: the integers have widths that fxq does not read.
    """
    bits, is_version_2 = check_bits(config.get("bits")), config.get("checkpoint_format") == _VERSION_2
    layers = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    parts = {f"{layer}.{part}" for layer in layers for part in _PARTS}
    readers: dict[str, Callable[[], Tensor | GridWeight]] = {n: t for n, t in tensors.items() if n not in parts}
    for layer in layers:
        readers[f"{layer}.weight"] = partial(_weight, tensors, layer, bits, is_version_2)
    return readers


def _weight(tensors: Tensors, layer: str, bits: int, is_version_2: bool) -> GridWeight:
    qweight, scales, qzeros = (tensors[f"{layer}.{part}"]() for part in ("qweight", "scales", "qzeros"))
    per_word = 32 // bits
    groups, rows = scales.shape
    columns = qweight.shape[0] * per_word
    check_shape("qweight", qweight, (columns // per_word, rows), torch.int32)
    check_shape("qzeros", qzeros, (groups, blocks_of(rows, per_word)), torch.int32)
    if not groups or columns % groups:
        raise FileError(f"{groups} groups do not divide {columns} inputs.")
    block = columns // groups
    order = tensors.get(f"{layer}.g_idx")
    if order is not None and not torch.equal(
        check_shape("g_idx", order(), (columns,), torch.int32, torch.int64).long(), torch.arange(columns) // block
    ):
        raise FileError(
            "its groups are in the order of activations (desc_act), and fxq has blocks of adjacent inputs. "
            "Use a checkpoint with desc_act=False, or quantize the float model with fxq's gptq."
        )
    zero = unpack_words(qzeros, bits, rows).to(torch.int32)
    if not is_version_2:
        if bool((zero == 2**bits - 1).any()):
            raise FileError("a zero point is stored as -1, which readers of version 1 take for 0 or for 2**bits.")
        zero = zero + 1
    integers = unpack_words(qweight.t(), bits, columns)
    return GridWeight.of(integers, scales.t(), zero.t(), block, bits)


def write(weights: Mapping[str, GridWeight]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of layers, and `quantization_config` of config.json.

    The scales are float32, as in the quantized model; loaders convert them to the dtype of the model.

    Args:
        weights: weights of all linear layers, by the path of the layer.

    Raises:
        ExportError: the format cannot hold a layer, or not two of them together.
    """
    common: dict[tuple[int, int], str] = {}
    divided = {w.grid.block for w in weights.values() if w.grid.block != w.integers.shape[1]}
    for layer, weight in weights.items():
        (rows, columns), bits, block = weight.integers.shape, weight.grid.bits, weight.grid.block or 0
        if columns % block or (columns * bits) % 32 or (rows * bits) % 32:
            raise ExportError(
                f"{layer}: GPTQ has no weights {rows}x{columns} of {bits} bits in blocks of {block}: blocks divide the "
                "inputs, and a row and a column are a multiple of 32 bits. Quantize the layer with another block size."
            )
        common.setdefault((bits, -1 if block == columns and block not in divided else block), layer)
    if len(common) > 1:
        first, second = (
            f"{layer} has {bits} bits with {'one scale per row' if size == -1 else f'blocks of {size}'}"
            for (bits, size), layer in list(common.items())[:2]
        )
        raise ExportError(
            f"GPTQ has one width and block size for all layers, and {first}, but {second}. Use "
            'format="compressed-tensors".'
        )
    ((bits, size),) = common
    parts = {layer: weight.unsigned() for layer, weight in weights.items()}
    is_version_2 = any(bool((zero == 0).any()) for _, zero in parts.values())  # which version 1 has no number for
    tensors: dict[str, Tensor] = {}
    for layer, (integers, zero) in parts.items():
        columns = integers.shape[1]
        tensors[f"{layer}.qweight"] = pack_words(integers, bits).t().contiguous()
        tensors[f"{layer}.qzeros"] = pack_words((zero - (0 if is_version_2 else 1)).t().to(torch.uint8), bits)
        tensors[f"{layer}.scales"] = weights[layer].grid.scale.t().contiguous()
        tensors[f"{layer}.g_idx"] = (torch.arange(columns) // (columns if size == -1 else size)).to(torch.int32)
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "desc_act": False,
        "sym": all(bool((zero == 2 ** (bits - 1)).all()) for _, zero in parts.values()),
        "checkpoint_format": _VERSION_2 if is_version_2 else "gptq",
    }
    return tensors, config
