"""Lines of a graph's text that declare modules: kernels and observers with options and tensors, leaves by type."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx, nn

from fxq.errors import InputError
from fxq.graph.bindable import Bindable
from fxq.graph.text.text_values import dotted, key_of, read_value, value_text
from fxq.quant.observer_base import Observer
from fxq.quant.observers import observer_for

Kernels = Callable[[str], Any]
"""Function that returns the kernel class of a name, or raises `FxqError` if there is none."""


def declaration(path: str, module: nn.Module | None, runs: str | None) -> str:
    """Return the line that declares a module; `runs` names the graph inside it, if it has one."""
    config: Mapping[str, Any]
    if isinstance(module, Observer):
        keys = ("spec", "axis", "name", "constants", *(["paused"] if module.paused else []))
        name, config = "observer", {key: getattr(module, key) for key in keys}
    elif isinstance(module, Bindable):
        name, config = str(module.described.name), module.config()  # type: ignore[union-attr, operator]
    else:
        return f"modules[{value_text(path)}] = leaf({value_text(type(module).__name__)})"
    options = [f"{key}={value_text(value)}" for key, value in config.items()]
    if runs is not None:  # its tensors are those of the graph
        return f"modules[{value_text(path)}] = {name}({', '.join([*options, f'runs={runs}'])})"
    tensors = [f"{key}=tensor({value_text(f'{path}.{key}')})" for key, _ in module.named_buffers(recurse=False)]
    return f"modules[{value_text(path)}] = {name}({', '.join([*options, *tensors])})"


def read_module(
    call: ast.expr,
    tensor: Callable[[Any], Tensor],
    kernels: Kernels,
    graphs: Mapping[str, Callable[[], fx.GraphModule]],
) -> nn.Module:
    """Construct the kernel or observer that a line declares.

    Args:
        call: the expression after `=`.
        tensor: returns the tensor of a name.
        kernels: returns the kernel class of a name.
        graphs: functions that return the graphs inside kernels, by name.

    Raises:
        InputError: the line does not declare a kernel or observer.
    """
    if not isinstance(call, ast.Call):
        raise InputError(f"expected a call, not `{ast.unparse(call)}`.")
    name = dotted(call.func)
    options = {key_of(keyword): keyword.value for keyword in call.keywords}
    runs = options.pop("runs", None)
    named = {k: v for k, v in options.items() if isinstance(v, ast.Call) and dotted(v.func) == "tensor"}
    tensors = {k: tensor(read_value(v.args[0], {})) for k, v in named.items() if v.args}
    config = {k: read_value(v, {}) for k, v in options.items() if k not in named}
    try:
        if name == "observer":
            paused = bool(config.pop("paused", False))
            observer = observer_for(**config)
            observer.paused = paused
            observer._buffers.update(tensors)
            return observer
        kind: Any = kernels(name)
        if runs is None:
            return kind.from_config(config, tensors)
        inside = graphs[dotted(runs)]()
        return kind.of_graph(inside, inside.graph, config)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"these options do not fit {name}: {error}") from None
