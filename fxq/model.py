"""The quantized model, which `fxq.quantize`, `fxq.convert` and `fxq.load` return."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fxq.backends import cpu
from fxq.backends.by_name import recipe_name
from fxq.backends.loops.tokens.token_binding import growing_kinds
from fxq.common.attributes import FloatAttributes
from fxq.common.data import batches, check_finite
from fxq.common.isolation import unshare, with_united_views
from fxq.common.names import check_names
from fxq.errors import InputError, RecipeError
from fxq.graph.plain_data import NodeData, from_data, to_data
from fxq.ledger.clipped import Clipped, count_clipped
from fxq.ledger.comparison import Comparison
from fxq.ledger.decisions import Decisions
from fxq.ledger.float_record import FloatRecord
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
from fxq.saved.other_machine import fit, stored_checksums, verify

_COPIED_ATTRIBUTES = (
    "history", "ledger", "recipe", "backend", "record", "kinds_kept", "attempts", "_decided", "_float_attributes",
)  # fmt: skip
"""Attributes of a quantized model, besides its graph and tensors, that copies and files keep."""


class QuantizedModel(Quantized):
    """Quantized model: a callable, printable and editable `fx.GraphModule`.

    Integers cannot represent NaN or infinity. Infinite inputs are clamped to the ends of the grid and NaN becomes an
    unspecified value, so outputs may be finite where the float model returns NaN. With
    `Recipe.static(check_inputs=True)`, calls raise `InputError` for inputs with NaN or +Inf (-Inf is allowed, for
    masks).

    Plain data of the float model (numbers, strings, containers, config objects) is copied and can be read as
    attributes, as in `qmodel.config`.

    Attributes:
        history: one `Snapshot` per pass.
        ledger: precision of every op of the float model, and the reason for it.
        recipe: the recipe that it was quantized with.
        backend: name of the backend of its kernels, as in a recipe.
        record: facts about the float model: distributions of its values, its inputs and its size.
        attempts: result of each backend with `backend="fastest"` (`fxq.ledger.attempts.Attempts`); otherwise None.
        kinds_kept: number of kinds of inputs (shapes, dtypes, threads) for which the model caches a binding; 16 by
            default. Inputs of further kinds run unbound, which is slower. 0 turns bindings off.
    """

    _decided: tuple[Pin, ...]
    attempts: Any = None
    kinds_kept: int
    _float_attributes: FloatAttributes
    _float: weakref.ref[nn.Module] | None = None
    _mapped: MappedFile | None = None

    @classmethod
    def from_manager(cls, manager: PassManager, ledger: Ledger, record: FloatRecord) -> QuantizedModel:
        """Wrap the graph of a manager that has run its pipeline to the end."""
        context = manager.context
        check_names(manager.gm, cls)
        model = cls(manager.gm, manager.gm.graph)
        unshare(model, context.model)
        model._attach(
            history=manager.history,
            ledger=ledger,
            recipe=context.recipe,
            backend=recipe_name(context.backend),
            record=replace(record, stored=stored_checksums(model)),
            kinds_kept=MAX_BOUND_KINDS,
            _decided=context.decided,
            _float_attributes=FloatAttributes.of(context.model),
        )
        model._float = weakref.ref(context.model)
        return model.eval()

    def _attach(self, **attributes: Any) -> None:
        vars(self).update(attributes)
        if _note_loaded not in self._load_state_dict_post_hooks.values():
            self.register_load_state_dict_post_hook(_note_loaded)

    @property
    def _copied_attributes(self) -> dict[str, Any]:
        """Attributes that copies and files keep, by name."""
        return {name: getattr(self, name) for name in _COPIED_ATTRIBUTES}

    def __getattr__(self, name: str) -> Any:
        """Plain data of the float model, if the quantized model has no attribute of that name.

        Raises:
            NoAttributeError: the attribute of the float model is a method, a module or a tensor.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            float_attributes = self.__dict__.get("_float_attributes")
            if float_attributes is None or name.startswith("__"):
                raise
        return float_attributes.get(type(self).__name__, name)

    @property
    def float_model(self) -> nn.Module | None:
        """The float model that was quantized. It is weakly referenced: None once deleted, and in copies and pickles."""
        return self._float() if self._float is not None else None

    def __prepare_scriptable__(self) -> Any:
        raise InputError(
            "torch.jit.script needs Python source, which a quantized model does not have. Quantize with "
            'backend="reference" and trace it: torch.jit.trace(qmodel, inputs); or export it: qmodel.export("m.pt2").'
        )

    def recompile(self) -> Any:
        """Regenerate the forward method; call it after editing the graph. The forward caches bindings by input kind."""
        code = super().recompile()
        own_class: Any = type(self)  # every graph module has a class of its own
        plain, kernels = own_class.forward, has_kernels(self)
        bindings, signature = Bindings(plain, growing_kinds()), inspect.signature(plain)
        names = list(signature.parameters)[1:]  # without self

        @functools.wraps(plain)
        def forward(self: QuantizedModel, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return compiled(self, plain, kernels, args, kwargs)
            if self._mapped is not None:
                self._mapped.check()
            if self.recipe.check_inputs:  # not part of a binding, since it depends on values
                check_call(self, args, kwargs)  # tracing tools pass tensors without values
                check_finite(names, args, kwargs)
            return bindings(self, args, kwargs)

        forward.__signature__ = signature  # type: ignore[attr-defined]  # for tools that do not unwrap
        own_class.forward = forward
        del own_class.__call__  # the wrapper of `fx.GraphModule`: it rewords errors of generated code, and costs time
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
        """Recipe that reproduces this graph on any machine, with every choice between int8 and float fixed.

        It names the backend, and the precision of each op or unit that could run either way. With the same model and
        data on the same kind of CPU, the results are the same, bit for bit. Kernels that are missing or wrong on
        another machine are replaced by float, with a warning. On CPUs whose 16-bit sums saturate (x86 without VNNI),
        activations or weights have 7 bits; `TensorSpec(bits=7)` for either uses 7 bits on every machine.

        To save it: `recipe.save("decided.toml")`.

        Raises:
            RecipeError: no op could run on integers, so nothing was decided.

        Example:
            >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
            >>> qmodel = fxq.quantize(model, data=[torch.rand(1, 3, 16, 16)])
            >>> qmodel.recipe_as_decided().decided[0].op
            'conv2d+relu'
        """
        if not self._decided:
            raise RecipeError("no op of this model could run on integers: there is nothing to decide.")
        reduced = self.ledger.reduced_range
        reduce_range = reduced.role if reduced is not None else self.recipe.reduce_range
        return replace(
            self.recipe, backend=self.backend, optimize="decided", decided=self._decided, reduce_range=reduce_range
        )

    def verify(self) -> None:
        """Verify that stored weights are unchanged, and every kernel on this machine by its output and its q/dq form.

        Sums over the weights of kernels, and over constants, show a write to them since `fxq.quantize` or
        `load_state_dict`, or damaged memory; layers in float are not looked at. `fxq.quantize` verifies kernels too, as
        do `fxq.load` and unpickling on another kind of machine. The inputs are random integers, distributed like
        activations.

        Raises:
            BackendError: weights have changed, or kernels are wrong on this machine; each is named, with the reason.

        Example:
            >>> model = nn.Sequential(nn.Linear(16, 8), nn.ReLU()).eval()
            >>> fxq.quantize(model, "static", data=[torch.rand(4, 16)]).verify()
        """
        verify(self, self.record.stored or {})

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save the model to one file, for `fxq.load`. The file holds data only: loading it needs no code of the model.

        It is a safetensors file, whose metadata hold the graph as text (`fxq.extend.write_graph`), the recipe, the
        ledger and the history. Leaf modules (`Recipe.leaf`) are not saved; pass them to `fxq.load`.

        Args:
            path: the file. Missing folders are created. An existing file is replaced atomically.

        Returns:
            The path.

        Raises:
            InputError: the graph or the recipe has a call that a file cannot name, such as a function that is neither
                an op nor from torch, or a kernel with hooks; the message says which.
            RecipeError: a pass, op or kernel of your own is defined inside a function.
            RenderError: the file cannot be written.

        Example: see `fxq.load`.
        """
        if self._mapped is not None:
            self._mapped.check()
        return save_model(path, self, self._copied_attributes, self._set_by_user)

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        example_inputs: Any = None,
        dynamic: bool | Mapping[str, Mapping[int, str]] = True,
        check: bool = True,
        format: str | None = None,
        target: str | None = None,
    ) -> Path:
        """Export the model for another runtime: ONNX, OpenVINO or `torch.export`. Works for models of any backend.

        The suffix selects the format: `.onnx`; `.xml` for OpenVINO; or `.pt2`, a `torch.export` program that runs
        without fxq.

        An ONNX file (opset 21) has QuantizeLinear and DequantizeLinear nodes around float ops, all of the standard
        opset. Weights are integers with one scale per channel or block (4-bit weights: INT4 or UINT4), biases are
        int32. Inputs have the names of forward's arguments; outputs the names of their keys, or "output", "output_0"
        and so on.

        Args:
            path: the file. Missing folders are created.
            example_inputs: one batch. Default: random inputs of the recorded shapes and dtypes.
            dynamic: sizes that may vary between calls. True: the batch size, axis 0 of each input; if the model fixes
                it, the file has the example's sizes, with a warning. False: none. Or names of dynamic sizes by input
                and axis: `{"ids": {0: "batch", 1: "length"}}`.
            check: whether to run the exported model in its runtime, if installed, and compare its outputs, at the
                example's batch size and, if that is dynamic, at another one. ONNX is checked node by node in ONNX
                Runtime without optimizations: each quantized value must be within one step. If optimizations change
                more than that, a warning names session options that help. `.xml` is also checked in OpenVINO, whose
                outputs may differ by this model's own rounding error.
            format: "matmulnbits": an ONNX file whose linear layers with float inputs and integer weights are nodes
                MatMulNBits, which ONNX Runtime alone has. With default options, it then computes what this model
                computes, where it would round the inputs of the standard nodes to 8 bits. None: standard nodes.
            target: "tensorrt": an ONNX file for TensorRT, of a model quantized with `backend="tensorrt"`: all zero
                points 0, and biases in float. It is checked as other ONNX files, but not in TensorRT.

        Returns:
            The path.

        Raises:
            ExportError: the format cannot express a call of the model, the target does not take its grids, or the
                runtime computes other outputs. Nothing is written.
            InputError: the suffix, format or target is unknown, or `dynamic` names an input that does not exist.
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
        return export_model(path, self, batch_for(self, example_inputs), dynamic, check, format, target)

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        comparison: Comparison | None = None,
        example_inputs: Any = None,
        tuning: Tuning | None = None,
    ) -> Path:
        """Write a report page: the graph after every pass, the accuracy, the ledger, and the latency.

        It is one HTML file that needs no server, network or other files. The latency is measured for a second or two.

        Args:
            path: the file. Missing folders are created.
            comparison: comparison of this model with its float model (`fxq.compare`). Its numbers replace those that
                were computed on one batch when the model was quantized.
            example_inputs: one batch to time. Default: random inputs of the recorded shapes and dtypes.
            tuning: result of `fxq.search` or `fxq.sensitivity`, to be shown on the page, too.

        Returns:
            The path.

        Raises:
            InputError: `path` is not a path; `comparison` is of another model; `tuning` is neither of these results; or
                the model does not run on `example_inputs`.
            RenderError: the file cannot be written.
        """
        return write_report(self, path, comparison, example_inputs, tuning)

    def clipped(self, data: Iterable[Any]) -> Clipped:
        """Count the values that the calibrated grids clip, to notice in production that inputs have changed.

        Calibration may leave a small share outside of a grid on purpose: compare with the table for calibration data.
        After each call of the model, its q/dq graph runs on the same inputs, so that the counts do not depend on the
        backend. Other threads may call the model meanwhile: their calls are not counted, and not slower.

        In quantized ONNX files, the lower end of a grid often replaces a ReLU: its zeros count as clipped below there.

        Args:
            data: batches, as for `fxq.quantize`.

        Returns:
            A table with a row for each grid of a float32 value. Ranges that are computed at run time clip nothing, and
            have no row.

        Raises:
            InputError: `data` is empty, or the model does not run on a batch.
            CalibrationError: a batch has NaN or +Inf.

        Example:
            >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
            >>> data = [torch.rand(64, 8)]
            >>> qmodel = fxq.quantize(model, fxq.Recipe.static(optimize="coverage"), data=data)
            >>> qmodel.clipped(data).share < 0.01, qmodel.clipped([4 * data[0]]).worst.share > 0.5
            (True, True)
        """
        return count_clipped(self, {"": self}, batches(data, self))

    def profile(self, *, example_inputs: Any = None) -> Profile:
        """Latency of every node in microseconds, and of every layer that an engine runs inside a region.

        Rows of layers name the ops that the engine fused and the dtype that it computes in. Takes a second or two.

        Args:
            example_inputs: one batch to time. Default: random inputs of the recorded shapes and dtypes.

        Returns:
            A table with a row per node or layer.

        Raises:
            InputError: the model does not run on `example_inputs`, or no inputs were recorded.

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
        united = vars(with_united_views(self))
        tables = {name: united[name] for name in self._tables}
        return _restore, (tables, to_data(self.graph), self._attributes, cpu.machine())

    @property
    def _tables(self) -> dict[str, Any]:
        """Tables of parameters, buffers and modules, including those that the graph does not use."""
        if self._mapped is not None:
            self._mapped.check()
        return {name: vars(self)[name] for name in _TABLES}

    @property
    def _attributes(self) -> dict[str, Any]:
        """Further attributes that copies share: fxq's own, hooks, and those that the user set."""
        return {name: v for name, v in vars(self).items() if name not in _GRAPH_ATTRIBUTES or ("hooks" in name and v)}

    @property
    def _set_by_user(self) -> dict[str, Any]:
        """Attributes that the user set, without parameters, buffers and modules."""
        own = (*_COPIED_ATTRIBUTES, "meta")
        return {name: v for name, v in self._attributes.items() if not name.startswith("_") and name not in own}


_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_GRAPH_ATTRIBUTES = frozenset((*vars(fx.GraphModule(nn.Module(), fx.Graph())), "_float", "_mapped")) - {"meta"}
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


def _note_loaded(model: QuantizedModel, _keys: Any) -> None:
    """Take the checksums of the tensors that `load_state_dict` has just set."""
    model.record = replace(model.record, stored=stored_checksums(model))
