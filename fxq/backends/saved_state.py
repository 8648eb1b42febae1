"""Extra state of a quantized model in its state dict: the grids, and checksums of the graph that they belong to."""

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
"""Options of conversions that may differ between models with the same graph, as weights may."""
Entry = tuple[str, int, list[float]]
"""Node of a graph: its name, a checksum of its target and arguments, and the numbers of its grid."""


def state_of(model: fx.GraphModule) -> Tensor:
    """Grids of a model, and checksums of its graph and kernels, as compressed JSON in a uint8 tensor (n,).

    It is a tensor so that every tool that saves state dicts can save it.
    """
    kernels = {
        path: {
            "kind": _kind(kernel),
            "config": kernel.config(),
            "form": _entries(kernel.form.nodes) if kernel.form else [],
        }
        for path, kernel in _kernels(model)
    }
    state = {"graph": _entries(to_data(model.graph)), "tensors": list(_shapes(model)), "kernels": kernels}
    packed = zlib.compress(json.dumps(state).encode())
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def take_over(model: fx.GraphModule, state: Tensor) -> None:
    """Replace the grids of a model by those in `state`, the state of a model with the same graph. Recompile it then.

    If it raises, the model has not changed.

    Raises:
        InputError: the state is of a model with another graph, other kernels or other shapes; the message names the
            first difference.
    """
    loaded = check_same(model, state)
    grids = {name: numbers for name, _, numbers in loaded["graph"]}
    for node in model.graph.nodes:
        node.kwargs = _with_numbers(node.target, node.kwargs, grids[node.name])
    for path, kernel in list(_kernels(model)):  # a list, since `adopt` may replace the modules inside a kernel
        kernel_state = loaded["kernels"][path]
        if kernel.form is not None:
            grids_of_form = (numbers for _, _, numbers in kernel_state["form"])
            nodes = [_renumbered(node, grid) for node, grid in zip(kernel.form.nodes, grids_of_form, strict=True)]
            kernel.form = replace(kernel.form, nodes=nodes)
        kernel.adopt(kernel_state["config"])


def check_same(model: fx.GraphModule, state: Tensor) -> Any:
    """Check that `state` is of a model with the same graph, kernels and shapes, and return its unpacked content.

    Raises:
        InputError: it is not, and the message names the first difference; or `state` is not the state of a model.
    """
    own, loaded = _unpacked(state_of(model)), _unpacked(state)
    layers = {node.name: info(node).path for node in model.graph.nodes}
    pairs: list[tuple[str, Any, Any]] = [
        ("node", _checks(own["graph"]), _checks(loaded["graph"])),
        ("tensor", own["tensors"], loaded["tensors"]),
        ("kernel", _kernel_checks(own), _kernel_checks(loaded)),
    ]
    for noun, here, there in pairs:
        if here != there:
            differing = (i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b)
            i = next(differing, min(len(here), len(there)))
            (a, b) = (side[i][0] if i < len(side) else "none" for side in (here, there))
            layer = layers.get(a) or layers.get(str(a).rpartition(".")[2])
            place = f"{noun} {a!r}" + (f" of {layer!r}" if layer else "")
            difference = "differs in its options, bits or shapes" if a == b else f"is {b!r} there"
            raise InputError(
                f"the state dict is of another model: {place} {difference}. A quantized model takes state dicts of "
                "models that were quantized alike: same network, recipe and kind of machine. To load a whole model, "
                "save it with qmodel.save(path) and load it with fxq.load(path)."
            )
    return loaded


def _unpacked(state: Tensor) -> Any:
    try:
        return json.loads(zlib.decompress(state.cpu().numpy().tobytes()))
    except (zlib.error, ValueError) as error:
        raise InputError(
            f"the entry '_extra_state' of the state dict does not hold the grids of a quantized model ({error}). Load "
            "a state dict that state_dict() of a quantized model returned."
        ) from None


def _checks(entries: Sequence[Any]) -> list[tuple[str, int, int]]:
    return [(name, checksum, len(numbers)) for name, checksum, numbers in entries]


def _kernel_checks(state: Any) -> list[tuple[str, Any]]:
    return [
        (path, (kernel["kind"], _without_grids(kernel["config"]), _checks(kernel["form"])))
        for path, kernel in state["kernels"].items()
    ]


def _without_grids(value: Any) -> Any:
    """Return the config of a kernel without the numbers of its grids."""
    if isinstance(value, dict):
        return {k: _without_grids(v) for k, v in value.items() if k not in _GRID}
    return [_without_grids(v) for v in value] if isinstance(value, (list, tuple)) else value


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules by path, except modules inside kernels."""
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module not in inside:
            if isinstance(module, Kernel):
                inside.update(module.modules())
            yield path, module


def _kernels(model: nn.Module) -> Iterator[tuple[str, Kernel]]:
    return ((path, module) for path, module in _modules(model) if isinstance(module, Kernel))


def _shapes(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Each parameter and buffer with its dtype and shape, each module with its class, as text by path."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        yield name, f"{tensor.dtype} {list(tensor.shape)}"
    for path, module in _modules(model):
        yield path, _kind(module)


def _kind(module: nn.Module) -> str:
    if isinstance(module, Unit):
        return f"unit {zlib.crc32(str(_checks(_entries(to_data(module.graph)))).encode())}"
    if isinstance(module, fx.GraphModule):
        return "graph"  # torch.fx makes a class for every graph module
    kind = module.described if isinstance(module, Kernel) else type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def _entries(nodes: Sequence[NodeData]) -> list[Entry]:
    """Entries of the nodes of a graph."""
    entries = []
    for op, target, args, kwargs, name, _ in nodes:
        numbers = _numbers(target, kwargs)
        options = {k: v for k, v in kwargs.items() if k not in numbers}
        text = repr(map_aggregate((op, _text(target), args, options), _text))
        entries.append((name, zlib.crc32(text.encode()), [*map(float, numbers.values())]))
    return entries


def _numbers(target: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of the grid among the options of a conversion. Per-channel scales are tensors, which are left out."""
    converts = getattr(target, "__name__", "") in CONVERSIONS
    return {k: kwargs[k] for k in _GRID if converts and isinstance(kwargs.get(k), (int, float))}


def _text(value: Any) -> Any:
    """Text of a value that is the same in every process."""
    if callable(value) and not isinstance(value, type):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', str(value))}"
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device, slice)):
        return repr(value)
    return f"{type(value).__qualname__} {getattr(value, 'index', '')}"


def _renumbered(node: NodeData, numbers: Sequence[float]) -> NodeData:
    """Return a node with the grid numbers replaced."""
    op, target, args, kwargs, name, meta = node
    return op, target, args, _with_numbers(target, kwargs, numbers), name, meta


def _with_numbers(target: Any, kwargs: Mapping[str, Any], numbers: Sequence[float]) -> dict[str, Any]:
    """Return the options of a node with the grid numbers replaced, in the order of `_numbers`."""
    old = _numbers(target, kwargs)
    return {**kwargs, **{k: type(v)(new) for (k, v), new in zip(old.items(), numbers, strict=True)}}
