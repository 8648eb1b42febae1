"""Quantized models that bind their graph, and a look at what they are bound to."""

import copy
from functools import cache

import torch
from torch import nn

import fxq
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.runtime.binding import Bindings

# The role that has 7 bits without VNNI is fixed, not measured: two models of one network must have the same grids.
ALL = fxq.Recipe.static(optimize="coverage", backend="x86", reduce_range="activations")
X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(144, 5)
    return nn.Sequential(*layers).eval()


@cache
def quantized_once():
    return fxq.quantize(network(), ALL, data=[X])


def quantized(model=None, data=(X,), recipe=ALL):
    """Quantize a model with some data. The network above is quantized once with `ALL`: this is a copy."""
    if model is None and recipe is ALL and len(data) == 1 and data[0] is X:
        return copy.deepcopy(quantized_once())
    return fxq.quantize(network() if model is None else model, recipe, data=list(data))


def plain(qmodel, *args, **kwargs):
    """Outputs of the graph's own forward, unbound."""
    return type(qmodel).forward.__wrapped__(qmodel, *args, **kwargs)


def bindings(qmodel):
    """The model's `Bindings`."""
    cells = [cell.cell_contents for cell in type(qmodel).forward.__closure__]
    return next(value for value in cells if isinstance(value, Bindings))


def functions(qmodel):
    """The functions that it is bound to now, the newest last."""
    return [bound for bound in bindings(qmodel)._cache.values() if bound is not None]


def first_kernel(qmodel, kind=OnednnConv):
    return next(name for name, kernel in qmodel.fxq_kernels.named_children() if isinstance(kernel, kind))
