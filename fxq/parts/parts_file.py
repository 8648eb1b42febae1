"""Saving a model in parts to one file, and loading it into the float model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxq.common.checksums import checksum
from fxq.common.source import without_imports
from fxq.errors import FileError, FxqError, InputError, warn, words_of
from fxq.ledger.ledger import Ledger
from fxq.model import QuantizedModel, remade
from fxq.parts.absent import AbsentTensor
from fxq.parts.copying import copy_of
from fxq.parts.part import Part, Programs, parts_in, tensors_of
from fxq.recipe.recipe import Recipe
from fxq.saved.container import read_container, read_json, write_container
from fxq.saved.model_file import PARTS, checked_path, content_of, graph_from
from fxq.saved.records import from_plain, to_plain

_BUFFERS = "(buffers)"
"""Prefix of the names of tensors in a file that are buffers outside of the parts."""


@dataclass(frozen=True)
class StoredPart:
    """Description of one part in a file.

    Attributes:
        path: path of the submodule that it replaces.
        type: class name of that submodule.
        graphs: names of its graphs.
        read: names of the float weights inside that Python code reads; they are taken from the float model.
        has_float_calls: whether the float model's submodule runs for calls that none of the graphs takes.
    """

    path: str
    type: str
    graphs: tuple[str, ...]
    read: tuple[str, ...] = ()
    has_float_calls: bool = False


@dataclass(frozen=True)
class StoredParts:
    """Description of a model in parts, besides its graphs.

    Attributes:
        type: class name of the float model.
        parts: the parts.
        weights: checksums by name of the parameters and buffers outside of the parts, and of those inside that Python
            code reads.
        backend, ledger: as in `PartsModel`.
        buffers: names of the buffers outside of the parts that have changed since the model was quantized, such as
            a count of calls. The file has their values; a name without a tensor means None.
    """

    type: str
    parts: tuple[StoredPart, ...]
    weights: Mapping[str, int]
    backend: str
    ledger: Ledger = field(default_factory=lambda: Ledger(()))
    buffers: tuple[str, ...] = ()


def buffer_checksums(model: nn.Module) -> dict[str, int]:
    """Return the checksums of the buffers of a model in parts that code outside of the parts can read, by name."""
    return {name: checksum(buffer) for name, buffer in _buffers(model).items() if buffer.layout is torch.strided}


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers of a model in parts, without those of graphs, and with those of parts that Python code reads."""
    inside = _paths_of_programs(model)
    own = {n: t for n, t in model.named_buffers(remove_duplicate=False) if not n.startswith(inside)}
    for at, part in parts_in(model):
        shown = part.fxq_skeleton.named_buffers(remove_duplicate=False)
        own |= {f"{at}.{n}": t for n, t in shown if not isinstance(t, AbsentTensor)}
    return own


def _paths_of_programs(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the names of tensors of graphs. A part may have several paths."""
    modules = model.named_modules(remove_duplicate=False)
    return tuple(f"{path}.fxq_programs." for path, module in modules if isinstance(module, Part))


def set_buffers(model: nn.Module, values: Mapping[str, Tensor | None]) -> None:
    """Set buffers of a model in parts, by name; tied ones stay tied."""
    for name, value in values.items():
        path, _, own = name.rpartition(".")
        owner = model.get_submodule(path)
        buffers = (owner.fxq_skeleton if isinstance(owner, Part) else owner)._buffers
        current = buffers.get(own)
        is_alike = value is not None and current is not None and current.shape == value.shape
        if is_alike and current.dtype == value.dtype:  # type: ignore[union-attr]
            current.copy_(value)  # type: ignore[union-attr,arg-type]
        else:
            buffers[own] = value


def save_parts(path: str | os.PathLike[str], model: Any) -> Path:
    """Save the parts of a model to one file, see `PartsModel.save`."""
    path = checked_path(path)
    tensors: dict[str, Tensor] = {}
    texts: dict[str, str] = {}
    stored: list[StoredPart] = []
    inside = _paths_of_programs(model)
    around = {name: tensor for name, tensor in _named_tensors(model).items() if not name.startswith(inside)}
    lost: list[str] = []
    for at, part in parts_in(model):
        programs = part.fxq_programs
        assert isinstance(programs, Programs)
        shown = {f"{at}.{name}": tensor for name, tensor in tensors_of(part.fxq_skeleton)}
        read = {name: tensor for name, tensor in shown.items() if not isinstance(tensor, AbsentTensor)}
        around |= read
        whole = programs.float_module
        around |= (
            {f"{at}.{name}": tensor for name, tensor in _named_tensors(whole).items()} if whole is not None else {}
        )
        stored.append(
            StoredPart(at, part.float_class.__name__, programs.names, tuple(read), has_float_calls=whole is not None)
        )
        for name, graph in programs.named_graphs():
            content = content_of(graph, graph._copied_attributes, graph._set_by_user)
            tensors |= {f"{name}/{key}": tensor for key, tensor in content.tensors.items()}
            texts |= {f"{name}/{key}": text for key, text in content.texts.items()}
            lost += content.lost
    attributes = vars(model)
    weights = {name: checksum(tensor) for name, tensor in around.items()}
    before, after = attributes["_fxq_buffers"], buffer_checksums(model)
    emptied = before.keys() - _buffers(model).keys()
    changed = (*(name for name in after if before.get(name) != after[name]), *sorted(emptied))
    tensors |= {f"{_BUFFERS}/{name}": around[name] for name in changed if name in after}
    about = StoredParts(
        type(model).float_class.__name__,
        tuple(stored),
        {name: number for name, number in weights.items() if name not in changed},
        attributes["_fxq_backend"],
        attributes["_fxq_ledger"],
        changed,
    )
    texts |= {PARTS: json.dumps(to_plain(about)), "recipe": json.dumps(attributes["_fxq_recipe"].to_dict())}
    write_container(path, tensors, texts)
    if lost:
        warn(f"{path} does not contain {', '.join(lost)}: a file holds only plain data and tensors.")
    return path


@dataclass(frozen=True)
class LoadedParts:
    """Parts that were read from a file.

    Attributes:
        programs: module that each part calls, by the path of the submodule.
        weights: tensors in place of the float weights of the parts, by name: placeholders or copies.
        ledger, recipe, backend: as in `PartsModel`.
        buffers: values of buffers outside of the parts that differ from those of the float model, by name.
    """

    programs: Mapping[str, nn.Module]
    weights: Mapping[str, Tensor]
    ledger: Ledger
    recipe: Recipe
    backend: str
    buffers: Mapping[str, Tensor | None]


def read_parts(path: str | os.PathLike[str], model: nn.Module) -> LoadedParts:
    """Read the parts in a file, for a float model."""
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"path must be a str or a path, not {path!r}.")
    if not isinstance(model, nn.Module):
        raise InputError(f"into is a {type(model).__name__}; give the float model that was quantized.")
    container = read_container(Path(path))
    try:
        if PARTS not in container.texts:
            raise InputError("it holds a whole model, not parts: leave out into.")
        with without_imports():
            about = from_plain(StoredParts, read_json(container.texts[PARTS]))
            _check_float_model(model, about)
            programs = {
                part.path: _programs(part, container.tensors, container.texts, model, container.mapped)
                for part in about.parts
            }
            recipe = Recipe.from_dict(read_json(container.texts["recipe"]))
            stored = {name: container.tensors.get(f"{_BUFFERS}/{name}") for name in about.buffers}
            buffers = {name: None if value is None else value.clone() for name, value in stored.items()}
            for name in buffers:
                model.get_submodule(name.rpartition(".")[0])  # raises for a module that the model lacks
    except FxqError as error:
        raise FileError(f"cannot load {str(path)!r}: {error}") from None
    except Exception as error:  # invalid data may raise anything
        raise FileError(f"cannot load {str(path)!r}: {type(error).__name__}: {words_of(error)}") from error
    read = {name for part in about.parts for name in part.read}
    shown = {
        name: tensor.detach().clone() if name in read else AbsentTensor.like(tensor, name)
        for part in about.parts
        for name, tensor in ((f"{part.path}.{n}", t) for n, t in tensors_of(model.get_submodule(part.path)))
    }
    return LoadedParts(programs, shown, about.ledger, recipe, about.backend, buffers)


def _programs(
    part: StoredPart, tensors: dict[str, Tensor], texts: Mapping[str, str], model: nn.Module, mapped: Any
) -> Programs:
    graphs: dict[str, QuantizedModel] = {}
    for name in part.graphs:
        own_tensors = {key.removeprefix(f"{name}/"): t for key, t in tensors.items() if key.startswith(f"{name}/")}
        own_texts = {key.removeprefix(f"{name}/"): t for key, t in texts.items() if key.startswith(f"{name}/")}
        leaves = {path: model.get_submodule(path) for path in stored_leaves(own_texts)}
        gm, attributes, made_on = graph_from(own_tensors, own_texts, leaves)
        graphs[name] = remade(gm, gm.graph, {**attributes, "_mapped": mapped}, made_on)
    return Programs(graphs, copy_of(model.get_submodule(part.path), {}) if part.has_float_calls else None)


def stored_leaves(texts: Mapping[str, str]) -> list[str]:
    """Return the paths of the float modules that a graph calls, which are taken from the float model."""
    return list(read_json(texts["model"]).get("leaves", {}))


def _check_float_model(model: nn.Module, about: StoredParts) -> None:
    """Raise `InputError` unless parts can be loaded into a float model."""
    for part in about.parts:
        try:
            kind = type(model.get_submodule(part.path)).__name__
        except AttributeError:
            kind = "nothing"
        if kind != part.type:
            raise InputError(
                f"it has a part for the {part.type} at {part.path!r}, where the {type(model).__name__} that is given "
                f"has {kind}. Give a {about.type} like the one that was quantized."
            )
    now = _named_tensors(model)
    changed = [name for name, number in about.weights.items() if name not in now or checksum(now[name]) != number]
    if changed:
        raise InputError(
            f"the float model has other weights or buffers that Python code uses than the one that was quantized, for "
            f"instance {changed[0]!r} ({len(changed)} of {len(about.weights)}). Load those first."
        )


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a model, tied ones under each of their names."""
    return dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))
