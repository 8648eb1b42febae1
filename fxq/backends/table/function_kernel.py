"""Kernels from plain functions of the user: the integer tensors that a function gets, and its kernel class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fxq.backends.kernel import Kernel, encode, known_kernels, refuse
from fxq.backends.plain.stored_weight import float_input
from fxq.backends.table.kernel_table import FLOAT_INPUT, KernelRequest
from fxq.common.isolation import autocast_on
from fxq.common.source import imported, name_of
from fxq.errors import InputError
from fxq.graph.region import Weight
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.qparams import QParams

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class QTensor:
    """Integer tensor with its grid, as a kernel function receives it: x = (values - zero_point) * scale.

    Attributes:
        values: uint8 (an activation) or int8 (a weight), any shape.
        scale: float32: 0-d per tensor; (..., 1) per row, where the range is dynamic; (C,) along `axis`.
        zero_point: integers of the shape of `scale`; with a dynamic range they may be stored as float32.
        axis: channel axis of `values`; None: scale and zero point broadcast with `values`.
        block: number of values along `axis` that share a scale, as in `QParams.block`; None per tensor and per channel.
    """

    values: Tensor
    scale: Tensor
    zero_point: Tensor
    axis: int | None = None
    block: int | None = None

    def dequantize(self) -> Tensor:
        """Return the real values, float32, in the shape of `values`."""
        real: Tensor = torch.ops.fxq.dequantize.tensor(self.values, self.scale, self.zero_point, self.axis, self.block)
        return real


class FunctionKernel(Kernel):
    """Kernel that calls a function of the user. Each function has its own subclass, see `kernel_of`.

    Args:
        captures: description of each capture of the pattern by name, a dict with one key: `integers` (an activation:
            scale, zero_point, and as `dynamic` the number of inputs that follow its integers, see
            `DynamicGrid.inputs`), `float` (a float activation), `weight` (axis, block), `tensor` (a constant), or
            `value` (a number or None).
        outs: grid of each output as plain data; None for float32.
        settings: options of ops and variants of the pattern that are arguments of the function.
        tensors: weights and constants by name: `values_w`, `scale_w` and `zero_point_w` of a weight w, `tensor_b` of a
            constant b.
    """

    options: ClassVar[tuple[str, ...]] = ("captures", "outs", "settings")
    returns_view: ClassVar[bool] = True  # a function may return its input
    function: ClassVar[Callable[..., Any]]
    pack: ClassVar[Callable[..., Any] | None] = None

    def __init__(
        self,
        captures: Mapping[str, Mapping[str, Any]],
        outs: Sequence[Mapping[str, Any] | None],
        settings: Mapping[str, Any],
        **tensors: Tensor,
    ) -> None:
        super().__init__()
        self.captures, self.outs, self.settings = dict(captures), tuple(outs), dict(settings)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    @classmethod
    def of(cls, request: KernelRequest, settings: Mapping[str, Any]) -> Self:
        """Return the requested kernel. Raises `BackendError` if a capture cannot be passed to a function."""
        captures, tensors = dict[str, dict[str, Any]](), dict[str, Tensor]()
        for name, value in request.captures.items():
            if isinstance(value, (QParams, DynamicGrid)):
                static, dynamic = (value, 0) if isinstance(value, QParams) else (value.unit_grid, value.inputs)
                captures[name] = {"integers": {"scale": static.s, "zero_point": static.z, "dynamic": dynamic}}
            elif value is FLOAT_INPUT:
                captures[name] = {"float": True}
            elif isinstance(value, Weight):
                refuse(cls.name, f"its {name} is stored in float16" if value.stored.is_floating_point() else None)
                grid = value.qparams
                captures[name] = {"weight": {"axis": grid.axis, "block": grid.block}}
                parts = {"values": value.values, "scale": grid.scale, "zero_point": grid.zero_point}
                tensors |= {f"{part}_{name}": tensor for part, tensor in parts.items()}
            elif isinstance(value, Tensor):
                captures[name] = {"tensor": True}
                tensors[f"tensor_{name}"] = value.detach()
            else:
                can_pass = value is None or isinstance(value, (bool, int, float))
                refuse(cls.name, None if can_pass else f"its {name} is neither an activation, a constant nor a number")
                captures[name] = {"value": value}
        return cls(captures, [encode(grid) for grid in request.outs], settings, **tensors)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        return cls(config["captures"], config["outs"], config["settings"], **tensors)

    @classmethod
    def defined_as(cls) -> Any:
        """Return the user's function."""
        return cls.function

    def __reduce__(self) -> Any:
        return _empty, (self.name, name_of(self.function)), self.__getstate__()

    def forward(self, *inputs: Tensor) -> Any:
        """Call the function.

        Args:
            inputs: integers of the activations in the order of the captures, each followed by its dynamic scale and
                zero point; for weight-only layers, float32 activations.

        Raises:
            InputError: the function returns another number of values, or another dtype, than its pattern says.
        """
        call: _Call = self._cached("call", self._call)
        result = self.function(**call.arguments(inputs))
        if len(call.outs) == 1:
            return self._on_grid(result, call.outs[0])
        if not isinstance(result, tuple) or len(result) != len(call.outs):
            raise InputError(f"{self.name} returns {_description(result)}; its pattern has {len(call.outs)} outputs.")
        return tuple(map(self._on_grid, result, call.outs))

    def _call(self) -> _Call:
        fixed, activations = dict[str, Any](self.settings), dict[str, tuple[QTensor, int] | None]()
        for name, capture in self.captures.items():
            tensor = {part: self._buffers.get(f"{part}_{name}") for part in ("values", "scale", "zero_point", "tensor")}
            if "integers" in capture:
                grid = capture["integers"]
                qp = QParams.per_tensor(grid["scale"], grid["zero_point"])
                activations[name] = QTensor(torch.empty(0), qp.scale, qp.zero_point), grid["dynamic"]
            elif "float" in capture:
                activations[name] = None
            elif "weight" in capture:
                del tensor["tensor"]
                fixed[name] = QTensor(**tensor, **capture["weight"])  # type: ignore[arg-type]
            else:
                fixed[name] = tensor["tensor"] if "tensor" in capture else capture["value"]
        if self.pack is not None:
            fixed["packed"] = self.pack(**{name: fixed[name] for name in signature(self.pack).parameters})
        outs = tuple(
            None if grid is None else QParams.per_tensor(**grid)  # activations are uint8, per tensor
            for grid in self.outs
        )
        return _Call({**fixed, "out": outs[0] if len(outs) == 1 else outs}, activations, outs)

    def _on_grid(self, value: Any, out: QParams | None) -> Tensor:
        """Return a result of the function on the grid of the output: floats are quantized, unless `out` is None."""
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.float() if autocast_on() else value
            if value.dtype == torch.float32:
                return value if out is None else out.quantize(value)
        elif isinstance(value, Tensor) and out is not None and value.dtype == out.dtype:
            return value
        expected = "float32, as `out` is None" if out is None else "uint8 on the grid `out`, or float32"
        raise InputError(f"the kernel {self.name} returns {_description(value)}; it must return {expected}.")


@dataclass(frozen=True)
class _Call:
    """Arguments of a function.

    Attributes:
        fixed: arguments that are the same in every call, by name.
        activations: grid of each activation, and its number of dynamic inputs, by name; None: it is in float.
        outs: grid of each output; None for float32.
    """

    fixed: Mapping[str, Any]
    activations: Mapping[str, tuple[QTensor, int] | None]
    outs: tuple[QParams | None, ...]

    def arguments(self, inputs: Sequence[Tensor]) -> dict[str, Any]:
        arguments, remaining = dict(self.fixed), iter(inputs)
        for name, activation in self.activations.items():
            if activation is None:
                arguments[name] = float_input(next(remaining))
                continue
            (grid, dynamic), values = activation, next(remaining)
            scale = next(remaining) if dynamic else grid.scale
            zero_point = next(remaining) if dynamic > 1 else grid.zero_point
            arguments[name] = QTensor(values, scale, zero_point)
        return arguments


def kernel_of(function: Callable[..., Any], pack: Callable[..., Any] | None) -> type[FunctionKernel]:
    """Return a kernel class that calls a function. Its name is the function's qualified name with its module."""
    path = f"{function.__module__}.{function.__qualname__}"
    members = {
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
        "__doc__": function.__doc__,
        "name": ".".join(part for part in path.split(".") if part != "<locals>"),
        "function": staticmethod(function),
        "pack": None if pack is None else staticmethod(pack),
    }
    return type(function.__name__, (FunctionKernel,), members)


def _empty(name: str, path: str) -> FunctionKernel:
    """Return a kernel without state, for `copy` and `pickle`. Imports the module of the function, as a pickle does."""
    if name not in known_kernels():
        imported(path)
    kind: Any = known_kernels()[name]
    kernel: FunctionKernel = kind.__new__(kind)
    return kernel


def _description(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
