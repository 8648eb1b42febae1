"""Writes GGUF files for tests, and decodes blocks value by value, as ggml-quants.c defines them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

BLOCKS = {2: (32, 18, (0,)), 3: (32, 20, (0, 2)), 8: (32, 34, (0,)), 12: (256, 144, (0, 2)), 14: (256, 210, (208,))}
"""Values and bytes of a block by type, and where its numbers of 16 bits are."""


def random_blocks(kind: int, rows: int, columns: int, seed: int = 0, positive: bool = False) -> np.ndarray:
    """Random bytes of a weight, uint8 (rows, bytes), whose scales are finite and of both signs.

    With `positive`, as in most files, scales are positive and normal in float16, also those of the parts of a block.
    """
    generator = np.random.default_rng(seed)
    values, size, places = BLOCKS[kind]
    data = generator.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    for at in places:
        scales = (generator.normal(size=(rows, columns // values, 1)) / 50).astype(np.float16)
        scales = np.abs(scales) + np.float16(0.01) if positive else scales
        data[..., at : at + 2] = scales.view(np.uint8)
    if positive and kind == 12:
        data[..., 4:16] |= 1
    elif positive and kind == 14:
        data[..., 192:208] = data[..., 192:208] & 127 | 1
    return data.reshape(rows, -1)


def decoded(kind: int, row: np.ndarray) -> list[float]:
    """Values of a row of blocks, one by one, in double precision."""
    values, size, _ = BLOCKS[kind]
    return [value(kind, row[k : k + size], i) for k in range(0, len(row), size) for i in range(values)]


def _half(block: np.ndarray, at: int) -> float:
    return float(block[at : at + 2].copy().view(np.float16)[0])


def value(kind: int, block: np.ndarray, i: int) -> float:
    """Value i of a block."""
    b = [int(byte) for byte in block]
    if kind in (2, 3):
        start = 2 if kind == 2 else 4
        q = b[start + i % 16] >> (4 * (i // 16)) & 15
        return _half(block, 0) * (q - 8) if kind == 2 else _half(block, 0) * q + _half(block, 2)
    if kind == 8:
        return _half(block, 0) * ((b[2 + i] + 128) % 256 - 128)
    if kind == 12:
        part, s = i // 32, b[4:16]
        if part < 4:
            scale, low = s[part] & 63, s[part + 4] & 63
        else:
            scale, low = s[part + 4] & 15 | s[part - 4] >> 6 << 4, s[part + 4] >> 4 | s[part] >> 6 << 4
        q = b[16 + 32 * (i // 64) + i % 32] >> (4 * (i // 32 % 2)) & 15
        return _half(block, 0) * scale * q - _half(block, 2) * low
    half, place, quarter = i // 128, i % 32, i // 32 % 4
    low = b[64 * half + 32 * (quarter % 2) + place] >> (4 * (quarter // 2)) & 15
    high = b[128 + 32 * half + place] >> (2 * quarter) & 3
    scale = (b[192 + i // 16] + 128) % 256 - 128
    return _half(block, 208) * scale * ((low | high << 4) - 32)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _entry(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, tuple[int, ...], bytes]]
) -> Path:
    """Write a file. A tensor is its type, its shape and its bytes."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(_text(name) + _entry(value) for name, value in metadata.items())
    data = b""
    for name, (kind, shape, stored) in tensors.items():
        head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += stored + bytes(-len(stored) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path
