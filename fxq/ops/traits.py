"""How an op takes part in quantization: what passes ask about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fxq.quant.spec import Role, TensorSpec

Kind = Literal["computes", "moves", "float"]
STATE_DYNAMIC = "the range of its state is measured in each step: {}"
"""What is noted of a recurrent layer whose recipe asks for another range, with the reason."""


@dataclass(frozen=True)
class Recurrence:
    """What passes ask about an op whose values are its hidden states, step by step.

    On integers, the product with the hidden state reads that from a symmetric grid, which two options of the op say.

    Attributes:
        states: names of the arguments that are states in front of the first step, the hidden one first; float.
        gates: the names of its gates: equal parts of the rows of its weights, in this order.
        bounded: given the tensors and options of a call, whether its hidden states lie between -1 and 1.
        differs: given the same, whether the op's value may have another range than the hidden state that the product
            reads, so that no observer of the value can tell the range of the state.
        steps: the option that says how many integers there are on either side of zero; 0: the state is float.
        scale: the option that says their scale; None: measured in each step.
        affine: the option that says of a measured grid that it is not symmetric; empty: there is none.
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
        """The options of a call, on a grid."""
        known: dict[str, Any] = {self.scale: scale} if scale is not None else {}
        known |= {} if symmetric else {self.affine: True}
        return {**self.without_grid(options), self.steps: steps, **known}

    def without_grid(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a call whose hidden state is float."""
        return {name: value for name, value in options.items() if name not in (self.steps, self.scale, self.affine)}


@dataclass(frozen=True)
class OpTraits:
    """How an op takes part in quantization.

    Attributes:
        kind: `computes` (has integer kernels on some backend), `moves` (only selects or copies values, so its inputs
            and its output share scale and zero point), `float` (no integer form).
        inputs: names of the arguments that are activations.
        weight: name of the argument that is a weight, if any.
        more_weights: names of further ones, of the same output-channel axis.
        bias: name of the argument that is a bias, if any.
        more_biases: names of further biases, of a recurrent layer; correct-bias leaves them alone, and has no `bias`.
        axis: the output-channel axis of the weight.
        channels: the axis of these channels in the output, counted from its end.
        table: its weight is a table of which whole rows are read.
        heavy: worth an int8 kernel for its own sake; light ops only follow their neighbours.
        pointwise: each output element depends on one input element alone (and, at most, on its channel), so that a
            table with an entry for each integer is an exact kernel. With two inputs: where one of them is a constant.
        layout: `moves` without looking at a value, or only to see which is larger, hence right on integers of any grid
            as it stands.
        view: the output may alias an input.
        narrows: the range of the output is smaller than the input's (relu), so that quantizing after it is better.
        selects: hands on a part of the values only, whose range may be much narrower than that of all of them.
        fills: names of the arguments whose numbers, and constants, stand among the values of the output as they are:
            what a pad or a mask brings in.
        surrounds: name of the option that says how many of these numbers stand around the input, in `F.pad`'s order.
        maximum: the largest value of each window (options kernel_size, padding, dilation and ceil_mode) is the output,
            so that what is below all others in its window is not seen.
        masks: a mask can be applied by it: by adding large numbers, or by choosing between values.
        fused_after: the layers that fxq fuses this function with: "conv", "linear", "excite" (the first layer of
            squeeze-and-excitation) or "gate" (its second). Read when fxq is imported, so an own op leaves it empty.
        recurrence: what a recurrent layer says of its states and gates; None for any other op.
        unless: given all arguments, the reason why this call does not fit `kind`, or None.
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
    selects: bool = False
    fill_constants: tuple[str, ...] = ()
    surrounds: str | None = None
    maximum: bool = False
    masks: bool = False
    fused_after: tuple[str, ...] = ()
    recurrence: Recurrence | None = None
    unless: Callable[[Mapping[str, Any]], str | None] | None = None

    def in_float(self, activation: TensorSpec | None) -> bool:
        """Whether the op computes in float where this spec is asked of activations: always, or because it is None."""
        return activation is None or self.kind == "float"

    def role(self, name: str) -> Role | None:
        """What the argument of that name is to the op; None for one that is read in float whatever happens."""
        if name in self.inputs:
            return "activation"
        if name in (self.weight, *self.more_weights):
            return "weight"
        if name in (self.bias, *self.more_biases):
            return "bias"
        return "state" if self.recurrence is not None and name in self.recurrence.states else None


def computes(*inputs: str, **options: Any) -> OpTraits:
    """The op has integer kernels on some backend."""
    return OpTraits("computes", inputs or ("x",), **options)


def moves(*inputs: str, **options: Any) -> OpTraits:
    """The op selects, copies or clips values: inputs and output share scale and zero point."""
    return OpTraits("moves", inputs or ("x",), **options)


def float_only(*inputs: str, **options: Any) -> OpTraits:
    """The op has no integer form."""
    return OpTraits("float", inputs or ("x",), **options)
