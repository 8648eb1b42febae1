"""Run of a traced forward on the example, call by call."""

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
from fxq.tracing.proxies import is_value, untraced


class ExampleRun:
    """Runs the calls of a traced forward on the example's values.

    Attributes:
        root: the model.
        trace_code: code object that runs the trace. Only frames that it called are searched for the user's line.
        is_on: whether a call runs now. Calls inside it are not traced.
    """

    def __init__(self, root: nn.Module, trace_code: CodeType) -> None:
        self.root, self.trace_code, self.is_on = root, trace_code, False
        self._copies: dict[Tensor, Tensor] = {}
        self._folded: dict[nn.Module, Tensor] = {}

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy of a tensor of the model. All readers share one copy."""
        if tensor not in self._copies:
            with untraced():
                self._copies[tensor] = copied(tensor)
        return self._copies[tensor]

    def has_changed(self, tensor: Tensor) -> bool:
        """Whether traced calls changed the copy of a tensor in place."""
        copy = self._copies.get(tensor)
        return copy is not None and copy._version != 0

    def values(self, arguments: Any) -> Any:
        """Arguments with the example's values for traced ones, and copies for tensors of the model."""
        return mapped(arguments, self._value, is_value)

    def _value(self, leaf: Any) -> Any:
        if is_value(leaf):
            return leaf._value
        return self.copy(leaf) if isinstance(leaf, Tensor) else leaf

    def call(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], path: str) -> Any:
        """Value of a call.

        Raises:
            InputError: the call fails. The message names the layer at `path` and the arguments.
        """
        values, named = self.values(args), self.values(kwargs)
        outer, self.is_on = self.is_on, True
        try:
            with untraced():
                if kind == "call_method":
                    return getattr(values[0], target)(*values[1:], **named)
                called = self.root.get_submodule(target) if kind == "call_module" else target
                if kind == "call_module" and has_traced_weights(called):
                    raise TraceError(_REPLACED_WEIGHTS.format(path=target))
                return called(*values, **named)
        except TraceError:
            raise
        except Exception as error:
            layer = f'layer "{path}"' if path else getattr(target, "__name__", str(target))
            line = user_line(self.trace_code)
            place = f"{layer} ({line})" if line else layer
            raise InputError(
                f"the model does not run on the example: {place} got {described_call(values, named)}: {words_of(error)}"
            ) from error
        finally:
            self.is_on = outer

    def fold(self, module: nn.Module, forward: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        """Value of a parametrized tensor of a module, computed once."""
        if module not in self._folded:
            self.is_on = True
            try:
                self._folded[module] = forward(*args, **kwargs).detach().clone()
            finally:
                self.is_on = False
        return self._folded[module]


def has_traced_weights(module: nn.Module) -> bool:
    """Whether `torch.func.functional_call` has replaced a module's tensors by traced values."""
    return any(is_value(t) for m in module.modules() for t in (*m._parameters.values(), *m._buffers.values()))


_REPLACED_WEIGHTS = (
    'layer "{path}" is called with weights that the forward passes to it (torch.func.functional_call), but a leaf is '
    "called with its own weights. Do not keep it as a leaf; if needed, keep a module that calls it."
)
