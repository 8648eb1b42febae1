"""Saving a quantized model to one file, and loading it: graph as text, tensors, recipe, ledger and history as data."""

from __future__ import annotations

import ast
import gc
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxq.backends import cpu
from fxq.backends.by_name import kernel_named
from fxq.backends.kernel import Kernel
from fxq.backends.qdq_form import FallbackKernel
from fxq.common.attributes import MAX_ATTRIBUTE_BYTES, FloatAttributes
from fxq.common.files import as_path
from fxq.common.source import without_imports
from fxq.errors import BackendError, FileError, FxqError, InputError, warn, words_of
from fxq.graph.info import info
from fxq.graph.text.text_reader import read
from fxq.graph.text.text_values import parsed, read_value, value_text
from fxq.graph.text.text_writer import graph_tensors, write_graph
from fxq.graph.view import GraphView, NodeView
from fxq.ledger.attempts import Attempts
from fxq.ledger.float_record import FloatRecord, checksums
from fxq.ledger.ledger import Ledger
from fxq.ledger.quantized import Quantized
from fxq.pipeline.history import History, Snapshot
from fxq.recipe.extensions import warn_of_main
from fxq.recipe.pins import Pin
from fxq.recipe.recipe import Recipe
from fxq.saved.container import read_container, read_json, write_container
from fxq.saved.kernel_forms import StoredForm, attach_forms, write_forms
from fxq.saved.model_export import WRITERS
from fxq.saved.named_code import StoredLeaf, check_imports, check_kernels, checked_leaves, imports_of, leaves_of
from fxq.saved.other_machine import kernels_of
from fxq.saved.own_tensors import OWN, own_tensors, set_own_tensors
from fxq.saved.records import from_plain, to_plain


@dataclass(frozen=True)
class StoredModel:
    """Description of a model in a file, besides its graph, recipe and history.

    Attributes:
        backend, ledger, record, kinds_kept, attempts, decided: as in `QuantizedModel`.
        made_on: `cpu.machine()` of the machine that it was quantized on.
        leaves: leaf modules, which are not in the file, by path.
        imports: import paths of its kernels and ops that are not fxq's, by "kernel" or "op" and the name.
        forms: q/dq forms of kernels, by the name of the graph.
        handed: plain data of the float model, as text, by name.
        left: reasons why other attributes of the float model are missing, by name.
        own: kinds of the tensors that the user attached, by path: "parameter", "buffer", "temporary buffer"
            (non-persistent) or "attribute".
    """

    backend: str
    ledger: Ledger
    record: FloatRecord
    kinds_kept: int
    attempts: Attempts | None
    decided: tuple[Pin, ...]
    made_on: Mapping[str, str]
    leaves: Mapping[str, StoredLeaf]
    imports: Mapping[str, str]
    forms: Mapping[str, StoredForm]
    handed: Mapping[str, str]
    left: Mapping[str, str]
    own: Mapping[str, str] = field(default_factory=dict)


def save_model(
    path: str | os.PathLike[str], model: Quantized, attributes: Mapping[str, Any], own: Mapping[str, Any]
) -> Path:
    """Save a model to a file, see `QuantizedModel.save`.

    Args:
        path: the file.
        model: the model.
        attributes: attributes of the model that the file keeps, by name.
        own: attributes that the user set, without modules.
    """
    path = checked_path(path)
    content = content_of(model, attributes, own)
    write_container(path, content.tensors, content.texts)
    _warn_of_lost(path, content.lost)
    return path


def _warn_of_lost(path: Path, lost: Sequence[str]) -> None:
    if lost:
        warn(
            f"{path} does not contain {', '.join(lost)}: a file holds only plain data and tensors, not modules or "
            "other objects. Set them again after fxq.load."
        )


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file to save a model to. Raises `InputError` if its suffix is that of another format."""
    path = as_path(path)
    if path.suffix in WRITERS:
        raise InputError(
            f"save writes fxq files, not {path.suffix}: use qmodel.export({str(path)!r}), or save to a .fxq file."
        )
    return path


@dataclass(frozen=True)
class FileContent:
    """Content of a file for one model.

    Attributes:
        tensors: tensors by name.
        texts: graph, kernel forms, recipe, further facts and history.
        lost: attributes that a file cannot hold.
    """

    tensors: Mapping[str, Tensor]
    texts: Mapping[str, str]
    lost: Sequence[str]


def content_of(model: Quantized, attributes: Mapping[str, Any], own: Mapping[str, Any]) -> FileContent:
    """Return the content of a file for one model, see `save_model`."""
    check_kernels(model)
    tensors, named, lost = own_tensors(model, own)
    forms_text, forms, more_tensors = write_forms(model)
    handed, left = _as_text(
        attributes["_float_attributes"], {k: v for k, v in own.items() if not isinstance(v, Tensor)}
    )
    lost += [name for name in own if name in left]
    about = StoredModel(
        **{key: attributes[key] for key in ("backend", "ledger", "record", "kinds_kept", "attempts")},
        decided=attributes["_decided"],
        made_on=cpu.machine(),
        leaves={path: StoredLeaf(type(leaf).__name__, checksums(leaf)) for path, leaf in leaves_of(model).items()},
        imports=dict(imports_of(model)),
        forms=forms,
        handed=handed,
        left=left,
        own=named,
    )
    graph_text = write_graph(model, complete=True)
    _check_readable(graph_text, about, model)
    texts = {
        "graph": graph_text,
        "forms": forms_text,
        "recipe": _json(warn_of_main(attributes["recipe"].to_dict())),
        "model": _json(to_plain(about)),
        "history": _json(history_data(attributes["history"])),
    }
    return FileContent({**graph_tensors(model), **more_tensors, **tensors}, texts, lost)


def save_programs(
    path: str | os.PathLike[str],
    models: Mapping[str, tuple[Quantized, Mapping[str, Any], Mapping[str, Any]]],
    description: Any,
) -> Path:
    """Save the programs of one model to a file. Tensors that they share are stored once.

    Args:
        path: the file.
        models: model, attributes and attributes that the user set, as for `save_model`, by the name of the program.
        description: plain data that describes the calls of the programs.
    """
    path = checked_path(path)
    tensors: dict[str, Tensor] = {}
    texts = {"programs": _json(description)}
    lost: list[str] = []
    for name, (model, attributes, own) in models.items():
        content = content_of(model, attributes, own)
        tensors |= {f"{name}/{key}": tensor for key, tensor in content.tensors.items()}
        texts |= {f"{name}/{key}": text for key, text in content.texts.items()}
        lost += content.lost
    write_container(path, tensors, texts)
    _warn_of_lost(path, lost)
    return path


LoadedModel = tuple[fx.GraphModule, dict[str, Any], Mapping[str, str]]
"""Graph module, further attributes, and `cpu.machine()` of the machine that a model was quantized on."""


def load_programs(
    path: str | os.PathLike[str], leaves: Mapping[str, nn.Module] | None = None
) -> tuple[Any, dict[str, LoadedModel]]:
    """Load the programs of a model from a file.

    Returns:
        The description of their calls, and the models by the name of the program. A file of a single model has no
        description and the name "".
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"path must be a str or a path, not {path!r}.")
    container = read_container(Path(path))
    with _reading(path):
        if PARTS in container.texts:
            raise InputError("it holds the parts of a model: pass the float model, fxq.load(path, into=model).")
        if "programs" not in container.texts:
            gm, attributes, made_on = graph_from(container.tensors, container.texts, leaves or {})
            return None, {"": (gm, {**attributes, "_mapped": container.mapped}, made_on)}
        models = {}
        for name in dict.fromkeys(key.partition("/")[0] for key in container.texts if "/" in key):
            gm, attributes, made_on = graph_from(
                _under(container.tensors, name), _under(container.texts, name), leaves or {}
            )
            models[name] = gm, {**attributes, "_mapped": container.mapped}, made_on
        return read_json(container.texts["programs"]), models


def _under(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Entries of a file that belong to one program, by their names without it."""
    prefix = f"{name}/"
    return {key.removeprefix(prefix): entry for key, entry in entries.items() if key.startswith(prefix)}


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Context in which the content of a file is read: nothing is imported, and errors name the file."""
    try:
        with without_imports(), _garbage_collection_off():
            yield
    except FxqError as error:
        raise FileError(f"cannot load {str(path)!r}: {error}") from None
    except Exception as error:  # invalid data may raise anything
        raise FileError(f"cannot load {str(path)!r}: {type(error).__name__}: {words_of(error)}") from error


@contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """Context without garbage collection, which would scan the many new objects again and again."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


PARTS = "parts"
"""Name of the text of files that hold a model in parts (`fxq/parts/parts_file.py`)."""


def graph_from(
    tensors: dict[str, Tensor], texts: Mapping[str, str], leaves: Mapping[str, nn.Module]
) -> tuple[fx.GraphModule, dict[str, Any], Mapping[str, str]]:
    """Rebuild a model from the content of a file, see `load_model`."""
    missing = [name for name in ("graph", "forms", "recipe", "model", "history") if name not in texts]
    if missing:
        raise InputError(f"it has no {missing[0]}.")
    about = from_plain(StoredModel, read_json(texts["model"]))
    check_imports(about.imports)
    modules = checked_leaves(about.leaves, leaves)
    own = {name: tensors.pop(f"{OWN}{name}", None) for name in about.own}
    inside = {name: tensor for name, tensor in tensors.items() if name.partition(":")[0] in about.forms}
    gm = read(
        texts["graph"], {n: t for n, t in tensors.items() if n not in inside}, modules, _KernelClass, complete=True
    )
    for name, expected in graph_tensors(gm).items():
        if (expected.dtype, expected.shape) != (tensors[name].dtype, tensors[name].shape):
            raise InputError(
                f"{name} is {tensors[name].dtype} {list(tensors[name].shape)}, but its kernel needs {expected.dtype} "
                f"{list(expected.shape)}."
            )
    attach_forms(gm, texts["forms"], about.forms, inside)
    unformed = next((k for _, k in kernels_of(gm) if isinstance(k, FallbackKernel) and "form" not in vars(k)), None)
    if unformed is not None:
        raise BackendError(f"{unformed.described.name}: {unformed.reason}")
    _warn_of_refused(gm, about)
    attributes = {key: getattr(about, key) for key in ("backend", "ledger", "record", "kinds_kept", "attempts")}
    attributes["_decided"], attributes["recipe"] = about.decided, Recipe.from_dict(read_json(texts["recipe"]))
    values = {name: read_value(_expression(text), {}) for name, text in about.handed.items()}
    attributes["_float_attributes"] = FloatAttributes(values, dict(about.left))
    attributes["history"] = history_from(read_json(texts["history"]))
    plain = set_own_tensors(gm, own, about.own)
    return gm, {**plain, **attributes}, about.made_on


def _check_readable(text: str, about: StoredModel, model: Quantized) -> None:
    """Raise `InputError` if the text of a model cannot be read back. Does not construct kernels."""
    try:
        with without_imports(), _garbage_collection_off():
            read(text, graph_tensors(model), leaves_of(model), _Named, complete=True)
            from_plain(StoredModel, read_json(_json(to_plain(about))))
    except FxqError as error:
        line = re.match(r"line (\d+): ", str(error))
        shown = f" That line is `{text.splitlines()[int(line[1]) - 1].strip()[:200]}`." if line else ""
        raise InputError(f"the model cannot be saved, since its text could not be read back: {error}{shown}") from None


class _Named:
    """Placeholder for a kernel class when a text is only checked. Raises `FxqError` if there is no such kernel."""

    def __init__(self, name: str) -> None:
        kernel_named(name)

    def from_config(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
        return nn.Identity()

    def of_graph(self, gm: fx.GraphModule, graph: fx.Graph, config: Mapping[str, Any]) -> nn.Module:
        return nn.Identity()


def _warn_of_refused(gm: fx.GraphModule, about: StoredModel) -> None:
    """Warn of kernels that this version of fxq refuses on the same machine; `fit` handles other machines."""
    in_qdq_form = {form.kernel for form in about.forms.values() if form.reason}
    refused = [(n, k) for n, k in kernels_of(gm) if isinstance(k, FallbackKernel) and str(n.target) not in in_qdq_form]
    if refused and about.made_on == cpu.machine():
        node, kernel = refused[0]
        warn(
            f"{len(refused)} kernels of this file are refused, for instance {info(node).path or node.name!r}: "
            f"{kernel.reason.rstrip('.')}. They run in q/dq form, which is correct but slow. Quantize the float model "
            "again."
        )


class _KernelClass:
    """Kernel class by name, for reading a graph. A kernel that this machine refuses is replaced by its q/dq form."""

    def __init__(self, name: str) -> None:
        self.kind = kernel_named(name)

    def from_config(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Kernel:
        try:
            return self.kind.from_config(config, tensors)
        except BackendError as error:
            return FallbackKernel(self.kind, config, tensors, words_of(error))

    def of_graph(self, gm: fx.GraphModule, graph: fx.Graph, config: Mapping[str, Any]) -> Kernel:
        return self.kind.of_graph(gm, graph, config)  # type: ignore[attr-defined]


def _as_text(attributes: FloatAttributes, own: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return attributes of the float model and of the user as text, and the reasons why others cannot be saved."""
    handed, left = {}, {name: why for name, why in attributes.left.items() if name not in own}
    for name, value in {**attributes.values, **own}.items():
        text = value_text(value) if _is_literal(value) else ""
        if text and len(text) <= MAX_ATTRIBUTE_BYTES:
            handed[name] = text
        else:
            left[name] = f"it is a {type(value).__name__}, or contains one, and a model file holds plain data only"
    return handed, left


def _is_literal(value: Any) -> bool:
    """Whether a value can be rebuilt from its text."""
    if type(value) in (list, tuple):
        return all(map(_is_literal, value))
    if type(value) is dict:
        return all(type(key) in _KEYS for key in value) and all(map(_is_literal, value.values()))
    return type(value) in (*_KEYS, torch.dtype, torch.device, torch.layout, torch.memory_format)


_KEYS = (str, int, float, bool, type(None))


def _expression(text: str) -> ast.expr:
    stmt, _ = parsed(text)
    if not isinstance(stmt, ast.Expr):
        raise InputError(f"expected a value, not {text!r}.")
    return stmt.value


def _json(data: Any) -> str:
    try:
        return json.dumps(data)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"a file cannot hold this part of the recipe or the record: {error}.") from None


# ---- history


def history_data(history: History) -> dict[str, Any]:
    """Return a history as plain data, with each distinct node view stored once; snapshots refer to it by its index."""
    indices: dict[NodeView, int] = {}
    steps = []
    for step in history:
        nodes = [indices.setdefault(node, len(indices)) for node in step.graph]
        steps.append([to_plain(replace(step, graph=GraphView((), step.graph.name))), nodes])
    return {"first_loss": history.first_loss, "views": to_plain(list(indices)), "steps": steps}


def history_from(data: Any) -> History:
    """Rebuild a history from `history_data`. Raises `InputError` for other data."""
    views = from_plain(tuple[NodeView, ...], data["views"])
    steps = []
    for step, nodes in from_plain(tuple[tuple[Snapshot, tuple[int, ...]], ...], data["steps"]):
        if not all(0 <= i < len(views) for i in nodes):
            raise InputError(f"{step.name}: its graph refers to nodes that do not exist.")
        steps.append(replace(step, graph=replace(step.graph, nodes=tuple(views[i] for i in nodes))))
    return History(steps, from_plain(str | None, data["first_loss"]))
