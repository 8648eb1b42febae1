"""Tracer that runs the example beside the proxies of `torch.fx`, so that branches on sizes can be traced."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from fxq.common.data import Batch
from fxq.common.globs import path_matches
from fxq.common.hooks import call_forward_hooks
from fxq.common.isolation import copied
from fxq.errors import FxqError, InputError, TraceError
from fxq.graph.guards import is_plain
from fxq.ops import OPS
from fxq.tracing.call_recorder import READS_ONLY, CallRecorder
from fxq.tracing.example_run import has_traced_weights
from fxq.tracing.failure import Untraceable, locate_failure
from fxq.tracing.forward_arguments import arguments, can_be_default
from fxq.tracing.proxies import (
    Dependence,
    TracedValue,
    example_tensors,
    is_value,
    recording_calls,
    untraced,
)
from fxq.tracing.wrappers import wrapped

_TRACE_LOCK = threading.RLock()
"""Held during a trace, which patches functions of torch: a second one would undo the patches of the first."""


class Tracer(CallRecorder):
    """Traces a model while running it on the example. Each node gets module path, source line, shape and memory.

    A module that cannot be traced becomes a leaf, and `broken` gets its path and the reason. If `broken` is not empty
    after the trace, the graph is invalid: trace again with those modules among the leaves.

    Attributes:
        leaves: path globs of modules that are not traced into.
        example: one batch.
        fixed: values of arguments of forward that the recipe fixes, by name.
        strict: whether a module that cannot be traced is an error.
        broken: for each module that cannot be traced, its path and the reason.
        record: whether to record the outputs of the traced modules.
        outputs: path and output tensors of each call of a traced module, in order of return, if `record`.

    Args:
        options: arguments of `CallRecorder`.
    """

    def __init__(
        self,
        leaves: tuple[str, ...],
        example: Batch,
        fixed: Mapping[str, Any],
        *,
        strict: bool = False,
        record: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.leaves, self.example, self.fixed, self.strict = leaves, example, fixed, strict
        self.record, self.outputs = record, list[tuple[str, list[Tensor]]]()
        self._failed_as_leaf: Exception | None = None
        self.broken: dict[str, str] = {}

    def trace_model(self, model: nn.Module) -> fx.Graph:
        """Trace a model into a graph.

        Raises:
            TraceError: the model's own forward cannot be traced. A submodule becomes a leaf instead.
            InputError: the model does not run on the example.
        """
        self.begin(model, Tracer.trace_model.__code__)
        buffers = [(module._buffers, dict(module._buffers)) for module in model.modules() if _has_buffers(module)]
        try:
            with (
                _TRACE_LOCK,
                torch.inference_mode(False),
                torch.no_grad(),
                recording_calls(self.create_proxy, self._traces, self._create if self.created else None),
            ):
                graph = super().trace(model)  # outside inference mode, whose tensors have no version counter
        except FxqError:
            raise
        except Exception as error:  # the user's forward may raise any type of error
            raise TraceError(locate_failure(model, error).error()) from error
        finally:  # a forward may have set a buffer to a traced value, but the graph reads the model's buffer
            for current, before in buffers:
                current.update(before)
        self.assumptions.add_checks(self.graph)
        self._erase_unused()
        return graph

    # ---- inputs and outputs

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Arguments of forward: traced values, or plain values where the recipe fixes them."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        entries = arguments(self.root, self.example, self.fixed)
        inputs = [self._input(entry) if can_be_default(entry.default) else entry.value for entry in entries]
        for entry, value in zip(entries, inputs, strict=True):  # all inputs come first in a graph
            value = self._expand(value, value._value) if is_value(value) else value
            if entry.name.startswith("*"):
                args.extend(value)
            elif entry.positional:
                args.append(value)
            elif value is not entry.value or not entry.left_out:  # decorators may look at which arguments are passed
                kwargs[entry.name] = value

        def forward(root: nn.Module) -> Any:
            result = root.forward(*args, **kwargs)
            self._check_swallowed(0)
            self.returned = list(example_tensors(result))
            return result

        return forward, [self.root]

    def _input(self, entry: Any) -> Any:
        node = self.create_node("placeholder", entry.name, entry.default, {})
        with untraced():
            value = copied(entry.value)
        self._record_value(node, value)
        self.assumptions.add_input(entry, node)
        return value if entry.fixed else TracedValue(node, self, value, Dependence.SIZES)

    def _expand(self, value: TracedValue, example: Any) -> Any:
        """Container of inputs of the example's type, with traced values for tensors; plain values stay plain."""
        if isinstance(example, Tensor):
            value._own_dependence = Dependence.DATA
            return value
        kind: Any = type(example)
        if kind in (dict, OrderedDict):
            return kind((key, self._expand(value[key], example[key])) for key in example)  # type: ignore[index]
        if kind in (tuple, list) or (isinstance(example, tuple) and hasattr(example, "_fields")):
            parts = [self._expand(value[i], part) for i, part in enumerate(example)]  # type: ignore[index]
            return kind(*parts) if hasattr(example, "_fields") else kind(parts)
        return example if is_plain(example) else value

    def _erase_unused(self) -> None:
        """Erase reads of sizes and parts that only the trace needed."""
        for node in reversed(self.graph.nodes):
            if not node.users and node.meta.get(READS_ONLY):
                self.graph.erase_node(node)
            node.meta.pop(READS_ONLY, None)

    # ---- modules

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is a leaf: named by the recipe, in the op table, or a module of torch.

        nn.Transformer is an exception: it only calls its encoder and decoder, and is traced.
        """
        if is_kept(module_qualified_name, self.leaves):
            return True
        if isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) or "forward" in vars(m):
            return False  # a forward set on the object replaces that of its type, which the op table describes
        own = type(m).__mro__[1] if parametrize.is_parametrized(m) else type(m)
        is_whole = own.__module__.startswith(("torch.nn.", "torch.ao.nn.")) and own is not nn.Transformer
        return (is_whole or OPS.of_call(own) is not None) and not has_traced_weights(m)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace a call of a module of the model. Modules that a graph cannot call, such as wrappers, run as code."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        path = self.submodule_paths.get(m) if self.submodule_paths else None
        inside = wrapped(m)
        if inside is not None and (self.run.is_on or not is_kept(path or "", self.leaves)):
            return inside(*args, **kwargs)
        if m._compiled_call_impl is not None:  # set by module.compile(); the compiled call cannot be traced
            forward = m._call_impl
        if self.run.is_on:
            return forward(*args, **kwargs)
        if isinstance(m, parametrize.ParametrizationList):
            return self.run.fold(m, forward, args, kwargs)
        if path is None:  # created in forward, or in a plain list: a node cannot call it
            if any(p not in self._paths for p in m.parameters()):
                raise Untraceable(_NO_PATH.format(kind=type(m).__name__), remedy=_LIST_MODULES)
            return forward(*args, **kwargs)
        return self._traced_or_kept(m, path, forward, args, kwargs)

    def _traced_or_kept(
        self, m: nn.Module, path: str, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace into a module, or keep it as a leaf if it is one or if tracing into it fails."""
        stack, refusals = dict(self.module_stack), len(self.assumptions.refusals)
        try:
            if isinstance(m, torch.jit.ScriptModule) and not self.is_leaf_module(m, path):
                raise Untraceable(_TORCHSCRIPT)
            result = super().call_module(m, forward, args, kwargs)
            self._check_swallowed(refusals)
            if self.is_leaf_module(m, path):
                self._show_to_hooks(m, args, kwargs, result)
            if self.record and not self.is_leaf_module(m, path):
                with untraced():
                    self.outputs.append((path, copied(list(example_tensors(result)))))
            return result
        except Exception as error:
            del self.assumptions.refusals[refusals:]
            self.module_stack.clear()
            self.module_stack.update(stack)
            if self.strict or self.is_leaf_module(m, path):
                raise
            return self._keep(m, path, args, kwargs, error)

    def _show_to_hooks(self, m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Call the forward hooks of a leaf with its traced result, which forward reads where a hook stores it.

        The graph calls the leaf with its hooks, so what they return here does not matter.
        """
        refusals = len(self.assumptions.refusals)
        call_forward_hooks(m, args, kwargs, result)
        del self.assumptions.refusals[refusals:]

    def _check_swallowed(self, start: int) -> None:
        """Raise the first refusal from index `start` on, if any.

        Raises:
            Untraceable: the forward caught a refusal in a `try`, and then took a path that it would not take on data.
        """
        if len(self.assumptions.refusals) > start:
            raise self.assumptions.refusals[start]

    def _keep(self, m: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        """Call a module that cannot be traced as a leaf. Raises the error again if it does not run as a leaf either."""
        try:
            if error is self._failed_as_leaf:
                raise error
            output = self.create_proxy("call_module", path, args, kwargs)
        except InputError:
            self._failed_as_leaf = error
            raise error from None
        self.broken[path] = locate_failure(self.root, error).note()
        return output


def _has_buffers(module: nn.Module) -> bool:
    return not isinstance(module, torch.jit.ScriptModule)  # holds its buffers in C++


_NO_PATH = (
    "it calls a {kind} that is not a submodule of the model, but is in a plain list or dict, or created in forward."
)
_LIST_MODULES = "Store it in an nn.ModuleList or nn.ModuleDict, or set it as an attribute in __init__."
_TORCHSCRIPT = (
    "a TorchScript module has no Python code to trace: pass the nn.Module that it was scripted from, not the script."
)


def is_kept(path: str, leaves: tuple[str, ...]) -> bool:
    """Whether the recipe keeps a module as a leaf."""
    return any(path_matches(path, pattern) for pattern in leaves)
