"""Traits of ops: how an op takes part in quantization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fxq.quant.spec import Role, TensorSpec

Kind = Literal["computes", "moves", "float"]
STATE_DYNAMIC = "its state has a dynamic range, computed in each step: {}"
"""Note for a recurrent layer whose state has a dynamic range although the recipe asks for another, with the reason."""


@dataclass(frozen=True)
class Recurrence:
    """Traits of a recurrent layer, whose value holds its hidden states, step by step.

    On integers, the product with the hidden state reads it from a grid, which options of the op define.

    Attributes:
        states: names of the arguments that are initial states, the hidden state first; float.
        gates: names of its gates, in the order of their equal parts of the weights' rows.
        bounded: whether the hidden states of a call are between -1 and 1, from its tensors and options.
        differs: whether the value of a call may have another range than its hidden state, so that an observer of the
            value does not see the range of the state; from the call's tensors and options.
        steps: name of the option with the number of integers on either side of zero; 0 for a float state.
        scale: name of the option with the scale of the state; None for a dynamic scale.
        affine: name of the option that makes a dynamic grid asymmetric; empty if there is no such option.
    """

    states: tuple[str, ...]
    gates: tuple[str, ...]
    bounded: Callable[[Mapping[str, Any], Mapping[str, Any]], bool]
    differs: Callable[[Mapping[str, Any], Mapping[str, Any]], bool]
    steps: str = "state_qmax"
    scale: str = "state_scale"
    affine: str = ""

    def with_grid(
        self, options: Mapping[str, Any], steps: int, scale: float | None, symmetric: bool = True
    ) -> dict[str, Any]:
        """Options of a call with its hidden state on this grid."""
        grid: dict[str, Any] = {self.scale: scale} if scale is not None else {}
        grid |= {} if symmetric else {self.affine: True}
        return {**self.without_grid(options), self.steps: steps, **grid}

    def without_grid(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options of a call with its hidden state in float."""
        return {name: value for name, value in options.items() if name not in (self.steps, self.scale, self.affine)}


@dataclass(frozen=True)
class OpTraits:
    """Traits of an op: how it takes part in quantization.

    Attributes:
        kind: `computes` (has integer kernels on some backend), `moves` (only selects, copies or clips values, so that
            inputs and output share scale and zero point) or `float` (no integer form).
        inputs: names of the arguments that are activations.
        weight: name of the argument that is a weight, if any.
        more_weights: names of further weights, with the same output-channel axis.
        bias: name of the argument that is a bias, if any.
        more_biases: names of the biases of a recurrent layer, in the order of its weights; it has no `bias`.
        axis: output-channel axis of the weight.
        channels: axis of these channels in the output, counted from the end (negative).
        table: whether the weight is a table of which whole rows are read.
        heavy: whether the op is worth an int8 kernel by itself; other ops follow their neighbours.
        pointwise: whether each output element depends on one input element and, at most, its channel, so that a lookup
            table is an exact kernel. For two inputs: if one of them is a constant.
        layout: for `moves`: whether the op only copies or compares values, so that it is correct on integers of any
            grid.
        view: whether the output may alias an input.
        narrows: whether the output has a smaller range than the input (relu), so that quantizing after it is better.
        slopes: for max(0, x) + slope * min(0, x), name of the argument or option with the slopes: one for all values,
            or one for each channel.
        selects: whether the output is a part of the values, whose range may be much smaller.
        fill_constants: names of the arguments with fill constants: numbers that a pad or a mask writes into the output.
        surrounds: name of the option with the widths of the padding, in the order of `F.pad`.
        maximum: whether the output is the maximum of each window (options kernel_size, padding, dilation, ceil_mode),
            so that smaller values in a window do not matter.
        masks: whether the op can apply a mask, by adding large numbers or by choosing between values.
        fused_after: layers that fxq fuses this activation function with: "conv", "linear", "excite" (the first layer of
            squeeze-and-excitation) or "gate" (its second). Read when fxq is imported, so leave it empty for your own
            ops.
        recurrence: traits of a recurrent layer; None for other ops.
        grows: whether the result is the first input with further entries, in memory that results of successive calls
            share. PyTorch runs such an op on every backend, and its strides do not follow from those of its inputs.
        unless: function of the options of a call; returns the reason why `kind` does not hold for it, or None.
    """

    kind: Kind
    inputs: tuple[str, ...] = ("x",)
    weight: str | None = None
    more_weights: tuple[str, ...] = ()
    bias: str | None = None
    more_biases: tuple[str, ...] = ()
    axis: int | None = None
    channels: int | None = None
    table: bool = False
    heavy: bool = False
    pointwise: bool = False
    layout: bool = False
    view: bool = False
    narrows: bool = False
    slopes: str | None = None
    selects: bool = False
    fill_constants: tuple[str, ...] = ()
    surrounds: str | None = None
    maximum: bool = False
    masks: bool = False
    fused_after: tuple[str, ...] = ()
    recurrence: Recurrence | None = None
    grows: bool = False
    unless: Callable[[Mapping[str, Any]], str | None] | None = None

    def in_float(self, activation: TensorSpec | None) -> bool:
        """Whether the op computes in float if this is the spec of activations; a spec of None asks for float."""
        return activation is None or self.kind == "float"

    def role(self, name: str) -> Role | None:
        """Role of an argument; None for one that is always read in float."""
        if name in self.inputs:
            return "activation"
        if name in (self.weight, *self.more_weights):
            return "weight"
        if name in (self.bias, *self.more_biases):
            return "bias"
        return "state" if self.recurrence is not None and name in self.recurrence.states else None


def computes(*inputs: str, **options: Any) -> OpTraits:
    """Traits of an op with integer kernels on some backend."""
    return OpTraits("computes", inputs or ("x",), **options)


def moves(*inputs: str, **options: Any) -> OpTraits:
    """Traits of an op that selects, copies or clips values: inputs and output share scale and zero point."""
    return OpTraits("moves", inputs or ("x",), **options)


def float_only(*inputs: str, **options: Any) -> OpTraits:
    """Traits of an op without an integer form."""
    return OpTraits("float", inputs or ("x",), **options)
