"""Machine code of `on_addresses` functions, compiled in one process for each kind of CPU that this machine plays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import llvmlite.binding as llvm
from llvmlite import ir

from fxq.backends.loops.code import amx_probe, machine_code
from fxq.backends.loops.code.cpu_kinds import AMX, KINDS, CpuKind, chosen_kind, features_of, played_features

_FEATURES = ",".join([llvm.get_host_cpu_features().flatten(), *(f"-{name}" for name in AMX if amx_probe.refusal())])
PLAYED = sorted(
    (chosen_kind(kind.name, _FEATURES) for kind in KINDS if kind.runs_on(features_of(_FEATURES))),
    key=lambda kind: kind.is_played,
)
"""Kinds of CPUs that this machine can play, its own first."""
WITH_AMX = [replace(kind, is_played=played) for kind in PLAYED if kind.has_amx for played in {True, kind.is_played}]
"""The kind with AMX, emulated; on a CPU that has AMX also with its own instructions; none on CPUs without VNNI."""


def module_of(kind: CpuKind, make: Callable[[], Any], *parameters: Any) -> ir.Module:
    """LLVM module with a function `tile` of int64.

    Args:
        kind: Kind of CPU that code is emitted for.
        make: Function that returns an `on_addresses` function.
        parameters: For each of its parameters, a class of named tuples, or None for an int64.
    """
    module = ir.Module()
    module.triple = llvm.get_default_triple()
    counts = [1 if cls is None else len(cls._fields) for cls in parameters]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * sum(counts)), "tile")
    b, values = ir.IRBuilder(function.append_basic_block()), iter(function.args)
    taken = [[next(values) for _ in range(count)] for count in counts]
    with mock.patch.object(machine_code, "KIND", kind):
        make().emit(
            b, *[group[0] if cls is None else cls(*group) for cls, group in zip(parameters, taken, strict=True)]
        )
    b.ret_void()
    return module


def optimized(module: ir.Module, cpu: str, features: str) -> tuple[Any, Any]:
    """LLVM's optimized form of a module for a CPU, and the target machine."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(module.triple)
    machine = target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return parsed, machine


def assembly(module: ir.Module, cpu: str, features: str) -> str:
    """Assembly code of a module for a CPU, which need not be this one."""
    parsed, machine = optimized(module, cpu, features)
    return str(machine.emit_assembly(parsed))


@cache
def emitted(kind: CpuKind, make: Callable[[], Any], *parameters: Any) -> Callable[..., None]:
    """Compile an `on_addresses` function for a kind in `PLAYED`, as a function of numbers and of addresses.

    Arguments: see `module_of`. Fields of named tuples are single arguments of the result.
    """
    module = module_of(kind, make, *parameters)
    parsed, machine = optimized(module, llvm.get_host_cpu_name(), played_features(kind, _FEATURES))
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    call: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(module.get_global("tile").args))
    result = call(engine.get_function_address("tile"))
    result.keeps = engine
    return result


def unplayed(name: str) -> CpuKind:
    """Kind of this name on a CPU of its own."""
    return next(replace(kind, is_played=False) for kind in KINDS if kind.name == name)
