"""How well a model can be quantized by others: where fxq is not near the float model, run_coverage.py asks them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from scripts.coverage.outputs import call, outputs, sqnr


def rounding(model: nn.Module, data: list[Any], fresh: list[Any], expected: list[Tensor]) -> float:
    """dB of the float model with conv and linear layers that round their input and weight to 8 bits: no graph at all.

    Inputs per tensor on the range that `data` shows, weights per output channel. Adds, activation functions and what
    is between the layers is exact, so that this is about the best that quantizing the layers can come to.
    """
    model = copy.deepcopy(model)
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd))]
    with _each(layers, _Range()) as ranges:
        for batch in data:
            call(model, batch)
    for layer in layers:
        axis = 1 if getattr(layer, "transposed", False) else 0
        most = layer.weight.abs().amax([d for d in range(layer.weight.dim()) if d != axis], keepdim=True)
        scale = most.clamp(min=1e-12) / 127
        layer.weight.copy_((layer.weight / scale).round() * scale)
    with _each(layers, _Rounder(ranges.seen)):
        return sqnr(expected, outputs(model, fresh))


class _Range:
    """A forward hook that keeps the least and the greatest input of each module."""

    def __init__(self) -> None:
        self.seen: dict[nn.Module, tuple[float, float]] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        least, most = self.seen.get(module, (0.0, 0.0))
        self.seen[module] = min(least, float(args[0].min())), max(most, float(args[0].max()))


class _Rounder:
    """A forward hook that rounds each module's input to uint8 on its range."""

    def __init__(self, ranges: dict[nn.Module, tuple[float, float]]) -> None:
        self.ranges = ranges

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if module not in self.ranges:
            return args
        least, most = self.ranges[module]
        scale = max(most - least, 1e-12) / 255
        return torch.fake_quantize_per_tensor_affine(args[0], scale, round(-least / scale), 0, 255), *args[1:]


@contextmanager
def _each(modules: Sequence[nn.Module], hook: Any) -> Iterator[Any]:
    """`hook` before the forward of each of the modules."""
    handles = [module.register_forward_pre_hook(hook) for module in modules]
    try:
        yield hook
    finally:
        for handle in handles:
            handle.remove()


def torch_ao(model: nn.Module, data: list[Any], fresh: list[Any], expected: list[Tensor]) -> float | None:
    """dB of torch.ao's FX reference graph with its settings for x86; None where it cannot quantize the model."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # all of it is deprecated
            from torch.ao.quantization import get_default_qconfig_mapping
            from torch.ao.quantization.quantize_fx import convert_to_reference_fx, prepare_fx

            example = tuple(data[0].values()) if isinstance(data[0], Mapping) else (data[0],)
            observed = prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping("x86"), example)
            for batch in data:
                call(observed, batch)
            return sqnr(expected, outputs(convert_to_reference_fx(observed), fresh))
    except Exception:  # whatever it raises: it is a comparison, not a test
        return None
