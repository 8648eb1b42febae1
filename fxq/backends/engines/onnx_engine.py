"""Engines that run ONNX: regions become ONNX models, which the engine compiles."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.backends.engine import EngineBackend, EngineKernel, is_channels_last
from fxq.backends.engine_layers import region_layer
from fxq.backends.engines.request import EngineCall, Request
from fxq.graph.info import EngineLayer
from fxq.graph.query import is_op, op_of
from fxq.onnx.graph import TO_LAST, OnnxGraph, refusal, write_onnx


class OnnxKernel(EngineKernel):
    """Kernel of a region that an engine runs as an ONNX model."""

    integer_bias: ClassVar[bool] = True

    @classmethod
    def written(cls, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> OnnxGraph:
        """Return the region as the ONNX model that the engine gets; `gm` may be edited. See `write_onnx`."""
        return write_onnx(gm, inputs, integer_bias=cls.integer_bias, **options)

    @classmethod
    @abstractmethod
    def compiled(cls, model: Any, threads: int, **options: Any) -> Callable[[], Request]:
        """Compile an `onnx.ModelProto` with the options of a kernel, and return a function that creates requests."""

    @classmethod
    @abstractmethod
    def profile(cls, model: Any, inputs: Sequence[Tensor], **options: Any) -> Iterable[EngineLayer]:
        """Run an `onnx.ModelProto` with the options of a kernel, and yield the layers that the engine runs, in order.

        Each layer names nodes of the model, in any order. Its kind is "int8", "float" or "convert".
        """

    @classmethod
    def model_for(cls, gm: fx.GraphModule, inputs: Sequence[Any], floats: bool = False) -> tuple[Any, Sequence[Tensor]]:
        """Write a region as an `onnx.ModelProto`, and return it with the inputs that it reads.

        The model has q/dq form, or with `floats` no conversions.
        """
        arguments = [x.float() if floats and x.dtype in (torch.uint8, torch.int8) else x for x in inputs]
        last = [is_channels_last(x) for x in arguments]
        written = cls.written(gm, arguments, channels_last=last, floats=floats)
        tensors = [
            (arguments[i].permute(TO_LAST) if last[i] else arguments[i]).contiguous() for i in written.input_indices
        ]
        return written.model, tensors

    @classmethod
    def profiled(
        cls, gm: fx.GraphModule, inputs: Sequence[Any], floats: bool = False, **options: Any
    ) -> list[EngineLayer]:
        """Layers that the engine runs for a region, with the options of a kernel. See `model_for`."""
        layers = cls.profile(*cls.model_for(gm, inputs, floats), **options)
        nodes = {node.name: node for node in gm.graph.nodes if node.op != "placeholder"}
        return [region_layer(layer, nodes) for layer in layers]

    @classmethod
    def try_out(cls, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Raise the engine's error for a region that it does not compile."""
        cls.compiled(cls.written(gm, inputs).model, 1)

    def prepared(self, form: fx.GraphModule, inputs: Sequence[Any], last: Sequence[bool]) -> Callable[..., Any]:
        """Compile the region for inputs like these."""
        written = self.written(form, inputs, channels_last=last)
        requests = type(self).compiled(written.model, torch.get_num_threads(), **self.config())
        return EngineCall(written, requests, inputs, last)


def _computed_index(node: fx.Node) -> fx.Node | None:
    """Op that computes the indices that a node reads; None if they are an input or a constant, moved or not."""
    if not is_op(node, "embedding", "embedding_bag", "index_select"):
        return None
    index = node.args[1 if is_op(node, "index_select") else 0]
    while isinstance(index, fx.Node) and (op := op_of(index)) is not None:
        if op.name != "cast" and (not op.traits.view or op.traits.selects):
            break
        index = index.args[0]
    return index if isinstance(index, fx.Node) and index.op not in ("placeholder", "get_attr") else None


class OnnxBackend(EngineBackend):
    """Engine that runs or compiles ONNX models."""

    def refusal(self, gm: fx.GraphModule, node: fx.Node) -> str | None:
        """Reason why the engine does not run a node: it has no ONNX form, or the engine refuses it. None if it runs."""
        reason = refusal(gm, node)
        if reason is not None:
            return reason
        computed = _computed_index(node)
        if (
            computed is not None and self.refusal(gm, computed) is None
        ):  # otherwise they are inputs of the region, which are checked
            return "its indices are computed, and the engine would not report one out of range"
        return super().refusal(gm, node)
