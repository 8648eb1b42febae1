"""Modules that a bound graph calls without asking each time what there is to do (see `fxq/binding.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import nn


class Bindable(nn.Module):
    """A module that can be fixed to inputs of one kind, and that tells when it changes behind that.

    Attributes:
        changes: how often any bound module was changed: a hook, an attribute, other weights.
    """

    changes: ClassVar[int] = 0
    _is_bound: bool = False

    def bind(self, *inputs: Any) -> Callable[..., Any]:
        """What `forward` does with inputs of these shapes, strides and dtypes and as many threads as now.

        Nobody looks at later inputs again; they must be alike. The default is `forward` itself.

        Args:
            inputs: what `forward` takes; the values make no difference.

        Returns:
            A function with the arguments and the value of `forward`.
        """
        return self.forward

    def watch(self) -> None:
        """Count changes from now on."""
        self.__dict__["_is_bound"] = True

    def changed(self) -> None:
        """Count a change, so that what was bound is bound anew."""
        if self._is_bound:
            Bindable.changes += 1

    def __setattr__(self, name: str, value: Any) -> None:
        self.changed()
        super().__setattr__(name, value)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """As in `nn.Module`."""
        self.changed()
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """As in `nn.Module`."""
        self.changed()
        return super().register_forward_pre_hook(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.changed()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> Mapping[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_is_bound"}
