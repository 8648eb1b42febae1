"""canonicalize: one spelling per op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from fxq.errors import InputError
from fxq.graph.guards import own_copy
from fxq.graph.info import Decision, info
from fxq.graph.place import where
from fxq.graph.query import (
    argument,
    constant,
    fills_like,
    flat_nodes,
    is_op,
    op_of,
    options_of,
    reads_only_metadata,
    taken_part,
)
from fxq.ops import OPS, conv_padding
from fxq.ops.table import Arguments, Instead, Op, Pick, Spelling
from fxq.patterns.decompositions.written_out import WRITTEN_OUT
from fxq.pipeline.float_ops import keep_original
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.computed import parametrized_constant, record_trainable
from fxq.rewriting.constant_folding import fold_constant
from fxq.rewriting.editor import DATA
from fxq.rewriting.pattern import rewrite
from fxq.rewriting.rewriter import Rewriter
from fxq.tracing.weight_norm import reparametrized


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Rewrite every spelling of an op into its canonical call, with weights as inputs.

    Before: conv1(x), x.relu(), F.relu(x, inplace=True)    After: conv2d(x, w, b, stride=(2, 2)), relu(x), relu(x)
    Also: removes identities and dropout; turns 'same' and non-zero padding of a convolution into a pad of its own, each
    value taken from a tuple (chunk, split) into an op of its own, functions written out into the function, and what
    depends on nothing but weights into its value.
    Keeps: the output, to 1e-6. What the op table does not know stays as it is, with the reason.
    Refuses: weights and statistics that are not finite, but in layers that the recipe leaves in float.
    """

    name: ClassVar[str] = "canonicalize"
    needs: ClassVar[Stage] = Stage.TRACED
    gives: ClassVar[Stage] = Stage.CANONICAL

    def run(self, rewriter: Rewriter) -> None:
        """Rewrite node by node, then apply the rules."""
        for node in rewriter.nodes():
            if node._erased:  # a part of a tuple that nobody reads
                continue
            if node.op == "call_module":
                _module(rewriter, node)
            elif node.op in ("call_function", "call_method") and not _fix_dtype(rewriter, node):
                _call(rewriter, node)
        called = [n for n in rewriter.nodes() if n.op not in ("placeholder", "output", "get_attr")]
        written = [(info(n).path, op.name if (op := op_of(n)) else "") for n in called]
        for node in rewriter.nodes():
            fold_constant(rewriter, node)
        constants = {n for n in called if n._erased}
        rewriter.context.dropouts = list(_dropouts(rewriter))
        rewriter.apply(drop_identity, drop_dropout, same_padding, padding_mode, merge_slices, *WRITTEN_OUT)
        made = [(info(n).path, op.name) for n in rewriter.nodes() if (op := op_of(n)) is not None]
        rewriter.context.written = written + made
        rewriter.erase_unused()
        for node in rewriter.nodes():
            _check_weights(rewriter, node)
        keep_original(rewriter, called, constants)


def _dropouts(rewriter: Rewriter) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The module path of every dropout, and the origins of the value that it drops from."""
    for node in rewriter.nodes("dropout"):
        value: Any = node.args[0]
        while is_op(value, "dropout", "identity"):
            value = value.args[0]
        yield info(node).path, info(value).origins or (value.name,)


def _check_weights(rewriter: Rewriter, node: fx.Node) -> None:
    """Refuse weights and statistics that are not finite, while they still go by the names that the user knows."""
    op, path = op_of(node), info(node).path
    if op is None or rewriter.context.config_for(path, op.name)[0].is_float:
        return
    for name in (n for n in op.tensors if n in _WEIGHTS and n not in op.traits.inputs):
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
    if found is None or op_of(node) is not None or info(node).kept:
        return
    op, spelling = found
    if info(node).is_tensor:
        _rewrite(rewriter, node, op, op.bind(spelling, node.args, node.kwargs))
    elif spelling.pick is not None and not reads_only_metadata(node):
        _rewrite_picks(rewriter, node, op, spelling, spelling.pick)


def _fix_dtype(rewriter: Rewriter, node: fx.Node) -> bool:
    """Say the dtype that a node reads from a value: it is another one where the value becomes integers.

    Whether the node is gone: x.dtype is what it is.
    """
    x = node.args[0] if node.args else None
    if not isinstance(x, fx.Node) or not info(x).is_tensor:
        return False
    if fills_like(node) and node.kwargs.get("dtype") is None:
        rewriter.update(node, kwargs={**node.kwargs, "dtype": info(x).dtype})
    if node.target is not getattr or node.args[1] != "dtype":
        return False
    rewriter.replace(node, info(x).dtype)
    return True


def _module(rewriter: Rewriter, node: fx.Node) -> None:
    module = rewriter.gm.get_submodule(str(node.target))
    found = OPS.of_module(module)
    if found is None or info(node).kept:  # a leaf because the recipe says so stays one
        return
    op, spelling = found
    norms = reparametrized(module)
    hooks = len(module._forward_hooks) + len(module._forward_pre_hooks) > len(norms)
    bound = "has forward hooks" if hooks else _bind_module(rewriter, node, module, op, spelling)
    _rewrite(rewriter, node, op, bound)


def _bind_module(
    rewriter: Rewriter, node: fx.Node, module: nn.Module, op: Op, spelling: Spelling
) -> Arguments | Instead | str:
    """The op's arguments, with the module's tensors as `get_attr` nodes. Parametrized weights are evaluated."""
    norms = reparametrized(module)
    bound = op.bind_module(spelling, module, node.args, node.kwargs)
    if not isinstance(bound, dict):
        return bound
    for key, value in bound.items():
        if isinstance(value, Tensor):
            path = f"{node.target}.{key}"
            if key in norms:
                value = norms[key]
            if key in norms or parametrize.is_parametrized(module, key):
                made = rewriter.constant(value.detach().clone(), path, before=node, like=node)
                record_trainable(rewriter, made, parametrized_constant(module, str(node.target), key))
                bound[key] = made
            else:
                bound[key] = rewriter.read(path, value, before=node, like=node)
    return bound


def _rewrite(rewriter: Rewriter, node: fx.Node, op: Op, bound: Arguments | Instead | str) -> None:
    """Make a node the canonical call of its op, or say why it stays as it is."""
    chosen, arguments = _settled(op, bound)
    if isinstance(arguments, str):
        _keep(rewriter, node, op, arguments)
        return
    args, kwargs = chosen.canonical(arguments)
    with rewriter.attributed(chosen.name, chosen.target):
        rewriter.update(node, chosen.target, args, kwargs, op="call_function")
        for copy in [n for n in node.all_input_nodes if info(node).changes and n.target is own_copy]:
            # the copy was for the module to overwrite; its op does not write
            node.replace_input_with(copy, copy.all_input_nodes[0])
            if not copy.users:  # a reader whose value is unused would keep the value before it from being fused
                rewriter.erase(copy)


def _keep(rewriter: Rewriter, node: fx.Node, op: Op, why: str) -> None:
    """Decide that a call stays a leaf. If it overwrites its input, it gets a private copy."""
    x: Any = node.args[0] if node.args else None
    if info(node).changes and isinstance(x, fx.Node) and x.target is not own_copy:
        copy = rewriter.node("call_function", own_copy, (x,), like=x, before=node, typed=(info(x).shape, info(x).dtype))
        rewriter.describe(copy, origins=(), memory=info(node).memory)
        rewriter.update(node, args=(copy, *node.args[1:]))
    text = f"stays as it is: {op.name} {why}"
    rewriter.describe(node, kept=Decision("float", "unsupported", text, decided_by=rewriter.name))


def _settled(op: Op, bound: Arguments | Instead | str) -> tuple[Op, Arguments | str]:
    """The op that a call is, with its arguments; or why it is none."""
    if isinstance(bound, Instead):
        op = OPS[bound.op]
        bound = op.fill(dict(bound.arguments))
    if isinstance(bound, str):
        return op, bound
    if not any(_is_tensor(v) for name in op.traits.inputs for v in flat_nodes(bound.get(name))):
        return op, "is called on no tensor"
    given = next((k for k in op.options for v in flat_nodes(bound[k]) if _is_tensor(v)), None)
    return op, bound if given is None else f"is given a tensor for its option {given}"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and info(value).is_tensor


def _rewrite_picks(rewriter: Rewriter, node: fx.Node, op: Op, spelling: Spelling, pick: Pick) -> None:
    """Make each value that is taken from a call with several results an op of its own, so that no tuple is left."""
    for user in [u for u in node.users if taken_part(u, node) is not None and not u.users]:
        rewriter.erase(user)  # an exported program takes every part, also what nobody reads
    taken = {user: taken_part(user, node) for user in node.users if not reads_only_metadata(user)}
    made: dict[fx.Node, tuple[Op, Arguments]] = {}
    for user, index in taken.items():
        raw = op.bind_raw(spelling, node.args, node.kwargs)
        bound = "is used as a whole" if index is None else pick(raw, index) if isinstance(raw, dict) else raw
        chosen, arguments = _settled(op, op.fill(bound) if isinstance(bound, dict) else bound)
        if isinstance(arguments, str):
            for left in (node, *(user for user, index in taken.items() if index is not None)):
                _keep(rewriter, left, op, arguments)
            return
        made[user] = chosen, arguments
    for user, (chosen, arguments) in made.items():
        args, kwargs = chosen.canonical(arguments)
        with rewriter.attributed(chosen.name, chosen.target):
            rewriter.update(user, chosen.target, args, kwargs, op="call_function")
        rewriter.describe(user, path=info(node).path, source=info(node).source)
    if not node.users:  # else its length is checked
        rewriter.erase(node)


@rewrite
def drop_identity(op: Any, x: Any) -> Any:
    """An identity is its input."""
    return op.identity(x)


@rewrite
def drop_dropout(op: Any, x: Any) -> Any:
    """Dropout outside training is its input."""
    return op.dropout(x, training=False)


@drop_identity.becomes
@drop_dropout.becomes
def _its_input(op: Any, m: Any) -> Any:
    return m.x


@rewrite
def merge_slices(op: Any, x: Any) -> Any:
    """Slices one axis at a time, as torch.export writes x[:, 1:, 2:]."""
    return op.getitem(op.getitem(x))


@merge_slices.unless
def they_share_an_axis_or_change_axes(m: Any) -> bool:
    """Then the second index counts what the first one left."""
    first, second = _slices(m)
    plain = all(isinstance(part, slice) for part in (*first, *second))
    return not plain or any(slice(None) not in pair for pair in zip(first, second, strict=False))


@merge_slices.becomes
def _merged(op: Any, m: Any) -> Any:
    pairs = zip_longest(*_slices(m), fillvalue=slice(None))
    return op.getitem(m.x, index=tuple(a if b == slice(None) else b for a, b in pairs))


def _slices(m: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    second = m.root.node
    return second.args[0].kwargs["index"], second.kwargs["index"]


@rewrite("same_padding_{conv}", conv=OPS.family("conv"))
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


@rewrite("padding_mode_{conv}_{mode}", conv=OPS.family("conv"), mode=("circular", "reflect", "replicate"))
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
