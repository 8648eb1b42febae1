"""Modules that a bound graph calls without asking each time what there is to do (see `fxq/runtime/binding.py`)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

_TELLING = threading.Lock()
_ABSENT = object()
Members = Mapping[str, Any]
"""The modules, parameters or buffers of a module, by name."""


class Seen:
    """The members of modules, and the values of the tensors among them, as they were when this was made.

    A tensor says how often it was written to, and where its values lie: 0.1 us to ask both. What is written through
    `tensor.data` or `tensor.numpy()` torch keeps no count of.

    Args:
        members: of a module, see `follow`.
    """

    def __init__(self, *members: Members) -> None:
        self._lengths: list[tuple[Members, int]] = []
        self._values: list[tuple[Members, str, Any]] = []
        self._written: list[tuple[Tensor, int]] = []  # those that count it
        self._places: list[tuple[Tensor, int]] = []
        self._memory: list[Tensor] = []  # held, so that nothing else gets the same place
        for each in members:
            self.follow(each)

    def follow(self, members: Members) -> None:
        """Take in the members of another module as they are now."""
        self._lengths.append((members, len(members)))
        for name, value in members.items():
            self._values.append((members, name, value))
            if isinstance(value, Tensor) and value.layout is torch.strided:
                self._places.append((value, value.data_ptr()))
                self._memory.append(value.detach())
                if not value.is_inference():
                    self._written.append((value, value._version))

    def holds(self) -> bool:
        """Whether they are all the same, and no tensor was written to. Plain loops: every call of a model waits."""
        try:
            for members, length in self._lengths:
                if len(members) != length:
                    return False
            for members, name, value in self._values:
                if members[name] is not value:
                    return False
        except KeyError:
            return False
        for tensor, version in self._written:
            if tensor._version != version:
                return False
        for tensor, place in self._places:  # noqa: SIM110 (a generator takes longer)
            if tensor.data_ptr() != place:
                return False
        return True


class ModuleWatch:
    """Whether any of some modules has changed: a hook, an attribute, a weight. They tell it (`Bindable.tell`).

    Attributes:
        changed: whether one has said so.
        seen: their tensors.
    """

    def __init__(self) -> None:
        self.changed = False
        self.seen = Seen()


class Bindable(nn.Module):
    """A module that can be fixed to inputs of one kind, and that tells when it changes behind that."""

    _watches: weakref.WeakSet[ModuleWatch] | None = None

    def ends_in(self, part: int | None = None) -> tuple[Any, Mapping[str, Any]]:
        """What it calls last for its value, with the options; (None, {}) where nobody knows.

        Args:
            part: which of several values; None: it has one.
        """
        return None, {}

    def graph_inside(self) -> fx.GraphModule | None:
        """The graph that it runs, with its tensors, where its options do not say that."""
        return None

    def bind(self, *inputs: Any) -> Callable[..., Any]:
        """What `forward` does with inputs of these shapes, strides and dtypes and as many threads as now.

        Nobody looks at later inputs again: they must be as many, and alike. The default is `forward` itself.

        Args:
            inputs: what `forward` takes; the values make no difference.

        Returns:
            A function with the arguments and the value of `forward`.
        """
        return self.forward

    def callee(self, *inputs: Any) -> Callable[..., Any]:
        """What to call for inputs like these, until this module changes (see `tell`).

        That is the module itself where hooks have to run, and its forward where a subclass, or whoever has put another
        one in its place, did not write a `bind` that goes with it.

        Args:
            inputs: as for `bind`; none: inputs of any kind.
        """
        if self.is_hooked():
            return self
        goes_with = self.is_itself() and _depth(type(self), "bind") <= _depth(type(self), "forward")
        return self.bind(*inputs) if inputs and goes_with else self.forward

    def is_hooked(self) -> bool:
        """Whether hooks have to run, so that nothing but a call of the module itself will do."""
        return bool(self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks)

    def is_itself(self) -> bool:
        """Whether it does what its class does: no hooks, and no other forward in the place of its own."""
        return not self.is_hooked() and "forward" not in vars(self)

    def tell(self, watch: ModuleWatch) -> None:
        """Tell `watch` when this module changes, and of its tensors."""
        with _TELLING:
            if self._watches is None:
                self.__dict__["_watches"] = weakref.WeakSet()
            assert self._watches is not None  # made just now
            self._watches.add(watch)
        watch.seen.follow(self._buffers)

    def _changes(self) -> None:
        if self._watches is None or self.is_hooked():  # with hooks it is called as it is, whatever it becomes
            return
        with _TELLING:
            for watch in self._watches:
                watch.changed = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get(name, _ABSENT) is not value:  # `eval()` sets what is set
            self._changes()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._changes()
        super().__delattr__(name)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._changes()
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._changes()
        return super().register_forward_pre_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._changes()
        return super().register_full_backward_hook(*args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._changes()
        return super().register_full_backward_pre_hook(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._changes()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> Mapping[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_watches"}


def _depth(cls: type, method: str) -> int:
    """How far up in the bases of a class a method is defined; 0: in the class itself."""
    return next(i for i, base in enumerate(cls.__mro__) if method in vars(base))
