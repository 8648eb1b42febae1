"""Products of AMX tiles: as emulated, and with the CPU's own instructions where it has them; and their assembly."""

import os
import re
import subprocess
import sys
from functools import cache, partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.any_cpu

amx_code = pytest.importorskip("fxq.backends.loops.code.amx_code", reason="needs Numba", exc_type=ImportError)
machine_code = pytest.importorskip("fxq.backends.loops.code.machine_code")
emitted = pytest.importorskip("tests.support.emitted")

needs_kind = pytest.mark.skipif(not emitted.WITH_AMX, reason="AMX is emulated on CPUs with AVX512-VNNI")
OF_KINDS = st.sampled_from(emitted.WITH_AMX or [None])
AMX_FEATURES = "+sse2,+avx2,+fma,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512vnni,+amx-int8,+amx-bf16,+amx-tile"


def product(rows, columns, configured=True, released=False):
    """Code that configures the tiles, stores sums, and frees the tiles."""

    def code(b, tiles, sums, state):
        if configured:
            amx_code.configure.emit(b, state, tiles.size)
        if released:
            amx_code.release.emit(b, state)
        amx_code.sums_of_tiles(rows, columns).emit(b, tiles, sums, state)
        amx_code.release.emit(b, state)

    return machine_code.on_addresses(code)


PARAMETERS = amx_code.TilesInput, None, None


@cache
def code_of(kind, *arguments):
    return emitted.emitted(kind, partial(product, *arguments), *PARAMETERS)


@needs_kind
@settings(deadline=None)
@given(
    kind=OF_KINDS, rows=st.integers(1, 2), columns=st.integers(1, 2), count=st.integers(1, 3), room=st.integers(0, 70),
    size=st.sampled_from([4, 24, 60, 64]),
    runs=st.lists(st.integers(0, 40), min_size=1, max_size=3), between=st.integers(0, 99),
    values=st.sampled_from([(0, 256), (255, 256)]), weights=st.sampled_from([(-128, 128), (-128, -127), (127, 128)]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_sums(kind, rows, columns, count, room, size, runs, between, values, weights, seed):
    """Integers of pixels are unsigned, those of weights signed, and no sum saturates."""
    random, x_step, depth = np.random.default_rng(seed), size * count + room, size // 4 * count * len(runs)
    second = 16 * x_step + between
    x = random.integers(*values, second + 16 * x_step + 40).astype(np.uint8)
    weight = random.integers(*weights, (columns, depth + 16, 16, 4)).astype(np.int8)  # one tile is not read
    start = random.integers(-(2**30), 2**30, (columns, 16)).astype(np.int32)
    offsets = np.array(runs, np.int32)
    sums, state = np.full((2, 32, 16), 77, np.int32), np.full(amx_code.STATE_BYTES + 64, 9, np.uint8)
    code_of(kind, rows, columns)(
        x.ctypes.data, x.ctypes.data + second, x_step, offsets.ctypes.data, len(runs), count, size,
        weight.ctypes.data,         weight[0].nbytes, start.ctypes.data, sums.ctypes.data, state.ctypes.data,
    )  # fmt: skip
    begins = np.concatenate([tile + x_step * np.arange(16) for tile in (0, second)])[: 16 * rows]
    places = begins[:, None, None] + offsets[:, None] + np.arange(size * count)
    exact = np.einsum("mgk,cgnk->cmn", x[places].reshape(-1, depth, 4).astype(int), weight[:, :depth].astype(int))
    exact += start[:, None]
    assert sums[:columns, : 16 * rows].tolist() == exact.tolist()
    assert bool((sums[columns:] == 77).all()) and bool((sums[:, 16 * rows :] == 77).all())
    assert bool((state[amx_code.STATE_BYTES :] == 9).all())


@needs_kind
@pytest.mark.parametrize("state_of_tiles", [(False, False), (True, True)], ids=["never", "released"])
def test_emulated_tiles_without_configuration(state_of_tiles):
    """The CPU would raise an exception; emulated tiles have no rows then, so that a missing configuration is seen."""
    (kind,) = [kind for kind in emitted.WITH_AMX if kind.is_played]
    ones = np.ones(4096, np.uint8)
    sums, state = np.full((2, 32, 16), 77, np.int32), np.zeros(amx_code.STATE_BYTES, np.uint8)
    zero = np.zeros(1, np.int32)
    code_of(kind, 2, 2, *state_of_tiles)(
        ones.ctypes.data, ones.ctypes.data, 64, zero.ctypes.data, 1, 1, 64, ones.ctypes.data, 1024, ones.ctypes.data,
        sums.ctypes.data, state.ctypes.data,
    )  # fmt: skip
    assert bool((sums == 77).all()) and not state.any()


def copying():
    return amx_code.copy_run


@needs_kind
@pytest.mark.parametrize("groups", [1, 15, 16, 17, 40])
def test_copies_of_runs(groups):
    run = emitted.emitted(emitted.WITH_AMX[0], copying, None, None, None)
    x, out = np.arange(1, 201, dtype=np.uint8), np.full(260, 9, np.uint8)
    run(x.ctypes.data + 3, groups, out.ctypes.data)
    written = -(-4 * groups // 64) * 64
    assert out[: 4 * groups].tolist() == x[3 : 4 * groups + 3].tolist()
    assert not out[4 * groups : written].any() and bool((out[written:] == 9).all())


# ---- assembly


def assembly(make, *parameters):
    """Assembly for a CPU with AMX, which need not be this one."""
    module = emitted.module_of(emitted.unplayed("amx_int8"), make, *parameters)
    module.triple = "x86_64-unknown-linux-gnu"
    return emitted.assembly(module, "sapphirerapids", AMX_FEATURES).replace("\t", " ")


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_instructions(rows, columns):
    """The inner loop loads each tile of pixels and columns once, and adds to as many tiles of sums as there are."""
    code = assembly(partial(product, rows, columns), *PARAMETERS)
    loop = max(re.split(r"\n\.L\w+:", code), key=lambda block: block.count("tdpbusd"))
    sums = [str(columns * r + c) for r in range(rows) for c in range(columns)]
    factors = [*map(str, range(4, 4 + rows)), *map(str, range(6, 6 + columns))]
    added = re.findall(r"tdpbusd %tmm(\d), %tmm(\d), %tmm(\d)", loop)
    repeats = len(added) // len(sums)  # LLVM unrolls small loops
    assert sorted(total for *_, total in added) == sorted(repeats * sums)
    assert all(int(weight) >= 6 > int(pixels) >= 4 for weight, pixels, _ in added)
    assert sorted(re.findall(r"tileloadd .*\), %tmm(\d)", loop)) == sorted(repeats * factors)
    assert not re.search(r"tilestored|tileload.*%rsp", loop)
    assert sorted(re.findall(r"tilestored %tmm(\d)", code)) == sums, "no tile is spilled"
    assert re.findall(r"ldtilecfg|tilerelease", code) == ["ldtilecfg", "tilerelease"]
    assert code.index("ldtilecfg") < code.index("tileloadd") < code.index("tilestored") < code.index("tilerelease")
    assert " call" not in code


PROGRAM = """
from fxq.backends.loops.code import amx_probe
amx_probe.refusal = lambda: ""
import numba
from fxq.backends.loops.code import amx_loops, compiler
from fxq.backends.loops.code.memory_loops import words
kind = numba.types.void(numba.types.int64, numba.types.int64)
loop = numba.cfunc(kind, **compiler._OPTIONS)(
    lambda step, bases: amx_loops.amx_product(numba.carray(words(step), 32), words(bases))
)
print(loop._library.get_asm_str())
"""


@pytest.mark.slow
def test_the_loop_holds_tiles_from_its_begin_to_its_end():
    """As Numba compiles it for a CPU with AMX: each way through it configures tiles once, and frees them."""
    environment = {**os.environ, "NUMBA_CPU_NAME": "sapphirerapids", "NUMBA_CPU_FEATURES": AMX_FEATURES}
    environment.pop("FXQ_CPU_KIND", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    functions = re.findall(r"^(_ZN\w+):\n(.*?)\n\.Lfunc_end", done.stdout.replace("\t", " "), re.M | re.S)
    tiles = r"ldtilecfg|tilerelease|tileloadd|tilestored|tdpbusd"
    (code,) = [code for _, code in functions if re.search(tiles, code)]
    used = re.findall(tiles, code)
    assert used[0] == "ldtilecfg" and used[-1] == "tilerelease" and used.count("tdpbusd") >= 9
    assert used.count("ldtilecfg") == used.count("tilerelease") == code.count(" retq") == 1
    assert not re.findall(r"(?:tileloadd|tilestored).*%rsp", code), "a tile is spilled"
