"""Quantized model with one program (graph) for each form of call, and shared weights."""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fxq.common.container_data import as_data, from_data
from fxq.common.containers import Leaves, Structure
from fxq.common.data import Batch, batches
from fxq.common.files import as_path
from fxq.errors import FileError, InputError, warn
from fxq.ledger.clipped import Clipped, count_clipped
from fxq.ledger.comparison import Comparison
from fxq.ledger.ledger import Ledger
from fxq.ledger.qparams_table import ModelQParams
from fxq.model import QuantizedModel, remade
from fxq.pipeline.history import History
from fxq.programs.call_form import CallForm, form_of
from fxq.programs.fitting import first_fitting
from fxq.programs.flat_model import ResultForm
from fxq.recipe.recipe import Recipe
from fxq.report.report import report_data, write_page
from fxq.saved.model_file import load_programs, save_programs

Value = TypeVar("Value")


@dataclass(frozen=True)
class Program:
    """One graph of a model, for calls of one form.

    Attributes:
        name: name in messages, pictures and files, such as "prefill".
        form: form of the calls that it serves.
        results: how its outputs become results.
        qmodel: the graph, whose inputs and outputs are the tensors and numbers of a call by name.
    """

    name: str
    form: CallForm
    results: ResultForm
    qmodel: QuantizedModel


NewProgram = Callable[[str, CallForm, Leaves], Program]
"""Function that traces and quantizes a program, given its name, the form of its calls and the tensors of one call."""

log = logging.getLogger("fxq")


class QuantizedPrograms(nn.Module):
    """Quantized model that is called as the float model is: with containers such as key-value caches, in several forms.

    A call runs the program of its form. Several programs have one form if forward branches on sizes; then the program
    runs whose graph is valid for the sizes of the call. The programs share equal weights. With `new_kinds="trace"` in
    the recipe, a call that fits no program is traced from the float model and gets a program of its own.

    Attributes:
        signature: signature of the float model's forward.
        new_program: function that traces a program for a call that fits none; None: such a call is an error. Copies of
            the model share it; files and pickles do not contain it.
    """

    def __init__(
        self, programs: tuple[Program, ...], signature: inspect.Signature, new_program: NewProgram | None = None
    ) -> None:
        super().__init__()
        self.signature = signature
        self.new_program = new_program
        self._programs = {program.name: program for program in programs}
        self.models = nn.ModuleList(program.qmodel for program in programs)
        self._last: dict[Any, str] = {}
        share_tensors([program.qmodel for program in programs])
        self.eval()

    @property
    def programs(self) -> Mapping[str, QuantizedModel]:
        """Quantized model of each program by name, with its own history, ledger and graph.

        Their inputs and outputs are the tensors of a call by name.
        """
        return {name: program.qmodel for name, program in self._programs.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model as the float model is called.

        Containers that the float model changes, such as caches, are changed in the same way.

        Raises:
            InputError: no program fits the call. The message lists the forms of all programs.
        """
        form, leaves, containers = self._taken_apart(args, kwargs)
        program, outputs = self.run(form, leaves)
        return program.results.deliver(outputs, leaves, containers)

    def _taken_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CallForm, Leaves, dict[str, Any]]:
        """Form of a call, its tensors and numbers by name, and its containers by name."""
        if not args:
            for program in self._programs.values():
                if matched := program.form.matched(kwargs, self.signature.parameters):
                    return program.form, *matched
        return form_of(self.signature, Batch(args, kwargs))

    def run(self, form: CallForm, leaves: Leaves) -> tuple[Program, Leaves]:
        """Run the program of a call, or trace one for it. Returns it with its outputs by name.

        Args:
            form: form of the call.
            leaves: tensors and numbers of the call by name.

        Raises:
            InputError: no program fits the call.
        """
        if self.new_program is None:
            return self._run_fitting(form, leaves)
        try:
            return self._run_fitting(form, leaves)
        except InputError:
            pass
        with _TRACING:
            try:
                return self._run_fitting(form, leaves)  # another thread may have traced it meanwhile
            except InputError:
                pass
            name = next(name for i in itertools.count() if (name := f"program_{i}") not in self._programs)
            program = self.new_program(name, form, leaves)
            outputs = program.qmodel(**leaves)
            self._add(program)
            return program, outputs

    def _add(self, program: Program) -> None:
        """Add a program that was traced at a call."""
        log.info("traced %s for a call of the form (%s)", program.name, program.form)
        others = self.programs
        share_tensors([*others.values(), program.qmodel])
        if fitted := {name: passes for name, model in others.items() if (passes := _fitted_by(model))}:
            earlier, passes = next(iter(fitted.items()))
            warn(
                f"{program.name} was traced at a call, without data, and {earlier} was fitted to data "
                f"({', '.join(passes)}): their weights differ. Quantize with an example and data of such a call, too."
            )
        self.models.append(program.qmodel)
        self._programs = {**self._programs, program.name: program}
        if len(self._programs) % _MANY_PROGRAMS == 0:
            warn(
                f"the model has {len(self._programs)} programs now, since calls that fitted none were traced. The last "
                f"is {program.name}({program.form}). If forward branches on sizes, every other size is traced again."
            )

    def _run_fitting(self, form: CallForm, leaves: Leaves) -> tuple[Program, Leaves]:
        """Run the program that fits a call. Raises `InputError` if none does."""
        candidates = [program for program in self._programs.values() if program.form is form or program.form == form]
        if not candidates:
            raise InputError(self._no_program(form))
        if len(candidates) == 1:
            return candidates[0], candidates[0].qmodel(**leaves)
        kind = (candidates[0].name, tuple(map(_size_class, leaves.values())))
        last = self._last.get(kind)
        candidates.sort(key=lambda program: program.name != last)
        fitting = first_fitting(((program.name, program.qmodel) for program in candidates), kwargs=leaves)
        if fitting.key is None:
            raise InputError(f"no program fits these inputs: {fitting}")
        self._last[kind] = fitting.key
        return self._programs[fitting.key], fitting.result

    def _no_program(self, form: CallForm) -> str:
        """Message for a call of a form that no program has."""
        nearest = min(self._programs.values(), key=lambda program: len(form.differences(program.form)))
        names = f" Its programs: {', '.join(self._programs)}." if len(self._programs) > 1 else ""
        if self.recipe.new_kinds == "trace":
            advice = "New kinds of calls are traced from the float model, which files do not hold. Quantize it"
        else:
            advice = "Quantize the float model"
        return (
            f"the model was not quantized for such a call. It differs from {nearest.name}({nearest.form}) in that "
            f"{', and '.join(form.differences(nearest.form))}.{names} {advice} with an example of such a call, too: "
            'example_inputs=[{...}, {...}], or, without calibrated ranges, with Recipe(new_kinds="trace").'
        )

    @property
    def history(self) -> ByProgram[History]:
        """History of each program."""
        return ByProgram((name, model.history) for name, model in self.programs.items())

    @property
    def ledger(self) -> ByProgram[Ledger]:
        """Ledger of each program."""
        return ByProgram((name, model.ledger) for name, model in self.programs.items())

    @property
    def recipe(self) -> Recipe:
        """Recipe that the model was quantized with."""
        return next(iter(self.programs.values())).recipe

    def qparams(self) -> ByProgram[ModelQParams]:
        """Return the weights, scales and zero points of every layer, for each program."""
        return ByProgram((name, model.qparams()) for name, model in self.programs.items())

    def clipped(self, data: Iterable[Any]) -> Clipped:
        """Count the values that the calibrated grids of all programs clip, see `QuantizedModel.clipped`."""
        return count_clipped(self, self.programs, batches(data, self))

    def report(
        self, path: str | os.PathLike[str], comparisons: Mapping[str, Comparison] | None = None
    ) -> dict[str, Path]:
        """Write a report page for each program, see `QuantizedModel.report`.

        Args:
            path: the file. With several programs, each file has the program in its name: `report.decode.html`.
            comparisons: comparison of each program with the float model, by name.

        Returns:
            The path of each program's page.
        """
        pages: dict[str, Path] = {}
        for name, model in self.programs.items():
            data = report_data(model, (comparisons or {}).get(name))
            title = data["title"] if len(self._programs) == 1 else f"{data['title']}, program {name}"
            pages[name] = write_page({**data, "title": title}, as_path(self._path_for(path, name)))
        return pages

    def export(self, path: str | os.PathLike[str], **options: Any) -> dict[str, Path]:
        """Export each program for another runtime, see `QuantizedModel.export`. Inputs and outputs are tensors by name.

        Args:
            path: the file. With several programs, each file has the program in its name: `model.decode.onnx`.
            options: as for `QuantizedModel.export`.

        Returns:
            The path of each program's file.
        """
        return {name: model.export(self._path_for(path, name), **options) for name, model in self.programs.items()}

    def _path_for(self, path: str | os.PathLike[str], name: str) -> Path:
        whole = Path(path)
        return whole if len(self._programs) == 1 else whole.with_suffix(f".{name}{whole.suffix}")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save the model to one file, for `fxq.load`. Weights that programs share are stored once.

        Args:
            path: the file.

        Returns:
            The path.

        Raises:
            InputError: a graph calls a function, or a container has a constant, that no file can hold; see the message.
            RenderError: the file cannot be written.
        """
        models = {name: (model, model._copied_attributes, model._set_by_user) for name, model in self.programs.items()}
        return save_programs(path, models, self._description())

    def _description(self) -> dict[str, Any]:
        """Signature of forward and forms of the programs as plain data, for files."""
        parameters = [
            [p.name, p.kind.name, None if p.default is p.empty else [as_data(_constant(p.default))]]
            for p in self.signature.parameters.values()
        ]
        programs = {
            name: {
                "arguments": [[argument, as_data(structure)] for argument, structure in program.form.arguments],
                "positional": program.form.positional,
                "changed": [[argument, as_data(structure)] for argument, structure in program.results.changed],
                "result": as_data(program.results.result),
                "kept": [list(kept) for kept in program.results.kept],
            }
            for name, program in self._programs.items()
        }
        return {"parameters": parameters, "programs": programs}

    @classmethod
    def from_description(cls, description: Any, models: Mapping[str, QuantizedModel]) -> QuantizedPrograms:
        """Rebuild a model from the content of a file.

        Args:
            description: description of its calls.
            models: quantized model of each program.

        Raises:
            InputError: the class of a container is not imported, or not registered.
        """
        parameters = [
            inspect.Parameter(
                name,
                getattr(inspect.Parameter, kind),
                default=inspect.Parameter.empty if default is None else from_data(default[0]).constant,
            )
            for name, kind, default in description["parameters"]
        ]
        programs = []
        for name, about in description["programs"].items():
            form = CallForm(_structures(about["arguments"]), int(about.get("positional", 0)))
            kept = tuple((str(name), str(before), bool(written)) for name, before, written in about["kept"])
            results = ResultForm(_structures(about["changed"]), from_data(about["result"]), kept)
            programs.append(Program(name, form, results, models[name]))
        return cls(tuple(programs), inspect.Signature(parameters))


def load_model(path: str | os.PathLike[str], leaves: Mapping[str, nn.Module] | None = None) -> Any:
    """Load a `QuantizedModel` or `QuantizedPrograms` from a file, see `fxq.load`.

    Raises:
        FileError: the file cannot be read, or its content is invalid.
    """
    description, loaded = load_programs(path, leaves)
    models = {name: remade(gm, gm.graph, *about) for name, (gm, *about) in loaded.items()}
    if description is None:
        return models[""]
    try:
        return QuantizedPrograms.from_description(description, models)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"cannot load {str(path)!r}: the description of its programs is invalid: {error}.") from error


_TRACING = threading.Lock()
"""Held while a program is traced at a call."""

_MANY_PROGRAMS = 8
"""Number of programs after which a model warns that calls add programs, again at each multiple."""


class ByProgram(dict[str, Value]):
    """Tables or histories of a model by the name of the program. `print` shows each under its name."""

    def __str__(self) -> str:
        return "\n\n".join(f"{name}:\n{value}" for name, value in self.items())


def _constant(default: Any) -> Structure:
    """Structure of a default value of forward. Defaults that are not plain values become None."""
    plain = default is None or isinstance(default, (bool, int, float, str))
    return Structure("constant", constant=default if plain else None)


def _structures(data: Any) -> tuple[tuple[str, Structure], ...]:
    return tuple((str(name), from_data(structure)) for name, structure in data)


def _size_class(value: Any) -> Any:
    """Sizes of a leaf, each reduced to 0, 1 or 2 (more than 1): forwards branch on these cases."""
    return tuple(min(size, 2) for size in value.shape) if isinstance(value, Tensor) else type(value)


def share_tensors(models: list[QuantizedModel], tied: bool = False) -> None:
    """Let models share the tensors that are equal in their names, values, shapes, strides and dtypes.

    Tensors of one model stay apart: those that happen to be equal, as new layer norms are, may be given other values.

    Args:
        models: quantized models.
        tied: whether their float models share weights under different names: names are not compared, and tensors that
            are constant stay apart.
    """
    seen: dict[str, list[Tensor]] = {}
    for model in models:
        shared, taken = dict[int, Tensor](), set[int]()  # one tensor may have several names
        for module, table, name, path, tensor in list(_tensors_of(model)):
            if tied and bool((tensor == tensor.flatten()[0]).all()):
                continue
            alike = seen.setdefault("" if tied else path, [])
            if id(tensor) not in shared:
                equal = (first for first in alike if id(first) not in taken and _is_equal(tensor, first))
                shared[id(tensor)] = next(equal, tensor)
                taken.add(id(shared[id(tensor)]))
            same = shared[id(tensor)]
            if not any(same is first for first in alike):
                alike.append(same)
            if same is not tensor:
                getattr(module, table)[name] = same
        if any(key != id(tensor) for key, tensor in shared.items()):
            model.recompile()


def _is_equal(tensor: Tensor, second: Tensor) -> bool:
    """Whether two tensors have equal values and may be shared."""
    if tensor is second:
        return True
    kinds = [(t.shape, t.stride(), t.dtype, t.device) for t in (tensor, second)]
    return kinds[0] == kinds[1] and torch.equal(tensor, second)


def _fitted_by(model: QuantizedModel) -> list[str]:
    """Names of the passes that changed a model with the help of data, for instance the integers of its weights."""
    readers = {step.name for step in model.recipe.pipeline if step.samples_read}
    return [shot.name for shot in model.history if shot.name in readers and shot.edits]


_MIN_SHARED = 64
"""Minimum number of elements of a tensor that is shared."""


def _tensors_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, str, Tensor]]:
    """Tensors that may be shared: their module, its table, their name there, their path in the model and themselves."""
    for path, module in model.named_modules():
        for table in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, table).items():
                if tensor is not None and tensor.numel() >= _MIN_SHARED and tensor.layout is torch.strided:
                    yield module, table, name, f"{path}.{name}", tensor
