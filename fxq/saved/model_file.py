"""A quantized model as one file: the text of its graph, its tensors, its recipe, and what is known of it, as data."""

from __future__ import annotations

import ast
import copy
import gc
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxq.backends import cpu
from fxq.backends.by_name import kernel_named
from fxq.backends.kernel import Kernel, known_kernels
from fxq.backends.qdq_form import FallbackKernel
from fxq.common.attributes import MAX_ATTRIBUTE_BYTES, FloatAttributes
from fxq.common.files import as_path
from fxq.common.source import import_path, imported, without_imports
from fxq.errors import BackendError, FileError, FxqError, InputError, unknown, warn, words_of
from fxq.graph.info import info
from fxq.graph.query import op_of, submodule
from fxq.graph.text.text_reader import read
from fxq.graph.text.text_values import parsed, read_value, value_text
from fxq.graph.text.text_writer import graph_tensors, write_graph
from fxq.graph.unit import Unit
from fxq.graph.view import GraphView, NodeView
from fxq.ledger.attempts import Attempts
from fxq.ledger.float_record import Record, checksums
from fxq.ledger.ledger import Ledger
from fxq.ledger.quantized import Quantized
from fxq.ops import OPS
from fxq.pipeline.history import History, Snapshot
from fxq.recipe.extensions import warn_of_main
from fxq.recipe.pins import Pin
from fxq.recipe.recipe import Recipe
from fxq.saved.container import read_container, read_json, write_container
from fxq.saved.kernel_forms import StoredForm, attach_forms, write_forms
from fxq.saved.model_export import WRITERS as OTHERS
from fxq.saved.other_machine import kernels_of
from fxq.saved.own_tensors import OWN, own_tensors, set_own_tensors
from fxq.saved.records import from_plain, to_plain


@dataclass(frozen=True)
class StoredLeaf:
    """What a file says of a module that it does not hold.

    Attributes:
        type: the name of its class.
        weights: a checksum of each of its parameters, by name.
    """

    type: str
    weights: Mapping[str, int]


@dataclass(frozen=True)
class StoredModel:
    """What a file says of a model besides its graph, its recipe and its history.

    Attributes:
        backend, ledger, record, kinds_kept, attempts, decided: as in `QuantizedModel`.
        made_on: `cpu.machine()` of the machine that it was quantized on.
        leaves: the modules that it calls and are not in the file, by path.
        imports: the import paths of its kernels and ops that are not fxq's, by "kernel" or "op" and the name.
        forms: of kernels, by the name of the graph.
        handed: plain data of the float model, as text, by name.
        left: why other attributes of the float model are not there.
        own: kinds of the tensors that the user attached, by path: "parameter", "buffer", "temporary buffer"
            (non-persistent) or "attribute".
    """

    backend: str
    ledger: Ledger
    record: Record
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
    path: str | os.PathLike[str], model: Quantized, parts: Mapping[str, Any], own: Mapping[str, Any]
) -> Path:
    """Write a model into a file; see `QuantizedModel.save`.

    Args:
        path: the file.
        model: the model.
        parts: what it knows besides its graph and tensors, by attribute.
        own: attributes that the user set, without modules.
    """
    path = as_path(path)
    if path.suffix in OTHERS:
        raise InputError(
            f"save writes fxq files, not {path.suffix}: use qmodel.export({str(path)!r}), or save to a .fxq file."
        )
    _check_kernels(model)
    tensors, named, lost = own_tensors(model, own)
    forms_text, forms, more_tensors = write_forms(model)
    handed, left = _handed(parts["_handed"], {k: v for k, v in own.items() if not isinstance(v, Tensor)})
    lost += [name for name in own if name in left]
    about = StoredModel(
        **{key: parts[key] for key in ("backend", "ledger", "record", "kinds_kept", "attempts")},
        decided=parts["_decided"],
        made_on=cpu.machine(),
        leaves={path: StoredLeaf(type(leaf).__name__, checksums(leaf)) for path, leaf in _leaves(model).items()},
        imports=dict(_imports(model)),
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
        "recipe": _json(warn_of_main(parts["recipe"].to_dict())),
        "model": _json(to_plain(about)),
        "history": _json(history_data(parts["history"])),
    }
    write_container(path, {**graph_tensors(model), **more_tensors, **tensors}, texts)
    if lost:
        warn(
            f"{path} does not contain {', '.join(lost)}: a file holds only plain data and tensors, not modules or "
            "other objects. Set them again after fxq.load."
        )
    return path


def load_model(
    path: str | os.PathLike[str], leaves: Mapping[str, nn.Module] | None = None
) -> tuple[fx.GraphModule, dict[str, Any], Mapping[str, str]]:
    """A model from its file: its graph, what else it knows, and the machine that it was made on; see `fxq.load`."""
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"a file is named by a str or a path, not by {path!r}.")
    held = read_container(Path(path))
    try:
        with without_imports(), _uncollected():
            gm, parts, made_on = _read(held.tensors, held.texts, leaves or {})
            return gm, {**parts, "_mapped": held.mapped}, made_on
    except FxqError as error:
        raise FileError(f"cannot load {str(path)!r}: {error}") from None
    except Exception as error:  # whatever comes of data that is no model's
        raise FileError(f"cannot load {str(path)!r}: {type(error).__name__}: {words_of(error)}") from error


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection: what is made stays, and to look through all of it again and again takes long."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _read(
    tensors: dict[str, Tensor], texts: Mapping[str, str], leaves: Mapping[str, nn.Module]
) -> tuple[fx.GraphModule, dict[str, Any], Mapping[str, str]]:
    missing = [name for name in ("graph", "forms", "recipe", "model", "history") if name not in texts]
    if missing:
        raise InputError(f"it has no {missing[0]}.")
    about = from_plain(StoredModel, read_json(texts["model"]))
    _check_imports(about.imports)
    modules = _checked_leaves(about.leaves, leaves)
    own = {name: tensors.pop(f"{OWN}{name}", None) for name in about.own}
    inside = {name: tensor for name, tensor in tensors.items() if name.partition(":")[0] in about.forms}
    gm = read(texts["graph"], {n: t for n, t in tensors.items() if n not in inside}, modules, _Kind, complete=True)
    for name, expected in graph_tensors(gm).items():
        if (expected.dtype, expected.shape) != (tensors[name].dtype, tensors[name].shape):
            raise InputError(f"{name} is {tensors[name].dtype} {list(tensors[name].shape)}, which no kernel keeps so.")
    attach_forms(gm, texts["forms"], about.forms, inside)
    unformed = next((k for _, k in kernels_of(gm) if isinstance(k, FallbackKernel) and "form" not in vars(k)), None)
    if unformed is not None:
        raise BackendError(f"{unformed.described.name}: {unformed.reason}")
    _warn_of_refused(gm, about)
    parts = {key: getattr(about, key) for key in ("backend", "ledger", "record", "kinds_kept", "attempts")}
    parts["_decided"], parts["recipe"] = about.decided, Recipe.from_dict(read_json(texts["recipe"]))
    values = {name: read_value(_expression(text), {}) for name, text in about.handed.items()}
    parts["_handed"] = FloatAttributes(values, dict(about.left))
    parts["history"] = history_from(read_json(texts["history"]))
    plain = set_own_tensors(gm, own, about.own)
    return gm, {**plain, **parts}, about.made_on


def _check_readable(text: str, about: StoredModel, model: Quantized) -> None:
    """Raise `InputError` if the text of a model cannot be read back. Does not construct kernels."""
    try:
        with without_imports(), _uncollected():
            read(text, graph_tensors(model), _leaves(model), _Named, complete=True)
            from_plain(StoredModel, read_json(_json(to_plain(about))))
    except FxqError as error:
        line = re.match(r"line (\d+): ", str(error))
        shown = f" That line is `{text.splitlines()[int(line[1]) - 1].strip()[:200]}`." if line else ""
        raise InputError(f"the model cannot be saved, as its text could not be read back: {error}{shown}") from None


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
    known_names = {form.kernel for form in about.forms.values() if form.reason}
    refused = [(n, k) for n, k in kernels_of(gm) if isinstance(k, FallbackKernel) and str(n.target) not in known_names]
    if refused and about.made_on == cpu.machine():
        node, kernel = refused[0]
        warn(
            f"{len(refused)} kernels of this file are refused, {info(node).path or node.name!r} for one: "
            f"{kernel.reason.rstrip('.')}. They run in q/dq form, which is correct but slow. Quantize the float model "
            "again."
        )


class _Kind:
    """The kernels of a name. One that this machine refuses is its form from the beginning."""

    def __init__(self, name: str) -> None:
        self.kind = kernel_named(name)

    def from_config(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Kernel:
        try:
            return self.kind.from_config(config, tensors)
        except BackendError as error:
            return FallbackKernel(self.kind, config, tensors, words_of(error))

    def of_graph(self, gm: fx.GraphModule, graph: fx.Graph, config: Mapping[str, Any]) -> Kernel:
        return self.kind.of_graph(gm, graph, config)  # type: ignore[attr-defined]


# ---- what is no data


def _check_kernels(model: Quantized) -> None:
    """Refuse kernels and hooks that run something that the file would not hold."""
    for node, kernel in kernels_of(model):
        if not kernel.is_itself():
            raise InputError(f"{node.name}: its kernel has hooks or a forward of its own: a file holds no code.")
        if known_kernels().get(kernel.described.name) is not kernel.described:
            raise InputError(
                f"{node.name}: its kernel is a {kernel.described.__name__}, which has no name of its own: "
                f"{kernel.described.name!r} is another class. Give the class a `name`."
            )
    for path, module in model.named_modules():
        if (module is model or isinstance(module, Unit)) and (module._forward_hooks or module._forward_pre_hooks):
            where = f"the unit {path!r}" if path else "the model"
            raise InputError(f"{where} has hooks, and a file holds no code: remove them, and add them behind fxq.load.")


def _imports(model: Quantized) -> Iterator[tuple[str, str]]:
    """The kernels and ops that are not fxq's or torch's, each with its import path."""
    graphs: list[fx.Graph] = [model.graph]
    graphs += [module.graph for module in model.modules() if isinstance(module, Unit)]
    for _, kernel in kernels_of(model):
        kind = kernel.described
        if not _is_ours(kind):
            yield f"kernel {kind.name}", import_path(kind, f"the kernel {kind.name!r}")
        if kernel.form is not None:
            form = kernel.form.module(kernel)
            graphs += [form.graph, *(m.graph for m in form.modules() if isinstance(m, Unit))]
    for op in dict.fromkeys(op_of(node) for graph in graphs for node in graph.nodes):
        if op is not None and not _is_ours(op.target):
            yield f"op {op.name}", import_path(op.target, f"the op {op.name!r}")


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", None) or "torch").partition(".")[0] in ("fxq", "torch", *_PYTHON)


_PYTHON = ("operator", "_operator", "math", "builtins")


def _check_imports(paths: Mapping[str, str]) -> None:
    """Raise `FxqError` where the caller has not imported a kernel or an op, or has another one of its name."""
    for what, path in paths.items():
        kind, _, name = what.partition(" ")
        found = imported(path)
        if kind == "kernel":
            known = known_kernels()[name].defined_as() if name in known_kernels() else None
        else:
            known = OPS[name].target if name in OPS else None
        if found is not known:
            raise InputError(f"the {what} of the file is {path}, and here that is another, or not registered.")


def _leaves(model: Quantized) -> dict[str, nn.Module]:
    called = ((str(n.target), submodule(model, n)) for n in model.graph.nodes if n.op == "call_module")
    return {path: module for path, module in called if module is not None and not isinstance(module, (Unit, Kernel))}


def _checked_leaves(stored: Mapping[str, StoredLeaf], given: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Copies of the modules that the caller gives. Raises `InputError` where they are not those of the model."""
    missing = [path for path in stored if path not in given]
    if missing:
        named = ", ".join(f"{path!r}: ..." for path in missing)
        kinds = ", ".join(dict.fromkeys(stored[path].type for path in missing))
        raise InputError(
            f"modules that are kept as they are ({kinds}) are not in it: fxq.load(path, leaves={{{named}}})."
        )
    for path, leaf in given.items():
        if path not in stored:
            raise InputError(unknown("leaf", path, stored))
        about = StoredLeaf(type(leaf).__name__, checksums(leaf)) if isinstance(leaf, nn.Module) else None
        if about != stored[path]:
            raise InputError(
                f"the leaf {path!r} is not the module that the model was saved with, a {stored[path].type}: its class "
                "or its weights are others."
            )
    return {path: copy.deepcopy(leaf).eval() for path, leaf in given.items()}


def _handed(attributes: FloatAttributes, own: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Attributes of the float model and of the user as text, and the reasons why others cannot be saved."""
    handed, left = {}, {name: why for name, why in attributes.left.items() if name not in own}
    for name, value in {**attributes.values, **own}.items():
        text = value_text(value) if _is_literal(value) else ""
        if text and len(text) <= MAX_ATTRIBUTE_BYTES:
            handed[name] = text
        else:
            left[name] = (
                f"it is a {type(value).__name__}, or holds what is no plain data, which no file of a model holds"
            )
    return handed, left


def _is_literal(value: Any) -> bool:
    """Whether its text says all of it."""
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
    """A history as plain data: each view of a node stands there once, snapshots name it by its number."""
    number: dict[NodeView, int] = {}
    steps = []
    for step in history:
        nodes = [number.setdefault(node, len(number)) for node in step.graph]
        steps.append([to_plain(replace(step, graph=GraphView((), step.graph.name))), nodes])
    return {"first_loss": history.first_loss, "views": to_plain(list(number)), "steps": steps}


def history_from(data: Any) -> History:
    """Inverse of `history_data`. Raises `InputError` for what is none."""
    views = from_plain(tuple[NodeView, ...], data["views"])
    steps = []
    for step, nodes in from_plain(tuple[tuple[Snapshot, tuple[int, ...]], ...], data["steps"]):
        if not all(0 <= i < len(views) for i in nodes):
            raise InputError(f"{step.name}: its graph has nodes that are not there.")
        steps.append(replace(step, graph=replace(step.graph, nodes=tuple(views[i] for i in nodes))))
    return History(steps, from_plain(str | None, data["first_loss"]))
