"""Running the user's code without leaving a mark on the user's model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fxq.common.data import Batch

log = logging.getLogger("fxq")


@dataclass
class Touched:
    """What `untouched` has undone; known when it ends.

    Attributes:
        buffers: names of buffers changed in place.
        attributes: by module path, names of attributes and buffers that were set, or that are lists and dicts with
            other items than before.
    """

    buffers: list[str] = field(default_factory=list)
    attributes: dict[str, list[str]] = field(default_factory=dict)


@contextmanager
def untouched(model: nn.Module) -> Iterator[Touched]:
    """Undo what happens to the attributes and buffers of a model's modules inside; yields what that was.

    A forward may keep what it computes (`self.attention = a`), count its calls, or fill a cache. Lists and dicts that
    are attributes get their items back, other objects are not looked into.
    """
    # a script module keeps its own behind its attributes, and makes some of them when they are asked for
    modules = [(n, m) for n, m in model.named_modules() if not isinstance(m, torch.jit.ScriptModule)]
    kept = [(n, m, dict(vars(m)), _contents(vars(m))) for n, m in modules]
    buffers = [(n, b, b._version, b.detach().clone()) for n, b in model.named_buffers() if not b.is_inference()]
    touched = Touched()
    try:
        yield touched
    finally:
        for path, module, attributes, items in kept:
            if _is_as_before(vars(module), attributes, items):
                continue
            names = list(_set(vars(module), attributes, items))
            if names:
                touched.attributes[path] = names
            if not _same_items(vars(module), attributes):  # or another thread that runs the model may find it empty
                vars(module).clear()
                vars(module).update(attributes)
            for name, value in items.items():
                if _same_items(_items(attributes[name]), value):
                    continue
                if isinstance(value, dict):
                    attributes[name].clear()
                    attributes[name].update(value)
                else:
                    attributes[name][:] = value
        with torch.no_grad():
            for name, buffer, version, value in buffers:
                if buffer._version != version:
                    touched.buffers.append(name)
                    buffer.copy_(value)
                elif _has_other_values(buffer, value):
                    buffer.copy_(value)


def _has_other_values(buffer: Tensor, value: Tensor) -> bool:
    """Whether a buffer was written to: `batch_norm` counts no change of the statistics that it is given."""
    return buffer.layout is torch.strided and not buffer.is_meta and not torch.equal(buffer, value)


def _contents(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copies of the lists and dicts among a module's attributes."""
    return {name: _items(value) for name, value in attributes.items() if isinstance(value, (dict, list))}


def _is_as_before(now: dict[str, Any], before: dict[str, Any], contents: dict[str, Any]) -> bool:
    """Whether a module is as it was, which most are: the quick answer."""
    return _same_items(now, before) and all(
        len(before[name]) == len(value) and (not value or _same_items(before[name], value))
        for name, value in contents.items()
    )


def _items(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else None


def _set(now: dict[str, Any], before: dict[str, Any], items: dict[str, Any]) -> Iterator[str]:
    """Names of a module's attributes, buffers included, that are no longer what they were."""
    for name in dict.fromkeys((*now, *before)):
        value: Any = now.get(name)
        if name == "_buffers":
            yield from (k for k in {**value, **items[name]} if value.get(k) is not items[name].get(k))
        elif name.startswith("_tensor_constant"):  # of torch.fx
            continue
        elif value is not before.get(name) or not _same_items(_items(value), items.get(name)):
            yield name


def _same_items(now: Any, before: Any) -> bool:
    if isinstance(now, dict) and isinstance(before, dict):
        return list(now) == list(before) and _same_items(list(now.values()), list(before.values()))
    if now is None or before is None:
        return now is before
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


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
