"""Quantized model with one program (graph) for each form of call, and shared weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxq.common.containers import Leaves
from fxq.common.data import Batch, described_call
from fxq.errors import InputError, words_of
from fxq.model import QuantizedModel
from fxq.programs.call_form import CallForm, form_of
from fxq.programs.flat_model import ResultForm


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


class QuantizedPrograms(nn.Module):
    """Quantized model that is called as the float model is: with containers such as key-value caches, in several forms.

    A call runs the program of its form. If several programs have that form, as where forward branches on sizes, the one
    runs whose graph holds for the sizes of the call. The programs share equal weights.

    Attributes:
        signature: signature of the float model's forward.
    """

    def __init__(self, programs: tuple[Program, ...], signature: inspect.Signature) -> None:
        super().__init__()
        self.signature = signature
        self._programs = {program.name: program for program in programs}
        self.models = nn.ModuleDict({program.name: program.qmodel for program in programs})
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
            InputError: no program fits the call. The message names the forms that there are.
        """
        form, leaves, arguments = form_of(self.signature, Batch(args, kwargs))
        program, outputs = self._run(form, leaves)
        return program.results.deliver(outputs, arguments)

    def _run(self, form: CallForm, leaves: Leaves) -> tuple[Program, Leaves]:
        key = tuple(map(_size_class, leaves.values()))
        fitting = [program for program in self._programs.values() if program.form == form]
        last = self._last.get((form.arguments, key)) if len(fitting) > 1 else None
        errors = []
        for program in sorted(fitting, key=lambda program: program.name != last):
            try:
                outputs = program.qmodel(**leaves)
            except InputError as error:
                if len(fitting) == 1:
                    raise
                errors.append(f"{program.name}: {words_of(error)}")
                continue
            if len(fitting) > 1:
                self._last[form.arguments, key] = program.name
            return program, outputs
        if errors:
            raise InputError(f"no program fits these inputs: {'; '.join(errors)}")
        forms = "; ".join(f"{program.name}({program.form})" for program in self._programs.values())
        raise InputError(
            f"the model was quantized for calls of the form {forms}; this call is of the form ({form}). Quantize it "
            "with an example of such a call, too: example_inputs=[{...}, {...}]."
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "models" not in vars(self).get("_modules", {}):
                raise
        return getattr(next(iter(self.programs.values())), name)


def _size_class(value: Any) -> Any:
    """Sizes of a leaf, where only 0, 1 and more are told apart: forwards branch on these."""
    return tuple(min(size, 2) for size in value.shape) if isinstance(value, Tensor) else type(value)


def share_tensors(models: list[QuantizedModel]) -> None:
    """Let models share the tensors that are equal in their values, shapes, strides and dtypes."""
    seen: dict[Any, list[Tensor]] = {}
    for model in models:
        for module, table, name, tensor in _tensors_of(model):
            if tensor.numel() < _MIN_SHARED or tensor.layout is not torch.strided:
                continue
            alike = seen.setdefault((tensor.shape, tensor.stride(), tensor.dtype, tensor.device), [])
            same = next((other for other in alike if other is tensor or torch.equal(other, tensor)), None)
            if same is None:
                alike.append(tensor)
            elif same is not tensor:
                getattr(module, table)[name] = same
    for model in models if len(models) > 1 else ():
        model.recompile()


_MIN_SHARED = 64
"""Minimum number of elements of a tensor that is shared."""


def _tensors_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    for module in model.modules():
        for table in ("_parameters", "_buffers"):
            for name, tensor in list(getattr(module, table).items()):
                if tensor is not None:
                    yield module, table, name, tensor


def call_text(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Text of a call in messages."""
    return f"({described_call(args, kwargs)})"
