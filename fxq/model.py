"""The quantized model, which `fxq.quantize`, `fxq.convert` and `fxq.load` return."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fxq.backends import cpu
from fxq.backends.by_name import written
from fxq.common.attributes import FloatAttributes
from fxq.common.data import check_finite
from fxq.common.isolation import unshare
from fxq.common.names import check_names
from fxq.errors import InputError, RecipeError
from fxq.graph.plain_data import NodeData, from_data, to_data
from fxq.ledger.comparison import Comparison
from fxq.ledger.decisions import Decisions
from fxq.ledger.float_record import Record
from fxq.ledger.ledger import Ledger
from fxq.ledger.quantized import PLACE, Quantized
from fxq.pipeline.manager import PassManager
from fxq.recipe.pins import Pin
from fxq.recipe.recipe import Recipe
from fxq.report.latency import batch_for, profile_of
from fxq.report.profile import Profile
from fxq.report.report import Tuning, write_report
from fxq.runtime.binding import MAX_BOUND_KINDS, Bindings
from fxq.runtime.call_checks import check_call, compiled, has_kernels
from fxq.saved.mapped_file import MappedFile
from fxq.saved.model_export import export_model
from fxq.saved.model_file import save_model
from fxq.saved.other_machine import fit, verify

_KNOWN = ("history", "ledger", "recipe", "backend", "record", "kinds_kept", "attempts", "_decided", "_handed")
"""What a quantized model knows besides its graph and tensors, and takes along when it is copied."""


class QuantizedModel(Quantized):
    """An integer model: callable, printable, editable like any `fx.GraphModule`.

    Integers are neither NaN nor infinite: in an input, infinities become the ends of the grid, and NaN some value of
    it, so that what comes out is finite where the float model returns NaN. `Recipe.static(check_inputs=True)` makes a
    model that raises `InputError` where there is NaN or Inf (-Inf is what masks hold).

    Attributes:
        history: one `Snapshot` per pass.
        ledger: what became of every op of the float model.
        recipe: the recipe that made it.
        backend: what a recipe calls the backend that its kernels belong to.
        record: what was seen of the float model: how its values lie, its inputs and its size.
        attempts: with `backend="fastest"`, what each backend did (`fxq.ledger.attempts.Attempts`); else None.
        kinds_kept: of how many kinds of inputs (shapes, dtypes, threads) it keeps a function that runs without looking
            anything up; 16. Those of more kinds in turn run without one. 0: of none.

    Plain data of the float model (numbers, strings, containers, config objects) is handed on, copied: `qmodel.config`.
    """

    _decided: tuple[Pin, ...]
    attempts: Any = None
    kinds_kept: int
    _handed: FloatAttributes
    _float: weakref.ref[nn.Module] | None = None
    _mapped: MappedFile | None = None

    @classmethod
    def from_manager(cls, manager: PassManager, ledger: Ledger, record: Record) -> QuantizedModel:
        """Wrap the graph of a manager that has run its pipeline to the end."""
        context = manager.context
        check_names(manager.gm, cls)
        model = cls(manager.gm, manager.gm.graph)
        unshare(model, context.model)
        model._attach(
            history=manager.history,
            ledger=ledger,
            recipe=context.recipe,
            backend=written(context.backend),
            record=record,
            kinds_kept=MAX_BOUND_KINDS,
            _decided=context.decided,
            _handed=FloatAttributes.of(context.model),
        )
        model._float = weakref.ref(context.model)
        return model.eval()

    def _attach(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    @property
    def _parts(self) -> dict[str, Any]:
        """What it knows besides its graph and tensors, by attribute."""
        return {name: getattr(self, name) for name in _KNOWN}

    def __getattr__(self, name: str) -> Any:
        """Plain data of the float model, where the quantized model has nothing of that name itself.

        Raises:
            NoAttributeError: what the float model has there is a method, a module or a tensor.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            handed = self.__dict__.get("_handed")
            if handed is None or name.startswith("__"):
                raise
        return handed.get(type(self).__name__, name)

    @property
    def float_model(self) -> nn.Module | None:
        """The user's float model, for as long as the user keeps it; None in a copy, and in a model that was pickled."""
        return self._float() if self._float is not None else None

    def __prepare_scriptable__(self) -> Any:
        raise InputError(
            "torch.jit.script reads source text, and a quantized model is a graph. Trace it, quantized with "
            'backend="reference": torch.jit.trace(qmodel, inputs); or write a file: qmodel.export("m.pt2").'
        )

    def recompile(self) -> Any:
        """As in `fx.GraphModule`: to be called when the graph was edited. Its forward binds itself to its inputs."""
        code = super().recompile()
        own_class: Any = type(self)  # every graph module has a class of its own
        plain, kernels = own_class.forward, has_kernels(self)
        bindings, signature = Bindings(plain), inspect.signature(plain)
        names = list(signature.parameters)[1:]  # without self

        @functools.wraps(plain)
        def forward(self: QuantizedModel, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return compiled(self, plain, kernels, args, kwargs)
            if self._mapped is not None:
                self._mapped.check()
            if self.recipe.check_inputs:  # outside of what is bound to a kind of inputs: it depends on their values
                check_call(self, args, kwargs)  # tools have tensors without values
                check_finite(names, args, kwargs)
            return bindings(self, args, kwargs)

        forward.__signature__ = signature  # type: ignore[attr-defined]  # also for who does not unwrap
        own_class.forward = forward
        del own_class.__call__  # of `fx.GraphModule`: it words errors of generated code, and takes 0.6 us
        return code

    @property
    def decisions(self) -> Decisions:
        """Prices that decided between int8 and float, for every op that could run either way.

        Empty if there was no choice, as with `optimize="decided"` or a backend without kernels.

        Example:
            >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
            >>> qmodel = fxq.quantize(model, data=[torch.rand(1, 3, 16, 16)])
            >>> {decision.by for decision in qmodel.decisions} <= {"table", "measured"}
            True
        """
        return Decisions.of(self.ledger)

    def recipe_as_decided(self) -> Recipe:
        """The recipe that gives this graph again, on any machine: it says what runs on integers, and measures nothing.

        It names the backend, and for every op or unit that could run either way which way it went. With the same model
        and data on a CPU of the same kind the results are the same, bit for bit. Kernels that another machine has not,
        or that are wrong there, run in float, with a warning; and where its kernels add fewer bits right (x86 without
        VNNI), weights or activations have 7 bits, as here where that was decided: `TensorSpec(bits=7)` for either makes
        them so everywhere.
        It can be saved: `recipe.save("decided.toml")`.

        Raises:
            RecipeError: nothing could run on integers, so that there is nothing to decide.

        Example:
            >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
            >>> qmodel = fxq.quantize(model, data=[torch.rand(1, 3, 16, 16)])
            >>> qmodel.recipe_as_decided().decided[0].op
            'conv2d+relu'
        """
        if not self._decided:
            raise RecipeError("no op of this model could run on integers: there is nothing to decide.")
        gave_way = self.ledger.narrowed
        reduce_range = gave_way.role if gave_way is not None else self.recipe.reduce_range
        return replace(
            self.recipe, backend=self.backend, optimize="decided", decided=self._decided, reduce_range=reduce_range
        )

    def verify(self) -> None:
        """Try every kernel on this machine: it is asked whether it is right here, and run beside its q/dq form.

        So it is done when a model comes from another kind of machine (`fxq.load`, a pickle), and when it is quantized.
        Its inputs are made up: integers distributed as activations are.

        Raises:
            BackendError: kernels are not right here; each is named, with the reason.

        Example:
            >>> model = nn.Sequential(nn.Linear(16, 8), nn.ReLU()).eval()
            >>> fxq.quantize(model, "static", data=[torch.rand(4, 16)]).verify()
        """
        verify(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the model into one file, for `fxq.load`: data only, which no code is needed for but fxq.

        It is a safetensors file. Its metadata hold the graph as text (`fxq.extend.write_graph`), the recipe, the ledger
        and the history. Modules that are kept as they are (`Recipe.leaf`) are not in it, but named.

        Args:
            path: the file; folders that are missing are made. A file that is there is replaced at once.

        Returns:
            The path.

        Raises:
            InputError: the graph, or the recipe, calls what a file cannot name: a function that is neither an op nor
                torch's, a kernel with hooks; the message says which.
            RecipeError: a pass, an op or a kernel of yours is local to a function.
            RenderError: the file cannot be written.

        Example: see `fxq.load`.
        """
        if self._mapped is not None:
            self._mapped.check()
        return save_model(path, self, self._parts, self._set_by_user)

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        example_inputs: Any = None,
        dynamic: bool | Mapping[str, Mapping[int, str]] = True,
        check: bool = True,
    ) -> Path:
        """Write the model for another runtime, whichever backend it was made for.

        The file is `.onnx`, `.xml` for OpenVINO, or `.pt2`, a program of `torch.export` that needs no fxq.

        An ONNX file (opset 21) has QuantizeLinear and DequantizeLinear around float ops, all of them ONNX's own. Its
        weights are integers with a scale for each channel or block (of four bits: INT4 or UINT4), its biases int32. Its
        inputs are called as the arguments of forward are, its outputs by their keys, or "output", "output_0" and so on.

        Args:
            path: the file; its suffix says which kind. Folders that are missing are made.
            example_inputs: one batch; default: made up, of the shapes and dtypes on record.
            dynamic: sizes that may vary between calls. True: the batch size, axis 0 of each input; if the model fixes
                it, the file has the example's sizes, with a warning. False: none. Or names of dynamic sizes by input
                and axis: `{"ids": {0: "batch", 1: "length"}}`.
            check: whether to run the exported model in its runtime, if installed, and compare, at the example's batch
                size and at another one if it is dynamic. ONNX is checked node by node in ONNX Runtime without
                optimizations: each quantized value must be within one step. If optimizations change more than that, a
                warning names session options that help. `.xml` is also checked in OpenVINO, whose outputs may differ
                by this model's own rounding error.

        Returns:
            The path.

        Raises:
            ExportError: the format has no form of a call of the model, or the runtime computes otherwise; nothing is
                written.
            InputError: no file of this suffix can be written, or `dynamic` names what is no input.
            RenderError: the file cannot be written.

        Example:
            >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
            >>> qmodel = fxq.quantize(model, "static", data=[torch.rand(2, 3, 16, 16)])
            >>> import tempfile, onnxruntime
            >>> path = qmodel.export(tempfile.gettempdir() + "/model.onnx")
            >>> session = onnxruntime.InferenceSession(path)
            >>> session.run(None, {"input": torch.rand(5, 3, 16, 16).numpy()})[0].shape
            (5, 8, 14, 14)
            >>> path.unlink()
        """
        return export_model(path, self, batch_for(self, example_inputs), dynamic, check)

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        comparison: Comparison | None = None,
        example_inputs: Any = None,
        tuning: Tuning | None = None,
    ) -> Path:
        """Write a page that shows what happened: every pass and its graph, the quality, the ledger, the time.

        One HTML file that needs no server, no network and no other file. The time is measured now, for a second or two.

        Args:
            path: the file; folders that are missing are made.
            comparison: of this model with its float model (`fxq.compare`): its numbers, from as much data as it saw,
                take the place of those that were measured on one batch when the model was quantized.
            example_inputs: one batch to time with; default: made up, of the shapes and dtypes on record.
            tuning: what `fxq.search` or `fxq.sensitivity` found, which the page shows then, too.

        Returns:
            The path.

        Raises:
            InputError: `path` is no path, `comparison` is of another model, `tuning` is something else, or the model
                does not run on `example_inputs`.
            RenderError: the file cannot be written.
        """
        return write_report(self, path, comparison, example_inputs, tuning)

    def profile(self, example_inputs: Any = None) -> Profile:
        """Where the time goes: microseconds of every node, and of every layer that an engine runs inside of a region.

        A layer says what it is made of and in which type the engine computes it. Takes a second or two.

        Args:
            example_inputs: one batch to time with; default: made up, of the shapes and dtypes on record.

        Raises:
            InputError: the model does not run on `example_inputs`, or none can be made up.

        Example:
            >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
            >>> qmodel = fxq.quantize(model, "static", data=[torch.rand(1, 3, 16, 16)])
            >>> qmodel.profile().sort("us", reverse=True)[0].us > 0
            True
        """
        return profile_of(self, batch_for(self, example_inputs))

    def __copy__(self) -> QuantizedModel:
        model = QuantizedModel(self, self.graph)
        model._attach(**{name: copy.copy(table) for name, table in self._tables.items()}, **self._attributes)
        model._mapped = self._mapped
        return model

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedModel:
        tables = self._tables
        model: Any = super().__deepcopy__(memo)
        model._attach(**copy.deepcopy({**tables, **self._attributes}, memo))
        model._float = model._mapped = None
        return model.eval()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._tables, to_data(self.graph), self._attributes, cpu.machine())

    @property
    def _tables(self) -> dict[str, Any]:
        """Tables of parameters, buffers and modules, including those that the graph does not use."""
        if self._mapped is not None:
            self._mapped.check()
        return {name: vars(self)[name] for name in _TABLES}

    @property
    def _attributes(self) -> dict[str, Any]:
        """Further attributes that copies share: fxq's own, hooks, and those that the user set."""
        return {name: v for name, v in vars(self).items() if name not in _OF_GRAPH or ("hooks" in name and v)}

    @property
    def _set_by_user(self) -> dict[str, Any]:
        """Attributes that the user set, without parameters, buffers and modules."""
        return {n: v for n, v in self._attributes.items() if not n.startswith("_") and n not in (*_KNOWN, "meta")}


_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_OF_GRAPH = frozenset((*vars(fx.GraphModule(nn.Module(), fx.Graph())), "_float", "_mapped")) - {"meta"}
"""Attributes that every graph module creates for itself."""


def _restore(tables: Any, data: list[NodeData], attributes: Any, made_on: Mapping[str, str]) -> QuantizedModel:
    """Inverse of `QuantizedModel.__reduce__`."""
    root = nn.Module()
    vars(root).update(tables)
    return remade(root, from_data(data), attributes, made_on)


def remade(root: nn.Module, graph: fx.Graph, attributes: Any, made_on: Mapping[str, str]) -> QuantizedModel:
    """Rebuild a model from its parts. Checks the kernels again if this machine differs from `made_on`.

    Args:
        root: module with all tensors and modules of the model, including those that the graph does not use.
        graph: the graph.
        attributes: further attributes of the model.
        made_on: `cpu.machine()` of the machine that the kernels were created on.
    """
    model = QuantizedModel(root, graph)
    place = model.get_parameter(PLACE)
    model._attach(**{name: vars(root)[name] for name in _TABLES}, **attributes)
    model._parameters.setdefault(PLACE, place)
    if made_on != cpu.machine():
        fit(model, made_on)
    return model.eval()
