"""Kinds of CPUs: which one a CPU is, which it can play, and the instructions that LLVM emits for each."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fxq import FxqError
from fxq.backends.loops.code import amx_probe, cpu_kinds
from fxq.backends.loops.code.cpu_kinds import KINDS, chosen_kind, features_of, played_features

pytestmark = pytest.mark.any_cpu

config = pytest.importorskip("numba.core.config")
layer_code = pytest.importorskip("fxq.backends.loops.code.layer_code")
arm = pytest.importorskip("tests.support.arm")
emitted = pytest.importorskip("tests.support.emitted")

AVX2 = "+sse2,+avx2,+fma"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512dq,+avx512vl"
FEATURES = {
    "amx_int8": f"{AVX512},+avx512vnni,+amx-int8,+amx-bf16,+amx-tile",
    "avx512_vnni": f"{AVX512},+avx512vnni",
    "avx512": AVX512,
    "avx_vnni": f"{AVX2},+avxvnni",
    "avx2": AVX2,
    **arm.FEATURES,
    "other": "+sse2",
}
"""Features of a CPU of each kind."""


@pytest.mark.parametrize("name", FEATURES)
def test_kind_of_a_cpu(name):
    kind = chosen_kind("", FEATURES[name])
    assert kind.name == name and not kind.is_played
    assert chosen_kind(name, FEATURES[name]) == kind, "naming the CPU's own kind plays nothing"


@pytest.mark.parametrize("features", ["", "+neon", "+sse2,-avx2,-avx512f", f"{AVX2},-avx2"])
def test_other_cpus(features):
    assert chosen_kind("", features).name == "other"


def test_a_cpu_with_a_part_of_avx512_is_avx2():
    assert chosen_kind("", f"{AVX2},+avx512f,+avx512cd").name == "avx2"


@pytest.mark.parametrize(
    ("own", "smaller"),
    [
        ("amx_int8", ["avx512_vnni", "avx512", "avx_vnni", "avx2", "other"]),
        ("avx512_vnni", ["avx512", "avx_vnni", "avx2", "other"]),
        ("avx512", ["avx2", "other"]),
        ("avx_vnni", ["avx2", "other"]),
        ("avx2", ["other"]),
        ("neon_i8mm", ["neon_dot", "other"]),
        ("neon_dot", ["other"]),
    ],
)
def test_kinds_that_a_cpu_plays(own, smaller):
    """Smaller ones; AMX is emulated on CPUs with AVX512-VNNI."""
    for kind in KINDS:
        if kind.name in smaller or (kind.name == "amx_int8" and own == "avx512_vnni"):
            played = chosen_kind(kind.name, FEATURES[own])
            assert played.is_played and played.name == kind.name
            left = features_of(played_features(played, FEATURES[own]))
            assert not left.intersection(kind.lacks) and left | set(kind.lacks) >= features_of(FEATURES[own])
        elif kind.name != own:
            with pytest.raises(FxqError, match=f"FXQ_CPU_KIND: this CPU is {own} and lacks.*{', '.join(smaller)}"):
                chosen_kind(kind.name, FEATURES[own])


def test_an_unknown_kind_is_refused():
    with pytest.raises(FxqError, match=r"FXQ_CPU_KIND: there is no kind of CPU 'avx3'\. This CPU can play avx2, other"):
        chosen_kind("avx3", AVX2)


@pytest.mark.parametrize(
    ("name", "features", "result"),
    [("haswell", "+avx2,+fma", "+avx2,+fma"), ("generic", "", ""), ("haswell", None, ""), (None, "+x", "+x")],
)
def test_a_cpu_that_numba_is_told_of(name, features, result, monkeypatch):
    """Features of a CPU of which Numba has only the name are unknown."""
    monkeypatch.setattr(config, "CPU_NAME", name, raising=False)
    monkeypatch.setattr(config, "CPU_FEATURES", features, raising=False)
    assert cpu_kinds.compiled_features() == result


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists the flags of a CPU")
def test_this_cpu(monkeypatch):
    for setting in ("CPU_NAME", "CPU_FEATURES"):
        monkeypatch.setattr(config, setting, None, raising=False)
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    own = chosen_kind("", cpu_kinds.compiled_features()).name
    if "avx512_vnni" in flags:
        assert own in ("amx_int8", "avx512_vnni") and (own == "amx_int8") <= ("amx_int8" in flags)
    elif "avx512f" not in flags:
        assert own == ("avx_vnni" if "avx_vnni" in flags else "avx2" if "avx2" in flags else "other")


@pytest.mark.parametrize(("refusal", "name"), [("", "amx_int8"), ("it computes a wrong product", "avx512_vnni")])
def test_amx_is_used_if_it_works(refusal, name, monkeypatch):
    monkeypatch.setattr(cpu_kinds, "compiled_features", lambda: FEATURES["amx_int8"])
    monkeypatch.setattr(amx_probe, "refusal", lambda: refusal)
    monkeypatch.delenv("FXQ_CPU_KIND", raising=False)
    kind = cpu_kinds.cpu_kind.__wrapped__()
    assert kind.name == name and not kind.is_played


# ---- instructions


def tile_code(name):
    """Assembly of a large tile for a CPU of this kind."""
    kind = emitted.unplayed(name)
    make = partial(layer_code.layer_tile, kind.tile_pixels)
    module = emitted.module_of(kind, make, layer_code.TileInput, None)
    module.triple = arm.TRIPLE if name in arm.FEATURES else "x86_64-unknown-linux-gnu"
    return emitted.assembly(module, "generic" if name in arm.FEATURES else "x86-64", FEATURES[name])


def inner_loop(code, instruction):
    """The basic block with the most of some instruction: the products of one group, or of several."""
    return max(re.split(r"\n\.L\w+:", code), key=lambda block: len(re.findall(instruction, block)))


@pytest.mark.parametrize(
    ("name", "instruction", "per_pixel"),
    [
        ("avx512_vnni", r"vpdpbusd .*zmm", 1), ("avx512", r"vpmaddwd .*%zmm", 1),
        ("avx_vnni", r"\{vex\}\s+vpdpbusd .*%ymm", 2), ("avx2", r"vpmaddwd .*%ymm", 2), ("other", r"pmaddwd .*%xmm", 4),
        ("neon_i8mm", r"usdot v", 4), ("neon_dot", r"sdot v", 4),
    ],
)  # fmt: skip
def test_instructions_of_each_kind(name, instruction, per_pixel):
    """Each vector of sums takes one multiplication for four products; sums stay in registers."""
    code = tile_code(name).replace("\t", " ")
    block, pixels = inner_loop(code, instruction), emitted.unplayed(name).tile_pixels
    count = len(re.findall(instruction, block))
    assert count and count % (per_pixel * pixels) == 0
    if name not in ("avx512_vnni", "avx512"):
        assert "zmm" not in code
    if name != "other":
        stores = re.findall(r"vmov\w+ %[xyz]mm\d+, \S*\(%rsp|st[rp] q.*sp", block)
        assert not stores, "sums or weights are spilled"


@pytest.mark.slow
@pytest.mark.skipif(not (arm.ASSEMBLER and arm.EMULATOR), reason="needs qemu and binutils for aarch64")
@pytest.mark.parametrize("name", arm.FEATURES)
@pytest.mark.parametrize("pixels", [6, 4, 1])
@pytest.mark.parametrize("values", [(0, 256), (255, 256), (0, 1)])
def test_sums_on_aarch64(name, pixels, values, tmp_path):
    kind, random = emitted.unplayed(name), np.random.default_rng(pixels)
    many, groups = 3, 5
    x, places = random.integers(*values, 400).astype(np.uint8), random.integers(0, 200, pixels).astype(np.int32)
    runs = random.integers(0, 100, many).astype(np.int32)
    weight = random.integers(-128, 128, (many, groups, 16, 4)).astype(np.int8)
    start = (kind.x_offset * weight.sum((0, 1, 3), dtype=np.int64) + 7).astype(np.int32)
    arguments = x, places, runs, many, groups, weight, start, 0, np.zeros((pixels, 16), np.int32)
    make = partial(layer_code.layer_tile, pixels)
    *_, sums = arm.run_on_arm(kind, make, (layer_code.TileInput, None), arguments, tmp_path)
    read = x[places[:, None, None] + runs[:, None] + np.arange(4 * groups)].astype(int).reshape(pixels, many, groups, 4)
    assert sums.tolist() == (np.einsum("pmgk,mglk->pl", read, weight.astype(int)) + 7).tolist()


@pytest.mark.slow
@pytest.mark.skipif(not (arm.ASSEMBLER and arm.EMULATOR), reason="needs qemu and binutils for aarch64")
@pytest.mark.parametrize("name", arm.FEATURES)
@pytest.mark.parametrize("many", [1, 9])
def test_depthwise_sums_on_aarch64(name, many, tmp_path):
    random = np.random.default_rng(many)
    x, places = random.integers(0, 256, 400).astype(np.uint8), random.integers(0, 200, 4).astype(np.int32)
    runs, weight = (
        random.integers(0, 100, many).astype(np.int32),
        random.integers(-128, 128, (many, 16)).astype(np.int8),
    )
    start = random.integers(-(2**30), 2**30, 16).astype(np.int32)
    arguments = x, places, runs, many, 0, weight, start, 0, 16, np.zeros((4, 16), np.int32)
    make, parameters = partial(layer_code.depthwise_tile, 4), (layer_code.TileInput, None, None)
    *_, sums = arm.run_on_arm(emitted.unplayed(name), make, parameters, arguments, tmp_path)
    read = x[places[:, None, None] + runs[:, None] + np.arange(16)].astype(int)
    assert sums.tolist() == ((read * weight).sum(1) + start).tolist()


# ---- a process that plays

PROGRAM = """
import torch, fxq
from fxq.backends.loops.code.compiler import compiled, description
from fxq.backends.loops.code.cpu_kinds import cpu_kind
from numba import njit
print(description(), flush=True)
f = njit(lambda x, y: x @ y if False else (x * y).sum())
import numpy as np
f(np.ones(1000, np.float32), np.ones(1000, np.float32))
print("zmm" in "".join(f.inspect_asm().values()))
"""


def run_with(environment, before=""):
    """Output of `PROGRAM` in a process with these environment variables; error of the process."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", before + PROGRAM], capture_output=True, text=True, env=variables, check=False
    )
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in [kind.name for kind in emitted.PLAYED[1:]], reason="needs a CPU larger than AVX2")
def test_numba_compiles_for_the_kind_that_is_played():
    out, error = run_with({"FXQ_CPU_KIND": "avx2"})
    assert re.search(r"for avx2 by order of FXQ_CPU_KIND\nFalse\n", out), out + error


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in [kind.name for kind in emitted.PLAYED[1:]], reason="needs a CPU larger than AVX2")
def test_code_that_numba_compiled_before_is_an_error():
    out, error = run_with({"FXQ_CPU_KIND": "avx2"}, "import numba; numba.njit(lambda x: x + 1)(1)\n")
    assert not out and "BackendError: FXQ_CPU_KIND=avx2: Numba has compiled code for another kind" in error


@pytest.mark.slow
def test_a_process_with_an_unknown_kind():
    out, error = run_with({"FXQ_CPU_KIND": "pentium"})
    assert not out and "BackendError: FXQ_CPU_KIND: there is no kind of CPU 'pentium'" in error
