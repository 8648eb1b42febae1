"""AWQ checkpoints, version "gemm": integers packed along the outputs of a layer, in an order of their own.

Each linear layer has qweight, int32 (I, O / 8); qzeros, int32 (groups, O / 8); and scales, (groups, O).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxq.checkpoints.grid_weight import GridWeight, check_shape, unpack_words
from fxq.checkpoints.tensor_files import Tensors
from fxq.errors import FileError

_BITS, _PER_WORD = 4, 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word, counted from the lowest bits, of each of eight adjacent outputs."""
_PARTS = ("qweight", "qzeros", "scales")


def read(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, Callable[[], Tensor | GridWeight]]:
    """Return functions that read weights, by name.

    Args:
        tensors: tensors of the files.
        config: `quantization_config` of config.json.

    Raises:
        FileError: the file has another version of the format or another width.
    """
    version, bits = str(config.get("version", "gemm")).lower(), config.get("bits", config.get("w_bit", _BITS))
    if version != "gemm" or bits != _BITS:
        raise FileError(f'it has AWQ\'s version {version!r} with {bits!r} bits; fxq reads "gemm" with {_BITS} bits.')
    layers = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    parts = {f"{layer}.{part}" for layer in layers for part in _PARTS}
    readers: dict[str, Callable[[], Tensor | GridWeight]] = {n: t for n, t in tensors.items() if n not in parts}
    for layer in layers:
        readers[f"{layer}.weight"] = partial(_weight, tensors, layer)
    return readers


def _weight(tensors: Tensors, layer: str) -> GridWeight:
    qweight, qzeros, scales = (tensors[f"{layer}.{part}"]() for part in _PARTS)
    groups, rows = scales.shape
    columns = qweight.shape[0]
    if not groups or columns % groups:
        raise FileError(f"{groups} groups do not divide {columns} inputs.")
    check_shape("qweight", qweight, (columns, rows // _PER_WORD), torch.int32)
    check_shape("qzeros", qzeros, (groups, rows // _PER_WORD), torch.int32)
    integers, zero = (_in_order(unpack_words(words, _BITS, rows)) for words in (qweight, qzeros))
    return GridWeight.of(integers.t().contiguous(), scales.t(), zero.t().to(torch.int32), columns // groups, _BITS)


def _in_order(values: Tensor) -> Tensor:
    """Put the integers of each word, (N, O), in the order of outputs."""
    return values.reshape(len(values), -1, _PER_WORD)[:, :, list(_PLACES)].flatten(1)
