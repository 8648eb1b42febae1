"""canonicalize: bring every op into its canonical form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from fxq.errors import InputError
from fxq.graph.guards import own_copy
from fxq.graph.info import Decision, TracedInfo, info
from fxq.graph.place import where
from fxq.graph.query import (
    argument,
    constant,
    fills_like,
    flat_nodes,
    is_check,
    is_op,
    op_of,
    options_of,
    reads_only_metadata,
    taken_part,
)
from fxq.ops import OPS, conv_padding
from fxq.ops.table import Arguments, Op, Pick, Redirect, Spelling
from fxq.patterns.decompositions.written_out import WRITTEN_OUT
from fxq.pipeline.context import Context
from fxq.pipeline.float_ops import keep_original
from fxq.pipeline.own_traits import check_own_traits
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.computed import parametrized_constant, record_trainable
from fxq.rewriting.constant_folding import fold_constant
from fxq.rewriting.editor import DATA
from fxq.rewriting.pattern import rewrite
from fxq.rewriting.rewriter import Rewriter
from fxq.rewriting.size_reads import read_sizes_of_inputs
from fxq.tracing.weight_norm import has_own_hooks, reparametrized


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Rewrite every spelling of an op into its canonical form, with weights as inputs.

    Before: conv1(x), x.relu(), F.relu(x, inplace=True)    After: conv2d(x, w, b, stride=(2, 2)), relu(x), relu(x)
    Also: a state that grows, cat([past, x]) of an input and an output of the model, becomes append(past, x). Removes
    identities and dropout. 'same' and non-zero padding of a convolution becomes a separate pad op; each
    value taken from a tuple (chunk, split) becomes an op; a function that is written out in basic ops becomes that
    function; values computed only from weights become constants; the size of a value that decides another value,
    such as a mask, is read from the input that has the same size.
    Keeps: the output, to 1e-6. Calls that the op table does not know stay as they are, with the reason.
    Refuses: weights and statistics that are not finite, except in layers that the recipe leaves in float; ops of the
    user whose traits do not hold on the example.
    """

    name: ClassVar[str] = "canonicalize"
    needs: ClassVar[Stage] = Stage.TRACED
    gives: ClassVar[Stage] = Stage.CANONICAL

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Rewrite node by node, then apply the rules."""
        for node in rewriter.nodes():
            if node._erased:  # an unused part of a tuple
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
        for node in rewriter.nodes("cat"):
            _append(rewriter, node)
        rewritten = [(info(n).path, op.name) for n in rewriter.nodes() if (op := op_of(n)) is not None]
        rewriter.context.written = written + rewritten
        read_sizes_of_inputs(rewriter)
        rewriter.erase_unused()
        for node in rewriter.nodes():
            _check_weights(rewriter, node)
        keep_original(rewriter, called, constants)
        check_own_traits(rewriter.gm, rewriter.context.example)


def _append(rewriter: Rewriter, node: fx.Node) -> None:
    """Make a concatenation to an input that nothing else reads an `append`, if it, or a slice of it, is returned."""
    xs, dim = node.args[0], options_of(node)["dim"]
    parts = list(xs) if isinstance(xs, (tuple, list)) else []
    is_state = len(parts) == 2 and all(map(_is_tensor, parts)) and parts[0].op == "placeholder"
    is_state = is_state and all(user is node or is_check(user) or reads_only_metadata(user) for user in parts[0].users)
    if is_state and any(user.op == "output" for value in (node, *_slices_of(node)) for user in value.users):
        with rewriter.attributed("append", _append):
            rewriter.update(node, OPS["append"].target, tuple(parts), {"dim": dim})


def _slices_of(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if is_op(user, "getitem")]


def _dropouts(rewriter: Rewriter) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield for every dropout its module path and the origins of its input."""
    for node in rewriter.nodes("dropout"):
        value: Any = node.args[0]
        while is_op(value, "dropout", "identity"):
            value = value.args[0]
        yield info(node).path, info(value).origins or (value.name,)


def _check_weights(rewriter: Rewriter[Context], node: fx.Node) -> None:
    """Refuse weights and statistics that are not finite, while they have the names that the user knows."""
    op, path = op_of(node), info(node).path
    if op is None or rewriter.context.config_for(path, op.name)[0].is_float:
        return
    for name in (n for n in op.tensors if n in _WEIGHTS and n not in op.traits.inputs):
        read = argument(node, name)
        tensor = constant(rewriter.gm, read)
        if tensor is None:
            continue
        shown = f"{path}.{name}" if str(read.target).startswith(f"{DATA}.") else read.target  # parametrized
        wrong = "" if _is_finite(tensor) else "NaN or Inf"
        if name == "running_var" and not wrong and float(tensor.min()) + options_of(node)["eps"] <= 0:
            wrong = "a negative variance"
        if wrong:
            raise InputError(
                f"{where(rewriter.gm, node)}: {shown} holds {wrong}, which no integer can represent. "
                "Train it again, or set the layer to float in the recipe."
            )


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity. Its ends are NaN if it holds one; `isfinite` is slower."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.numel() == 0 or all(math.isfinite(end) for end in real.aminmax())


_WEIGHTS = {"weight", "bias", "running_mean", "running_var"}


def _call(rewriter: Rewriter, node: fx.Node) -> None:
    row = OPS.of_call(node.target)
    if row is None or op_of(node) is not None or info(node).traced.kept:
        return
    op, spelling = row
    if info(node).is_tensor:
        _rewrite(rewriter, node, op, op.bind(spelling, node.args, node.kwargs))
    elif spelling.pick is not None and not reads_only_metadata(node):
        _rewrite_picks(rewriter, node, op, spelling, spelling.pick)


def _fix_dtype(rewriter: Rewriter, node: fx.Node) -> bool:
    """Make a dtype that a node reads from a value explicit, since it would change once the value is integers.

    Returns:
        Whether the node was replaced by a constant, as x.dtype is.
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
    row = OPS.of_module(module)
    if row is None or info(node).traced.kept:  # the recipe keeps it as a leaf
        return
    op, spelling = row
    bound = "has forward hooks" if has_own_hooks(module) else _bind_module(rewriter, node, module, op, spelling)
    _rewrite(rewriter, node, op, bound)


def _bind_module(
    rewriter: Rewriter, node: fx.Node, module: nn.Module, op: Op, spelling: Spelling
) -> Arguments | Redirect | str:
    """Arguments of an op, with the module's tensors as `get_attr` nodes. Parametrized weights are evaluated."""
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
                constant_node = rewriter.constant(value.detach().clone(), path, before=node, like=node)
                record_trainable(rewriter, constant_node, parametrized_constant(module, str(node.target), key))
                bound[key] = constant_node
            else:
                bound[key] = rewriter.read(path, value, before=node, like=node)
    return bound


def _rewrite(rewriter: Rewriter, node: fx.Node, op: Op, bound: Arguments | Redirect | str) -> None:
    """Make a node the canonical call of its op, or record why it stays as it is."""
    chosen, arguments = _checked_arguments(op, bound)
    if isinstance(arguments, str):
        _keep(rewriter, node, op, arguments)
        return
    args, kwargs = chosen.canonical(arguments)
    with rewriter.attributed(chosen.name, chosen.target):
        rewriter.update(node, chosen.target, args, kwargs, op="call_function")
        for copy in [n for n in node.all_input_nodes if info(node).traced.changes and n.target is own_copy]:
            # the copy was for the module to overwrite; its op does not write
            node.replace_input_with(copy, copy.all_input_nodes[0])
            if not copy.users:  # a reader whose value is unused would keep the value before it from being fused
                rewriter.erase(copy)


def _keep(rewriter: Rewriter, node: fx.Node, op: Op, why: str) -> None:
    """Decide that a call stays a leaf. If it overwrites its input, it gets a private copy."""
    x: Any = node.args[0] if node.args else None
    if info(node).traced.changes and isinstance(x, fx.Node) and x.target is not own_copy:
        copy = rewriter.node("call_function", own_copy, (x,), like=x, before=node, typed=(info(x).shape, info(x).dtype))
        rewriter.describe(copy, origins=(), traced=TracedInfo(info(node).traced.memory))
        rewriter.update(node, args=(copy, *node.args[1:]))
    kept = Decision("float", "unsupported", f"stays as it is: {op.name} {why}", decided_by=rewriter.name)
    rewriter.describe(node, traced=info(node).traced._replace(kept=kept))


def _checked_arguments(op: Op, bound: Arguments | Redirect | str) -> tuple[Op, Arguments | str]:
    """Op and arguments of a call. If the arguments are wrong for the op, the reason is in their place."""
    if isinstance(bound, Redirect):
        op = OPS[bound.op]
        bound = op.fill(dict(bound.arguments))
    if isinstance(bound, str):
        return op, bound
    if not any(_is_tensor(v) for name in op.traits.inputs for v in flat_nodes(bound.get(name))):
        return op, "is called on no tensor"
    option = next((k for k in op.options for v in flat_nodes(bound[k]) if _is_tensor(v)), None)
    return op, bound if option is None else f"is given a tensor for its option {option}"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and info(value).is_tensor


def _rewrite_picks(rewriter: Rewriter, node: fx.Node, op: Op, spelling: Spelling, pick: Pick) -> None:
    """Replace each value taken from a call with several results by an op, so that no tuple is left."""
    for user in [u for u in node.users if taken_part(u, node) is not None and not u.users]:
        rewriter.erase(user)  # an exported program takes every part, also unused ones
    taken = {user: taken_part(user, node) for user in node.users if not reads_only_metadata(user)}
    calls: dict[fx.Node, tuple[Op, Arguments]] = {}
    for user, index in taken.items():
        raw = op.bind_raw(spelling, node.args, node.kwargs)
        bound = "is used as a whole" if index is None else pick(raw, index) if isinstance(raw, dict) else raw
        chosen, arguments = _checked_arguments(op, op.fill(bound) if isinstance(bound, dict) else bound)
        if isinstance(arguments, str):
            for kept_node in (node, *(user for user, index in taken.items() if index is not None)):
                _keep(rewriter, kept_node, op, arguments)
            return
        calls[user] = chosen, arguments
    for user, (chosen, arguments) in calls.items():
        args, kwargs = chosen.canonical(arguments)
        with rewriter.attributed(chosen.name, chosen.target):
            rewriter.update(user, chosen.target, args, kwargs, op="call_function")
        rewriter.describe(user, path=info(node).path, source=info(node).source)
    if not node.users:  # a check of its length may still read it
        rewriter.erase(node)


@rewrite
def drop_identity(op: Any, x: Any) -> Any:
    """Identity."""
    return op.identity(x)


@rewrite
def drop_dropout(op: Any, x: Any) -> Any:
    """Dropout in eval mode."""
    return op.dropout(x, training=False)


@drop_identity.becomes
@drop_dropout.becomes
def _its_input(op: Any, m: Any) -> Any:
    return m.x


@rewrite
def merge_slices(op: Any, x: Any) -> Any:
    """Slices of one axis at a time, as torch.export writes x[:, 1:, 2:]."""
    return op.getitem(op.getitem(x))


@merge_slices.unless
def they_share_an_axis_or_change_axes(m: Any) -> bool:
    """Whether the second index refers to axes or elements that the first one changed."""
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
    """Convolution with padding='same'."""
    return op[conv](x, w, b, padding="same", padding_mode="zeros")


@same_padding.becomes
def _same(op: Any, m: Any) -> Any:
    """Convolution with padding in numbers; if the right side has one more than the left, after a separate pad."""
    conv = m.rule.variant["conv"]
    options = m.options(conv)
    pad = conv_padding(m.w.shape, "same", options["dilation"])
    left, right = pad[0::2], pad[1::2]
    if left == right:
        return op[conv](m.x, m.w, m.b, **{**options, "padding": tuple(reversed(left))})
    return op[conv](op.pad(m.x, pad=pad), m.w, m.b, **{**options, "padding": (0,) * len(left)})


@rewrite("padding_mode_{conv}_{mode}", conv=OPS.family("conv"), mode=("circular", "reflect", "replicate"))
def padding_mode(op: Any, x: Any, w: Any, b: Any, *, conv: str, mode: str) -> Any:
    """Convolution that does not pad with zeros."""
    return op[conv](x, w, b, padding_mode=mode)


@padding_mode.becomes
def _mode(op: Any, m: Any) -> Any:
    """Convolution without padding, after a separate pad."""
    conv, mode = m.rule.variant["conv"], m.rule.variant["mode"]
    options = m.options(conv)
    pad = conv_padding(m.w.shape, options["padding"], options["dilation"])
    plain = {**options, "padding": (0,) * (len(pad) // 2), "padding_mode": "zeros"}
    return op[conv](op.pad(m.x, pad=pad, mode=mode), m.w, m.b, **plain)
