"""The networks that the benchmarks quantize, each with its calibration data and the input that it is timed on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scripts.demo.data import held_out_pairs, training_pairs
from scripts.networks.demo import load_demo_networks
from scripts.networks.mobile import efficientnet_b0, mobilenet_v2, mobilenet_v3_large
from scripts.networks.realistic import realistic
from scripts.networks.resnet import iresnet18, resnet18, resnet50

IMAGE = (3, 224, 224)
FACE = (3, 112, 112)


@dataclass(frozen=True)
class Case:
    """One network to measure.

    Attributes:
        model: the float network, in eval mode.
        data: calibration batches.
        fresh: a batch that is not among `data`, for the SQNR.
        timed: the input of the latency at batch 1.
    """

    model: nn.Module
    data: list[Tensor]
    fresh: Tensor
    timed: Tensor


def random_case(make: Callable[[], nn.Module], picture: tuple[int, int, int]) -> Case:
    """A network with random weights and realistic batch-norm statistics, on standard normal noise (N, *picture)."""
    torch.manual_seed(0)
    model = realistic(make(), (1, *picture))
    data = [torch.randn(8, *picture) for _ in range(4)]
    fresh = torch.randn(8, *picture)
    return Case(model, data, fresh, fresh[:1])


def fsrcnn_case() -> Case:
    """The demo's super-resolution network with its weights, on the held-out picture of a flower."""
    model, _ = load_demo_networks()
    low = training_pairs().low
    picture = held_out_pairs()["petals"].low
    return Case(model, list(low[:: len(low) // 320].split(16)), picture, picture)


CASES: dict[str, Callable[[], Case]] = {
    "resnet18": lambda: random_case(resnet18, IMAGE),
    "resnet50": lambda: random_case(resnet50, IMAGE),
    "mobilenet_v2": lambda: random_case(mobilenet_v2, IMAGE),
    "mobilenet_v3_large": lambda: random_case(mobilenet_v3_large, IMAGE),
    "efficientnet_b0": lambda: random_case(efficientnet_b0, IMAGE),
    "fsrcnn": fsrcnn_case,
    "iresnet18": lambda: random_case(iresnet18, FACE),
}
