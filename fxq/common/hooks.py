"""Forward hooks of the user's modules, and the hooks with which fxq records calls of these modules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

Enter = Callable[[], None]
Leave = Callable[[str, Any, Any], None]


class _RecordingHook:
    """Hook that runs only in the thread that created it. Its copies, in copies of the module, do nothing."""

    def __init__(self, record: Callable[..., None] | None = None) -> None:
        self.record, self.thread = record, threading.get_ident()

    def __call__(self, *args: Any) -> None:
        """Record a call of the module; returns None, so that inputs and results of the module stay the same."""
        if self.record is not None and threading.get_ident() == self.thread:
            self.record(*args)

    def __reduce__(self) -> Any:
        return _RecordingHook, ()


def forward_hooks(module: nn.Module) -> list[Any]:
    """Forward hooks and forward pre-hooks of a module, without the hooks of `recorded_calls` in any thread."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [hook for hook in hooks if not isinstance(hook, _RecordingHook)]


def call_forward_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Call the forward hooks of a module with a result. What they return or raise is ignored."""
    for key, hook in module._forward_hooks.items():
        with suppress(Exception):  # hooks that need values, such as those that print them, raise any type of error
            if key in module._forward_hooks_with_kwargs:
                hook(module, args, kwargs, result)
            else:
                hook(module, args, result)


@contextmanager
def recorded_calls(
    model: nn.Module, paths: Collection[str], leave: Leave, enter: Enter | None = None
) -> Iterator[None]:
    """Context that records the calls of modules in this thread. Script modules run no hooks, and are left out.

    Args:
        model: the model.
        paths: paths of the modules.
        leave: called after each call with the module's path, its inputs (positional and keyword), and its result.
        enter: called before each call.
    """

    def left(path: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        leave(path, (args, kwargs), result)

    modules = [(path, model.get_submodule(path)) for path in paths]
    handles = []
    try:
        for path, module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if enter is not None:
                handles.append(module.register_forward_pre_hook(_RecordingHook(lambda *_: enter())))
            handles.append(module.register_forward_hook(_RecordingHook(partial(left, path)), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
