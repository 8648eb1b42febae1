"""Weights that a module computes before every call, as plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def reparametrized(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that pre-hooks of torch (`weight_norm`, `spectral_norm`) set, by name, as they are in eval mode.

    Modules with `torch.nn.utils.parametrizations` compute theirs where they are read, and need no such thing.
    """
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                found[hook.name] = hook.compute_weight(module)
            elif isinstance(hook, SpectralNorm):
                found[hook.name] = hook.compute_weight(module, do_power_iteration=False)
    return found
