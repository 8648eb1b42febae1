"""Conversion of functions such as `torch.lstm` to calls of torch.nn's modules, which `decompose` then expands.

The forwards of these modules call them. They are in a graph if the module is the model itself, or of a class that the
user derived.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from fxq.graph.query import constant
from fxq.rewriting.expansion import CannotExpand
from fxq.rewriting.rewriter import Rewriter

FOLDER = "fxq_recurrent"


def called_as_module(rewriter: Rewriter, node: fx.Node) -> Sequence[fx.Node]:
    """Turn a call of a recurrent function with constant weights into the call of a module.

    Returns:
        The initial states if they are zeros, since the call of the module omits them.

    Raises:
        CannotExpand: the input is a packed sequence, the weights are not constants, or it applies dropout.
    """
    x, states, *rest = cast(Sequence[Any], node.args)
    is_cell = issubclass(FUNCTIONS[node.target], nn.RNNCellBase)  # type: ignore[index]
    weights_read, options = (rest, []) if is_cell else (rest[0], rest[1:])
    if options and not isinstance(options[0], bool):
        raise CannotExpand("its input is a packed sequence")
    if node.kwargs or not _takes_parts(node):
        raise CannotExpand("it is not called as torch.nn calls it")
    tensors = [constant(rewriter.gm, value) for value in weights_read if value is not None]
    weights = [tensor for tensor in tensors if tensor is not None]
    if len(weights) < len(tensors):
        raise CannotExpand("its weights are computed in each call")
    module = (_cell if is_cell else _layers)(node.target, weights, *options)
    if module.training:
        raise CannotExpand("it drops values at random (training=True)")
    for (name, _), tensor in zip(list(module.named_parameters()), weights, strict=True):
        setattr(module, name, nn.Parameter(tensor.detach(), requires_grad=False))
    zeros = _zeros(rewriter, states)
    target = rewriter.module(module, node.name, FOLDER)
    rewriter.update(node, target, (x, None if zeros else states), {}, op="call_module")
    if isinstance(module, nn.LSTM):
        _nest(rewriter, node)
    return zeros


def _layers(
    function: Any,
    weights: list[Tensor],
    bias: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> nn.Module:
    """Make the module, without its weights, that calls a recurrent function with these arguments."""
    kind, (rows, width) = FUNCTIONS[function], weights[1].shape
    hidden = rows // _GATES[kind]
    options: dict[str, Any] = {"bias": bias, "num_layers": num_layers, "bidirectional": bidirectional}
    if kind is nn.LSTM:
        options["proj_size"] = width if width != hidden else 0
    if kind is nn.RNN:
        options["nonlinearity"] = _nonlinearity(function)
    module = kind(weights[0].shape[1], hidden, batch_first=batch_first, device="meta", **options)
    return module.train(training and dropout > 0)


def _cell(function: Any, weights: list[Tensor]) -> nn.Module:
    kind = FUNCTIONS[function]
    options: dict[str, Any] = {"nonlinearity": _nonlinearity(function)} if kind is nn.RNNCell else {}
    return kind(weights[0].shape[1], weights[1].shape[1], bias=len(weights) > 2, device="meta", **options).eval()


def _nonlinearity(function: Any) -> str:
    return "relu" if "relu" in function.__name__ else "tanh"


def _takes_parts(node: fx.Node) -> bool:
    """Whether all users of an lstm take single values or the slice [1:], so that `_nest` can rewrite them."""
    places = [user.args[1] if user.target is operator.getitem else None for user in node.users]
    return node.target is not torch.lstm or all(place in _PLACES for place in places)


def _nest(rewriter: Rewriter, node: fx.Node) -> None:
    """Rewrite the users of a call that returned (output, h, c) for a module that returns (output, (h, c))."""
    for user in list(node.users):
        place = user.args[1]
        if place == slice(1, None):
            rewriter.update(user, args=(node, 1))
        elif place != 0:
            pair = rewriter.node("call_function", operator.getitem, (node, 1), like=user, typed=(None, None))
            rewriter.update(user, args=(pair, place - 1))  # type: ignore[operator]


def _zeros(rewriter: Rewriter, states: Any) -> list[fx.Node]:
    """Initial states if all are zeros. Their users that read a size then read the argument of `torch.zeros`."""
    nodes = list(dict.fromkeys(states if isinstance(states, (list, tuple)) else (states,)))
    if not all(isinstance(node, fx.Node) and node.target is torch.zeros for node in nodes):
        return []
    for node in nodes:
        sizes = node.args[0] if isinstance(node.args[0], (list, tuple)) else node.args
        for user in list(node.users):
            if user.target == "size" and user.args == (node,) and not user.kwargs:
                rewriter.replace(user, tuple(sizes))
    return nodes


FUNCTIONS: dict[Callable[..., Any], type[nn.Module]] = {
    torch.lstm: nn.LSTM,
    torch.gru: nn.GRU,
    torch.rnn_tanh: nn.RNN,
    torch.rnn_relu: nn.RNN,
    torch.lstm_cell: nn.LSTMCell,
    torch.gru_cell: nn.GRUCell,
    torch.rnn_tanh_cell: nn.RNNCell,
    torch.rnn_relu_cell: nn.RNNCell,
}
_GATES = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}
_PLACES = (0, 1, 2, slice(1, None))
