"""What the state dict of a quantized model holds besides tensors: the grids, and what they are the grids of."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from fxq.backends.kernel import Kernel
from fxq.errors import InputError
from fxq.graph.info import info
from fxq.graph.plain_data import NodeData, to_data
from fxq.graph.query import CONVERSIONS
from fxq.graph.unit import Unit

_GRID = ("scale", "zero_point", "from_scale", "from_zero_point")
"""Options of the conversions that are numbers of a model, as its weights are."""
Entry = tuple[str, int, list[float]]
"""A node: its name, a checksum of what it calls with which arguments, and its numbers."""


def state_of(model: fx.GraphModule) -> Tensor:
    """The grids of a model, and checksums of its graph and kernels: text as bytes, uint8 (n,).

    A tensor, so that whatever saves a state dict can save it.
    """
    kernels = {
        path: {
            "kind": _kind(kernel),
            "config": kernel.config(),
            "form": _entries(kernel.form.nodes) if kernel.form else [],
        }
        for path, kernel in _kernels(model)
    }
    known = {"graph": _entries(to_data(model.graph)), "tensors": list(_shapes(model)), "kernels": kernels}
    packed = zlib.compress(json.dumps(known).encode())
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def take_over(model: fx.GraphModule, state: Tensor) -> None:
    """Give a model the grids of another one that is the same but for its numbers; `recompile` the model then.

    Nothing has changed where it raises.

    Raises:
        InputError: that model has another graph, other kernels or other shapes; the message names the first difference.
    """
    theirs = check_same(model, state)
    grids = {name: numbers for name, _, numbers in theirs["graph"]}
    for node in model.graph.nodes:
        node.kwargs = _with_numbers(node.target, node.kwargs, grids[node.name])
    for path, kernel in list(_kernels(model)):  # what is inside a kernel may be made anew
        other = theirs["kernels"][path]
        if kernel.form is not None:
            numbers = (found for _, _, found in other["form"])
            nodes = [_renumbered(node, found) for node, found in zip(kernel.form.nodes, numbers, strict=True)]
            kernel.form = replace(kernel.form, nodes=nodes)
        kernel.adopt(other["config"])


def check_same(model: fx.GraphModule, state: Tensor) -> Any:
    """Refuse the state of a model that is not the same as this one but for its numbers; what is in the state.

    Raises:
        InputError: names the first difference; or it is no such state.
    """
    mine, theirs = _unpacked(state_of(model)), _unpacked(state)
    about = {node.name: info(node).path for node in model.graph.nodes}
    pairs: list[tuple[str, Any, Any]] = [
        ("node", _checks(mine["graph"]), _checks(theirs["graph"])),
        ("tensor", mine["tensors"], theirs["tensors"]),
        ("kernel", _kernel_checks(mine), _kernel_checks(theirs)),
    ]
    for what, own, other in pairs:
        if own != other:
            i = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other)))
            (a, b) = (side[i][0] if i < len(side) else "none" for side in (own, other))
            layer = about.get(a) or about.get(str(a).rpartition(".")[2])
            place = f"{what} {a!r}" + (f" of {layer!r}" if layer else "")
            same = "differs in its options, bits or shapes" if a == b else f"is {b!r} there"
            raise InputError(
                f"the state dict is of another model than this one: {place} {same}. A quantized model takes the state "
                "dict of one that was quantized alike: the same network, recipe and kind of machine. To carry a whole "
                "model, save it (qmodel.save(path), fxq.load(path))."
            )
    return theirs


def _unpacked(state: Tensor) -> Any:
    try:
        return json.loads(zlib.decompress(state.cpu().numpy().tobytes()))
    except (zlib.error, ValueError) as error:
        raise InputError(
            f"the entry '_extra_state' of the state dict does not hold the grids of a quantized model ({error}). Load "
            "what state_dict() of one gave."
        ) from None


def _checks(entries: Sequence[Any]) -> list[tuple[str, int, int]]:
    return [(name, checksum, len(numbers)) for name, checksum, numbers in entries]


def _kernel_checks(known: Any) -> list[tuple[str, Any]]:
    return [
        (path, (kernel["kind"], _without_grids(kernel["config"]), _checks(kernel["form"])))
        for path, kernel in known["kernels"].items()
    ]


def _without_grids(value: Any) -> Any:
    """The config of a kernel without the numbers of its grids."""
    if isinstance(value, dict):
        return {k: _without_grids(v) for k, v in value.items() if k not in _GRID}
    return [_without_grids(v) for v in value] if isinstance(value, (list, tuple)) else value


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules by path, without those inside kernels."""
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module not in inside:
            if isinstance(module, Kernel):
                inside.update(module.modules())
            yield path, module


def _kernels(model: nn.Module) -> Iterator[tuple[str, Kernel]]:
    return ((path, module) for path, module in _modules(model) if isinstance(module, Kernel))


def _shapes(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Every parameter and buffer with its type and shape, every module with its class."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, f"{tensor.dtype} {list(tensor.shape)}"
    for path, module in _modules(model):
        yield path, _kind(module)


def _kind(module: nn.Module) -> str:
    if isinstance(module, Unit):
        return f"unit {zlib.crc32(str(_checks(_entries(to_data(module.graph)))).encode())}"
    if isinstance(module, fx.GraphModule):
        return "graph"  # every one has a class of its own
    kind = module.described if isinstance(module, Kernel) else type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def _entries(nodes: Sequence[NodeData]) -> list[Entry]:
    """The nodes of a graph with their numbers."""
    found = []
    for op, target, args, kwargs, name, _ in nodes:
        numbers = _numbers(target, kwargs)
        rest = {k: v for k, v in kwargs.items() if k not in numbers}
        text = repr(map_aggregate((op, _text(target), args, rest), _text))
        found.append((name, zlib.crc32(text.encode()), [*map(float, numbers.values())]))
    return found


def _numbers(target: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a grid among the options of a conversion; scales per channel are tensors of the model."""
    converts = getattr(target, "__name__", "") in CONVERSIONS
    return {k: kwargs[k] for k in _GRID if converts and isinstance(kwargs.get(k), (int, float))}


def _text(value: Any) -> Any:
    """A value as what is the same in every process."""
    if callable(value) and not isinstance(value, type):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', str(value))}"
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device, slice)):
        return repr(value)
    return f"{type(value).__qualname__} {getattr(value, 'index', '')}"


def _renumbered(node: NodeData, numbers: Sequence[float]) -> NodeData:
    """A node as data with other numbers."""
    op, target, args, kwargs, name, meta = node
    return op, target, args, _with_numbers(target, kwargs, numbers), name, meta


def _with_numbers(target: Any, kwargs: Mapping[str, Any], numbers: Sequence[float]) -> dict[str, Any]:
    """The options of a node with the numbers of `_entries`."""
    old = _numbers(target, kwargs)
    return {**kwargs, **{k: type(v)(new) for (k, v), new in zip(old.items(), numbers, strict=True)}}
