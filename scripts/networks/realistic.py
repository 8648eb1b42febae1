"""Batch-norm values like those of a trained network, for networks with random weights."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from scripts.networks.demo import DigitsBlock
from scripts.networks.mobile import InvertedResidual, MBConv
from scripts.networks.resnet import BasicBlock, Bottleneck, IBasicBlock

Network = TypeVar("Network", bound=nn.Module)
Norm = nn.BatchNorm1d | nn.BatchNorm2d

RESIDUAL_BLOCKS = (DigitsBlock, BasicBlock, Bottleneck, IBasicBlock, InvertedResidual, MBConv)


def realistic(model: Network, input_shape: tuple[int, ...], seed: int = 0, batches: int = 4) -> Network:
    """Give every batch norm of `model` the values a trained network has; returns the same model, in eval mode.

    gamma is near 1 (near 0.5 at the end of a residual branch, which keeps the sum from growing block after block), beta
    near 0, and the running statistics are those of the activations on `batches` batches of standard normal noise of
    `input_shape` (N, C, h, w), N raised to 8 if smaller: feed the model torch.randn. The same seed gives the same
    values; torch's own generator is not touched.
    """
    generator = torch.Generator().manual_seed(seed)
    norms = [module for module in model.modules() if isinstance(module, Norm)]
    ends = {id(_last_norm(block)) for block in model.modules() if isinstance(block, RESIDUAL_BLOCKS)}
    momenta = [norm.momentum for norm in norms]
    model.eval()
    with torch.no_grad():
        for norm in norms:
            middle = 0.5 if id(norm) in ends else 1.0
            spread = torch.randn(norm.num_features, generator=generator) * 0.2
            norm.weight.copy_(middle * (1 + spread).clamp(0.3, 1.7))
            norm.bias.copy_(torch.randn(norm.num_features, generator=generator) * 0.15)
            norm.reset_running_stats()
            norm.momentum = None  # a plain average over the batches
            norm.train()
        for _ in range(batches):
            model(torch.randn(max(input_shape[0], 8), *input_shape[1:], generator=generator))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model.eval()


def _last_norm(block: nn.Module) -> Norm:
    """The batch norm whose output the block adds to its shortcut."""
    branch = [module for name, module in block.named_modules() if not name.startswith(("downsample", "project"))]
    return [module for module in branch if isinstance(module, Norm)][-1]
