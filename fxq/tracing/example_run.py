"""The run of a traced forward on the example: what every call in it gives."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import Tensor, nn

from fxq.common.data import described_call
from fxq.common.isolation import copied
from fxq.common.trees import mapped
from fxq.errors import InputError, TraceError, words_of
from fxq.tracing.failure import user_line
from fxq.tracing.proxies import is_value, unwatched


class ExampleRun:
    """Runs calls on the example's values.

    Attributes:
        root: the model.
        within: the code that the trace runs in: lines of the user's code are looked for inside.
        is_on: whether a call runs now: nothing that it calls in turn is traced.
    """

    def __init__(self, root: nn.Module, within: CodeType) -> None:
        self.root, self.within, self.is_on = root, within, False
        self._copies: dict[Tensor, Tensor] = {}
        self._folded: dict[nn.Module, Tensor] = {}

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor of the model, the same one for each reader."""
        if tensor not in self._copies:
            with unwatched():
                self._copies[tensor] = copied(tensor)
        return self._copies[tensor]

    def has_changed(self, tensor: Tensor) -> bool:
        """Whether traced calls changed the copy of a tensor in place."""
        copy = self._copies.get(tensor)
        return copy is not None and copy._version != 0

    def values(self, arguments: Any) -> Any:
        """Arguments with values in the place of traced ones, and copies in the place of the model's tensors."""
        return mapped(arguments, self._value, is_value)

    def _value(self, leaf: Any) -> Any:
        if is_value(leaf):
            return leaf._value
        return self.copy(leaf) if isinstance(leaf, Tensor) else leaf

    def call(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], path: str) -> Any:
        """The value of a call; errors name the layer, at `path`, and what it was given."""
        values, named = self.values(args), self.values(kwargs)
        outer, self.is_on = self.is_on, True
        try:
            with unwatched():
                if kind == "call_method":
                    return getattr(values[0], target)(*values[1:], **named)
                called = self.root.get_submodule(target) if kind == "call_module" else target
                if kind == "call_module" and has_traced_weights(called):
                    raise TraceError(_SWAPPED.format(path=target))
                return called(*values, **named)
        except TraceError:
            raise
        except Exception as error:
            layer = f'layer "{path}"' if path else getattr(target, "__name__", str(target))
            line = user_line(self.within)
            place = f"{layer} ({line})" if line else layer
            raise InputError(
                f"the model does not run on the example: {place} got {described_call(values, named)}: {words_of(error)}"
            ) from error
        finally:
            self.is_on = outer

    def fold(self, module: nn.Module, forward: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        """A parametrized tensor of a module, computed once."""
        if module not in self._folded:
            self.is_on = True
            try:
                self._folded[module] = forward(*args, **kwargs).detach().clone()
            finally:
                self.is_on = False
        return self._folded[module]


def has_traced_weights(module: nn.Module) -> bool:
    """Whether `torch.func.functional_call` has put traced values in the place of a module's tensors."""
    return any(is_value(t) for m in module.modules() for t in (*m._parameters.values(), *m._buffers.values()))


_SWAPPED = (
    'layer "{path}" is called with weights that the forward gives it (torch.func.functional_call), and a leaf is '
    "called with its own: do not keep it as one, but a module that calls it, if any."
)
