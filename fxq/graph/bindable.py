"""Base class of modules that can be bound to inputs of one kind, and detection of changes to them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

_WATCHES_LOCK = threading.Lock()
_ABSENT = object()
Members = Mapping[str, Any]
"""The modules, parameters or buffers of a module, by name."""


class ModuleSnapshot:
    """Snapshot of modules' members that detects replaced members and in-place writes to tensors.

    Compares version counters and data pointers of tensors. Writes through `tensor.data` or `tensor.numpy()` are not
    detected, since torch does not count them.

    Args:
        members: members of each module, see `add`.
    """

    def __init__(self, *members: Members) -> None:
        self._lengths: list[tuple[Members, int]] = []
        self._values: list[tuple[Members, str, Any]] = []
        self._versions: list[tuple[Tensor, int]] = []  # without inference tensors, which have no version counter
        self._addresses: list[tuple[Tensor, int]] = []
        self._memory: list[Tensor] = []  # kept alive, so that their addresses are not reused
        for module_members in members:
            self.add(module_members)

    def add(self, members: Members) -> None:
        """Add the members of a module as they are now."""
        self._lengths.append((members, len(members)))
        for name, value in members.items():
            self._values.append((members, name, value))
            if isinstance(value, Tensor) and value.layout is torch.strided:
                self._addresses.append((value, value.data_ptr()))
                self._memory.append(value.detach())
                if not value.is_inference():
                    self._versions.append((value, value._version))

    def is_unchanged(self) -> bool:
        """Whether no member was replaced and no tensor was written to. Plain loops, since every call checks this."""
        try:
            for members, length in self._lengths:
                if len(members) != length:
                    return False
            for members, name, value in self._values:
                if members[name] is not value:
                    return False
        except KeyError:
            return False
        for tensor, version in self._versions:
            if tensor._version != version:
                return False
        for tensor, address in self._addresses:  # noqa: SIM110 (a generator takes longer)
            if tensor.data_ptr() != address:
                return False
        return True


class ModuleWatch:
    """Watch that is notified of changes to modules: hooks, attributes, weights. `Bindable.notify` adds a module.

    Attributes:
        changed: whether a module has reported a change.
        seen: snapshot of the modules' tensors.
    """

    def __init__(self) -> None:
        self.changed = False
        self.seen = ModuleSnapshot()


class Bindable(nn.Module):
    """A module that can be bound to inputs of one kind, and that reports changes to watches."""

    _watches: weakref.WeakSet[ModuleWatch] | None = None

    def last_call(self, part: int | None = None) -> tuple[Any, Mapping[str, Any]]:
        """Function that computes the module's value last, and its options; (None, {}) if unknown.

        Args:
            part: index of one of several values; None if the module returns one value.
        """
        return None, {}

    def graph_inside(self) -> fx.GraphModule | None:
        """The graph that the module runs, with its tensors; None if its options say all."""
        return None

    def bind(self, *inputs: Any) -> Callable[..., Any]:
        """Return `forward` specialized for inputs of these shapes, strides and dtypes, and the current thread count.

        The returned function does not check its inputs: their number, shapes, strides and dtypes must be the same. The
        default is `forward` itself.

        Args:
            inputs: example arguments of `forward`; their values are not used.

        Returns:
            A function with the arguments and the result of `forward`.
        """
        return self.forward

    def callable_for(self, *inputs: Any) -> Callable[..., Any]:
        """Function to call for inputs like these, valid until this module changes (see `notify`).

        Returns the module itself if hooks have to run, and `forward` if it was overridden or replaced without a `bind`
        of its own.

        Args:
            inputs: as for `bind`; none for inputs of any kind.
        """
        if self.is_hooked():
            return self
        bind_fits = self.is_unmodified() and _depth(type(self), "bind") <= _depth(type(self), "forward")
        return self.bind(*inputs) if inputs and bind_fits else self.forward

    def is_hooked(self) -> bool:
        """Whether the module has hooks, so that it has to be called as a module."""
        return bool(self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks)

    def is_unmodified(self) -> bool:
        """Whether the module has no hooks and its `forward` is the one of its class."""
        return not self.is_hooked() and "forward" not in vars(self)

    def notify(self, watch: ModuleWatch) -> None:
        """Report later changes of this module to `watch`, and add its tensors to the watch's snapshot."""
        with _WATCHES_LOCK:
            if self._watches is None:
                self.__dict__["_watches"] = weakref.WeakSet()
            assert self._watches is not None  # set above
            self._watches.add(watch)
        watch.seen.add(self._buffers)

    def _notify_watches(self) -> None:
        if self._watches is None or self.is_hooked():  # a hooked module is called as a module, so changes take effect
            return
        with _WATCHES_LOCK:
            for watch in self._watches:
                watch.changed = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get(name, _ABSENT) is not value:  # `eval()` sets attributes to their current value
            self._notify_watches()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._notify_watches()
        super().__delattr__(name)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._notify_watches()
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._notify_watches()
        return super().register_forward_pre_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._notify_watches()
        return super().register_full_backward_hook(*args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._notify_watches()
        return super().register_full_backward_pre_hook(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._notify_watches()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> Mapping[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_watches"}


def _depth(cls: type, method: str) -> int:
    """Index of the class in the method resolution order that defines a method; 0 is the class itself."""
    return next(i for i, base in enumerate(cls.__mro__) if method in vars(base))
