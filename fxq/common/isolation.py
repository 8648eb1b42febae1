"""Running the user's code without leaving a mark on the user's model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fxq.common.data import Batch

log = logging.getLogger("fxq")


@dataclass
class ModelChanges:
    """What code has changed in a model inside of `untouched`, which undoes it; known when that ends.

    Attributes:
        buffers: names of buffers changed in place.
        attributes: by module path, names of attributes and buffers that were set, or that are lists and dicts with
            other items than before.
    """

    buffers: list[str] = field(default_factory=list)
    attributes: dict[str, list[str]] = field(default_factory=dict)


@contextmanager
def untouched(model: nn.Module) -> Iterator[ModelChanges]:
    """Undo what happens to the attributes and buffers of a model's modules inside; yields what that was.

    A forward may keep what it computes (`self.attention = a`), count its calls, or fill a cache. Lists and dicts that
    are attributes get their items back, other objects are not looked into.
    """
    # a script module keeps its own behind its attributes, and makes some of them when they are asked for
    modules = [(n, m) for n, m in model.named_modules() if not isinstance(m, torch.jit.ScriptModule)]
    kept = [(path, module, _contents(module)) for path, module in modules]
    buffers = [(n, b, b._version, b.detach().clone()) for n, b in model.named_buffers() if not b.is_inference()]
    changes = ModelChanges()
    try:
        yield changes
    finally:
        for path, module, before in kept:
            now = _contents(module)
            changed = [n for n in dict.fromkeys((*now, *before)) if not _same(now.get(n, []), before.get(n, []))]
            names = [name for n in changed for name in _named(n, now.get(n, []), before.get(n, []))]
            if names:
                changes.attributes[path] = names
            for name in changed:
                _restore(vars(module), name, before.get(name, []))
        with torch.no_grad():
            for name, buffer, version, value in buffers:
                if buffer._version != version:
                    changes.buffers.append(name)
                    buffer.copy_(value)
                elif _has_other_values(buffer, value):
                    buffer.copy_(value)


def _has_other_values(buffer: Tensor, value: Tensor) -> bool:
    """Whether a buffer was written to: `batch_norm` counts no change of the statistics that it is given."""
    return buffer.layout is torch.strided and not buffer.is_meta and not torch.equal(buffer, value)


def _contents(module: nn.Module) -> dict[str, list[Any]]:
    """Each attribute of a module, and what is in it where it is a list or a dict: keys and values in turns."""
    return {
        name: [value, *(chain(*value.items()) if isinstance(value, dict) else value if isinstance(value, list) else ())]
        for name, value in vars(module).items()
    }


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _named(name: str, now: list[Any], before: list[Any]) -> list[str]:
    """The names for a changed attribute: of a module's table of buffers, those of the buffers that were set.

    What torch.fx itself adds to a model has none.
    """
    if name == "_buffers":
        new, old = (dict(zip(found[1::2], found[2::2], strict=True)) for found in (now, before))
        return [k for k in {**new, **old} if new.get(k) is not old.get(k)]
    return [] if name.startswith("_tensor_constant") else [name]


def _restore(attributes: dict[str, Any], name: str, before: list[Any]) -> None:
    if not before:
        del attributes[name]
        return
    attributes[name], *items = before
    if isinstance(before[0], dict):
        before[0].clear()
        before[0].update(zip(items[::2], items[1::2], strict=True))
    elif isinstance(before[0], list):
        before[0][:] = items


def unshare(model: nn.Module, lender: nn.Module) -> None:
    """Copy what a finished model shares with the user's float model: neither is to change through the other.

    A leaf module that cannot be copied stays shared. The copies take no gradients: integers pass none on.
    """
    lent, memo = set(lender.modules()), dict[int, Any]()
    storages = {t.untyped_storage().data_ptr() for t in (*lender.parameters(), *lender.buffers())}
    for module in [m for m in model.modules() if m not in lent]:
        for name, child in module._modules.items():
            if child in lent:
                try:
                    module._modules[name] = copy.deepcopy(child, memo).requires_grad_(False)
                except Exception as error:  # whatever the module's own attributes raise
                    log.warning("%s is shared with the float model: it cannot be copied: %s", name, error)
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.untyped_storage().data_ptr() in storages:
                    own: Any = copy.deepcopy(tensor, memo)
                    own.requires_grad_(False)
                    tensors[name] = own


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
def seeded(seed: int = 0) -> Iterator[None]:
    """The same random numbers each time; the user's generator goes on where it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def copied(value: Any) -> Any:
    """A value with copies of the tensors in it; a batch with copies of its arguments."""
    if isinstance(value, Batch):
        return Batch(copied(value.args), copied(dict(value.kwargs)))
    return tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, value)
