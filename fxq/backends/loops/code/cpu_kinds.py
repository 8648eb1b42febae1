"""Kinds of CPUs that loops are compiled for: the vector instructions of each, and the sizes of tiles that fit them.

Code that differs between kinds reads the row of `KINDS` here. All other code is written for vectors of 16 numbers,
which LLVM divides into the registers of the CPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from fxq.backends.loops.code import amx_probe, arm_probe
from fxq.errors import BackendError

log = logging.getLogger("fxq")
VARIABLE = "FXQ_CPU_KIND"
"""Environment variable with the name of the kind of CPU to compile loops for, instead of this CPU's own."""


@dataclass(frozen=True)
class CpuKind:
    """Kind of CPU.

    Attributes:
        name: Name, as `FXQ_CPU_KIND` takes it. Those of x86 are flags of the CPU in Linux.
        needs: LLVM features of these CPUs.
        lacks: LLVM features of larger CPUs. They are switched off where a larger CPU plays this one.
        bits: Width of vector registers.
        dot: LLVM intrinsic that adds four products of uint8 and int8 to each sum of a register (see `x_offset`); ""
            where there is none.
        pairs: LLVM intrinsic that adds the products of int16 in pairs, to int32; "" where the code names none.
        tile_pixels: Pixels of a large tile: 16 sums of each stay in registers. Small tiles have 4 pixels, or one.
        wide_channels: Bytes of a register that depthwise convolutions fill with channels, with `dot`; 0: they do not.
        wide_pixels: Registers of a tile of such a convolution.
        float_tile: Rows and columns of a tile of a product of floats.
        unsigned_dot: LLVM intrinsic like `dot`, of uint8 and uint8, if `dot` multiplies int8 by int8; else "".
        pair_dot: LLVM intrinsic that adds the products of two rows of eight uint8 and two of eight int8 to four
            sums; "" where there is none.
        x_offset: 128 if `dot` multiplies int8 by int8: 128 is subtracted from integers of pixels before; else 0.
        has_amx: Whether large products use AMX, see `amx_code.py`.
        is_played: Whether another CPU plays this kind: a larger one, or one that emulates its AMX instructions.
    """

    name: str
    needs: tuple[str, ...]
    lacks: tuple[str, ...]
    bits: int
    dot: str
    pairs: str
    tile_pixels: int
    wide_channels: int
    wide_pixels: int
    float_tile: tuple[int, int]
    unsigned_dot: str = ""
    pair_dot: str = ""
    x_offset: int = 0
    has_amx: bool = False
    is_played: bool = False

    @property
    def x_bytes(self) -> int:
        """Bytes of an integer of a pixel as tiles of layers read it: with `dot` as it is, uint8, else as int16."""
        return 1 if self.dot else 2

    @property
    def has_avx512(self) -> bool:
        """Whether vectors have 512 bits, with AVX512's instructions for floats."""
        return self.bits == 512

    @property
    def has_masks(self) -> bool:
        """Whether an instruction loads some lanes of a vector; otherwise each lane is a branch."""
        return self.bits >= 256

    @property
    def is_arm(self) -> bool:
        """Whether it is a kind of ARM with instructions that add products."""
        return self.dot.startswith("llvm.aarch64")

    @property
    def has_many_rows(self) -> bool:
        """Whether loops multiply many rows: with wide vectors they are faster than PyTorch.

        On ARM, where they have not been timed, they have fewer instructions than products of floats.
        """
        return self.bits >= 256 or self.is_arm

    @property
    def registers(self) -> int:
        """Number of vector registers."""
        return 32 if self.has_avx512 or self.is_arm else 16

    def runs_on(self, features: Collection[str]) -> bool:
        """Whether a CPU with these LLVM features runs the code of this kind. AMX instructions may be emulated."""
        if self.dot == _DOT_256 and not {"avxvnni", "avx512vnni"}.isdisjoint(features):
            return set(self.needs) - {"avxvnni"} <= set(features)
        return set(self.needs).difference(AMX if self.has_amx else ()) <= set(features)


_DOT_256 = "llvm.x86.avx512.vpdpbusd.256"
"""Intrinsic of `vpdpbusd` with 256 bits. LLVM encodes it as AVX-VNNI where there is no AVX512."""
AMX = ("amx-int8", "amx-bf16", "amx-tile")
"""LLVM features of AMX with integers of 8 bits and bfloat16."""
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
_PAIRS_256, _PAIRS_512 = "llvm.x86.avx2.pmadd.wd", "llvm.x86.avx512.pmaddw.d.512"
_SDOT, _UDOT, _USDOT = (f"llvm.aarch64.neon.{prefix}dot.v4i32.v16i8" for prefix in ("s", "u", "us"))
_USMMLA = "llvm.aarch64.neon.usmmla.v4i32.v16i8"
_DOT_512 = "llvm.x86.avx512.vpdpbusd.512"
KINDS = (
    CpuKind(
        "amx_int8", (*_AVX512, "avx512vnni", *AMX), (), 512, _DOT_512, _PAIRS_512, 12, 64, 4, (12, 32), has_amx=True
    ),
    CpuKind("avx512_vnni", (*_AVX512, "avx512vnni"), (), 512, _DOT_512, _PAIRS_512, 12, 64, 4, (12, 32)),
    CpuKind("avx512", _AVX512, ("avx512vnni", "avxvnni"), 512, "", _PAIRS_512, 8, 0, 1, (12, 32)),
    CpuKind("avx_vnni", ("avx2", "fma", "avxvnni"), ("avx512f",), 256, _DOT_256, _PAIRS_256, 6, 32, 2, (4, 16)),
    CpuKind("avx2", ("avx2", "fma"), ("avx512f", "avxvnni"), 256, "", _PAIRS_256, 4, 0, 1, (4, 16)),
    CpuKind("neon_i8mm", ("neon", "i8mm"), (), 128, _USDOT, "", 6, 0, 1, (4, 16), pair_dot=_USMMLA),
    CpuKind(
        "neon_dot", ("neon", "dotprod"), ("i8mm",), 128, _SDOT, "", 6, 0, 1, (4, 16), unsigned_dot=_UDOT, x_offset=128
    ),
    CpuKind("other", (), (), 128, "", "", 4, 0, 1, (4, 16)),
)
"""Kinds of CPUs, larger ones first. The code of "other" has no instructions of its own: it runs on every CPU."""
_KINDS_WITHOUT_AMX = tuple(kind.name for kind in KINDS if not kind.has_amx)


def features_of(text: str) -> set[str]:
    """Features that a text of LLVM such as "+avx2,-avx512f" switches on."""
    features = set[str]()
    for word in filter(None, text.split(",")):
        (features.add if word.startswith("+") else features.discard)(word[1:])
    return features


def compiled_features() -> str:
    """CPU features that Numba compiles for, as LLVM writes them; "" if it has only the name of a CPU."""
    import llvmlite.binding
    from numba.core import config

    name, features = (getattr(config, setting, None) for setting in ("CPU_NAME", "CPU_FEATURES"))
    if features is not None:
        return str(features)
    return "" if name else str(llvmlite.binding.get_host_cpu_features().flatten())


def _unlisted_features(listed: str) -> list[str]:
    """Features of an ARM CPU that the operating system reports, and LLVM does not list; none if Numba has been told."""
    from numba.core import config

    if any(getattr(config, setting, None) is not None for setting in ("CPU_NAME", "CPU_FEATURES")):
        return []
    return [feature for feature in arm_probe.features() if feature not in features_of(listed)]


def chosen_kind(name: str, text: str) -> CpuKind:
    """Kind of a CPU with the features `text`, or the kind of this name, which it plays.

    Raises:
        BackendError: There is no kind of this name, or the CPU lacks its instructions.
    """
    features = features_of(text)
    playable = [kind for kind in KINDS if kind.runs_on(features)]
    own = next(kind for kind in playable if not kind.has_amx or features.issuperset(AMX))
    if name in ("", own.name):
        return own
    names = ", ".join(kind.name for kind in playable)
    if name not in [kind.name for kind in KINDS]:
        raise BackendError(f"{VARIABLE}: there is no kind of CPU {name!r}. This CPU can play {names}.")
    for kind in playable:
        if kind.name == name:
            return replace(kind, is_played=True)
    raise BackendError(f"{VARIABLE}: this CPU is {own.name} and lacks instructions of {name}. It can play {names}.")


@cache
def cpu_kind() -> CpuKind:
    """Kind of CPU that the loops of this process are compiled for.

    If it is played, Numba is told to compile all its code in this process for it, with the features that it lacks
    switched off. Likewise, Numba is told those features of an ARM CPU that LLVM does not list (`arm_probe.features`).
    A CPU with AMX is of a kind without it where AMX does not work (`amx_probe.refusal`).

    Raises:
        BackendError: `FXQ_CPU_KIND` is no kind that this CPU can play, or Numba has compiled for another one already.
    """
    name, listed = os.environ.get(VARIABLE, ""), compiled_features()
    reported = _unlisted_features(listed)
    features = ",".join([listed, *(f"+{feature}" for feature in reported)]).strip(",")
    if features_of(features).issuperset(AMX) and name not in _KINDS_WITHOUT_AMX and amx_probe.refusal():
        features = ",".join([features, *(f"-{feature}" for feature in AMX)])
    kind = chosen_kind(name, features)
    if kind.is_played and not _tell_numba(played_features(kind, features)):
        raise BackendError(
            f"{VARIABLE}={kind.name}: Numba has compiled code for another kind of CPU in this process. Import fxq, and "
            f"call fxq.doctor(), before code that Numba compiles; or set NUMBA_CPU_FEATURES as well."
        )
    if reported and not kind.is_played and not _tell_numba(features):
        log.warning(
            "Numba has compiled code in this process without %s, which the CPU has: fxq's loops do without as well and "
            "are slower. Import fxq, and call fxq.doctor(), before code that Numba compiles.",
            " and ".join(reported),
        )
        kind = chosen_kind(name, listed)
    return kind


def _tell_numba(features: str) -> bool:
    """Have Numba compile all code for a CPU with these features; False if it has compiled for another one already."""
    from numba.core import config
    from numba.core.registry import cpu_target

    settings: Any = config
    before, settings.CPU_FEATURES = settings.CPU_FEATURES, features
    if cpu_target.target_context.codegen().magic_tuple()[2] == features:
        return True
    settings.CPU_FEATURES = before
    return False


def played_features(kind: CpuKind, text: str) -> str:
    """Features of a CPU, as LLVM writes them, without those that a kind lacks.

    LLVM reads them in turn: the last ones also switch off all features that are built on them.
    """
    return ",".join(filter(None, [text, *(f"-{name}" for name in kind.lacks)]))
