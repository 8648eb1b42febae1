"""Tiles of few rows, on whole numbers that float32 holds exactly, against NumPy, for each kind of CPU."""

import re
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fxq.quant.packing import Packing

pytestmark = pytest.mark.any_cpu

chunk_code = pytest.importorskip("fxq.backends.loops.code.chunk_code", reason="needs Numba", exc_type=ImportError)
few_rows_code = pytest.importorskip("fxq.backends.loops.code.few_rows_code")
arranging_loops = pytest.importorskip("fxq.backends.loops.code.arranging_loops")
arm = pytest.importorskip("tests.support.arm")
emitted = pytest.importorskip("tests.support.emitted")

CHUNKS = {
    "8": chunk_code.Chunk8(True), "8 unsigned": chunk_code.Chunk8(False), "4": chunk_code.Chunk4(True),
    "4 unsigned": chunk_code.Chunk4(False), **{f"{bits} packed": chunk_code.UnitChunk(bits) for bits in (2, 3, 6)},
}  # fmt: skip
INTEGER_CHUNKS = {
    "8 integers": chunk_code.Integers8(True), "8 unsigned integers": chunk_code.Integers8(False),
    "4 integers": chunk_code.Integers4(True), "4 unsigned integers": chunk_code.Integers4(False),
    **{f"{bits} packed integers": chunk_code.IntegerUnit(bits) for bits in (2, 3, 6)},
}  # fmt: skip
ALL_CHUNKS = {**CHUNKS, **INTEGER_CHUNKS}
SIZES = [(1, 1), (1, 4), (4, 2), (4, 4), (2, 2)]
SPANS = [(20, 1), (4, 2), (5, 3)]
"""Chunks of a row, and those with one scale."""
TILES = 2
KINDS = [kind for kind in emitted.PLAYED if not kind.has_amx]
PLACE = few_rows_code.FewRows._fields.index("out")


class Case(NamedTuple):
    """Arguments of a tile, and its results in float64."""

    arguments: list
    result: np.ndarray


@cache
def tile(name, rows, columns):
    return lambda: few_rows_code.tiles(ALL_CHUNKS[name], (rows, columns))[0]


def case(name, kind, rows, columns, chunks, span, largest=False):
    """Random operands of a tile; `largest` are integers of the largest magnitude."""
    chunk, bits, random = ALL_CHUNKS[name], int(name[0]), np.random.default_rng(0)
    of_integers, outputs, depth = name in INTEGER_CHUNKS, columns * TILES, chunks * chunk.values
    signed = "unsigned" not in name and bits in (4, 8)
    low, x_low, x_end = -(2 ** (bits - 1)) if signed else 0, -8, 9
    if of_integers:  # unsigned if those of the weight are signed, else signed, but where one instruction needs the same
        x_low = -128 if (signed and bits == 8) == bool(kind.unsigned_dot) else 0
        x_end = x_low // 4 + 64
    values = random.integers(low, low + 2**bits, (outputs, depth))
    x = random.integers(x_low // 4, x_end, (rows, depth))
    if largest:
        values[:], x[:] = (low or 2**bits - 1), (x_low or 255)
    most = 1 if largest else 2
    halves, row_bytes = (2 if bits == 4 else 1), chunks * chunk.stored
    scales = -(-chunks // span) * halves
    places = np.arange(scales, dtype=np.int32).reshape(halves, -1).T
    scale, offset = (random.integers(1, most + 1, (outputs, scales)).astype(np.float32) for _ in range(2))
    bias, ones, added = (random.integers(-9, 9, n).astype(np.float32) for n in (outputs, outputs, rows))
    grid = random.integers(1, most + 1, rows).astype(np.float32)
    spread = np.repeat(np.repeat(places, span, 0)[:chunks].T, chunk.values // halves, 1).ravel()
    x_sums = np.zeros((rows, -(-scales // 16) * 16), np.float32)
    x_sums[:, :scales] = random.integers(-9, 9, (rows, scales))
    terms = values + (8 if bits == 4 and signed else 0)
    result = np.einsum("rk,ok,ok->ro", x, terms, scale.astype(np.int64)[:, spread]) - x_sums[:, :scales] @ offset.T
    result = ((result + np.outer(added, ones)) * grid[:, None] if of_integers else result) + bias
    in_pairs = of_integers and kind.pair_dot and rows % 2 == columns % 2 == 0
    few = few_rows_code.FewRows(
        arranged(x, kind, bits, of_integers, in_pairs), x_sums, stored(values, bits, signed), row_bytes, chunks, span,
        np.ascontiguousarray(4 * places), scale, scales, offset, bias, np.zeros((rows, outputs), np.float32),
        4 * outputs, np.stack([grid, added], 1), ones, TILES,
    )  # fmt: skip
    return Case(list(few), result.astype(np.float64))


def stored(values, bits, signed):
    """Rows of a weight as they are stored."""
    if bits == 8:
        return values.astype(np.int8 if signed else np.uint8)
    packing = Packing(values.shape[1:], bits, signed)
    return packing.pack(torch.from_numpy(values.astype(np.int8 if signed else np.uint8))).numpy()


def arranged(x, kind, bits, of_integers, in_pairs):
    """Rows of the input in the order of chunks."""
    if bits == 4:  # 32 from each half of the row in turn
        x = x.reshape(len(x), 2, -1, 32).swapaxes(1, 2)
    if in_pairs:  # eight integers of each of two rows in turn
        x = x.reshape(len(x) // 2, 2, -1, 8).swapaxes(1, 2)
    if of_integers:
        return x.astype(np.int8 if x.min() < 0 else np.uint8, order="C")
    x = x.astype(np.float32)
    if bits == 4:  # first bytes of words, then the next ones, of each half in turn
        size = 4 if kind.is_arm else 2
        words = np.moveaxis(x.reshape(*x.shape[:3], -1, size), -1, 2)
        x = words if kind.is_arm else words * 16.0 ** -np.arange(2 * size).reshape(size, 2, 1)
    return np.ascontiguousarray(x, np.float32)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ALL_CHUNKS)
def test_tiles(name, kind):
    for rows, columns in SIZES:
        function = emitted.emitted(kind, tile(name, rows, columns), few_rows_code.FewRows)
        for chunks, span in SPANS:
            arguments, result = case(name, kind, rows, columns, chunks, span)
            function(*(a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments))
            assert (arguments[PLACE] == result).all()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", INTEGER_CHUNKS)
def test_the_largest_integers(name, kind):
    function = emitted.emitted(kind, tile(name, 1, 4), few_rows_code.FewRows)
    arguments, result = case(name, kind, 1, 4, 3, 3, largest=True)
    function(*(a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments))
    assert (arguments[PLACE] == result).all()


@pytest.mark.parametrize(
    ("kind", "name", "size", "instruction", "count"),
    [
        ("neon_dot", "8 integers", (1, 4), "sdot", 8), ("neon_dot", "4 unsigned integers", (1, 4), "udot", 16),
        ("neon_i8mm", "2 packed integers", (1, 4), "usdot", 16), ("neon_i8mm", "4 integers", (4, 4), "usmmla", 32),
        ("neon_dot", "8", (1, 4), "scvtf", 32), ("neon_dot", "4", (4, 2), "ucvtf", 32),
    ],
)  # fmt: skip
def test_instructions_of_arm(kind, name, size, instruction, count):
    """A chunk takes one multiplication for 16 products, or 32 of pairs of rows, and one conversion for 4 values."""
    module = emitted.module_of(emitted.unplayed(kind), tile(name, *size), few_rows_code.FewRows)
    module.triple = arm.TRIPLE
    code = emitted.assembly(module, "generic", arm.FEATURES[kind])
    blocks = re.split(r"\n\.L\w+:", code)
    assert max(len(re.findall(rf"\t{instruction}\t", block)) for block in blocks) == count
    assert not re.search(r"\t([su]mull2?|[su]mlal2?|mla)\t", code), "other products"


@pytest.mark.slow
@pytest.mark.skipif(not (arm.ASSEMBLER and arm.EMULATOR), reason="needs qemu and binutils for aarch64")
@pytest.mark.parametrize("kind", arm.FEATURES)
@pytest.mark.parametrize("name", ALL_CHUNKS)
def test_tiles_on_aarch64(name, kind, tmp_path):
    kind = emitted.unplayed(kind)
    cases = [(*size, *span, False) for size in SIZES[:4] for span in SPANS] + [(1, 4, 3, 3, name in INTEGER_CHUNKS)]
    for rows, columns, chunks, span, largest in cases:
        arguments, result = case(name, kind, rows, columns, chunks, span, largest)
        done = arm.run_on_arm(kind, tile(name, rows, columns), [few_rows_code.FewRows], arguments, tmp_path)
        assert (done[PLACE] == result).all()


@pytest.mark.parametrize("is_arm", [False, True])
def test_rows_are_arranged_as_tiles_read_them(is_arm, monkeypatch):
    kind = emitted.unplayed("neon_i8mm" if is_arm else "avx512_vnni")
    monkeypatch.setattr(chunk_code.machine_code, "KIND", kind)
    monkeypatch.setattr(arranging_loops, "_WORD_BYTES", chunk_code.word_bytes())
    monkeypatch.setattr(arranging_loops, "_FACTORS", chunk_code.input_factors())
    monkeypatch.setattr(arranging_loops, "_HAS_PAIRS", bool(kind.pair_dot))
    random = np.random.default_rng(0)
    x, out = random.integers(-8, 9, (1, 192)).astype(np.float32), np.full(192, np.nan, np.float32)
    arranging_loops.arrange4.py_func(x[0], 192, 96, out)
    assert out.tolist() == arranged(x, kind, 4, False, False).ravel().tolist()
    rows = random.integers(0, 256, (4, 96)).astype(np.uint8)
    pairs = arranging_loops.in_pairs.py_func(rows)
    assert pairs.ravel().tolist() == arranged(rows, kind, 8, True, is_arm).ravel().tolist()


def test_the_end_of_an_odd_row_is_padded(monkeypatch):
    monkeypatch.setattr(chunk_code.machine_code, "KIND", emitted.unplayed("neon_dot"))
    monkeypatch.setattr(arranging_loops, "_WORD_BYTES", chunk_code.word_bytes())
    monkeypatch.setattr(arranging_loops, "_FACTORS", chunk_code.input_factors())
    x, out = np.arange(1, 72, dtype=np.float32), np.full(128, np.nan, np.float32)
    arranging_loops.arrange4.py_func(x, 71, 36, out)  # 36 bytes: the second chunk starts at byte 4
    first, second = out.reshape(2, 4, 2, 8)
    low, high = (np.moveaxis(first, 2, 0).reshape(8, 4, 2)[..., half].ravel() for half in range(2))
    assert low.tolist() == list(range(1, 33)) and high.tolist() == list(range(37, 69))
    low, high = (np.moveaxis(second, 2, 0).reshape(8, 4, 2)[..., half].ravel() for half in range(2))
    assert low.tolist() == [0] * 28 + [33, 34, 35, 36] and high.tolist() == [0] * 28 + [69, 70, 71, 0]
