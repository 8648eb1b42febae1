"""Tiles of many rows, of integers and of floats, on whole numbers that float32 holds exactly, for each kind of CPU."""

import re
from functools import partial

import numpy as np
import pytest

pytestmark = pytest.mark.any_cpu

many_rows_code = pytest.importorskip(
    "fxq.backends.loops.code.many_rows_code", reason="needs Numba", exc_type=ImportError
)
panel_code = pytest.importorskip("fxq.backends.loops.code.panel_code")
arm = pytest.importorskip("tests.support.arm")
emitted = pytest.importorskip("tests.support.emitted")
machine_code = many_rows_code.machine_code

KINDS = [kind for kind in emitted.PLAYED if not kind.has_amx]
SIZES = [(6, 2), (3, 1), (4, 1), (2, 1), (5, 1)]
"""Rows, and vectors of 16 columns."""
SPANS = [(1, 1), (3, 8), (7, 7), (16, 8), (13, 5)]
"""Groups of four integers of a row, and those with one scale."""
needs_qemu = pytest.mark.skipif(not (arm.ASSEMBLER and arm.EMULATOR), reason="needs qemu and binutils for aarch64")


def integers(kind, rows, count, words, span, largest=False):
    """Random operands of a tile, and its result; `largest` are integers of the largest magnitude."""
    random, columns, spans = np.random.default_rng(words), 16 * count, -(-words // span)
    x, values = random.integers(0, 256, (rows, 4 * words)), random.integers(-128, 128, (columns, 4 * words))
    if largest:
        x[:], values[:] = 255, -128
    scale = random.integers(1, 3, (spans, columns)).astype(np.float32)
    grids = random.integers(1, 3, (rows, 2)).astype(np.float32)
    ones, bias = (random.integers(-9, 9, columns).astype(np.float32) for _ in range(2))
    weight = values.reshape(columns, words, 4).swapaxes(0, 1).astype(np.int8, order="C")
    x_bytes = 4 * words + 3  # what follows a row belongs to something else
    padded = np.full((rows, x_bytes), 77, np.uint8)
    padded[:, : 4 * words] = x
    of_values = scale.astype(np.int64)[np.arange(4 * words) // (4 * span)]
    result = np.einsum("rk,ck,kc->rc", x - kind.x_offset, values, of_values)
    result = (result + np.outer(grids[:, 1], ones)) * grids[:, :1] + bias
    out = np.zeros((rows, columns), np.float32)
    many = many_rows_code.ManyRows(
        padded, x_bytes, weight, words, span, scale, grids, ones, bias, out, 4 * columns
    )  # fmt: skip
    return list(many), result


def floats(rows, count, depth):
    """Random operands of a product with a panel, and its result."""
    random, columns = np.random.default_rng(depth), 16 * count
    x, weight = (random.integers(-9, 9, shape).astype(np.float32) for shape in ((rows, depth), (depth, columns)))
    added = random.integers(-99, 99, (rows, columns)).astype(np.float32)
    out = np.zeros((rows, columns), np.float32)
    panel = panel_code.Panel(x, 4 * depth, weight, depth, added, 4 * columns, out, 4 * columns)
    return list(panel), x @ weight + added


def panel_tile(rows, count):
    """Function that returns the tile; it is emitted with this number of vectors."""

    def code(b, panel):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(panel_code, "VECTORS", count)
            patch.setattr(panel_code, "COLUMNS", 16 * count)
            panel_code._multiply_tile(b, panel, rows)

    return lambda: machine_code.on_addresses(code)


def call(function, arguments):
    function(*(a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_tiles_of_integers(kind):
    for rows, count in SIZES[:2]:
        function = emitted.emitted(
            kind, partial(many_rows_code.many_rows_tile, rows, count), many_rows_code.ManyRows
        )  # fmt: skip
        for words, span in SPANS:
            arguments, result = integers(kind, rows, count, words, span)
            call(function, arguments)
            assert (arguments[-2] == result).all()


@pytest.mark.parametrize("kind", KINDS[:1], ids=lambda kind: kind.name)
def test_tiles_of_floats(kind):
    arguments, result = floats(5, 2, 11)
    call(emitted.emitted(kind, panel_tile(5, 2), panel_code.Panel), arguments)
    assert (arguments[-2] == result).all()


def arm_loops(name, make, *parameters):
    """The basic blocks of code for ARM up to their first branch, as lists of instructions."""
    module = emitted.module_of(emitted.unplayed(name), make, *parameters)
    module.triple = arm.TRIPLE
    code = emitted.assembly(module, "generic", arm.FEATURES[name])
    blocks = (re.split(r"\n\tb\.", block)[0] for block in re.split(r"\n\.L\w+:", code))
    return [re.findall(r"^\t([a-z]\w*)\t(.*)$", block, re.M) for block in blocks]


@pytest.mark.parametrize(
    ("name", "instruction", "count", "most"),
    [("neon_dot", "sdot", 64, 1.35), ("neon_i8mm", "usmmla", 16, 2.5)],
)
def test_instructions_of_arm(name, instruction, count, most):
    """`count` multiplications in the inner loop, and few other instructions, none of which moves sums to memory."""
    blocks = arm_loops(name, partial(many_rows_code.many_rows_tile, 4, 1), many_rows_code.ManyRows)
    inner = max(blocks, key=lambda block: [name for name, _ in block].count(instruction))
    assert [name for name, _ in inner].count(instruction) == count and len(inner) <= most * count
    assert not any("[sp" in operands for _, operands in inner)


def test_instructions_of_arm_on_floats():
    inner = max(arm_loops("neon_dot", panel_tile(5, 1), panel_code.Panel), key=len)
    assert [name for name, _ in inner].count("fmla") == 80 and len(inner) <= 1.25 * 80


@pytest.mark.slow
@needs_qemu
@pytest.mark.parametrize("name", arm.FEATURES)
@pytest.mark.parametrize(("rows", "count"), SIZES)
def test_tiles_of_integers_on_aarch64(name, rows, count, tmp_path):
    kind, make = emitted.unplayed(name), partial(many_rows_code.many_rows_tile, rows, count)
    for words, span, largest in [*((*span, False) for span in SPANS), (16, 16, True)]:
        arguments, result = integers(kind, rows, count, words, span, largest)
        *_, out, _ = arm.run_on_arm(kind, make, [many_rows_code.ManyRows], arguments, tmp_path)
        assert (out == result).all()


@pytest.mark.slow
@needs_qemu
@pytest.mark.parametrize("rows", [3, 4, 5])
@pytest.mark.parametrize("depth", [1, 4, 11])
def test_tiles_of_floats_on_aarch64(rows, depth, tmp_path):
    arguments, result = floats(rows, 1, depth)
    kind = emitted.unplayed("neon_dot")
    *_, out, _ = arm.run_on_arm(kind, panel_tile(rows, 1), [panel_code.Panel], arguments, tmp_path)
    assert (out == result).all()
