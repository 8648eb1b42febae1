"""GGUF files of llama.cpp: weights in blocks of 32 or 256 values, with scales of 16 bits.

Q4_0, Q8_0 and Q6_K are exact on a grid with integer zero points. Q4_1 and Q4_K have an offset per block, which becomes
a zero point between integers: their values are equal up to rounding in float32. Source: ggml, ggml-quants.c.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxq.checkpoints.grid_weight import GridWeight, StoredWeights
from fxq.errors import FileError, FxqError, words_of
from fxq.quant.packing import halves

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Format of `struct` of each type of number in metadata."""
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


@dataclass(frozen=True)
class _Layout:
    """Blocks of a type: values, bytes, and the function that decodes uint8 (O, blocks, bytes) of O rows."""

    name: str
    values: int
    size: int
    decode: Callable[[Tensor], Tensor | GridWeight]


class _Header:
    """Reader of a header: each read is checked against the end of the file."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        """Bytes from the current position."""
        if size > len(self.data) - self.at:
            raise FileError(f"it ends within its header, at byte {self.at}.")
        self.at += size
        return self.data[self.at - size : self.at].tobytes()

    def number(self, kind: str) -> Any:
        """Number of a format of `struct`."""
        (number,) = struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))
        return number

    def text(self) -> str:
        """String: its length, then its bytes."""
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self) -> Any:
        """Value of metadata: a number or a string. Arrays are skipped, and None is returned."""
        kind = self.number("I")
        if kind != _ARRAY:
            return self._scalar(kind)
        kind, count = self.number("I"), self.number("Q")
        if kind in _NUMBERS:
            self.take(count * struct.calcsize(f"<{_NUMBERS[kind]}"))
        elif kind == _STRING and count <= (len(self.data) - self.at) // 8:
            for _ in range(count):
                self.take(self.number("Q"))
        else:
            raise FileError(f"its metadata have an array of {count} values of type {kind}.")
        return None

    def _scalar(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind not in _NUMBERS:
            raise FileError(f"its metadata have a value of the unknown type {kind}.")
        return self.number(_NUMBERS[kind])


class GgufFile(StoredWeights):
    """Weights of a GGUF file by the names that the file has.

    Attributes:
        metadata: numbers and strings of the header by name, without arrays.
    """

    def __init__(self, path: Path) -> None:
        try:
            data = np.memmap(path, dtype=np.uint8, mode="r")
            self.metadata, readers = _contents(data)
        except (OSError, ValueError, FileError) as error:
            raise FileError(f"cannot read {str(path)!r}: {words_of(error)}") from error
        super().__init__(path, readers)


def _contents(
    data: np.ndarray[Any, Any],
) -> tuple[dict[str, Any], dict[str, Callable[[], Tensor | GridWeight]]]:
    """Metadata of a file, and functions that read its tensors, by name."""
    header = _Header(data)
    magic, version = header.take(4), header.number("I")
    if magic != MAGIC or version not in _VERSIONS:
        raise FileError(f"it begins with {magic!r} and version {version}, not with GGUF of version 2 or 3.")
    tensors, entries = header.number("Q"), header.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(entries):  # each takes bytes of the file, so that a wrong number ends in an error
        name = header.text()
        metadata[name] = header.value()
    infos = [_tensor_info(header) for _ in range(tensors)] if tensors <= len(data) else []
    if len(infos) != tensors:
        raise FileError(f"its header counts {tensors} tensors, more than it has bytes.")
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
        raise FileError(f"its general.alignment is {alignment!r}.")
    start = -(-header.at // alignment) * alignment
    return metadata, {name: partial(_read, data, start + at, shape, kind) for name, at, shape, kind in infos}


def _tensor_info(header: _Header) -> tuple[str, int, tuple[int, ...], int]:
    """Name of a tensor, its offset among the data, its shape and its type."""
    name, dims = header.text(), header.number("I")
    if dims > _MAX_DIMS:
        raise FileError(f"{name!r} has {dims} axes.")
    shape = tuple(header.number("Q") for _ in range(dims))[::-1]
    kind, at = header.number("I"), header.number("Q")
    return name, at, shape, kind


def _read(data: np.ndarray[Any, Any], start: int, shape: tuple[int, ...], kind: int) -> Tensor | GridWeight:
    """Read a tensor. Raises `FileError` if its type is unknown, or it does not lie within the file."""
    if kind not in _LAYOUTS:
        raise FileError(
            f"it has the type {kind}; fxq reads {', '.join(layout.name for layout in _LAYOUTS.values())}. "
            "Convert the file with llama-quantize."
        )
    layout = _LAYOUTS[kind]
    columns = shape[-1] if shape else 1
    if not all(shape) or columns % layout.values:
        raise FileError(f"its shape {list(shape)} is no multiple of blocks of {layout.values} values.")
    blocks = columns // layout.values
    rows = prod(shape[:-1])
    size = rows * blocks * layout.size
    if start + size > len(data):
        raise FileError(f"its {size} bytes from byte {start} on do not lie within the file of {len(data)} bytes.")
    stored = torch.from_numpy(np.array(data[start : start + size])).reshape(rows, blocks, layout.size)
    decoded = layout.decode(stored)
    if isinstance(decoded, Tensor):
        return decoded.reshape(shape)
    return decoded if len(shape) == 2 else GridWeight.floats.fget(decoded).reshape(shape)  # type: ignore[attr-defined]


def _half(stored: Tensor, at: int) -> Tensor:
    """Number of 16 bits in each block, float32 (O, blocks)."""
    return stored[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(stored: Tensor) -> Tensor:
    """Integers of bytes (O, blocks, n): the low bits of all, then the high bits of all, uint8 (O, blocks, 2 n)."""
    return torch.cat(halves(stored, signed=False), -1)


def _q4_0(stored: Tensor) -> GridWeight:
    scale = _half(stored, 0)
    return GridWeight.of(_nibbles(stored[..., 2:]).flatten(1), scale, torch.full_like(scale, 8).int(), 32, 4)


def _q4_1(stored: Tensor) -> GridWeight:
    return _with_offset(_nibbles(stored[..., 4:]).flatten(1), _half(stored, 0), _half(stored, 2), 32)


def _with_offset(integers: Tensor, scale: Tensor, offset: Tensor, block: int) -> GridWeight:
    """Weight integers * scale + offset. Blocks of scale 0 get the scale of their offset, and integers 0."""
    flat = scale == 0
    steps = torch.where(flat, offset, scale)
    zero = torch.where(flat, torch.where(offset == 0, 0.0, -1.0), -offset / torch.where(steps == 0, 1.0, steps))
    integers = torch.where(flat.repeat_interleave(block, 1), 0, integers)
    return GridWeight.of(integers, steps, zero, block, 4)


def _q8_0(stored: Tensor) -> GridWeight:
    scale = _half(stored, 0)
    integers = stored[..., 2:].contiguous().view(torch.int8).flatten(1)
    return GridWeight.of(integers, scale, torch.zeros_like(scale).int(), 32, 8)


def _q4_k(stored: Tensor) -> GridWeight:
    """Blocks of 256 values: eight of 32 with a scale and an offset of 6 bits each."""
    rows = len(stored)
    packed = stored[..., 4:16].to(torch.int32)
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([low & 63, (rest & 15) | (low >> 6) << 4], -1)
    offsets = torch.cat([high & 63, (rest >> 4) | (high >> 6) << 4], -1)
    scale = (_half(stored, 0)[..., None] * scales).reshape(rows, -1)
    offset = -(_half(stored, 2)[..., None] * offsets).reshape(rows, -1)
    integers = _nibbles(stored[..., 16:].reshape(rows, -1, 4, 32)).reshape(rows, -1)
    return _with_offset(integers, scale, offset, 32)


def _q6_k(stored: Tensor) -> GridWeight:
    """Blocks of 256 values: sixteen of 16 with a scale of 8 bits each."""
    rows = len(stored)
    low = stored[..., :128].reshape(rows, -1, 2, 1, 64)
    low = torch.cat(halves(low, signed=False), 3).reshape(rows, -1, 2, 4, 32)
    high = stored[..., 128:192].reshape(rows, -1, 2, 1, 32)
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], 3)
    scales = stored[..., 192:208].contiguous().view(torch.int8).float()
    scale = (_half(stored, 208)[..., None] * scales).reshape(rows, -1)
    return GridWeight.of((low | high << 4).reshape(rows, -1), scale, torch.full_like(scale, 32).int(), 16, 6)


def _floats(dtype: torch.dtype, stored: Tensor) -> Tensor:
    return stored.contiguous().view(dtype)


_LAYOUTS = {
    0: _Layout("F32", 1, 4, partial(_floats, torch.float32)),
    1: _Layout("F16", 1, 2, partial(_floats, torch.float16)),
    2: _Layout("Q4_0", 32, 18, _q4_0),
    3: _Layout("Q4_1", 32, 20, _q4_1),
    8: _Layout("Q8_0", 32, 34, _q8_0),
    12: _Layout("Q4_K", 256, 144, _q4_k),
    14: _Layout("Q6_K", 256, 210, _q6_k),
    30: _Layout("BF16", 1, 2, partial(_floats, torch.bfloat16)),
}
"""Layout of each type of tensors that fxq reads, by its number."""

_PERMUTED, _PLAIN = ("llama",), ("qwen2", "qwen3")
"""Architectures whose files have the weights of transformers; of the first, rows of queries and keys are reordered."""


def in_names_of_transformers(file: GgufFile, names: Iterable[str]) -> StoredWeights:
    """Return the weights of a file under the names of a model of transformers, with rows in its order.

    Args:
        file: the file.
        names: names of the model's parameters. Those without a weight in the file are left out.

    Raises:
        FileError: the architecture is unknown, or its metadata are missing.
        FxqError: the package gguf is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise FxqError("gguf is not installed: pip install fxq[gguf].") from None
    about, arch = file.metadata, file.metadata.get("general.architecture")
    if arch not in (*_PERMUTED, *_PLAIN):
        names_read = ", ".join((*_PERMUTED, *_PLAIN))
        raise FileError(f"{str(file.path)!r} has a model of the architecture {arch!r}; fxq reads {names_read}.")
    layers, heads = about.get(f"{arch}.block_count"), about.get(f"{arch}.attention.head_count")
    key_heads = about.get(f"{arch}.attention.head_count_kv", heads)
    if not all(isinstance(number, int) and 0 < number < 1 << 16 for number in (layers, heads, key_heads)):
        raise FileError(f"{str(file.path)!r} does not say how many layers and heads its model has.")
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table: Any = gguf.get_tensor_name_map(number, int(layers or 0))
    new = {own: name for name in names if (own := table.get_name(name, (".weight", ".bias"))) in file}
    renamed = file.renamed(new)
    if arch in _PLAIN:
        return renamed
    ordered = {
        name: int(count or 1)
        for name in renamed
        for part, count in ((".q_proj.", heads), (".k_proj.", key_heads))
        if part in name
    }
    return StoredWeights(
        file.path,
        {name: partial(_in_halves, renamed, name, ordered.get(name)) for name in renamed},
    )


_IN_CONFIG = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""Attribute of a configuration of transformers that a number of the metadata describes."""


def check_configuration(file: GgufFile, config: Any) -> None:
    """Raise `FileError` if the metadata of a file contradict a configuration of transformers.

    The weights of a model with other heads or another norm may have equal shapes.
    """
    arch = file.metadata.get("general.architecture")
    for name, attribute in _IN_CONFIG.items():
        stored, own = file.metadata.get(f"{arch}.{name}"), getattr(config, attribute, None)
        if attribute == "rope_theta":
            own = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", own)
        are_numbers = isinstance(stored, (int, float)) and isinstance(own, (int, float))
        if are_numbers and not math.isclose(stored, own, rel_tol=1e-6):  # type: ignore[arg-type]
            raise FileError(
                f"{str(file.path)!r} has {arch}.{name} {stored:g}, and the configuration {attribute} {own:g}. Give a "
                "model with the configuration of the file."
            )


def _in_halves(weights: StoredWeights, name: str, heads: int | None) -> Tensor | GridWeight:
    """Read a weight whose rows alternate between the halves of each head; in order of the halves. None: as it is."""
    weight = weights[name]
    if heads is None:
        return weight
    rows = len(weight) if isinstance(weight, Tensor) else len(weight.integers)
    order = torch.arange(rows).reshape(heads, -1, 2).transpose(1, 2).flatten()
    return weight[order] if isinstance(weight, Tensor) else weight.rows(order)
