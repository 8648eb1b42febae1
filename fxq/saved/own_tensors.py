"""Tensors that the user attached to a quantized model and that its graph does not use, such as class weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from fxq.backends.kernel import Kernel
from fxq.errors import InputError
from fxq.graph.text.text_checks import check_path
from fxq.graph.unit import Unit
from fxq.ledger.quantized import PLACE, Quantized

OWN = ":"
"""Prefix of the names of such tensors in a file, which no tensor of the graph has."""


def own_tensors(model: Quantized, own: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """Collect the tensors that the user attached to a model, for saving.

    Args:
        model: the model.
        own: attributes that the user set on it.

    Returns:
        Tensors by name in the file; kind of each tensor ("parameter", "buffer", "temporary buffer", "attribute") by
        path; and paths of the user's modules, which cannot be saved.
    """
    called = {str(node.target) for node in model.graph.nodes if node.op in ("get_attr", "call_module")}
    tensors: dict[str, Tensor] = {}
    named: dict[str, str] = {}
    lost: dict[str, None] = {}
    for prefix, module in model.named_modules():
        if _is_of_graph(prefix, module, called):
            continue
        if prefix and type(module) is not nn.Module:
            if not any(prefix.startswith(f"{outer}.") for outer in lost):
                lost[prefix] = None
            continue
        values = own if not prefix else {}
        temporary = module._non_persistent_buffers_set
        kinds = {name: "temporary buffer" if name in temporary else "buffer" for name in module._buffers}
        kinds |= dict.fromkeys(module._parameters, "parameter")
        kinds |= {name: "attribute" for name, value in values.items() if isinstance(value, Tensor)}
        for name, kind in kinds.items():
            path = f"{prefix}.{name}" if prefix else name
            tensor = {**values, **module._buffers, **module._parameters}[name]
            if path in called or path == PLACE or not isinstance(tensor, Tensor):
                continue
            tensors[f"{OWN}{path}"], named[path] = tensor, kind
    return tensors, named, list(lost)


def _is_of_graph(path: str, module: nn.Module, called: set[str]) -> bool:
    outer = path
    while outer:
        if outer in called:
            return True
        outer = outer.rpartition(".")[0]
    return isinstance(module, (Unit, Kernel))


def set_own_tensors(gm: fx.GraphModule, tensors: Mapping[str, Any], named: Mapping[str, str]) -> dict[str, Tensor]:
    """Register loaded tensors at their paths on a model.

    Args:
        gm: the model.
        tensors: tensors by path.
        named: kind of each tensor by path, as `own_tensors` returns it.

    Returns:
        The tensors that are plain attributes, which the caller sets.

    Raises:
        InputError: a tensor is missing or of another kind, or its path is taken or not one that a user can set.
    """
    plain: dict[str, Tensor] = {}
    for path, kind in named.items():
        parent, _, name = check_path(path).rpartition(".")
        tensor = tensors[path]
        if not isinstance(tensor, Tensor) or kind not in _KINDS:
            raise InputError(f"it lists {path!r} as {kind!r}, but holds no such tensor.")
        if (kind == "parameter") != isinstance(tensor, nn.Parameter):
            raise InputError(f"{path!r} is a {type(tensor).__name__}, not a {kind}.")
        if kind == "attribute" and (hasattr(Quantized, path) or path.startswith("_")):
            raise InputError(f"{path!r} is an attribute of every quantized model, and cannot be set.")
        if kind == "attribute":
            plain[path] = tensor
            continue
        owner = _container(gm, parent)
        if hasattr(owner, name):
            raise InputError(f"it has two values named {path!r}.")
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(name, tensor)
        else:
            owner.register_buffer(name, tensor, persistent=kind == "buffer")
    return plain


_KINDS = ("parameter", "buffer", "temporary buffer", "attribute")


def _container(gm: fx.GraphModule, path: str) -> nn.Module:
    """Plain `nn.Module` at a path, created if it is missing."""
    module: nn.Module = gm
    for name in path.split(".") if path else ():
        if not hasattr(module, name):
            module.add_module(name, nn.Module())
        module = getattr(module, name)
        if type(module) is not nn.Module:
            raise InputError(f"{path!r} is a {type(module).__name__}, which cannot hold tensors of the user.")
    return module
