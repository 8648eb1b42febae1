"""canonicalize: one spelling per op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from fxq.edit import DATA
from fxq.errors import InputError
from fxq.graph import argument, constant, info, op_of, options_of
from fxq.ops import OPS, conv_padding
from fxq.optable import Arguments, Op, Spelling
from fxq.passbase import Pass, Stage
from fxq.pattern import rewrite
from fxq.rewrite import Rewriter
from fxq.stages import where


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Rewrite every spelling of an op into its canonical call, with weights as inputs.

    Before: conv1(x), x.relu(), F.relu(x, inplace=True)    After: conv2d(x, w, b, stride=(2, 2)), relu(x), relu(x)
    Also: removes identities and dropout, and turns 'same' and non-zero padding of a convolution into a pad of its own.
    Keeps: the output, exactly. What the op table does not know stays as it is, with a note.
    Refuses: weights and statistics that are not finite, but in layers that the recipe leaves in float.
    """

    name: ClassVar[str] = "canonicalize"
    needs: ClassVar[Stage] = Stage.TRACED
    gives: ClassVar[Stage] = Stage.CANONICAL

    def run(self, rewriter: Rewriter) -> None:
        """Rewrite node by node, check the recipe's selectors against what is there, then apply the rules."""
        for node in rewriter.nodes():
            if node.op == "call_module":
                _module(rewriter, node)
            elif node.op in ("call_function", "call_method"):
                _call(rewriter, node)
        called = [n for n in rewriter.nodes() if n.op not in ("placeholder", "output", "get_attr")]
        rewriter.context.check_selectors([(info(n).path, op.name if (op := op_of(n)) else "") for n in called])
        rewriter.apply(drop_identity, drop_dropout, same_padding, padding_mode)
        rewriter.erase_unused()
        for node in rewriter.nodes():
            _check_weights(rewriter, node)


def _check_weights(rewriter: Rewriter, node: fx.Node) -> None:
    """Refuse weights and statistics that are not finite, while they still go by the names that the user knows."""
    op, path = op_of(node), info(node).path
    if op is None or rewriter.context.config_for(path, op.name)[0].is_float:
        return
    for name in (n for n in op.tensors if n in _WEIGHTS and n not in op.quant.inputs):
        read = argument(node, name)
        tensor = constant(rewriter.gm, read)
        if tensor is None:
            continue
        known = f"{path}.{name}" if str(read.target).startswith(f"{DATA}.") else read.target  # parametrized
        wrong = "NaN or Inf" if not bool(torch.isfinite(tensor).all()) else ""
        if name == "running_var" and not wrong and float(tensor.min()) + options_of(node)["eps"] <= 0:
            wrong = "a negative variance"
        if wrong:
            raise InputError(
                f"{where(rewriter.gm, node)}: {known} holds {wrong}, which no integer stands for. "
                "Train it again, or set the layer to float in the recipe."
            )


_WEIGHTS = {"weight", "bias", "running_mean", "running_var"}


def _call(rewriter: Rewriter, node: fx.Node) -> None:
    found = OPS.of_call(node.target)
    if found is None or op_of(node) is not None or not info(node).is_tensor:
        return
    op, spelling = found
    _rewrite(rewriter, node, op, op.bind(spelling, node.args, node.kwargs))


def _module(rewriter: Rewriter, node: fx.Node) -> None:
    module = rewriter.gm.get_submodule(str(node.target))
    found = OPS.of_module(module)
    if found is None or info(node).note:  # a leaf because the recipe says so stays one
        return
    op, spelling = found
    hooks = len(module._forward_hooks) + len(module._forward_pre_hooks) > 0
    bound = "has forward hooks" if hooks else _bind_module(rewriter, node, module, op, spelling)
    _rewrite(rewriter, node, op, bound)


def _bind_module(rewriter: Rewriter, node: fx.Node, module: nn.Module, op: Op, spelling: Spelling) -> Arguments | str:
    """The op's arguments, with the module's tensors as `get_attr` nodes. Parametrized weights are evaluated."""
    bound = op.bind_module(spelling, module, node.args, node.kwargs)
    if isinstance(bound, str):
        return bound
    for key, value in bound.items():
        if isinstance(value, Tensor):
            path = f"{node.target}.{key}"
            if parametrize.is_parametrized(module, key):
                bound[key] = rewriter.constant(value.detach().clone(), path, before=node, like=node)
            else:
                bound[key] = rewriter.read(path, value, before=node, like=node)
    return bound


def _rewrite(rewriter: Rewriter, node: fx.Node, op: Op, bound: Arguments | str) -> None:
    if not isinstance(bound, str):
        tensors = [v for name in op.quant.inputs for v in _values(bound.get(name))]
        if not any(isinstance(v, fx.Node) and info(v).is_tensor for v in tensors):
            bound = "is called on no tensor"
    if isinstance(bound, str):
        rewriter.describe(node, note=f"stays as it is: {op.name} {bound}")
        return
    args, kwargs = op.canonical(bound)
    with rewriter.attributed(op.name, op.target):
        rewriter.update(node, op.target, args, kwargs, op="call_function")


def _values(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


@rewrite
def drop_identity(op: Any, x: Any) -> Any:
    """An identity is its input."""
    return op.identity(x)


@drop_identity.becomes
def _identity(op: Any, m: Any) -> Any:
    return m.x


@rewrite
def drop_dropout(op: Any, x: Any) -> Any:
    """Dropout outside training is its input."""
    return op.dropout(x, training=False)


@drop_dropout.becomes
def _dropout(op: Any, m: Any) -> Any:
    return m.x


@rewrite("same_padding_{conv}", conv=("conv1d", "conv2d"))
def same_padding(op: Any, x: Any, w: Any, b: Any, *, conv: str) -> Any:
    """padding='same' of a convolution."""
    return op[conv](x, w, b, padding="same", padding_mode="zeros")


@same_padding.becomes
def _same(op: Any, m: Any) -> Any:
    """Padding as numbers; where it is one more on the right, as a pad of its own."""
    conv = m.rule.variant["conv"]
    options = m.options(conv)
    pad = conv_padding(m.w.shape, "same", options["dilation"])
    left, right = pad[0::2], pad[1::2]
    if left == right:
        return op[conv](m.x, m.w, m.b, **{**options, "padding": tuple(reversed(left))})
    return op[conv](op.pad(m.x, pad=pad), m.w, m.b, **{**options, "padding": (0,) * len(left)})


@rewrite("padding_mode_{conv}_{mode}", conv=("conv1d", "conv2d"), mode=("circular", "reflect", "replicate"))
def padding_mode(op: Any, x: Any, w: Any, b: Any, *, conv: str, mode: str) -> Any:
    """A convolution that pads other than with zeros."""
    return op[conv](x, w, b, padding_mode=mode)


@padding_mode.becomes
def _mode(op: Any, m: Any) -> Any:
    """The padding as a pad of its own."""
    conv, mode = m.rule.variant["conv"], m.rule.variant["mode"]
    options = m.options(conv)
    pad = conv_padding(m.w.shape, options["padding"], options["dilation"])
    plain = {**options, "padding": (0,) * (len(pad) // 2), "padding_mode": "zeros"}
    return op[conv](op.pad(m.x, pad=pad, mode=mode), m.w, m.b, **plain)
