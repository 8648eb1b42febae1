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
    """A region that an engine runs as an ONNX model."""

    integer_bias: ClassVar[bool] = True

    @classmethod
    def written(cls, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> OnnxGraph:
        """A region as the ONNX model that the engine gets; `gm` may be edited for that. See `write_onnx`."""
        return write_onnx(gm, inputs, integer_bias=cls.integer_bias, **options)

    @classmethod
    @abstractmethod
    def compiled(cls, model: Any, threads: int, **options: Any) -> Callable[[], Request]:
        """What the engine makes of an `onnx.ModelProto`, with the options of a kernel: makes requests."""

    @classmethod
    @abstractmethod
    def profile(cls, model: Any, inputs: Sequence[Tensor], **options: Any) -> Iterable[EngineLayer]:
        """What the engine does to run an `onnx.ModelProto`, with the options of a kernel, in order.

        Of a layer, the nodes are those of the model, in any order, and its kind is "int8", "float" or "convert".
        """

    @classmethod
    def model_for(cls, gm: fx.GraphModule, inputs: Sequence[Any], floats: bool = False) -> tuple[Any, Sequence[Tensor]]:
        """A region as an `onnx.ModelProto`, in qdq form, or with `floats` without conversions; and what that reads."""
        given = [x.float() if floats and x.dtype in (torch.uint8, torch.int8) else x for x in inputs]
        last = [is_channels_last(x) for x in given]
        written = cls.written(gm, given, channels_last=last, floats=floats)
        tensors = [(given[i].permute(TO_LAST) if last[i] else given[i]).contiguous() for i in written.input_indices]
        return written.model, tensors

    @classmethod
    def profiled(
        cls, gm: fx.GraphModule, inputs: Sequence[Any], floats: bool = False, **options: Any
    ) -> list[EngineLayer]:
        """What the engine does to run a region, with the options of a kernel. See `model_for`."""
        layers = cls.profile(*cls.model_for(gm, inputs, floats), **options)
        nodes = {node.name: node for node in gm.graph.nodes if node.op != "placeholder"}
        return [region_layer(layer, nodes) for layer in layers]

    @classmethod
    def try_out(cls, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """As in `EngineKernel`."""
        cls.compiled(cls.written(gm, inputs).model, 1)

    def prepared(self, form: fx.GraphModule, inputs: Sequence[Any], last: Sequence[bool]) -> Callable[..., Any]:
        """As in `EngineKernel`."""
        written = self.written(form, inputs, channels_last=last)
        requests = type(self).compiled(written.model, torch.get_num_threads(), **self.config())
        return EngineCall(written, requests, inputs, last)


def _computed_index(node: fx.Node) -> fx.Node | None:
    """The op that computes the indices that a node reads; None where an input or a constant has them, moved or not."""
    if not is_op(node, "embedding", "embedding_bag", "index_select"):
        return None
    read = node.args[1 if is_op(node, "index_select") else 0]
    while isinstance(read, fx.Node) and (op := op_of(read)) is not None:
        if op.name != "cast" and (not op.traits.view or op.traits.selects):
            break
        read = read.args[0]
    return read if isinstance(read, fx.Node) and read.op not in ("placeholder", "get_attr") else None


class OnnxBackend(EngineBackend):
    """An engine with an interpreter, or a compiler, of ONNX models."""

    def refusal(self, gm: fx.GraphModule, node: fx.Node) -> str | None:
        """Why the engine does not take a node of the graph; None: it does. Not what has no ONNX form."""
        reason = refusal(gm, node)
        if reason is not None:
            return reason
        computed = _computed_index(node)
        if computed is not None and self.refusal(gm, computed) is None:  # else the region reads them, and checks them
            return "its indices are computed, and the engine would not say where one is out of range"
        return super().refusal(gm, node)
