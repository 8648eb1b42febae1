"""Checks of calls of a quantized model: by tools that trace it, and with inputs that it does not take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._compile import _disable_dynamo
from torch._guards import detect_fake_mode

from fxq.common.data import Batch, described, described_call
from fxq.common.metrics import tensors
from fxq.errors import FxqError, InputError, warn, words_of
from fxq.graph.info import info
from fxq.graph.run import inputs_for

OPAQUE = (
    "Its kernels are packed for this machine, and cannot be traced, mapped or differentiated. Quantize with "
    'backend="reference", whose graph consists of operators only and gives the same numbers up to rounding ties, or '
    'write a file for another runtime: qmodel.export("m.onnx"), or "m.pt2", which PyTorch loads without fxq.'
)
"""Remedies for a tool that would trace into kernels."""


def has_kernels(gm: fx.GraphModule) -> bool:
    """Whether a graph has kernels, which take only plain tensors and cannot be traced."""
    return any(getattr(module, "opaque", False) is True for module in gm.modules())


def check_call(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a call that would end in an unclear error of PyTorch, or store a fake tensor in the kernels.

    Raises:
        InputError: a tool traces, maps or differentiates the call, or an input is not a tensor as in the example.
    """
    tool = _tool(args, kwargs)
    if tool and has_kernels(gm):
        raise InputError(f"{tool} cannot run a quantized model of this backend. {OPAQUE}")
    if tool:
        _warn_of_onnx()
    _check_tensors(args, kwargs, kernels=has_kernels(gm))
    placeholders = gm.graph.find_nodes(op="placeholder")
    if any(str(node.target).startswith("*") for node in placeholders) or len(args) > len(placeholders):
        return  # Python reports it
    for node, value in inputs_for(gm.graph, Batch(args, kwargs)).items():
        shape = info(node).shape
        if shape is None or isinstance(value, (Tensor, fx.Proxy)):
            continue
        missing = str(node.target) not in kwargs and placeholders.index(node) >= len(args)
        if missing and not node.args:
            continue  # Python reports it
        problem = "left out" if missing else f"a {type(value).__name__}"
        hint = " Pass torch.from_numpy(x)." if problem == "a ndarray" else ""
        raise InputError(
            f"input {str(node.target)!r} is {problem}, but the model takes a tensor, such as the {list(shape)} of the "
            f"example that it was traced with.{hint}"
        )


def _check_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any], kernels: bool) -> None:
    """Raise `InputError` for nested and sparse tensors, and for meta tensors if there are kernels."""
    named = [*((f"input {i}", value) for i, value in enumerate(args)), *((repr(k), v) for k, v in kwargs.items())]
    for name, tensor in ((name, tensor) for name, value in named for tensor in tensors(value)):
        if tensor.is_nested:
            raise InputError(f"{name} is a nested tensor; pass a dense one: x.to_padded_tensor(0.0).")
        if tensor.layout is not torch.strided:
            raise InputError(f"{name} is a {tensor.layout} tensor; pass a dense one: x.to_dense().")
        if tensor.is_meta and kernels:
            raise InputError(f"{name} is on the meta device, so it has no values to compute with.")


@contextmanager
def naming_inputs(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Context in which errors of PyTorch name the input whose shape or dtype differs from the example's.

    Raises:
        InputError: in place of a PyTorch or Python error, if the inputs do not match the model's signature, or one has
            another rank, size or dtype than in the example.
    """
    try:
        yield
    except FxqError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        mismatch = _other_kind(gm, args, kwargs)
        if not mismatch:
            raise
        raise InputError(
            f"the model does not run on ({described_call(args, kwargs)}): {mismatch}. {words_of(error)}"
        ) from error


def _other_kind(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Difference between the inputs of a call and those of the example; empty if there is none."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    names = [str(node.target) for node in placeholders]
    if any(name.startswith("*") for name in names):
        return _unknown_keyword(names, kwargs)
    twice = [name for name in names[: len(args)] if name in kwargs]
    if twice:
        return f"{twice[0]!r} is passed twice"
    missing = [str(n.target) for n in placeholders[len(args) :] if not n.args and n.target not in kwargs]
    if missing:
        return f"it also needs {', '.join(missing)}"
    if len(args) > len(names):
        return f"it takes {len(names)} input{'s' if len(names) > 1 else ''}: {', '.join(names)}"
    unknown = _unknown_keyword(names, kwargs)
    if unknown:
        return unknown
    for node, value in inputs_for(gm.graph, Batch(args, kwargs)).items():
        about = info(node)
        if about.shape is None or not isinstance(value, Tensor):
            continue
        if value.dim() != len(about.shape) or value.dtype != about.dtype or value.shape[1:] != about.shape[1:]:
            example = described(torch.empty(about.shape, dtype=about.dtype, device="meta"))
            return f"{str(node.target)!r} was {example} in the example that it was traced with"
    return ""


def _unknown_keyword(names: list[str], kwargs: Mapping[str, Any]) -> str:
    """Text about a keyword that is no input of the graph, whose inputs have these names; empty if there is none."""
    unknown = [name for name in kwargs if name not in names]
    if not unknown or any(name.startswith("**") for name in names):
        return ""
    left_out = (
        " (if forward takes *args, only keywords that the example passes are inputs)"
        if any(name.startswith("*") for name in names)
        else ""
    )
    return f"it has no input {unknown[0]!r}; its inputs are {', '.join(names)}{left_out}"


def _tool(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Tool that traces, maps or differentiates a call; empty if there is none."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func (vmap, grad, ...)"
    if any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values())):
        return "torch.fx tracing"
    return "a tool that runs it on fake tensors" if detect_fake_mode((args, kwargs)) is not None else ""


def _warn_of_onnx() -> None:
    """Warn if `torch.onnx.export` runs the graph."""
    exporter = sys.modules.get("torch.onnx")
    if exporter is not None and exporter.is_in_onnx_export():
        warn(
            "torch.onnx.export cannot translate fxq's quantize and dequantize, unless a custom_translation_table is "
            'passed to it. Instead, qmodel.export("m.onnx") writes the model as ONNX and checks it.'
        )


def compiled(gm: fx.GraphModule, plain: Callable[..., Any], kernels: bool, args: Any, kwargs: Any) -> Any:
    """Run a call inside `torch.compile` or `torch.export`. A model with kernels is not compiled, and runs as it is.

    Raises:
        InputError: `torch.export` runs a model with kernels.
    """
    if not kernels:
        _warn_of_onnx()
        return plain(gm, *args, **kwargs)
    if torch.compiler.is_exporting():
        raise InputError(f"torch.export cannot run a quantized model of this backend. {OPAQUE}")
    return _uncompiled(gm, args, kwargs)


@_disable_dynamo  # like torch.compiler.disable, but without the slow import of the compiler
def _uncompiled(gm: fx.GraphModule, args: Any, kwargs: Any) -> Any:
    return type(gm).forward(gm, *args, **kwargs)


_MESSAGE = f"A quantized model runs uncompiled. {OPAQUE}"
vars(_uncompiled).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_MESSAGE)
