"""Kernels of the user's own: for a fusion, on a backend with a table of kernels, by one public call."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, TypeVar

from fxq.backends.by_name import backend_type
from fxq.backends.kernel import Kernel
from fxq.backends.kernel_table import FusedUnit, KernelRow, rule_key
from fxq.backends.lowering import RowBackend
from fxq.common.source import digest_of, name_of
from fxq.errors import BackendError, FxqError, InputError, words_of
from fxq.rewriting.pattern import Family

_MAKERS: dict[str, Callable[..., Any]] = {}
"""Who makes a kernel, by backend and fusion."""


Maker = TypeVar("Maker", bound=Callable[[FusedUnit], Kernel])


def register_kernel(backend: str, fusion: Family, *, emits_float: bool = True) -> Callable[[Maker], Maker]:
    """Decorator: on this backend, a unit of the fusion runs in the kernel that the function makes.

    The kernel takes the integers of the captured activations, in the order of the captures, and returns what the fusion
    does: of several outputs, a tuple, each on its grid of `FusedUnit.outs`. verify-lowering runs it against the
    fusion's meaning, and its price is measured. A recipe that is to be saved names it: `Recipe.with_extensions`.

    Args:
        backend: name of a backend with a table of kernels: "x86", "fbgemm", "qnnpack", or the import path of one
            of your own, see `fxq.backends.lowering.RowBackend`.
        fusion: what `fxq.fusion` made.
        emits_float: whether the kernel can emit float32; if not, its result is rounded to a grid wherever it is read.

    Returns:
        The decorator of a function `(FusedUnit) -> Kernel`, which it returns as it is. It may raise `BackendError` with
        the reason why there is no such kernel; the unit then runs as if there were none. A function that is defined
        anew replaces what it was.

    Raises:
        InputError: `fusion` is no fusion; the function returns no kernel.
        BackendError: the backend has no table of kernels, or another function makes this fusion's kernel.

    Example:
        A layer with a gate, which x86 does not take along. For shortness, the kernel computes in float.

        >>> @fxq.fusion(everywhere=False)
        ... def linear_gate(op, x, w, b, s):
        ...     return op.mul(op.sigmoid(op.linear(x, w, b)), s)
        >>> class LinearGate(fxq.Kernel):
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
        >>> @fxq.register_kernel("x86", linear_gate)
        ... def make(unit):
        ...     w, b, s = (unit.captures[name] for name in "wbs")
        ...     return LinearGate(w.values, w.qparams.scale, b, unit.captures["x"], unit.out, s)
    """
    if not isinstance(fusion, Family) or any(r.replacement is not None for r in fusion):
        raise InputError(f"register_kernel takes what fxq.fusion made, not {fusion!r}.")
    rows = _registered(backend)

    def register(make: Maker) -> Maker:
        row = KernelRow(_checked(make), emits_float=emits_float, code=digest_of(make))
        for rule in fusion:
            known = _MAKERS.setdefault(f"{backend} {rule.name}", make)
            if name_of(known) != name_of(make):
                raise BackendError(f"the kernel of {rule.name!r} on {backend} is made by {name_of(known)} already.")
            _MAKERS[f"{backend} {rule.name}"] = make
            rows[rule_key(rule.name, rule.captures)] = row
        return make

    return register


def _registered(backend: str) -> dict[str, KernelRow]:
    """The user's own kernels beside the table of a backend."""
    kind = backend_type(backend)
    if not issubclass(kind, RowBackend):
        raise BackendError(
            f"backend {backend!r} has no table of kernels: one of your own runs units as its lower says."
        )
    return kind.registered


def makes_kernels(value: Any) -> bool:
    """Whether this is a function that `register_kernel` was given."""
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
            raise InputError(f"{name_of(make)} makes kernels: fxq.Kernel with a name, not {kernel!r}.")
        told = {*kernel.options, *kernel._buffers}
        lost = [p.name for p in signature(type(kernel)).parameters.values() if p.name not in told and p.kind in _NAMED]
        if lost:
            raise InputError(
                f"{kernel.name}: {', '.join(lost)} of its __init__ is neither one of its `options` nor of its buffers. "
                "Copies and files make a kernel of these, and would lose it."
            )
        return kernel

    return made
