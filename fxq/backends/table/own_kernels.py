"""Decorators that add kernels of the user's own, for a fusion or an op, to a backend with a kernel table."""

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
from fxq.backends.table.kernel_table import KernelRequest, KernelRow, weight_only_key
from fxq.backends.table.lowering import RowBackend
from fxq.common.source import digest_of, name_of
from fxq.errors import BackendError, FxqError, InputError, unknown, words_of
from fxq.ops import OPS
from fxq.rewriting.pattern import FUSIONS, Family

_MAKERS: dict[str, Callable[..., Any]] = {}
"""The user's function that makes or is a kernel, by backend and pattern."""
Maker = TypeVar("Maker", bound=Callable[[KernelRequest], Kernel])


def register_kernel(backend: str, fusion: Family | str, *, emits_float: bool = True) -> Callable[[Maker], Maker]:
    """Decorate a function that makes the kernel of a fusion or op on a backend.

    The kernel takes the integers of the captured activations, in the order of the captures. It returns the value of the
    fusion on the grid `KernelRequest.outs[0]`; if the fusion has several outputs, a tuple, each on its grid.
    `verify-lowering` compares it with the float meaning of the fusion, and its price is measured. Name the function in
    recipes that you save, see `Recipe.with_extensions`.

    Args:
        backend: name of a backend with a kernel table: "x86", "fbgemm", "qnnpack", or the import path of one of your
            own, see `fxq.backends.table.lowering.RowBackend`.
        fusion: result of `fxq.fusion`, or the name of an op.
        emits_float: whether the kernel can emit float32. If not, its result is rounded to a grid wherever it is read.

    Returns:
        Decorator of a function `(KernelRequest) -> Kernel`, which it returns unchanged. The function may raise
        `BackendError` with the reason why it cannot make the kernel; the unit then runs as if there were none. A
        function that is defined again replaces the earlier one.

    Raises:
        InputError: `fusion` is neither a fusion nor an op, or the function does not return a kernel.
        BackendError: the backend has no kernel table, or another function makes the kernel of this fusion.

    Example:
        A linear layer with a gate, which x86 has no kernel for. For brevity, this kernel computes in float.

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
        ... def make(request):
        ...     w, b, s = (request.captures[name] for name in "wbs")
        ...     return LinearGate(w.values, w.qparams.scale, b, request.captures["x"], request.out, s)
    """
    patterns, rows = _patterns("register_kernel", fusion), _registered(backend)

    def register(make: Maker) -> Maker:
        row = KernelRow(_checked(make), emits_float=emits_float, code=digest_of(make))
        _register(backend, rows, make, {pattern: row for pattern in patterns})
        return make

    return register


Run = TypeVar("Run", bound=Callable[..., Any])


def kernel(
    backend: str, pattern: Family | str, *, pack: Callable[..., Any] | None = None, weight_only: bool = False
) -> Callable[[Run], Run]:
    """Decorate a function that is the kernel of a fusion or op on a backend.

    The function gets integer tensors with their grids and returns integers or floats. fxq derives the rest: weights and
    constants become buffers of a module, which is copied, moved and saved with the model, and `verify-lowering`
    compares its result with the float meaning of the pattern, as for every other kernel. A model's file names the
    function by its import path: import its module before `fxq.load`.

    Args:
        backend: name of a backend with a kernel table: "x86", "fbgemm", "qnnpack", or the import path of one of your
            own.
        pattern: result of `fxq.fusion`, or the name of an op, such as "linear".
        pack: function of some of the constants, by name. Its result is cached until one of them is edited, and is
            passed as `packed`. It is not copied or saved.
        weight_only: whether the kernel is for weight-only layers: activations are float32 tensors, and so is the
            result. `pattern` must be an op, since these layers are not fused. Weights of few bits are
            not packed, so that a value takes a byte.

    Returns:
        Decorator of a function, which it returns unchanged. The function's parameters are the captures of the pattern
        (of an op: its tensors), by name:

        - an activation is a `QTensor` of uint8 values, static or dynamic;
        - a weight is a `QTensor` of int8 values with a scale per channel or per tensor;
        - another constant is its float32 tensor, a number is itself, and an omitted input is None.

        Keyword-only parameters are `out`, the grid of the result, a `QParams`, or None for float32 (of several outputs,
        a tuple); `packed`; options of the ops, by name; and the variants of the fusion, by name. If an option is not a
        parameter, the kernel runs only units where it has its default or the value in the pattern.

        The function returns integers of `out.dtype` on the grid `out`, or float32, which is quantized to `out` unless
        that is None; of several outputs a tuple. A function that is defined again replaces the earlier one.

    Raises:
        InputError: `pattern` is neither a fusion nor an op, or is a fusion with `weight_only`; a parameter is not in
            the pattern, or a capture is not a parameter; at run time, the function returns another dtype.
        BackendError: the backend is unknown or has no kernel table, or another function runs this pattern there.

    Example:
        >>> @fxq.fusion(everywhere=False)
        ... def tanh_of_linear(op, x, w, b):
        ...     return op.tanh(op.linear(x, w, b))
        >>> @fxq.extend.kernel("x86", tanh_of_linear)
        ... def run(x, w, b, *, out):
        ...     return torch.tanh(nn.functional.linear(x.dequantize(), w.dequantize(), b))
    """
    patterns, rows = _patterns("kernel", pattern), _registered(backend)
    if weight_only:
        patterns = [replace(p, name=weight_only_key(p.name), key=weight_only_key(p.name)) for p in patterns]
        if not isinstance(pattern, str):
            raise InputError("kernel takes the name of an op if weight_only=True: weight-only layers are not fused.")

    def register(function: Run) -> Run:
        if not inspect.isfunction(function):
            raise InputError(f"fxq.extend.kernel decorates a plain function, not {function!r}.")
        option_names = [check_signature(function, pack, pattern) for pattern in patterns]
        kind, code = kernel_of(function, pack), digest_of(function)
        new_rows = {}
        for pattern, options in zip(patterns, option_names, strict=True):
            row = KernelRow(partial(_make, kind, pattern, options), partial(pattern.refused, options), code=code)
            new_rows[pattern] = row if weight_only else replace(row, dynamic=row)
        _register(backend, rows, function, new_rows)
        return function

    return register


def _make(
    kind: type[FunctionKernel], pattern: KernelPattern, options: Collection[str], request: KernelRequest
) -> Kernel:
    refuse(kind.name, pattern.refused(options, request))
    # the captures of an op lack omitted inputs
    captures = {name: request.captures.get(name) for name in pattern.captures}
    return kind.of(replace(request, captures=captures), pattern.settings(options, request))


def _patterns(caller: str, fusion: Any) -> list[KernelPattern]:
    if isinstance(fusion, str) and fusion in OPS:
        return [KernelPattern.of_op(OPS[fusion])]
    if isinstance(fusion, Family) and all(rule.replacement is None for rule in fusion):
        return [KernelPattern.of_rule(rule) for rule in fusion]
    if isinstance(fusion, str) and fusion not in FUSIONS:
        raise InputError(
            f"{caller} takes a fusion or the name of an op: {unknown('op', fusion, (op.name for op in OPS))}"
        )
    raise InputError(f"{caller} takes the result of fxq.fusion or the name of an op, not {fusion!r}.")


def _register(
    backend: str, rows: dict[str, KernelRow], code: Callable[..., Any], new_rows: Mapping[KernelPattern, KernelRow]
) -> None:
    """Add rows to a table. Raises `BackendError` if another function makes the kernel of a pattern."""
    for pattern, row in new_rows.items():
        maker = _MAKERS.setdefault(f"{backend} {pattern.name}", code)
        if name_of(maker) != name_of(code):
            raise BackendError(f"the kernel of {pattern.name!r} on {backend} is made by {name_of(maker)} already.")
        _MAKERS[f"{backend} {pattern.name}"] = code
        rows[pattern.key] = row


def _registered(backend: str) -> dict[str, KernelRow]:
    """Rows of the user's own kernels on a backend."""
    kind = backend_type(backend)
    if not issubclass(kind, RowBackend):
        raise BackendError(
            f"backend {backend!r} has no table of kernels. Override lower() of a backend of your own instead."
        )
    return kind.registered


def makes_kernels(value: Any) -> bool:
    """Whether `value` is a function that `register_kernel` or `kernel` has decorated."""
    return any(value is make for make in _MAKERS.values())


_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def _checked(make: Callable[[KernelRequest], Kernel]) -> Callable[[KernelRequest], Kernel]:
    if not callable(make):
        raise InputError(f"register_kernel decorates a function that makes a kernel, not {make!r}.")

    def make_checked(request: KernelRequest) -> Kernel:
        try:
            kernel = make(request)
        except FxqError:
            raise
        except Exception as error:
            failure = f"{name_of(make)} fails for the captures {', '.join(request.captures)}"
            raise InputError(f"{failure}: {type(error).__name__}: {words_of(error)}") from error
        if not isinstance(kernel, Kernel) or not hasattr(kernel, "name"):
            raise InputError(f"{name_of(make)} must return a fxq.extend.Kernel with a name, not {kernel!r}.")
        stored = {*kernel.options, *kernel._buffers}
        parameters = signature(type(kernel)).parameters.values()
        lost = [p.name for p in parameters if p.name not in stored and p.kind in _NAMED]
        if lost:
            raise InputError(
                f"{kernel.name}: {', '.join(lost)} of its __init__ is neither an option nor a buffer. Copies and files "
                "make the kernel from its `options` and buffers, and would lose the value."
            )
        return kernel

    return make_checked
