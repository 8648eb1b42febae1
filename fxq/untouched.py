"""Running the user's code without leaving a mark on the user's model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fxq.data import Batch


@contextmanager
def untouched(model: nn.Module) -> Iterator[list[str]]:
    """Undo what happens to the attributes and buffers of a model's modules inside; yields names of changed buffers.

    A forward may keep what it computes (`self.attention = a`), count its calls, or fill a cache. Lists and dicts that
    are attributes get their items back, other objects are not looked into.
    """
    kept = [(m, dict(vars(m)), {k: _items(v) for k, v in vars(m).items()}) for m in model.modules()]
    buffers = [(n, b, b._version, b.detach().clone()) for n, b in model.named_buffers() if not b.is_inference()]
    changed: list[str] = []  # filled at the end
    try:
        yield changed
    finally:
        for module, attributes, items in kept:
            vars(module).clear()
            vars(module).update(attributes)
            for name, value in items.items():
                if isinstance(value, dict):
                    attributes[name].clear()
                    attributes[name].update(value)
                elif value is not None:
                    attributes[name][:] = value
        with torch.no_grad():
            for name, buffer, version, value in buffers:
                if buffer._version != version:
                    changed.append(name)
                    buffer.copy_(value)


def _items(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else None


@contextmanager
def without_autocast() -> Iterator[None]:
    """Compute in the types of the tensors: under `torch.autocast` a float32 layer hands on bfloat16."""
    with ExitStack() as stack:
        for device in autocast_on():
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def autocast_on() -> list[str]:
    """The types of devices on which `torch.autocast` is on."""
    return [device for device in ("cpu", "cuda", "xpu", "mps") if torch.is_autocast_enabled(device)]


@contextmanager
def seeded() -> Iterator[None]:
    """The same random numbers each time; the user's generator goes on where it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def copied(value: Any) -> Any:
    """A value with copies of the tensors in it; a batch with copies of its arguments."""
    if isinstance(value, Batch):
        return Batch(copied(value.args), copied(dict(value.kwargs)))
    return tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, value)
