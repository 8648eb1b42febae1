"""Kernels of the user's own: for a fusion or an op, on a backend with a table of kernels, by one public call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from typing import Any, TypeVar

from fxq.backends.by_name import backend_type
from fxq.backends.kernel import Kernel, refuse
from fxq.backends.table.function_kernel import FunctionKernel, kernel_of
from fxq.backends.table.kernel_pattern import KernelPattern, check_signature
from fxq.backends.table.kernel_table import FusedUnit, KernelRow
from fxq.backends.table.lowering import RowBackend
from fxq.common.source import digest_of, name_of
from fxq.errors import BackendError, FxqError, InputError, unknown, words_of
from fxq.ops import OPS
from fxq.rewriting.pattern import FUSIONS, Family

_MAKERS: dict[str, Callable[..., Any]] = {}
"""The function that makes or is a kernel, by backend and pattern."""


Maker = TypeVar("Maker", bound=Callable[[FusedUnit], Kernel])


def register_kernel(backend: str, fusion: Family | str, *, emits_float: bool = True) -> Callable[[Maker], Maker]:
    """Decorator: on this backend, a unit of the fusion runs in the kernel that the function makes.

    The kernel takes the integers of the captured activations, in the order of the captures, and returns what the fusion
    does: of several outputs, a tuple, each on its grid of `FusedUnit.outs`. verify-lowering runs it against the
    fusion's meaning, and its price is measured. A recipe that is to be saved names it: `Recipe.with_extensions`.

    Args:
        backend: name of a backend with a table of kernels: "x86", "fbgemm", "qnnpack", or the import path of one
            of your own, see `fxq.backends.table.lowering.RowBackend`.
        fusion: what `fxq.fusion` returned, or the name of an op.
        emits_float: whether the kernel can emit float32; if not, its result is rounded to a grid wherever it is read.

    Returns:
        The decorator of a function `(FusedUnit) -> Kernel`, which it returns as it is. It may raise `BackendError` with
        the reason why there is no such kernel; the unit then runs as if there were none. A function that is defined
        anew replaces what it was.

    Raises:
        InputError: `fusion` is no fusion and no op; the function returns no kernel.
        BackendError: the backend has no table of kernels, or another function makes this fusion's kernel.

    Example:
        A layer with a gate, which x86 does not take along. For shortness, the kernel computes in float.

        >>> @fxq.fusion(everywhere=False)
        ... def linear_gate(op, x, w, b, s):
        ...     return op.mul(op.sigmoid(op.linear(x, w, b)), s)
        >>> class LinearGate(fxq.extend.Kernel):
        ...     name, options = "mine.linear_gate", ("x", "out", "factor")
        ...     def __init__(self, weight, scale, bias, x, out, factor):
        ...         super().__init__()
        ...         for name, tensor in (("weight", weight), ("scale", scale), ("bias", bias)):
        ...             self.register_buffer(name, tensor)
        ...         self.x, self.out, self.factor = x, out, factor
        ...
        ...     def forward(self, x):
        ...         real, weight = (x.float() - self.x.z) * self.x.s, self.weight * self.scale.view(-1, 1)
        ...         y = nn.functional.linear(real, weight, self.bias).sigmoid() * self.factor
        ...         return y if self.out is None else fxq.quant.qparams.quantize(y, self.out)
        >>> @fxq.extend.register_kernel("x86", linear_gate)
        ... def make(unit):
        ...     w, b, s = (unit.captures[name] for name in "wbs")
        ...     return LinearGate(w.values, w.qparams.scale, b, unit.captures["x"], unit.out, s)
    """
    patterns, rows = _patterns("register_kernel", fusion), _registered(backend)

    def register(make: Maker) -> Maker:
        row = KernelRow(_checked(make), emits_float=emits_float, code=digest_of(make))
        _register(backend, rows, make, {pattern: row for pattern in patterns})
        return make

    return register


Run = TypeVar("Run", bound=Callable[..., Any])


def kernel(backend: str, pattern: Family | str, *, pack: Callable[..., Any] | None = None) -> Callable[[Run], Run]:
    """Decorator: on this backend, units of a fusion, or single ops, run in the function.

    The function gets integer tensors with their grids and returns integers or floats. fxq derives the rest: weights and
    constants become buffers of a module, which is copied, moved and saved with the model, and `verify-lowering`
    compares its result with the float meaning of the pattern, as for every other kernel. A model's file names the
    function by its import path: import its module before `fxq.load`.

    Args:
        backend: name of a backend with a table of kernels: "x86", "fbgemm", "qnnpack", or the import path of one of
            your own.
        pattern: what `fxq.fusion` returned, or the name of an op, such as "linear".
        pack: function of some of the constants, by their names. Its value is computed once, and again when one of them
            is edited, and is passed as `packed`. Copies and files do not hold it.

    Returns:
        The decorator of a function, which it returns as it is. The function's parameters are the captures of the
        pattern (of an op: its tensors), by name:

        - an activation is a `QTensor` of uint8 values, static or dynamic;
        - a weight is a `QTensor` of int8 values with a scale per channel or per tensor;
        - another constant is its tensor, float32; a number is itself; an input left out is None.

        Keyword-only parameters are `out`, the grid that the result is wanted on, a `QParams`, or None where it is
        wanted in float32 (of several outputs, a tuple of them); `packed`; options of the ops, by name; and the
        variants of the fusion, by name. An option that is not taken must have its default, or what the pattern says;
        elsewhere the unit runs as if there were no kernel.

        It returns integers of `out.dtype` on the grid `out`, or float32, which is rounded to `out` where that is given;
        of several outputs a tuple. A function that is defined again replaces the one before.

    Raises:
        InputError: `pattern` is no fusion and no op; a parameter is not in the pattern, or a capture is no parameter;
            in use, the function returns another dtype.
        BackendError: the backend is unknown or has no table of kernels, or another function runs this pattern there.

    Example:
        >>> @fxq.fusion(everywhere=False)
        ... def tanh_of_linear(op, x, w, b):
        ...     return op.tanh(op.linear(x, w, b))
        >>> @fxq.extend.kernel("x86", tanh_of_linear)
        ... def run(x, w, b, *, out):
        ...     return torch.tanh(nn.functional.linear(x.dequantize(), w.dequantize(), b))
    """
    patterns, rows = _patterns("kernel", pattern), _registered(backend)

    def register(function: Run) -> Run:
        if not inspect.isfunction(function):
            raise InputError(f"fxq.extend.kernel decorates a plain function, not {function!r}.")
        taken = [check_signature(function, pack, pattern) for pattern in patterns]
        kind, code = kernel_of(function, pack), digest_of(function)
        made = {}
        for pattern, options in zip(patterns, taken, strict=True):
            row = KernelRow(partial(_made_of, kind, pattern, options), partial(pattern.refused, options), code=code)
            made[pattern] = replace(row, dynamic=row)
        _register(backend, rows, function, made)
        return function

    return register


def _made_of(kind: type[FunctionKernel], pattern: KernelPattern, options: Collection[str], unit: FusedUnit) -> Kernel:
    refuse(kind.name, pattern.refused(options, unit))
    captures = {name: unit.captures.get(name) for name in pattern.captures}  # an op lacks the inputs that are not given
    return kind.of(replace(unit, captures=captures), pattern.settings(options, unit))


def _patterns(caller: str, fusion: Any) -> list[KernelPattern]:
    if isinstance(fusion, str) and fusion in OPS:
        return [KernelPattern.of_op(OPS[fusion])]
    if isinstance(fusion, Family) and all(rule.replacement is None for rule in fusion):
        return [KernelPattern.of_rule(rule) for rule in fusion]
    if isinstance(fusion, str) and fusion not in FUSIONS:
        raise InputError(
            f"{caller} takes a fusion or the name of an op: {unknown('op', fusion, (op.name for op in OPS))}"
        )
    raise InputError(f"{caller} takes what fxq.fusion returned, or the name of an op, not {fusion!r}.")


def _register(
    backend: str, rows: dict[str, KernelRow], code: Callable[..., Any], made: Mapping[KernelPattern, KernelRow]
) -> None:
    """Add rows to a table. Raises `BackendError` where the kernel of a pattern is another function's."""
    for pattern, row in made.items():
        known = _MAKERS.setdefault(f"{backend} {pattern.name}", code)
        if name_of(known) != name_of(code):
            raise BackendError(f"the kernel of {pattern.name!r} on {backend} is made by {name_of(known)} already.")
        _MAKERS[f"{backend} {pattern.name}"] = code
        rows[pattern.key] = row


def _registered(backend: str) -> dict[str, KernelRow]:
    """The user's own kernels beside the table of a backend."""
    kind = backend_type(backend)
    if not issubclass(kind, RowBackend):
        raise BackendError(
            f"backend {backend!r} has no table of kernels: one of your own runs units as its lower says."
        )
    return kind.registered


def makes_kernels(value: Any) -> bool:
    """Whether this is a function that `register_kernel` or `kernel` was given."""
    return any(value is make for make in _MAKERS.values())


_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def _checked(make: Callable[[FusedUnit], Kernel]) -> Callable[[FusedUnit], Kernel]:
    if not callable(make):
        raise InputError(f"register_kernel decorates a function that makes a kernel, not {make!r}.")

    def made(unit: FusedUnit) -> Kernel:
        try:
            kernel = make(unit)
        except FxqError:
            raise
        except Exception as error:
            what = f"{name_of(make)} makes no kernel of the captures {', '.join(unit.captures)}"
            raise InputError(f"{what}: {type(error).__name__}: {words_of(error)}") from error
        if not isinstance(kernel, Kernel) or not hasattr(kernel, "name"):
            raise InputError(f"{name_of(make)} makes kernels: fxq.extend.Kernel with a name, not {kernel!r}.")
        told = {*kernel.options, *kernel._buffers}
        lost = [p.name for p in signature(type(kernel)).parameters.values() if p.name not in told and p.kind in _NAMED]
        if lost:
            raise InputError(
                f"{kernel.name}: {', '.join(lost)} of its __init__ is neither one of its `options` nor of its buffers. "
                "Copies and files make a kernel of these, and would lose it."
            )
        return kernel

    return made
