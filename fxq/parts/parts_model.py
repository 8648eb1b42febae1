"""Model of the user's own class whose parts are quantized, which `fxq.quantize` and `fxq.load` return."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fxq.common.data import batches
from fxq.ledger.clipped import Clipped, count_clipped
from fxq.ledger.layer_qparams import layers_of
from fxq.ledger.ledger import Entry, Ledger
from fxq.ledger.qparams_table import ModelQParams
from fxq.model import QuantizedModel
from fxq.parts.copying import copy_of
from fxq.parts.part import graphs_in, make_part, state_of_object, tensors_of
from fxq.parts.parts_file import buffer_checksums, read_parts, save_parts, set_buffers
from fxq.parts.parts_report import write_parts_report
from fxq.pipeline.history import History
from fxq.recipe.recipe import Recipe


class PartsModel:
    """Model whose parts are quantized, with Python code around them; it is also of the float model's class.

    Methods and attributes of the float model's class have precedence. If that class defines `save`, call
    `fxq.results.PartsModel.save(q, path)`.

    Attributes:
        ledger: precision of every op of the parts, and a row for each module whose code stays in Python.
        recipe: the recipe that it was quantized with.
        backend: name of the backend of its kernels.
        float_class: class of the float model.
    """

    ledger: Ledger
    recipe: Recipe
    backend: str
    float_class: type[nn.Module]

    @property
    def parts(self) -> Mapping[str, QuantizedModel]:
        """Quantized graphs by the path of the part; further graphs of one part have a number, as in "encoder (2)"."""
        return graphs_in(self)

    @property
    def history(self) -> Mapping[str, History]:
        """Snapshots of the passes, for each part."""
        return {name: graph.history for name, graph in graphs_in(self).items()}

    @property
    def output_sqnr(self) -> float | None:
        """SQNR of its outputs against the float model's, in dB, when it was quantized; None if not comparable."""
        return vars(self)["_fxq_ledger"].output_sqnr

    def qparams(self) -> ModelQParams:
        """Return the weights, scales and zero points of every layer with an integer weight, by module path."""
        layers: dict[str, Any] = {}
        for graph in graphs_in(self).values():
            layers = {**layers_of(graph), **layers}
        return ModelQParams(layers)

    def clipped(self, data: Iterable[Any]) -> Clipped:
        """Count the values that the calibrated grids of all parts clip, see `QuantizedModel.clipped`."""
        model: Any = self
        return count_clipped(model, graphs_in(self), batches(data, model))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save the parts to one file, for `fxq.load(path, into=float_model)`.

        The file holds no float weights outside of the parts, and only the buffers that changed since quantization.

        Args:
            path: the file. Missing folders are created. An existing file is replaced atomically.

        Returns:
            The path.

        Raises:
            FxqError: a part cannot be saved, see `QuantizedModel.save`.
        """
        return save_parts(path, self)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write a report page of all parts, one HTML file that needs no other files; see `QuantizedModel.report`.

        Args:
            path: the file. Missing folders are created.

        Returns:
            The path.

        Raises:
            InputError: `path` is not a path.
            RenderError: the file cannot be written.
        """
        return write_parts_report(self, path)

    def verify(self) -> None:
        """Verify every kernel on this machine, see `QuantizedModel.verify`."""
        for graph in graphs_in(self).values():
            graph.verify()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank_model, (type(self).float_class,), state_of_object(self)


@functools.lru_cache(maxsize=64)
def _model_class(float_class: Any) -> Any:
    content = {"float_class": float_class, "__module__": float_class.__module__, "__doc__": float_class.__doc__}
    kind = types.new_class(float_class.__name__, (float_class, PartsModel), {}, lambda space: space.update(content))
    kind.__qualname__ = float_class.__qualname__
    return kind


def _blank_model(float_class: Any) -> Any:
    kind = _model_class(float_class)
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    return model


def with_parts(model: nn.Module, programs: Mapping[str, nn.Module], weights: Mapping[str, Tensor]) -> Any:
    """Return a copy of a float model with parts in the places of submodules.

    Args:
        model: the float model; it is not changed.
        programs: module that each part calls, by the path of the submodule.
        weights: tensor in place of each parameter and buffer of these submodules, by name.
    """
    memo: dict[int, Any] = {}
    for path, called in programs.items():
        module = model.get_submodule(path)
        shown = {id(t): weights[f"{path}.{n}"] for n, t in tensors_of(module) if f"{path}.{n}" in weights}
        memo[id(module)] = make_part(module, called, shown)
    copied = copy_of(model, memo)
    float_class: Any = type(model)
    copied.__class__ = _model_class(float_class)
    return copied


def attach(model: Any, ledger: Ledger, recipe: Recipe, backend: str) -> None:
    """Set ledger, recipe and backend of a model in parts, unless its float class has an attribute of that name.

    Stores checksums of its buffers, so that `save` finds those that calls have changed.
    """
    vars(model)["_fxq_buffers"] = buffer_checksums(model)
    attributes = {"ledger": ledger, "recipe": recipe, "backend": backend}
    vars(model).update({f"_fxq_{name}": value for name, value in attributes.items()})
    for name, value in attributes.items():
        if not hasattr(model, name):
            vars(model)[name] = value


def load_parts(path: str | os.PathLike[str], model: nn.Module) -> Any:
    """Load the parts in a file into a copy of the float model, see `fxq.load`."""
    stored = read_parts(path, model)
    loaded = with_parts(model, stored.programs, stored.weights).eval()
    attach(loaded, stored.ledger, stored.recipe, stored.backend)
    set_buffers(loaded, stored.buffers)
    return loaded


def ledger_of_parts(
    graphs: Mapping[str, QuantizedModel],
    times: Mapping[str, float],
    in_python: Mapping[str, tuple[str, int]],
    output_sqnr: float | None,
) -> Ledger:
    """Return the ledger of a model: rows of its parts, then one for each module whose code stays in Python.

    Args:
        graphs: the quantized graphs, by name.
        times: arithmetic of each graph on the example, as a multiple of the call that it was traced from.
        in_python: for each module that stays in Python, the reason, and its multiply-accumulates.
        output_sqnr: dB of the model's output.
    """
    rows = [
        replace(entry, name=f"{name}: {entry.name}", macs=round(entry.macs * times[name]))
        for name, graph in graphs.items()
        for entry in graph.ledger
    ]
    rows += [
        Entry(path or "forward", path, "python", "float", reason=reason, kind="leaf", decided_by="trace", macs=macs)
        for path, (reason, macs) in in_python.items()
    ]
    return Ledger(tuple(rows), output_sqnr)
