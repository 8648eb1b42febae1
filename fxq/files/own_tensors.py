"""Tensors that the user has set on a quantized model, and that its graph does not use: anchors, class weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from fxq.backends.kernel import Kernel
from fxq.errors import InputError
from fxq.graph.text_checks import check_path
from fxq.graph.unit import Unit
from fxq.ledger.quantized import PLACE, Quantized

OWN = ":"
"""What the names of such tensors begin with in a file. Those of the graph have no colon there."""


def own_tensors(model: Quantized, own: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """What a file is to hold of such tensors.

    Args:
        model: the model.
        own: the attributes that the user has set.

    Returns:
        The tensors by their names in the file; what each of them is, by its path; and the paths of the user's modules,
        which no file holds.
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
    """Register such tensors where they were; returns those that are plain attributes of the model.

    Raises:
        InputError: a path is none that the user can have set, or its tensor is missing.
    """
    plain: dict[str, Tensor] = {}
    for path, kind in named.items():
        parent, _, name = check_path(path).rpartition(".")
        tensor = tensors[path]
        if not isinstance(tensor, Tensor) or kind not in _KINDS:
            raise InputError(f"it names {path!r} as {kind!r}, and holds no such tensor.")
        if (kind == "parameter") != isinstance(tensor, nn.Parameter):
            raise InputError(f"{path!r} is a {type(tensor).__name__}, and no {kind}.")
        if kind == "attribute" and (hasattr(Quantized, path) or path.startswith("_")):
            raise InputError(f"a quantized model has another {path!r}.")
        if kind == "attribute":
            plain[path] = tensor
            continue
        owner = _container(gm, parent)
        if hasattr(owner, name):
            raise InputError(f"it has two values of the name {path!r}.")
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(name, tensor)
        else:
            owner.register_buffer(name, tensor, persistent=kind == "buffer")
    return plain


_KINDS = ("parameter", "buffer", "temporary buffer", "attribute")


def _container(gm: fx.GraphModule, path: str) -> nn.Module:
    """The plain module of a path, which is made where it is missing."""
    module: nn.Module = gm
    for name in path.split(".") if path else ():
        if not hasattr(module, name):
            module.add_module(name, nn.Module())
        module = getattr(module, name)
        if type(module) is not nn.Module:
            raise InputError(f"{path!r} is no place for a tensor of the user's.")
    return module
