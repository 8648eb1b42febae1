"""Run Python code as on a machine with aarch64, under qemu: Debian's Python, and packages from the package index.

    python -m scripts.dev.aarch64 FOLDER                             what scripts/dev/aarch64_networks.py checks
    python -m scripts.dev.aarch64 FOLDER -m pytest -n 0 tests/backends/loops/test_jit_linear.py      or other arguments
    python -m scripts.dev.aarch64 FOLDER --cpu cortex-a76            as on a CPU without i8mm; arguments may follow

It needs Debian, `qemu-user-static`, and a Python of the same version as Debian's. FOLDER is filled once: Python, its
packages without those of development but for pytest and hypothesis, and the package fxq as links to this checkout.
fxq's loops are compiled in this machine's Python, for the CPU that qemu plays, and cached in FOLDER: under qemu they
would take many times as long. They are compiled anew where a file that they are compiled of has changed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from pathlib import Path
from typing import Any

from fxq.backends.loops.code.compiler import MODULES

CHECKOUT = Path(__file__).resolve().parents[2]
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
CPU = "max,sme=off,sve-max-vq=2"
"""A CPU with all instructions but SME, with which kernels of PyTorch fail under qemu 7. Its vectors have 256 bits, as
those of the CPU that `_CPU_FACTS` describe: OpenBLAS chooses kernels by that, and its Cholesky factors of float32 are
wrong where vectors are longer."""
TORCH = "2.10.0"
"""Newest version whose wheel for aarch64 on PyPI is for CPUs only."""
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
TRIPLE = "aarch64-unknown-linux-gnu"
_PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in (28, 27, 26, 24, 17)] + ["manylinux2014_aarch64"]
_CPU_FACTS = {
    "proc/cpuinfo": """processor : 0
Features : fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimdrdm asimddp i8mm
CPU implementer : 0x41
CPU architecture: 8
CPU variant : 0x1
CPU part : 0xd40
CPU revision : 1

""",
    "sys/devices/system/cpu/cpu0/regs/identification/midr_el1": "0x00000000411fd401\n",
}
"""Files in which Linux describes a Neoverse V1. qemu 7 does not write them: programs would read those that are here."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder for Python, packages and compiled loops: 1.2 GiB")
    parser.add_argument("--cpu", default=CPU, help="CPU that qemu plays; default: %(default)s")
    parser.add_argument(
        "--loops", default=",".join(MODULES), help="modules of loops to compile here; default: %(default)s"
    )
    options, command = parser.parse_known_args()
    if EMULATOR is None:
        parser.error("qemu-aarch64 is missing: apt install qemu-user-static")
    machine = Machine(options.folder.resolve(), options.cpu)
    machine.build()
    machine.compile_loops(options.loops.split(","))
    if not command:
        networks, expected = "scripts.dev.aarch64_networks", str(machine.folder / "networks")
        _finish([sys.executable, "-m", networks, "write", expected], cwd=CHECKOUT)
        command = ["-m", networks, "check", expected]
    sys.exit(machine.run(*command).returncode)


class Machine:
    """A folder with Debian's Python for aarch64, and a CPU that qemu plays.

    Args:
        folder: The folder.
        cpu: Name of the CPU, as qemu takes it.
    """

    def __init__(self, folder: Path, cpu: str) -> None:
        self.folder, self.cpu = folder, cpu
        self.root, self.site, self.package = folder / "debian", folder / "site", folder / "package"

    def build(self) -> None:
        """Fill the folder, but for what is there already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.root.exists():
            self._unpack_debian()
        if not self.site.exists():
            self._install_packages()
        package = self.package / "fxq"
        package.mkdir(parents=True, exist_ok=True)
        links = {path.name: path for path in (CHECKOUT / "fxq").iterdir() if path.name != "__pycache__"}
        links.update({name: CHECKOUT / name for name in ("passes", "patterns")})  # as pyproject.toml says
        for path in package.iterdir():
            path.unlink()
        for name, path in links.items():
            (package / name).symlink_to(path)
        metadata = self.package / f"fxq-{version('fxq')}.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(distribution("fxq").read_text("METADATA") or "", encoding="utf-8")

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run Python under qemu in the checkout; `options` are those of `subprocess.run`."""
        command = [str(EMULATOR), str(self.root / "usr" / "bin" / PYTHON), *arguments]
        return subprocess.run(command, cwd=CHECKOUT, env=self._environment(), text=True, check=False, **options)

    def _environment(self) -> dict[str, str]:
        """Environment variables of Python under qemu."""
        paths = [str(self.package), str(CHECKOUT), str(self.site)]
        variables = {
            "PYTHONHOME": str(self.root / "usr"), "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1",
            "PYTHONNOUSERSITE": "1", "PYTHONPYCACHEPREFIX": str(self.folder / "bytecode"), "QEMU_CPU": self.cpu,
            "QEMU_LD_PREFIX": str(self.root), "FXQ_CACHE": str(self.folder / "cache"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        kept = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "LD_PRELOAD")}
        return {**{n: v for n, v in kept.items() if not n.startswith(("PYTHON", "NUMBA_", "FXQ_"))}, **variables}

    def _unpack_debian(self) -> None:
        """Unpack Debian's Python and all that it needs, with a package list and a cache of its own."""
        state, root = self.folder / "apt", _emptied(self.root)
        for name in ("lists/partial", "archives/partial"):
            (state / name).mkdir(parents=True, exist_ok=True)
        (state / "status").touch()
        settings = {
            "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "root",
            "Dir::State": state, "Dir::State::status": state / "status", "Dir::Cache": state,
            "Debug::NoLocking": "true",
        }  # fmt: skip
        apt = ["apt-get", "-q", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
        wanted = [PYTHON, "libgomp1", "libstdc++6"]
        _finish([*apt, "update"])
        _finish([*apt, "install", "--download-only", "-y", "--no-install-recommends", *wanted])
        for file in sorted((state / "archives").glob("*.deb")):
            _finish(["dpkg-deb", "-x", str(file), str(root)])
        shutil.rmtree(state)
        for name, text in _CPU_FACTS.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
        root.rename(self.root)

    def _install_packages(self) -> None:
        """Install the packages that fxq, its loops and its tests need, in the versions that this Python has."""
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
        named = [f"{name}=={TORCH if name == 'torch' else version(name)}" for name in sorted(_needed())]
        site = _emptied(self.site)
        command = [
            sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary", ":all:", "--python-version",
            f"{sys.version_info.major}.{sys.version_info.minor}", "--implementation", "cp", "--abi", tag, "--abi",
            "abi3", "--abi", "none", *platforms, "--target", str(site), *named,
        ]  # fmt: skip
        _finish(command)
        site.rename(self.site)

    def compile_loops(self, modules: Sequence[str]) -> None:
        """Compile loops in this machine's Python, for the CPU that qemu plays, into the cache of the folder."""
        asked = self.run("-c", _ASK_CPU, stdout=subprocess.PIPE)
        if asked.returncode:
            sys.exit(f"{PYTHON} does not run under qemu; is {self.folder} of another version of Python?")
        name, features = json.loads(asked.stdout.splitlines()[-1])
        variables = {
            **os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "PYTHONSAFEPATH": "1",
            "FXQ_CACHE": str(self.folder / "cache"), "PYTHONPATH": os.pathsep.join(map(str, (self.package, CHECKOUT))),
        }  # fmt: skip
        _finish([sys.executable, "-c", _COMPILE.format(triple=TRIPLE), *modules], env=variables)


_ASK_CPU = """
import json
from fxq.backends.loops.code.cpu_kinds import cpu_kind
print(cpu_kind())
from numba.core.registry import cpu_target
print(json.dumps(cpu_target.target_context.codegen().magic_tuple()[1:]))
"""
"""Program that prints the name and the features of the CPU that Numba compiles for."""
_COMPILE = """
import platform
import sys
import llvmlite.binding as llvm
from numba.core import codegen

platform.machine = lambda: "aarch64"
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
llvm.get_process_triple = llvm.get_default_triple = lambda: "{triple}"
llvm.Target.from_default_triple = classmethod(lambda cls: cls.from_triple("{triple}"))
library, jit = codegen.JITCodeLibrary, codegen.JITCPUCodegen
jit._add_module = lambda self, module: library._object_compiled_hook(module, self._tm.emit_object(module))
jit.set_env = lambda *_: None
library.get_pointer_to_function = lambda *_: 0
library._finalize_specific = lambda _: None

from fxq.backends.loops.code.compiler import missing

for name in sys.argv[1:]:
    print("loops for aarch64:", name, flush=True)
    if reason := missing(name):
        sys.exit(f"{{name}} cannot be compiled: {{reason}}")
"""
"""Program that compiles modules of loops for another machine: Numba's code is written to the cache, and not loaded."""


def _finish(command: Sequence[str], **options: Any) -> None:
    """Run a command, which says itself what is wrong; exit if it fails."""
    if subprocess.run(command, check=False, **options).returncode:
        sys.exit(f"failed: {' '.join(command[:2])} ...")


def _emptied(folder: Path) -> Path:
    """Empty folder to fill before it gets the name of `folder`, so that a folder of that name is whole."""
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    return new


def _needed() -> set[str]:
    """Names of the packages that fxq with its loops needs, and of those that its tests need."""
    needed: set[str] = set()
    left = ["fxq[jit]", "pytest", "pytest-xdist", "hypothesis"]
    while left:
        name, extra = re.fullmatch(r"([^\[]+)(?:\[(.*)\])?", left.pop()).groups()  # type: ignore[union-attr]
        if name != "fxq" and name in needed:
            continue
        needed.add(name)
        left.extend(_requirements(name, extra or ""))
    return needed - {"fxq"}


def _requirements(name: str, extra: str) -> Iterator[str]:
    """Names of the packages that a package needs on aarch64, of those that are installed here."""
    from packaging.requirements import Requirement

    machine: Mapping[str, str] = {"platform_machine": "aarch64", "extra": extra}
    for text in requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(dict(machine)):
            try:
                version(requirement.name)
            except PackageNotFoundError:
                continue
            yield requirement.name


if __name__ == "__main__":
    main()
