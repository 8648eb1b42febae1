"""Values of weights that a torch module recomputes in each call."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fxq.common.hooks import forward_hooks


def reparametrized(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that a torch module recomputes in each call, by name, with their values in eval mode.

    `weight_norm` and `spectral_norm` set them in a pre-hook; an embedding with a `max_norm` scales the rows that it
    reads. Weights with `torch.nn.utils.parametrizations` are not among them: they are computed where they are read.
    """
    weights: dict[str, Tensor] = {}
    with torch.no_grad():
        for hook in forward_hooks(module):
            if isinstance(hook, WeightNorm):
                weights[hook.name] = hook.compute_weight(module)
            elif isinstance(hook, SpectralNorm):
                weights[hook.name] = hook.compute_weight(module, do_power_iteration=False)
        if is_normed(module):
            rows = torch.arange(module.num_embeddings, device=module.weight.device)
            largest = float(module.max_norm or 0.0)
            weights["weight"] = torch.embedding_renorm_(module.weight.clone(), rows, largest, module.norm_type)
    return weights


def has_own_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks of the user, other than those of `reparametrized`."""
    return any(not isinstance(hook, (WeightNorm, SpectralNorm)) for hook in forward_hooks(module))


def is_normed(module: nn.Module) -> TypeGuard[nn.Embedding | nn.EmbeddingBag]:
    """Whether a module is an embedding with `max_norm`, which renormalizes the rows that it reads in place."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
